"""A plan's sizes, stages and ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.plan.load import load, read
from trainwright.plan.plan import AXES, cut_layers, mesh_order
from trainwright.problems import PlanError

EXAMPLE = """\
[model]
name = "llama-3-8b"
[cluster]
device = "h100-sxm"
nodes = 8
devices_per_node = 8
[batch]
sequence_tokens = 8192
global_sequences = 512
[parallel]
pipeline = { size = 4 }
zero = { size = 4 }
tensor = { size = 4, sequence = true }
"""


def test_ranks_are_numbered_row_major_with_the_last_line_fastest():
    """The example of the plan file: rank = (pipeline * 4 + zero) * 4 + tensor."""
    plan = read(EXAMPLE)

    assert plan.coordinates(27) == {"pipeline": 1, "data": 0, "zero": 2, "context": 0, "tensor": 3}
    assert plan.rank_of({"pipeline": 1, "zero": 2, "tensor": 3}) == 27
    assert plan.ranks_of({"pipeline": 1, "tensor": 3}) == (19, 23, 27, 31)


def test_the_order_of_lines_is_the_mesh_order():
    """Moving a line renumbers the ranks; the mathematics stays."""
    lines = EXAMPLE.splitlines(keepends=True)
    moved = read("".join([*lines[:10], lines[12], lines[10], lines[11]]))

    assert moved.parallel.order == ("tensor", "pipeline", "data", "zero", "context")
    assert moved.rank_of({"tensor": 3, "pipeline": 1, "zero": 2}) == 3 * 16 + 1 * 4 + 2


@given(lines=st.permutations(AXES).flatmap(lambda axes: st.integers(0, 5).map(lambda count: tuple(axes[:count]))))
def test_the_mesh_order_keeps_the_lines_and_names_every_axis_once(lines):
    """Whatever lines there are."""
    order = mesh_order(lines)

    assert sorted(order) == sorted(AXES)
    assert tuple(axis for axis in order if axis in lines) == lines


def test_every_rank_has_one_place():
    """Coordinates and rank_of are inverse to each other."""
    plan = read(EXAMPLE)

    assert [plan.rank_of(plan.coordinates(rank)) for rank in range(64)] == list(range(64))
    assert plan.ranks_of({}) == tuple(range(64))


@pytest.mark.parametrize("rank", [-1, 64])
def test_a_rank_outside_the_mesh_is_refused(rank):
    """There are 64."""
    with pytest.raises(ValueError, match="0 to 63"):
        read(EXAMPLE).coordinates(rank)


def test_microbatches_are_what_one_replica_sees():
    """512 sequences over 4 replicas, one at a time."""
    assert read(EXAMPLE).num_microbatches == 128


@given(num_layers=st.integers(1, 200), num_stages=st.integers(1, 64))
def test_an_automatic_cut_loses_no_block_and_leaves_no_stage_empty(num_layers, num_stages):
    """Even, or one fewer at both ends."""
    cut = cut_layers(num_layers, num_stages)
    if cut is None:
        assert num_layers % num_stages
        return

    assert (num_stages, num_layers) == (len(cut), sum(cut))
    assert min(cut) >= 1
    assert set(cut[1:-1]) <= {max(cut)}


def test_llama_3_405b_is_cut_as_it_was_trained():
    """126 blocks on 16 positions: 7 at both ends, 8 between."""
    assert cut_layers(126, 16) == (7, *(8,) * 14, 7)


def test_interleaved_takes_its_own_number_of_chunks():
    """Where the plan names none."""
    plan = read(EXAMPLE.replace("pipeline = { size = 4 }", 'pipeline = { size = 4, schedule = "interleaved" }'))

    assert plan.parallel.pipeline.chunks == 2
    assert plan.stage_layers == (4,) * 8


def test_settings_can_be_replaced_by_their_dotted_names():
    """As search does, many times over."""
    plan = read(EXAMPLE).replace_settings({"parallel.tensor.size": 2, "cluster.nodes": 4, "optimizer.lr": 1e-3})

    assert (plan.size("tensor"), plan.cluster.num_nodes, plan.optimizer.lr, plan.num_devices) == (2, 4, 1e-3, 32)


def test_replacing_what_is_no_setting_names_the_nearest():
    """A path that leads nowhere."""
    with pytest.raises(PlanError, match=r"parallel\.tensor\.size"):
        read(EXAMPLE).replace_settings({"parallel.tensor.sise": 2})


def test_a_bare_name_is_one_node_of_h100_for_predict_and_one_process_to_run():
    """The two default plans."""
    far, near = load("llama-3-8b"), load("llama-3-8b", command="run")

    assert (far.cluster.device.name, far.num_devices, far.size("zero"), far.batch.global_sequences) == ("h100-sxm", 8, 8, 64)
    assert (near.cluster.device.name, near.num_devices, near.precision.compute) == ("local", 1, "fp32")


def test_a_bare_name_gives_zero_the_devices_that_are_left():
    """So that one override is enough."""
    plan = load("llama-3-8b", {"--parallel.tensor.size": "2", "cluster.nodes": 2})

    assert (plan.size("tensor"), plan.size("zero"), plan.num_devices) == (2, 8, 16)


def test_a_local_cluster_has_as_many_processes_as_the_sizes_need():
    """Unless the plan says how many."""
    assert load("tiny-gpt", {"parallel.data.size": 2, "parallel.tensor.size": 2}, command="run").cluster.num_devices == 4
    with pytest.raises(PlanError, match="multiply to 6 ranks"):
        load("tiny-gpt", {"parallel.data.size": 2, "cluster.devices_per_node": 3}, command="run")


def test_an_override_takes_the_place_of_a_rival():
    """--model.name replaces the config that the file named."""
    plan = read(EXAMPLE.replace('name = "llama-3-8b"', 'config = "nowhere.json"'), overrides={"model.name": "llama-3-8b"})

    assert plan.model.name == "llama-3-8b"


@pytest.mark.parametrize(
    ("text", "value"),
    [("4", 4), ("true", True), ("1e-3", 1e-3), ("[8, 8, 8, 8]", (8, 8, 8, 8)), ("1f1b", "1f1b"), ("1\nx = 2", "1\nx = 2"), ("", "")],
)
def test_a_value_of_the_command_line_is_toml_where_it_can_be(text, value):
    """Else it is text; a line break cannot smuggle a second key in."""
    path = {int: "run.steps", bool: "parallel.zero.overlap", float: "optimizer.lr", tuple: "parallel.pipeline.layers"}.get(type(value))
    overrides = {path or "run.tokenizer": text}
    part: object = read(EXAMPLE, overrides=overrides)
    for name in (path or "run.tokenizer").split("."):
        part = getattr(part, name)

    assert part == value
