"""Logical parameters cut into the flat buffers of ranks, and put together again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np

from trainwright.ir.ref import Ref
from trainwright.plan.plan import Plan
from trainwright.prove.numeric.call import Array
from trainwright.spec.families.segment import Parameter, Unit

Flats: TypeAlias = Mapping[int, Mapping[Ref, Array]]
"""Rank -> its flat buffers of one kind."""


def logical_name(parameter: Parameter, block: int | None) -> str:
    """`b3.q.weight` in block 3, `embed.tokens` outside the blocks."""
    return parameter.name if block is None else f"b{block}.{parameter.name}"


def unit_of(ref: Ref) -> str:
    """The unit that a flat buffer belongs to; those of blocks have no prefix."""
    return ref.tensor.rpartition(".")[0] or "block"


def box(parameter: Parameter, tensor_index: int) -> tuple[slice, ...]:
    """Where a tensor rank's piece lies in the logical tensor; the last rank's may be short."""
    everything = [slice(0, size) for size in parameter.shape]
    if (dim := parameter.tensor_dim) is not None:
        step, size = parameter.local_shape[dim], parameter.shape[dim]
        everything[dim] = slice(min(tensor_index * step, size), min((tensor_index + 1) * step, size))
    return tuple(everything)


def cut(unit: Unit, block: int | None, parameters: Mapping[str, Array], *, tensor_index: int, num_shards: int) -> Array:
    """A unit's whole flat buffer on one tensor rank, padded with zeros. Raises KeyError for a parameter that is not given."""
    flat = np.zeros(unit.padded(num_shards))
    for span in unit.spans:
        piece = parameters[logical_name(span.parameter, block)][box(span.parameter, tensor_index)]
        local = flat[span.start : span.stop].reshape(span.parameter.local_shape)
        local[tuple(slice(0, size) for size in piece.shape)] = piece
    return flat


def views(unit: Unit, flat: Array) -> dict[str, Array]:
    """The parameters in a flat buffer, as views of it."""
    return {span.parameter.name: flat[span.start : span.stop].reshape(span.parameter.local_shape) for span in unit.spans}


def put_together(plan: Plan, units: Mapping[str, Unit], flats: Flats) -> dict[str, list[Array]]:
    """Logical tensors out of all ranks' flat buffers: every copy that some rank holds, in rank order."""
    found: dict[str, list[Array]] = {}
    for rank, mine in flats.items():
        for ref in mine:
            for parameter, whole in _parameters(plan, units[unit_of(ref)], flats, rank=rank, ref=ref):
                found.setdefault(logical_name(parameter, ref.block), []).append(whole)
    return found


def _parameters(plan: Plan, unit: Unit, flats: Flats, *, rank: int, ref: Ref) -> Iterator[tuple[Parameter, Array]]:
    at = plan.coordinates(rank)
    of_tensor = {
        index: _whole(plan, unit, flats, rank=plan.rank_of({**at, "tensor": index}), ref=ref) for index in range(plan.size("tensor"))
    }
    for span in unit.spans:
        parameter = span.parameter
        if parameter.tensor_dim is None:
            yield parameter, of_tensor[at["tensor"]][span.start : span.stop].reshape(parameter.shape)
        elif at["tensor"] == 0:
            whole = np.full(parameter.shape, np.nan)
            for index, flat in of_tensor.items():
                place = box(parameter, index)
                inside = tuple(slice(0, one.stop - one.start) for one in place)
                whole[place] = flat[span.start : span.stop].reshape(parameter.local_shape)[inside]
            yield parameter, whole


def _whole(plan: Plan, unit: Unit, flats: Flats, *, rank: int, ref: Ref) -> Array:
    """A rank's flat buffer, with the pieces of its zero group if it holds only one."""
    flat = flats[rank][ref]
    if flat.size == unit.padded(plan.size("zero")):
        return flat
    at = plan.coordinates(rank)
    return np.concatenate([flats[plan.rank_of({**at, "zero": index})][ref] for index in range(plan.size("zero"))])
