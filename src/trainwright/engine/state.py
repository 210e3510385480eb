"""Persistent state of a rank: weights, master copy, moments; made from a seed, taken out, put back.

Initial values depend on the seed, the logical name and the element's place in the unsharded tensor alone, so every mesh starts alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from trainwright.engine.formats import DTYPES
from trainwright.engine.place import Place
from trainwright.engine.random import Piece, init_parameter
from trainwright.engine.store import Store
from trainwright.ir.program import Program
from trainwright.ir.ref import Ref
from trainwright.plan.lower import family_of
from trainwright.plan.plan import Plan
from trainwright.spec.families.segment import Parameter, Unit


def initial_store(plan: Plan, program: Program, rank: int, device: str = "cpu") -> Store:
    """A Store with the persistent buffers of one rank: weights from the plan's seed, moments zero."""
    store = Store()
    place = Place(plan, rank)
    units = family_of(plan).units
    for ref in program.persistent(place.coordinate("pipeline")):
        buffer = program.buffers[ref.tensor]
        kind = ref.tensor.rpartition(".")[2]
        if kind in {"weights", "master"}:
            name = ref.tensor.rpartition(".")[0] or "block"
            flat = initial_flat(plan, units[name], ref.block, place.coordinate("tensor"), DTYPES[buffer.format])
            (size,) = buffer.shape
            if size < flat.numel():
                flat = flat[place.coordinate("zero") * size :][:size].clone()
            store.put(ref, flat.to(device))
        else:
            store.put(ref, torch.zeros(buffer.shape, dtype=DTYPES[buffer.format], device=device))
    store.mark()
    return store


def initial_flat(plan: Plan, unit: Unit, block: int | None, tensor_index: int, dtype: torch.dtype) -> Tensor:
    """A unit's whole flat buffer of one tensor rank, with padding."""
    flat = torch.zeros(unit.padded(plan.size("zero")), dtype=dtype)
    for span in unit.spans:
        piece = local_piece(span.parameter, tensor_index)
        values = init_parameter(
            logical_name(span.parameter, block),
            Piece(global_shape=span.parameter.shape, offsets=piece.offsets, shape=piece.shape),
            kind=span.parameter.initial,
            std=span.parameter.std,
            seed=plan.run.seed,
            dtype=dtype,
        )
        view = flat[span.start : span.stop].view(span.parameter.local_shape)
        view[tuple(slice(0, size) for size in piece.shape)] = values
    return flat


def logical_name(parameter: Parameter, block: int | None) -> str:
    """The name of a parameter in the model: `b3.q.weight`, `embed.tokens`."""
    return parameter.name if block is None else f"b{block}.{parameter.name}"


def local_piece(parameter: Parameter, tensor_index: int) -> Piece:
    """Which part of the logical tensor a tensor rank holds; the last rank's may be smaller than its place."""
    offsets = [0] * len(parameter.shape)
    shape = list(parameter.local_shape)
    if (dim := parameter.tensor_dim) is not None:
        offsets[dim] = min(tensor_index * parameter.local_shape[dim], parameter.shape[dim])
        shape[dim] = min(parameter.local_shape[dim], parameter.shape[dim] - offsets[dim])
    return Piece(global_shape=parameter.shape, offsets=tuple(offsets), shape=tuple(shape))


def flat_pieces(store: Store, kind: str) -> Iterator[tuple[Ref, Tensor]]:
    """The flat buffers of one kind ("weights", "gradients", "master") that a rank holds."""
    for ref in store:
        if ref.tensor.rpartition(".")[2] == kind:
            yield ref, store.tensor(ref)


def assemble(plan: Plan, pieces: Mapping[int, Mapping[Ref, Tensor]]) -> dict[str, dict[int, Tensor]]:
    """Logical tensors out of every rank's flat buffers: name -> {copy: tensor}, where a copy is named by its first rank.

    `pieces` maps rank to its flat buffers. Copies that should be equal (replicas over data, over zero where whole, over tensor where
    replicated, both ends of a tied pipeline) are all returned.
    """
    units = family_of(plan).units
    wholes: dict[tuple[str, int | None, int, int], dict[int, dict[int, Tensor]]] = {}
    for rank, refs in pieces.items():
        at = plan.coordinates(rank)
        for ref, flat in refs.items():
            unit = ref.tensor.rpartition(".")[0] or "block"
            padded = units[unit].padded(plan.size("zero"))
            if flat.numel() == padded:
                copy, shard = at["data"] * plan.size("zero") + at["zero"], 0
            else:
                copy, shard = at["data"] * plan.size("zero"), at["zero"]
            key = (unit, ref.block, at["pipeline"], copy)
            wholes.setdefault(key, {}).setdefault(at["tensor"], {})[shard] = flat
    logical: dict[str, dict[int, Tensor]] = {}
    for (unit, block, position, copy), by_tensor in wholes.items():
        flats = {index: torch.cat([shards[one] for one in sorted(shards)]) for index, shards in by_tensor.items()}
        for span in units[unit].spans:
            name = logical_name(span.parameter, block)
            copies = logical.setdefault(name, {})
            number = (position * plan.num_replicas + copy) * plan.size("tensor")
            if span.parameter.tensor_dim is None:
                for index, flat in flats.items():
                    copies[number + index] = flat[span.start : span.stop].view(span.parameter.local_shape)
            else:
                copies[number] = joined(span.parameter, {i: flat[span.start : span.stop] for i, flat in flats.items()})
    return logical


def joined(parameter: Parameter, pieces: Mapping[int, Tensor]) -> Tensor:
    """A logical tensor from the pieces of all tensor ranks; padding is cut off."""
    first = next(iter(pieces.values()))
    whole = torch.empty(parameter.shape, dtype=first.dtype)
    for index, flat in pieces.items():
        piece = local_piece(parameter, index)
        box = tuple(slice(start, start + size) for start, size in zip(piece.offsets, piece.shape, strict=True))
        inside = tuple(slice(0, size) for size in piece.shape)
        whole[box] = flat.view(parameter.local_shape)[inside]
    return whole
