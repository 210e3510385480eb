"""The clock of schedules: published figures, a deadlock, split backwards."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from trainwright.ir.slot import Backward, BackwardInput, BackwardWeight, Forward
from trainwright.schedules import SCHEDULES
from trainwright.schedules.timeline import Deadlock, Prices, draw, walk

GOLDEN = tomllib.loads((Path(__file__).parents[2] / "golden" / "schedules.toml").read_text(encoding="utf-8"))["row"]


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row['schedule']}-{row['stages']}x{row['microbatches']}x{row.get('chunks', 1)}")
def test_a_published_schedule_comes_out_as_published(row):
    """Makespan, idle slots and peaks of every row."""
    timeline = draw(
        SCHEDULES.get(row["schedule"]), row["stages"], row["microbatches"], row.get("chunks", 1), Prices(weight=row.get("weight", 0))
    )

    assert row["makespan"] == timeline.makespan
    assert row["idle_slots"] == timeline.idle_slots
    assert row["peaks"] == [visits.peak_kept for visits in timeline.visits]


def test_slots_that_wait_for_each_other_are_named():
    """Position 0 wants a backward before the forward that leads to it."""
    orders = [[Backward(0, 0), Forward(0, 0)], [Forward(1, 0), Backward(1, 0)]]

    with pytest.raises(Deadlock) as caught:
        walk(orders, (0, 1), 1, Prices())

    assert {Backward(0, 0), Forward(0, 0), Forward(1, 0), Backward(1, 0)} == set(caught.value.slots)


def test_a_split_backward_lets_the_stage_below_go_on():
    """B is passed down at once, W fills the gap; with W as a slot of its own no lower bound is known."""
    whole = walk([[Forward(0, 0), Backward(0, 0)], [Forward(1, 0), Backward(1, 0)]], (0, 1), 1, Prices(weight=1))
    halves = [[Forward(stage, 0), BackwardInput(stage, 0), BackwardWeight(stage, 0)] for stage in (0, 1)]
    split = walk(halves, (0, 1), 1, Prices(weight=1))

    assert 6 == whole.makespan == whole.lower_bound
    assert 5 == split.makespan
    assert split.lower_bound is None
    assert split.gap is None
    assert [1, 1] == [visits.peak_kept for visits in split.visits]
    assert [1, 1] == [visits.num_backwards for visits in split.visits]


def test_a_send_costs_only_between_positions():
    """Two chunks on one position hand over for nothing; on two positions each crossing waits."""
    order = [Forward(0, 0), Forward(1, 0), Backward(1, 0), Backward(0, 0)]
    alone = walk([order], (0, 0), 1, Prices(send=10))
    apart = walk([[order[0], order[3]], [order[1], order[2]]], (0, 1), 1, Prices(send=10))

    assert 4 == alone.makespan == alone.lower_bound
    assert 24 == apart.makespan == apart.lower_bound


def test_elapsed_is_shorter_where_positions_are_staggered():
    """Position 1 starts after the first send; the last to end here is position 0."""
    timeline = walk([[Forward(0, 0), Backward(0, 0)], [Forward(1, 0), Backward(1, 0)]], (0, 1), 1, Prices())

    assert 4 == timeline.elapsed_max == timeline.makespan
    assert 2 == timeline.ends[3] - timeline.starts[2]


def test_whole_prices_stay_whole_and_fractions_are_allowed():
    """Integers give integers, exactly; halves give halves."""
    assert isinstance(draw(SCHEDULES.get("1f1b"), 4, 8, 1, Prices()).makespan, int)
    assert 11.0 == draw(SCHEDULES.get("1f1b"), 4, 8, 1, Prices(forward=0.5, backward=0.5)).makespan
