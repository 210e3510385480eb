"""A schedule on a clock: when every slot starts, what is idle, what is kept, and how far it is from the least possible.

Glossary
    position   place on the pipeline axis; runs one slot at a time, in the schedule's order
    price      time units of one slot of one virtual stage; all stages cost the same here
    send       wait between the end of a slot and the start of the slot on another position that needs its result; sends overlap
               with compute and with each other
    kept       microbatches (times chunks) whose forward has begun and whose last backward has not ended, on one position
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, assert_never

import numpy as np

from trainwright.cost.longest_path import Cycle, Indices, Times, longest_path
from trainwright.ir.slot import Backward, BackwardInput, BackwardWeight, Forward, Slot

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

Ticks: TypeAlias = int | float


class Kind(IntEnum):
    """The kinds of slots, as array entries."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Time units of the parts of one virtual stage; a whole Backward takes `backward` + `weight`."""

    forward: Ticks = 1
    backward: Ticks = 1
    weight: Ticks = 0
    send: Ticks = 0

    def of(self, kind: Kind) -> Ticks:
        """Return the duration of one slot."""
        match kind:
            case Kind.FORWARD:
                return self.forward
            case Kind.BACKWARD:
                return self.backward + self.weight
            case Kind.BACKWARD_INPUT:
                return self.backward
            case Kind.BACKWARD_WEIGHT:
                return self.weight
            case _:
                assert_never(kind)


class Deadlock(Exception):  # noqa: N818 - the thing found, as in verify()
    """Slots that wait for each other in a circle, each for the next."""

    def __init__(self, slots: tuple[Slot, ...]) -> None:
        """Name every slot of the circle."""
        super().__init__(f"{' waits for '.join(map(str, (*slots, slots[0])))}")
        self.slots = slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """What one position did: counts over its chunks, and the most it kept at once."""

    position: int
    num_forwards: int
    num_backwards: int
    peak_kept: int


@dataclass(frozen=True, kw_only=True)  # not slotted: cached_property needs a __dict__
class Timeline:
    """Every slot of every position with its start. Arrays have one entry a slot, position after position, in order."""

    slots: Sequence[Slot]
    positions: Indices
    kinds: Indices
    starts: Times
    durations: Times
    stage_positions: tuple[int, ...]
    prices: Prices

    @cached_property
    def ends(self) -> Times:
        """End of every slot."""
        return self.starts + self.durations

    @property
    def num_positions(self) -> int:
        """Length of the pipeline axis."""
        return max(self.stage_positions) + 1

    @property
    def makespan(self) -> Ticks:
        """Time from the first start to the last end."""
        return _plain(self.ends.max())

    @property
    def elapsed_max(self) -> Ticks:
        """The largest time, over positions, from its own first start to its own last end.

        The step time if positions may begin the next step at once; smaller than the makespan where they are staggered.
        """
        return max(_plain(self.ends[rows][-1] - self.starts[rows][0]) for rows in self._rows())

    @property
    def idle_slots(self) -> Ticks:
        """Time units, summed over positions, in which a position does nothing between 0 and the makespan."""
        return self.num_positions * self.makespan - _plain(self.durations.sum())

    @property
    def idle_fraction(self) -> float:
        """Idle time as a share of positions x makespan."""
        return self.idle_slots / (self.num_positions * self.makespan)

    @property
    def visits(self) -> tuple[Visits, ...]:
        """Counts and peak of every position."""
        return tuple(self._visits_of(position, rows) for position, rows in enumerate(self._rows()))

    @property
    def lower_bound(self) -> Ticks | None:
        """A makespan below which no order of these slots can go; None where none is known (split backwards).

        Position p cannot begin before its first stage is reached, then has all its work to do, ends with a backward, and that
        backward must still travel down to stage 0. One microbatch alone must go up and down. Memory is not limited.
        """
        if Kind.BACKWARD_INPUT in self.kinds:
            return None
        prices, places = self.prices, self.stage_positions
        forward, backward = prices.of(Kind.FORWARD), prices.of(Kind.BACKWARD)
        hops = list(accumulate((prices.send * (one != other) for one, other in pairwise(places)), initial=0))
        num_microbatches = sum(1 for slot in self.slots if isinstance(slot, Forward)) // len(places)
        entries = {places[stage]: stage for stage in reversed(range(len(places)))}  # first stage of every position
        by_work = max(
            stage * (forward + backward) + 2 * hops[stage] + places.count(position) * num_microbatches * (forward + backward)
            for position, stage in entries.items()
        )
        return max(by_work, len(places) * (forward + backward) + 2 * hops[-1])

    @property
    def gap(self) -> float | None:
        """How far the makespan is above the lower bound, as a share of the bound."""
        bound = self.lower_bound
        return None if bound is None else self.makespan / bound - 1

    def _rows(self) -> Iterator[slice]:
        bounds = np.searchsorted(self.positions, np.arange(self.num_positions + 1))
        for first, last in pairwise(bounds.tolist()):
            yield slice(first, last)

    def _visits_of(self, position: int, rows: slice) -> Visits:
        kinds = self.kinds[rows]
        change = (kinds == Kind.FORWARD).astype(np.int64) - ((kinds == Kind.BACKWARD) | (kinds == Kind.BACKWARD_WEIGHT))
        return Visits(
            position=position,
            num_forwards=int((kinds == Kind.FORWARD).sum()),
            num_backwards=int(((kinds == Kind.BACKWARD) | (kinds == Kind.BACKWARD_INPUT)).sum()),
            peak_kept=int(np.cumsum(change).max()),
        )


def kind_of(slot: Slot) -> Kind:
    """Return the kind of a slot."""
    match slot:
        case Forward():
            return Kind.FORWARD
        case Backward():
            return Kind.BACKWARD
        case BackwardInput():
            return Kind.BACKWARD_INPUT
        case BackwardWeight():
            return Kind.BACKWARD_WEIGHT
        case _:
            assert_never(slot)


def draw(schedule: ModuleType, num_positions: int, num_microbatches: int, chunks: int, prices: Prices) -> Timeline:
    """Walk a schedule that passed its own check. Raises Deadlock if its orders cannot be carried out."""
    orders = [list(schedule.order(position, num_positions, num_microbatches, chunks)) for position in range(num_positions)]
    places = tuple(schedule.position_of(stage, num_positions, chunks) for stage in range(num_positions * chunks))
    return walk(orders, places, num_microbatches, prices)


def walk(orders: Sequence[Sequence[Slot]], stage_positions: tuple[int, ...], num_microbatches: int, prices: Prices) -> Timeline:
    """Start every slot as early as its position's order and the results it needs allow. Raises Deadlock."""
    slots = [slot for order in orders for slot in order]
    num_slots = len(slots)
    kinds = np.fromiter(map(kind_of, slots), np.int64, num_slots)
    stages = np.fromiter((slot.stage for slot in slots), np.int64, num_slots)
    microbatches = np.fromiter((slot.microbatch for slot in slots), np.int64, num_slots)
    places = np.array(stage_positions, dtype=np.int64)
    lengths = [len(order) for order in orders]
    positions = np.repeat(np.arange(len(orders)), lengths)
    assert np.array_equal(places[stages], positions), "every slot runs where its stage lives"

    before = np.arange(num_slots) - 1  # the slot before it on the same position
    before[np.cumsum([0, *lengths[:-1]])] = -1
    source = _sources(kinds, stages, microbatches, len(places), num_microbatches)
    predecessors = np.stack((before, source), axis=1)
    hop = np.where(source >= 0, positions[source] != positions, False) * prices.send
    lags = np.stack((np.zeros_like(hop), hop), axis=1)
    there = predecessors >= 0
    offsets = np.concatenate(([0], np.cumsum(there.sum(axis=1))))
    durations = np.array([prices.of(kind) for kind in Kind])[kinds]
    try:
        starts = longest_path(num_slots, offsets, predecessors[there], lags[there], durations)
    except Cycle as cycle:
        raise Deadlock(tuple(slots[node] for node in cycle.nodes)) from cycle
    return Timeline(
        slots=slots,
        positions=positions,
        kinds=kinds,
        starts=starts,
        durations=durations,
        stage_positions=stage_positions,
        prices=prices,
    )


def _sources(kinds: Indices, stages: Indices, microbatches: Indices, num_stages: int, num_microbatches: int) -> Indices:
    """Return the slot whose result each slot needs, -1 for none.

    A forward needs the forward of the stage below, a backward that of the stage above (in the last stage its own forward), the
    second half of a backward its first half.
    """
    numbers = np.full((len(Kind), num_stages + 1, num_microbatches), -1, dtype=np.int64)  # row num_stages: beyond the last stage
    numbers[kinds, stages, microbatches] = np.arange(kinds.size)
    backward = np.maximum(numbers[Kind.BACKWARD], numbers[Kind.BACKWARD_INPUT])
    own = numbers[Kind.FORWARD, stages, microbatches]
    below = numbers[Kind.FORWARD, stages - 1, microbatches]  # stage 0 reads the row beyond the last: -1
    above = np.where(stages == num_stages - 1, own, backward[stages + 1, microbatches])
    first_half = numbers[Kind.BACKWARD_INPUT, stages, microbatches]
    needs_none = (kinds == Kind.FORWARD) & (stages == 0)
    source: Indices = np.select((kinds == Kind.FORWARD, kinds == Kind.BACKWARD_WEIGHT), (below, first_half), above)
    assert bool(np.all((source >= 0) | needs_none)), "every slot's source is in the schedule"
    return source


def _plain(number: Any) -> Ticks:  # noqa: ANN401 - a numpy scalar of either kind
    """Return a numpy scalar as a Python number, so that it prints and dumps as one."""
    plain: Ticks = number.item()
    return plain
