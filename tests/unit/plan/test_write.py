"""What is written reads back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.plan.load import load, read
from trainwright.plan.plan import AXES, Plan
from trainwright.plan.write import dump, edit
from trainwright.problems import PlanError

PLANS = sorted((Path(__file__).parents[3] / "plans").glob("*.toml"))
FORMATS = st.sampled_from([None, "bf16", "fp32", "fp64"])
FRACTION = st.floats(0, 0.999)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of tiny-gpt on local processes that keep every law."""
    sizes = {axis: draw(st.sampled_from([1, 2])) for axis in AXES if axis != "context"}
    order = draw(st.permutations(AXES))
    replicas = sizes["data"] * sizes["zero"]
    lines = [f"{axis} = {{ size = {sizes.get(axis, 1)} }}" for axis in order]
    text = "\n".join(
        [
            '[model]\nname = "tiny-gpt"\n[cluster]\nname = "local"',
            f"[batch]\nsequence_tokens = 32\nglobal_sequences = {replicas * draw(st.integers(1, 9))}\n[parallel]",
            *lines,
        ]
    )
    choices: dict[str, object] = {
        "parallel.zero.stage": draw(st.sampled_from([1, 2, 3])),
        "parallel.tensor.sequence": draw(st.booleans()),
        "recompute.policy": draw(st.sampled_from(["none", "selective", "full"])),
        "precision.master": draw(FORMATS),
        "optimizer.lr": draw(st.floats(1e-300, 1e300)),
        "optimizer.betas": (draw(FRACTION), draw(FRACTION)),
        "run.seed": draw(st.integers(0, 2**31 - 1)),
        "run.tokens": draw(st.none() | st.integers(1, 10**18)),
        "run.data": "text:" + draw(st.text(min_size=1)),
    }
    return read(text).replace_settings(choices)


@settings(max_examples=60, deadline=None)
@given(plan=plans())
def test_a_plan_reads_back_equal(plan):
    """load(dump(plan)) == plan, whatever the order of the mesh and the text of a path."""
    assert read(dump(plan)) == plan


@pytest.mark.parametrize("file", PLANS, ids=lambda file: file.stem)
def test_the_plans_that_ship_read_back_equal(file):
    """With their paths, which are relative to the file."""
    plan = load(file)

    assert read(dump(plan), file=file) == plan


@pytest.mark.parametrize("command", ["predict", "run"])
@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b"])
def test_the_plan_of_a_bare_name_reads_back_equal(name, command):
    """It has no file, and can become one."""
    plan = load(name, command=command)

    assert read(dump(plan)) == plan


def test_a_replaced_cluster_is_written_as_it_is_now():
    """Not as the file once had it."""
    plan = load(PLANS[1]).replace_settings({"cluster.nodes": 2})

    assert read(dump(plan), overrides={"parallel.zero.size": 2}, file=PLANS[1]).cluster == plan.cluster


def test_a_model_made_in_python_is_in_no_file():
    """A plan file cannot name it, and says so."""
    plan = load("gpt2").replace_settings({"model.name": "mine"})

    with pytest.raises(PlanError, match="made in Python"):
        dump(plan)


def test_an_edit_keeps_comments_order_and_spacing():
    """Only the values change."""
    text = "# head\n[parallel]          # mesh\nzero   = { size = 8 }    # eight\n\n[run]\nsteps = 5\n"
    changed = edit(text, {"parallel.zero.size": 4, "parallel.tensor": {"size": 2}, "run.steps": None, "recompute.policy": "full"})

    assert changed == (
        "# head\n[parallel]          # mesh\nzero   = { size = 4 }    # eight\n"
        'tensor = {size = 2}\n\n[run]\n\n[recompute]\npolicy = "full"\n'
    )


def test_an_edit_through_a_value_is_refused():
    """A number has no settings."""
    with pytest.raises(PlanError, match="no table"):
        edit("a = 1\n", {"a.b": 2})
