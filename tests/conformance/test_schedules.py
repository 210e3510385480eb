"""Every schedule visits everything once, cannot deadlock, keeps what it says, and is never faster than its lower bound."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.ir.slot import Backward, BackwardInput, BackwardWeight, Forward
from trainwright.schedules import SCHEDULES
from trainwright.schedules.timeline import Prices, draw

PARTS = list(SCHEDULES.parts())
SHAPES = [
    (positions, microbatches, chunks) for positions in (1, 2, 3, 4, 8) for microbatches in (1, 2, 3, 4, 6, 8, 16) for chunks in (1, 2, 3)
]
CASES = [
    pytest.param(part, *shape, id=f"{name}-{'x'.join(map(str, shape))}")
    for name, part in PARTS
    for shape in SHAPES
    if not list(part.check(*shape))
]


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_a_schedule_can_do_something(name, part):
    """Its default chunks pass its own check at some shape; only a schedule that uses chunks accepts more than one."""
    assert part.NAME == name
    assert list(part.check(4, 8, part.DEFAULT_CHUNKS)) == []
    assert bool(list(part.check(4, 8, part.DEFAULT_CHUNKS + 1))) != part.USES_CHUNKS


@pytest.mark.parametrize(("part", "num_positions", "num_microbatches", "chunks"), CASES)
def test_every_stage_runs_every_microbatch_once_each_way(part, num_positions, num_microbatches, chunks):
    """One forward, and one backward or its two halves, and on the position where the stage lives."""
    seen = Counter()
    for position in range(num_positions):
        for slot in part.order(position, num_positions, num_microbatches, chunks):
            assert part.position_of(slot.stage, num_positions, chunks) == position
            seen[slot] += 1

    everything = [(stage, microbatch) for stage in range(num_positions * chunks) for microbatch in range(num_microbatches)]
    halves = {BackwardInput(*each) for each in everything} | {BackwardWeight(*each) for each in everything}
    wholes = {Backward(*each) for each in everything}
    assert set(seen.values()) == {1}
    assert {Forward(*each) for each in everything} == {slot for slot in seen if isinstance(slot, Forward)}
    assert {slot for slot in seen if not isinstance(slot, Forward)} in (wholes, halves)


@pytest.mark.parametrize(("part", "num_positions", "num_microbatches", "chunks"), CASES)
def test_gradients_of_a_stage_are_summed_in_the_order_of_the_microbatches(part, num_positions, num_microbatches, chunks):
    """So that every schedule adds the same numbers in the same order, and proofs compare to the last bit."""
    for position in range(num_positions):
        slots = list(part.order(position, num_positions, num_microbatches, chunks))
        for stage in {slot.stage for slot in slots}:
            backwards = [slot.microbatch for slot in slots if slot.stage == stage and isinstance(slot, (Backward, BackwardWeight))]
            assert backwards == list(range(num_microbatches))


@pytest.mark.parametrize(("part", "num_positions", "num_microbatches", "chunks"), CASES)
def test_a_schedule_comes_to_an_end_no_earlier_than_its_bound(part, num_positions, num_microbatches, chunks):
    """Walking it raises no Deadlock; positions are never busier than the makespan."""
    timeline = draw(part, num_positions, num_microbatches, chunks, Prices(forward=2, backward=3, weight=1, send=1))

    assert timeline.lower_bound is None or timeline.lower_bound <= timeline.makespan
    assert timeline.elapsed_max <= timeline.makespan
    assert timeline.idle_slots >= 0


@pytest.mark.parametrize(("part", "num_positions", "num_microbatches", "chunks"), CASES)
def test_slots_of_a_position_do_not_overlap_and_results_arrive_before_use(part, num_positions, num_microbatches, chunks):
    """The clock, checked slot by slot against the rules, not against the code that made it."""
    prices = Prices(forward=2, backward=3, weight=1, send=5)
    timeline = draw(part, num_positions, num_microbatches, chunks, prices)
    times = dict(zip(timeline.slots, zip(timeline.starts.tolist(), timeline.ends.tolist(), strict=True), strict=True))
    last_stage = num_positions * chunks - 1
    for slot, (start, _) in times.items():
        match slot:
            case Forward(stage=0):
                continue
            case Forward(stage=stage, microbatch=microbatch):
                source, other = Forward(stage - 1, microbatch), stage - 1
            case Backward(stage=stage, microbatch=microbatch) if stage == last_stage:
                source, other = Forward(stage, microbatch), stage
            case Backward(stage=stage, microbatch=microbatch):
                source, other = Backward(stage + 1, microbatch), stage + 1
        hop = prices.send * (timeline.stage_positions[other] != timeline.stage_positions[slot.stage])
        assert start >= times[source][1] + hop
    for position in range(num_positions):
        row = sorted(times[slot] for slot in part.order(position, num_positions, num_microbatches, chunks))
        assert all(end <= start for (_, end), (start, _) in pairwise(row))


@given(num_positions=st.integers(1, 12), num_microbatches=st.integers(1, 40))
def test_gpipe_and_1f1b_take_equally_long_and_keep_what_the_papers_say(num_positions, num_microbatches):
    """2 (M + P - 1) ticks; M kept everywhere, or min(P - s, M) on stage s; neither can be shortened."""
    gpipe, one = (draw(SCHEDULES.get(name), num_positions, num_microbatches, 1, Prices()) for name in ("gpipe", "1f1b"))

    assert 2 * (num_microbatches + num_positions - 1) == gpipe.makespan == one.makespan == gpipe.lower_bound
    assert 2 * num_positions * (num_positions - 1) == gpipe.idle_slots == one.idle_slots
    assert [num_microbatches] * num_positions == [visits.peak_kept for visits in gpipe.visits]
    assert [min(num_positions - stage, num_microbatches) for stage in range(num_positions)] == [visits.peak_kept for visits in one.visits]


@given(num_positions=st.integers(2, 8), num_groups=st.integers(1, 5), chunks=st.integers(2, 5))
def test_interleaving_divides_the_bubble_by_the_chunks(num_positions, num_groups, chunks):
    """(P - 1) chunk visits each way are lost, whatever V; peaks by the length of the warm-up."""
    num_microbatches = num_groups * num_positions
    timeline = draw(SCHEDULES.get("interleaved"), num_positions, num_microbatches, chunks, Prices(weight=1))
    warm_ups = [2 * (num_positions - position - 1) + (chunks - 1) * num_positions for position in range(num_positions)]

    assert 3 * (num_microbatches * chunks + num_positions - 1) == timeline.makespan
    assert [min(warm_up + 1, num_microbatches * chunks) for warm_up in warm_ups] == [visits.peak_kept for visits in timeline.visits]


@pytest.mark.parametrize(
    ("num_microbatches", "attempt"), [(9, "8 microbatches"), (11, "12 microbatches"), (3, "4 microbatches"), (10, "12 microbatches")]
)
def test_interleaving_names_the_nearest_number_of_microbatches(num_microbatches, attempt):
    """Of two equally near the larger, which has the smaller bubble."""
    (problem,) = SCHEDULES.get("interleaved").check(4, num_microbatches, 2)

    assert problem.attempt.startswith(attempt)
