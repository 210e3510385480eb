"""The ledger of the two-layer toy comes out of the zero strategy itself, performed on numpy arrays."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

from trainwright.lessons import zero_ledger
from trainwright.plan.lower import lower

GOLDEN = tomllib.loads((Path(__file__).parents[2] / "golden" / "zero_ledger.toml").read_text(encoding="utf-8"))
FREES = ("before-reduce", "after-reduce")


def page(**changes):
    return zero_ledger.page(**{each.name: each.default for each in zero_ledger.INPUTS} | changes)


@pytest.fixture(scope="module")
def figures():
    return {name: shown.figure.value for name, shown in page().figures.items()}


@pytest.mark.parametrize("row", GOLDEN["row"], ids=lambda row: row["order"])
def test_all_twelve_figures_come_out_of_the_strategy(row, figures):
    """All-gathers, and the peak with weights freed before and after the reduction."""
    order = row["order"]

    assert row["all_gathers"] == figures[f"all_gathers_{order}"]
    assert row["peak_before_reduce"] == figures[f"peak_{order}_before_reduce"]
    assert row["peak_after_reduce"] == figures[f"peak_{order}_after_reduce"]


@pytest.mark.parametrize("row", GOLDEN["row"], ids=lambda row: row["order"])
@pytest.mark.parametrize("free", FREES)
def test_the_names_of_the_orders_are_those_of_the_options(row, free):
    """A ledger made from the options alone has the row's figures."""
    ledger = zero_ledger.ledger_of(reshard_after_forward=row["reshard_after_forward"], prefetch=row["prefetch"], free=free)

    assert row[f"peak_{free.replace('-', '_')}"] == ledger.peak
    assert row["all_gathers"] == ledger.counts["all_gather"]
    assert 2 == ledger.counts["reduce_scatter"]


def test_event_by_event_without_prefetch():
    """The peak comes in the backward of the first layer, and nothing is left over at the end."""
    begin, *steps = page().steps
    trace = GOLDEN["trace"]

    assert trace["begin"] == begin.buffers["live"]
    assert trace["events"] == [[step.event.en, step.buffers["live"]] for step in steps]


@pytest.mark.parametrize("rank", [0, 1])
def test_both_ranks_hold_equally_much(rank):
    """Parts add up to the whole."""
    ledger = zero_ledger.ledger_of(reshard_after_forward=True, prefetch=0, free="before-reduce")

    assert [live for _, live in GOLDEN["trace"]["events"]] == [entry.live for entry in ledger.entries[rank]]


@pytest.mark.parametrize("free", FREES)
@pytest.mark.parametrize(("release", "prefetch"), [(True, 0), (True, 1), (False, 0), (False, 1)])
def test_the_sharded_update_equals_the_unsharded_one(release, prefetch, free):
    """To the last bit, after three steps."""
    sharded = zero_ledger.run(zero_ledger.toy_plan(reshard_after_forward=release, prefetch=prefetch, free=free), num_steps=3)
    whole = zero_ledger.run(zero_ledger.whole_plan(), num_steps=3)

    assert all(np.array_equal(value, sharded.parameters()[name]) for name, value in whole.parameters().items())
    assert all(np.array_equal(value, sharded.gradients()[name]) for name, value in whole.gradients().items())


def test_the_numbers_are_those_of_the_definition():
    """Two matrices with tanh between, half the squared distance, its mean over both samples, momentum 0.9, rate 0.1: written out."""
    weights = [value.copy() for value in zero_ledger.WEIGHTS.values()]
    momenta = [np.zeros((2, 2)), np.zeros((2, 2))]
    x = np.concatenate([one.inputs for one in zero_ledger.SAMPLES])
    target = np.concatenate([one.targets for one in zero_ledger.SAMPLES])
    for _ in range(3):
        hidden = np.tanh(x @ weights[0].T)
        away = (hidden @ weights[1].T - target) / 2
        gradients = (((away @ weights[1]) * (1 - hidden**2)).T @ x, away.T @ hidden)
        momenta = [0.9 * momentum + gradient for momentum, gradient in zip(momenta, gradients, strict=True)]
        weights = [weight - 0.1 * momentum for weight, momentum in zip(weights, momenta, strict=True)]
    machine = zero_ledger.run(zero_ledger.whole_plan(), num_steps=3)

    for expected, found in zip(weights, machine.parameters().values(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-13)


def test_the_steps_show_real_numbers():
    """A gathered matrix is the matrix; the pieces that two ranks reduce are the two rows of the sum of their gradients."""
    steps = {step.event.en: step.buffers for step in page().steps}
    sent = [steps["backward of layer 1"][f"rank {rank}"] for rank in (0, 1)]
    reduced = [steps["reduce-scatter g1"][f"rank {rank}"] for rank in (0, 1)]

    assert [0.6, -0.2, 0.1, 0.5] == steps["all-gather W1"]["value"]
    np.testing.assert_allclose(np.add(*sent).reshape(2, 2), reduced, atol=2e-4)


def test_the_page_follows_its_inputs():
    """Steps and bytes are those of the chosen order."""
    chosen = page(reshard_after_forward=0, prefetch=1, free_before_reduce=0)

    assert 22 * 4 == chosen.figures["peak_bytes"].figure.value
    assert 22 == max(step.buffers["live"] for step in chosen.steps)
    assert 2 == sum(step.event.en.startswith("all-gather") for step in chosen.steps)
    assert 0.0 == chosen.figures["largest_difference"].figure.value
    json.dumps(chosen.to_json("zh"))


def test_the_toy_goes_through_the_same_program_and_verify():
    """Sound actions, no embedding, no head: only the units that the family has."""
    program = lower(zero_ledger.toy_plan(reshard_after_forward=True, prefetch=1, free="before-reduce"))

    assert {"b0.weights", "b0.momentum", "b1.weights", "b1.momentum"} == {str(ref) for ref in program.persistent(0)}
