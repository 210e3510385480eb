"""`trainwright predict`: the document, the report, exit codes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

from trainwright.cli import predict
from trainwright.plan.plan import Plan
from trainwright.predict.predict import predict as predicted
from trainwright.predict.report import lines, plain, show
from trainwright.problems import PlanError


def run(*arguments, overrides=None):
    parser = argparse.ArgumentParser()
    predict.add_arguments(parser)
    return predict.run(argparse.Namespace(**vars(parser.parse_args(arguments)), overrides=overrides or {}))


@pytest.fixture
def plan(root):
    return str(root / "plans" / "tiny-llama-text.toml")


def test_json_is_one_document(plan, capsys):
    """One JSON document and nothing else on stdout."""
    assert 0 == run(plan, "--json")

    document = json.loads(capsys.readouterr().out)
    assert "trainwright/predict/1" == document["schema"]
    assert "provenance" not in document


def test_why_adds_the_reasons(plan, capsys):
    """Every number gets an entry; in the report each is spelled out."""
    run(plan, "--json", "--why")
    document = json.loads(capsys.readouterr().out)
    run(plan, "--why")
    report = capsys.readouterr().out

    assert "tokens / step" == document["provenance"]["/tokens_per_s"]["formula"]
    assert "= tokens / step   where tokens = /plan/tokens_per_step, step = /step_s" in report
    assert all(pointer in report for pointer in document["provenance"])


def test_the_report_says_what_matters_without_colour(plan, capsys):
    """Piped: plain text, with the verdict, each part of time and memory, the wire, and what it rests on."""
    run(plan)

    report = capsys.readouterr().out
    assert "\x1b" not in report
    for word in ("FITS", "step", "MFU", "compute", "exposed wire", "activations", "reduce_scatter", "limited by", "rests on", "left out"):
        assert word in report, word


def test_the_report_is_the_same_in_colour(plan, capsys):
    """Colour changes no letter."""
    from trainwright.plan.load import load

    document = predicted(load(plan)).to_json()
    show(lines(document))

    assert plain(lines(document)).split() == capsys.readouterr().out.split()


def test_a_plan_that_does_not_fit_is_shown_whole(capsys):
    """Exit code 3, and the document all the same."""
    assert 3 == run("llama-3-70b", "--json", overrides={"parallel.zero.size": 8, "parallel.tensor.size": 1})

    document = json.loads(capsys.readouterr().out)
    assert "does not fit" == document["memory"]["verdict"]
    assert document["memory"]["reserved_bytes"] > document["memory"]["capacity_bytes"]
    run("llama-3-70b", overrides={"parallel.zero.size": 8, "parallel.tensor.size": 1})
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    assert "largest    activations, " in text
    assert "try        " in text
    assert text.count(" reserved then, ") == text.count("not enough alone") + text.count("risky")
    assert "or more devices" in text


def test_a_remedy_was_tried(capsys):
    """What is said to be reserved then is what the changed plan reserves; a plan that fits needs none."""
    wrong = {"batch.sequence_tokens": 65536, "recompute.policy": "none"}
    assert 3 == run("llama-3-8b", overrides=wrong)
    text = capsys.readouterr().out
    assert 0 == run("llama-3-8b", overrides=wrong | {"recompute.policy": "full"})
    mended = capsys.readouterr().out
    said = text.partition('try        recompute.policy = "full": ')[2].partition(" reserved then, fits")[0]

    assert f"FITS   {said} of" in mended
    assert "try " not in mended


def test_settings_can_be_overridden(plan, capsys):
    """A dotted option changes the plan."""
    run(plan, "--json", overrides={"batch.global_sequences": 32})

    assert 32 == json.loads(capsys.readouterr().out)["plan"]["global_sequences"]


def test_a_missing_plan_is_a_problem():
    """Bad input raises PlanError; the edge prints it and exits 2."""
    with pytest.raises(PlanError):
        run("no-such-plan.toml")


def test_no_torch_is_imported(plan):
    """A prediction starts in a blink."""
    code = f"""
import sys
from trainwright.cli.main import main
main(["predict", {plan!r}, "--json"])
assert "torch" not in sys.modules and "rich" not in sys.modules, "too much"
"""
    assert 0 == subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode


def test_many_positions_are_shown_by_example():
    """Of more than sixteen positions only some are drawn, the fullest among them."""
    from small_plans import small_plan

    plan: Plan = small_plan(mesh={"pipeline": 20}, model={"num_layers": 20}, num_microbatches=20)
    report = plain(lines(predicted(plan).to_json()))

    assert "pipeline[0]" in report
    assert "pipeline[7]" not in report
    assert "more, none fuller" in report
