"""The trial of a plan (`run --check`): a few steps on one batch tell whether training can work at all.

Three things are looked at: the loss of one batch falls when that batch is learned, what is saved comes back to the last bit, and
every parameter has a gradient that is finite and not zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trainwright.engine import saving
from trainwright.engine.data import Batch, Corpus, Cursor, Feed
from trainwright.engine.execute import Executor
from trainwright.engine.gathering import told_by_all
from trainwright.engine.state import flat_pieces, logical_name
from trainwright.engine.train import Rank, feed_of
from trainwright.engine.world import World
from trainwright.plan.plan import Plan

NUM_STEPS = 10
_SAVED_AFTER = 5
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One item of a trial: what was asked, whether it held, and what was seen."""

    name: str
    holds: bool
    seen: str


@dataclass(frozen=True, slots=True)
class OneBatch:
    """The same batch at every step."""

    feed: Feed

    def batch(self, step: int, replica: int, microbatch: int) -> Batch:
        """The replica's microbatch of step 0."""
        del step
        return self.feed.batch(0, replica, microbatch)

    def global_batch(self, step: int) -> Batch:
        """All sequences of step 0."""
        del step
        return self.feed.global_batch(0)

    def num_valid_tokens(self, step: int) -> int:
        """Targets of step 0."""
        del step
        return self.feed.num_valid_tokens(0)


def trial(world: World, plan: Plan, corpus: Corpus, folder: Path) -> list[Verdict]:
    """Try a plan, as one rank of it; all ranks return the same verdicts. The first rank's `folder` takes one checkpoint."""
    folder = Path(told_by_all(world, str(folder.resolve()))[0])  # every rank has one of its own, and the first one's is used
    steady = replace(plan, optimizer=replace(plan.optimizer, warmup_steps=0, decay="none"))
    rank = Rank.of(steady, world, OneBatch(feed_of(plan, corpus)))
    gradients: dict[str, list[float]] = {}
    losses = []
    agreed = (False, "")
    for step in range(NUM_STEPS):
        result, _ = rank.step(step, NUM_STEPS, observe=(lambda executor: gradients.update(sizes(executor))) if step == 0 else None)
        losses.append(result.loss)
        if step + 1 == _SAVED_AFTER:
            agreed = save_and_restore(rank, folder, step + 1)
    said = told_by_all(world, {"gradients": {name: list(map(str, size)) for name, size in gradients.items()}, "agreed": list(agreed)})
    return [fall(losses), restored(said), complete(said)]


def fall(losses: list[float]) -> Verdict:
    """One batch, seen again and again, is learned."""
    holds = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    return Verdict(name="the loss of one batch falls", holds=holds, seen=f"from {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps")


def save_and_restore(rank: Rank, folder: Path, num_done: int) -> tuple[bool, str]:
    """Save, go one step on, restore, and go the same step again."""
    state = rank.state
    saved = {name: tensor.clone() for name, tensor in state.items()}
    saving.save(rank.world, folder, Cursor(num_done, 0), state, rank.plan)
    once, _ = rank.step(num_done, NUM_STEPS)
    saving.restore(rank.world, folder, state, rank.plan)
    unequal = [name for name, tensor in state.items() if not torch.equal(tensor, saved[name])]
    again, _ = rank.step(num_done, NUM_STEPS)
    saving.restore(rank.world, folder, state, rank.plan)
    if unequal:
        return False, f"{unequal[0]} came back changed"
    if once.loss != again.loss:
        return False, f"the next step's loss is {again.loss!r} after restoring, and was {once.loss!r}"
    return True, f"{len(state)} buffers and the next step's loss are equal to the last bit"


def restored(said: list[Any]) -> Verdict:
    """What every rank says of its own buffers."""
    failed = [f"rank {rank}: {one['agreed'][1]}" for rank, one in enumerate(said) if not one["agreed"][0]]
    return Verdict(name="save and restore agree", holds=not failed, seen=failed[0] if failed else said[0]["agreed"][1])


def sizes(executor: Executor) -> Iterator[tuple[str, list[float]]]:
    """Of every parameter that this rank has gradients of: the largest size, and 1 if all are finite."""
    for ref, flat in flat_pieces(executor.store, "gradients"):
        unit = executor.units[executor.unit_name(ref)]
        whole = unit.padded(executor.plan.size("zero"))
        begin = executor.place.coordinate("zero") * flat.numel() if flat.numel() < whole else 0
        for span in unit.spans:
            first, last = max(span.start - begin, 0), min(span.stop - begin, flat.numel())
            if first < last:
                part = flat[first:last]
                yield logical_name(span.parameter, ref.block), [part.abs().max().item(), float(part.isfinite().all().item())]


def complete(said: list[Any]) -> Verdict:
    """Every parameter has a gradient somewhere that is not zero, and everywhere one that is finite."""
    largest: dict[str, float] = {}
    broken: set[str] = set()
    for one in said:
        for name, (size, is_finite) in one["gradients"].items():
            largest[name] = max(largest.get(name, 0.0), float(size))
            broken |= {name} if not float(is_finite) else set()
    dead = sorted(name for name, size in largest.items() if size == 0.0)
    faults = [*(f"{name} is not finite" for name in sorted(broken)), *(f"{name} is zero" for name in dead)]
    seen = "; ".join(faults[:_MOST_NAMED]) if faults else f"{len(largest)} parameters, each finite and not zero"
    return Verdict(name="gradients are finite and not zero", holds=not faults, seen=seen)
