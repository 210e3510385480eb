"""The Python API: what is refused, and what a default plan becomes."""

from __future__ import annotations

import pytest

import trainwright
from trainwright import api
from trainwright.problems import PlanError


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: api.predict(None), "a NoneType is not a plan"),
        (lambda: api.predict({}), "the name of a model"),
        (lambda: api.load("gpt2", "bogus"), "predict, prove, run"),
        (lambda: api.load("gpt2", "prov"), "prove"),
        (lambda: api.prove("gpt2", dtype="bf16"), "fp64, fp32"),
        (lambda: api.prove("gpt2", max_ranks=0), "whole numbers from 1 to 64"),
        (lambda: api.predict(api.load("gpt2"), foo=17), "foo = 17"),
    ],
)
def test_what_cannot_be_used_is_a_plan_error(call, said):
    """With what was given, what is allowed, or what to try."""
    with pytest.raises(PlanError) as caught:
        call()
    assert said in str(caught.value)


def test_the_settings_of_a_plan_do_not_name_its_source():
    """Where it was written is none."""
    with pytest.raises(PlanError) as caught:
        api.predict(api.load("gpt2"), foo=17)
    assert "source" not in str(caught.value)


def test_a_prediction_and_a_proof_are_one_short_line():
    """As an interpreter shows them."""
    assert repr(trainwright.predict("gpt2")).startswith("Prediction(gpt2 on zero 8: ")
    proof = repr(trainwright.prove("gpt2", **{"parallel.zero.size": 2}))
    assert proof.startswith("Proof(gpt2 on zero 2, fp64: proved, worst relative error ")
    assert len(proof) < 140


def test_a_model_by_name_takes_as_many_devices_as_the_cluster_that_is_named(tmp_path):
    """By name or by file, with the batch in proportion."""
    file = tmp_path / "cluster.toml"
    file.write_text('device = "h100-sxm"\nnodes = 2\ndevices_per_node = 4\n', encoding="utf-8")

    named = api.load("gpt2", **{"cluster.name": "h100-64"})
    assert (64, 64, 512) == (named.num_devices, named.size("zero"), named.batch.global_sequences)
    assert 8 == api.load("gpt2", **{"cluster.file": str(file)}).size("zero")
    assert 1 == api.load("gpt2", **{"cluster.name": "local"}).num_devices
