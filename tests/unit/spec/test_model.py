"""Models: exact parameter counts, and shapes that cannot be built."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.spec import catalog
from trainwright.spec.families.decoder import describe
from trainwright.spec.families.local import Local
from trainwright.spec.model import Model, num_parameters

GOLDEN = tomllib.loads((Path(__file__).parents[2] / "golden" / "parameter_counts.toml").read_text())["model"]


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row["name"])
def test_published_models_have_their_published_number_of_parameters(row):
    """To the last one."""
    assert row["num_parameters"] == num_parameters(catalog.model(row["name"]))


def shapes(model: Model) -> list[tuple[int, ...]]:
    """Every weight and bias by itself, written out independently of the formula."""
    h, d, f = model.width, model.head_width, model.ffn_width
    norm = [(h,), (h,)] if model.norm == "layernorm" and model.bias else [(h,)]
    linears = [(model.num_heads * d, h), (model.num_kv_heads * d, h), (model.num_kv_heads * d, h), (h, model.num_heads * d)]
    linears += [(f, h), (h, f)] + ([(f, h)] if model.activation == "swiglu" else [])
    block = 2 * norm + linears + ([(rows,) for rows, _ in linears] if model.bias else [])
    ends = [(model.vocab, h)] + ([] if model.tied else [(model.vocab, h)]) + norm
    return ends + ([(model.max_positions, h)] if model.positions == "learned" else []) + model.num_layers * block


def product(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) == 1 else shape[0] * shape[1]


models = st.builds(
    Model,
    name=st.just("m"),
    num_layers=st.integers(1, 5),
    width=st.integers(1, 40),
    num_heads=st.integers(1, 6),
    num_kv_heads=st.integers(1, 6),
    head_width=st.integers(1, 9),
    ffn_width=st.integers(1, 50),
    vocab=st.integers(1, 300),
    max_positions=st.integers(1, 64),
    norm=st.sampled_from(["rmsnorm", "layernorm"]),
    positions=st.sampled_from(["rope", "learned"]),
    activation=st.sampled_from(["swiglu", "gelu", "gelu_tanh"]),
    bias=st.booleans(),
    tied=st.booleans(),
)


@given(model=models)
def test_the_count_is_the_sum_over_all_weights_and_biases(model):
    """The formula and a list of shapes agree."""
    assert sum(map(product, shapes(model))) == num_parameters(model)


@pytest.mark.parametrize("name", catalog.model_names())
def test_the_units_of_the_family_hold_every_parameter_once(name):
    """What is trained is what is counted: one `block` unit for each block, each other unit once."""
    model = catalog.model(name)
    units = describe(model, Local(num_sequences=1, sequence_tokens=8)).units
    repeats = {unit: model.num_layers if unit == "block" else 1 for unit in units}

    assert sum(repeats[unit] * units[unit].num_elements for unit in units) == num_parameters(model)


TINY = catalog.model("tiny-llama-2m")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"num_layers": 0}, "model.num_layers"),
        ({"width": -1}, "model.width"),
        ({"vocab": 10**18}, "model.vocab"),
        ({"num_kv_heads": 4}, "model.num_kv_heads"),
        ({"head_width": 31}, "model.head_width"),
        ({"norm": "batchnorm"}, "model.norm"),
        ({"activation": "relu"}, "model.activation"),
        ({"positions": "alibi"}, "model.positions"),
        ({"dropout": 1.0}, "model.dropout"),
        ({"norm_eps": float("nan")}, "model.norm_eps"),
        ({"rope_theta": float("inf")}, "model.rope_theta"),
    ],
)
def test_a_shape_that_cannot_be_built_is_named(change, path):
    """One fault, one problem, at its field."""
    assert [path] == [problem.path for problem in replace(TINY, **change).check()]


def test_all_faults_are_found_at_once():
    """Two faults, two problems."""
    assert len(list(replace(TINY, num_layers=0, norm="x").check())) == 2
