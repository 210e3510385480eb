"""What helps a plan that does not fit: the largest part of its memory, and a setting that was tried on the ledger of memory.

Candidates are tried in the order that suits the largest part, three at most, each alone: lowered anew, its memory added up. No time is
simulated, so a remedy says nothing of speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from trainwright.plan.check import check
from trainwright.plan.lower import lower
from trainwright.plan.plan import Plan
from trainwright.predict.predict import DOES_NOT_FIT, Prediction
from trainwright.units import show_bytes

FITS: Final = "fits"
MOST_TRIED: Final = 3
OF_THE_BATCH: Final = frozenset({"activations", "temporary"})


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of settings, as the plan file writes it, and the plan with it."""

    setting: str
    plan: Plan


def remedy(prediction: Prediction) -> tuple[str, ...]:
    """Lines for a plan that does not fit: what is largest, and what to try. None for a plan that fits."""
    if prediction.fits:
        return ()
    fullest = prediction.memory.fullest
    part = max(fullest.parts, key=lambda name: fullest.parts[name])
    share = f"{show_bytes(fullest.parts[part])} of the {show_bytes(fullest.peak_bytes)} of pipeline[{fullest.position}]"
    first, *more = _attempts(prediction, part)
    return f"largest    {part.replace('_', ' ')}, {share}", f"try        {first}", *(f"{'':11}{line}" for line in more)


def _attempts(prediction: Prediction, part: str) -> Iterator[str]:
    """The first setting that is enough, alone; else all that were tried, with what each would need."""
    tried: list[str] = []
    for one in islice(_sound(candidates(prediction, part)), MOST_TRIED):
        memory = replace(prediction.memory, program=lower(one.plan))
        said = f"{one.setting}: {show_bytes(memory.reserved_bytes)} reserved then"
        if memory.verdict == FITS:
            yield f"{said}, fits"
            return
        tried.append(f"{said}, {'risky' if memory.verdict != DOES_NOT_FIT else 'not enough alone'}")
    yield from tried
    last = "a smaller model" if prediction.plan.cluster.is_local else "a smaller model, or more devices"
    yield f"several of these together, {last}" if len(tried) > 1 else last


def _sound(found: Iterator[Remedy]) -> Iterator[Remedy]:
    """Those that break no law of plans, tensor within a node."""
    return (one for one in found if one.plan.size("tensor") <= one.plan.cluster.scale_up_domain and not any(check(one.plan)))


def candidates(prediction: Prediction, part: str) -> Iterator[Remedy]:
    """Changes that lower memory, those first that lower the given part."""
    memory = prediction.memory
    times = 2 ** max(1, math.ceil(math.log2(memory.reserved_bytes / memory.capacity_bytes)))
    kinds = (_of_the_batch(prediction.plan), _of_the_state(prediction.plan, times))
    for kind in kinds if part in OF_THE_BATCH else reversed(kinds):
        yield from kind


def _of_the_batch(plan: Plan) -> Iterator[Remedy]:
    """Fewer activations: recomputed, or of fewer sequences."""
    if plan.recompute.policy != "full":
        yield Remedy('recompute.policy = "full"', replace(plan, recompute=replace(plan.recompute, policy="full", blocks=0)))
    if plan.batch.microbatch_sequences > 1:
        yield Remedy("batch.microbatch_sequences = 1", replace(plan, batch=replace(plan.batch, microbatch_sequences=1)))


def _of_the_state(plan: Plan, times: int) -> Iterator[Remedy]:
    """Less weights, gradients and optimizer state a device: sharded further, with as many devices; then on `times` as many."""
    data, zero = plan.parallel.data, plan.parallel.zero
    if zero.size > 1 and zero.stage < 3:
        yield Remedy("parallel.zero.stage = 3", replace(plan, parallel=replace(plan.parallel, zero=replace(zero, stage=3))))
    if data.size > 1:
        size = data.size * zero.size
        wider = replace(plan.parallel, data=replace(data, size=1), zero=replace(zero, size=size))
        yield Remedy(f"parallel.data.size = 1 with parallel.zero.size = {size}", replace(plan, parallel=wider))
    if plan.cluster.is_local:
        return  # more processes share the same memory
    for axis in ("zero", "tensor"):
        factors = (2**power for power in range(times.bit_length() - 1, 0, -1))
        yield from islice(_sound(_wider(plan, axis, factor) for factor in factors), 1)


def _wider(plan: Plan, axis: str, factor: int) -> Remedy:
    """An axis `factor` times as large, on as many times the nodes."""
    part = getattr(plan.parallel, axis)
    size = factor * part.size
    cluster = replace(plan.cluster, num_nodes=factor * plan.cluster.num_nodes)
    wider = replace(plan, cluster=cluster, parallel=replace(plan.parallel, **{axis: replace(part, size=size)}))
    return Remedy(f"parallel.{axis}.size = {size} on {cluster.num_devices:,} devices", wider)
