"""A shrunk plan is still that plan, and still a legal one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plans import small_plan
from trainwright.plan.check import check
from trainwright.prove.shrink import shrink
from trainwright.strategies.data import Data
from trainwright.strategies.pipeline import Pipeline
from trainwright.strategies.recompute import Recompute
from trainwright.strategies.zero import Zero


def pipelined(size: int, num_microbatches: int, schedule: str = "1f1b", chunks: int = 1):
    """A plan of 12 blocks on a pipeline alone."""
    plan = small_plan(Pipeline(size=size, schedule=schedule, chunks=chunks), num_microbatches=num_microbatches)
    return replace(plan, model=replace(plan.model, num_layers=12))


@pytest.mark.parametrize(
    ("size", "num_microbatches", "expected"), [(4, 8, 4), (4, 6, 5), (4, 5, 5), (3, 9, 4), (2, 4, 4), (2, 7, 5), (4, 1, 5)]
)
def test_microbatches_divide_by_positions_if_they_did(size, num_microbatches, expected):
    """At least 2 P of them, with a remainder if and only if there was one."""
    small, _ = shrink(pipelined(size, num_microbatches))

    assert (2, expected) == (small.size("pipeline"), small.num_microbatches)


def test_one_position_needs_two_microbatches():
    """Two are enough to show accumulation."""
    assert shrink(small_plan(num_microbatches=8))[0].num_microbatches == 2


@pytest.mark.parametrize("num_microbatches", [3, 9])
def test_an_interleaved_plan_stays_legal(num_microbatches):
    """Three positions and an odd number of microbatches become two positions and an even one."""
    small, _ = shrink(pipelined(3, num_microbatches, "interleaved", chunks=2))

    assert list(check(small)) == []


def test_strategies_are_kept():
    """What is proved is the plan's own way of doing it."""
    plan = small_plan(Zero(size=4, stage=2, gradients="whole", prefetch=0), Data(size=3), Recompute(policy="selective"))
    small, changes = shrink(plan)

    assert (2, 2) == (small.size("zero"), small.size("data"))
    assert replace(plan.parallel.zero, size=2) == small.parallel.zero
    assert plan.recompute == small.recompute
    assert "parallel.zero.size 4 -> 2" in map(str, changes)


def test_more_ranks_let_axes_grow_towards_the_plan():
    """The outermost first, to divisors of the plan's sizes, and never beyond the limit."""
    small, _ = shrink(small_plan(Zero(size=8), Data(size=3)), max_ranks=13)

    assert 12 == small.size("data") * small.size("zero")
