"""`trainwright demo`: three steps, what each must show, and one exit code for all of it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from trainwright.cli import demo
from trainwright.export.report.page import Section
from trainwright.plan.load import load
from trainwright.problems import PlanError, Problem

PART = demo.Part(
    document={"schema": "a"}, text="text", sections=(Section(anchor="plan", title="Plan", body="<p>body</p>"),), checks={"it holds": True}
)


def run(*arguments):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo.run(parser.parse_args(arguments))


def part(name, *, holds):
    return replace(PART, document={"schema": name}, checks={"the plan fits": holds, "it holds": holds})


@pytest.fixture
def steps(monkeypatch, tmp_path):
    """Stands in for the three steps; which of them hold is set by the test. The current folder is an empty one."""
    holds = {"predict": True, "prove": True, "run": True}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "predict", lambda: part("predict", holds=holds["predict"]))
    monkeypatch.setattr(demo, "prove", lambda: part("prove", holds=holds["prove"]))
    monkeypatch.setattr(demo, "train", lambda num_steps: part(f"run {num_steps}", holds=holds["run"]))
    return holds


def test_the_plans_are_part_of_the_package(root, monkeypatch, tmp_path):
    """They are found from any folder, and the folder plans/ at the root is the same one."""
    monkeypatch.chdir(tmp_path)

    assert (root / "plans").resolve() == demo.PLANS.resolve()
    assert ["llama-3-8b", "tiny-llama-2m"] == [load(plan).model.name for plan in (demo.LARGE, demo.SMALL)]
    assert "hf" in demo.LARGE.read_text(encoding="utf-8")  # the large model is read from the config.json that the package ships


def test_all_three_hold(steps, capsys):
    """0, one line for each step, and a report in the current folder that has the sections of all."""
    assert steps
    assert 0 == run("--steps", "7")

    said = capsys.readouterr().out
    assert ["1/3 predict", "2/3 prove", "3/3 run"] == [line.partition(":")[0] for line in said.splitlines() if line[1:3] == "/3"]
    assert f"The report: {Path('report.html').resolve()}" in said
    assert 3 == Path("report.html").read_text(encoding="utf-8").count("<p>body</p>")


@pytest.mark.parametrize(("fails", "code"), [("predict", 3), ("prove", 4), ("run", 4)])
def test_what_does_not_hold_shows_in_the_exit_code(steps, capsys, fails, code):
    """All steps are done nevertheless, and the report is written."""
    steps[fails] = False

    assert code == run()
    assert "NO: it holds" in capsys.readouterr().out
    assert Path("report.html").exists()


def test_json_is_one_document(steps, capsys):
    """The documents of all three, what was checked, and nothing else on stdout."""
    assert steps
    run("--json", "--steps", "5")

    document = json.loads(capsys.readouterr().out)
    assert ["trainwright/demo/1", True] == [document["schema"], document["holds"]]
    assert ["predict", "prove", "run 5"] == [document[name]["schema"] for name in ("predict", "prove", "run")]
    assert {"predict", "prove", "run"} == document["checks"].keys()


@pytest.mark.parametrize("arguments", [("--report", "no/such/folder/report.html"), ("--report", "."), ("--steps", "0")])
def test_mistakes_are_told_before_anything_is_done(steps, capsys, arguments):
    """Nobody waits two minutes to learn that a file cannot be written."""
    assert steps
    with pytest.raises(PlanError):
        run(*arguments)

    assert "" == capsys.readouterr().out
    assert [] == list(Path().iterdir())


def test_the_prediction_loads_no_torch():
    """The first step, in an interpreter of its own: it holds, and torch is not there."""
    code = "from trainwright.cli import demo; import sys; part = demo.predict(); print(part.checks, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())

    assert "{'the plan fits': True, 'no torch was loaded': True} False" == done.stdout.strip()


RAN = {
    "validation": {"below_unigram": 0.6},
    "predicted": {
        "memory": {"peak_bytes": 10},
        "wire": [
            {"axis": "zero", "op": "all_gather", "payload_bytes": 8, "sent_bytes_per_rank": 4},
            {"axis": "zero", "op": "recv", "payload_bytes": 0, "sent_bytes_per_rank": 0},
        ],
    },
    "measured": {
        "memory": {"peak_bytes": 10},
        "wire": [{"axis": "zero", "op": "all_gather", "payload_bytes": 8, "sent_bytes_per_rank": 4}],
    },
}


def test_what_a_run_must_show():
    """Half a nat per byte learned, and bytes as predicted; a run without validation has shown nothing."""
    little = {**RAN, "validation": {"below_unigram": 0.4}}
    unseen = {**RAN, "validation": {"below_unigram": None}}
    fuller = {**RAN, "measured": {**RAN["measured"], "memory": {"peak_bytes": 11}}}
    louder = {**RAN, "measured": {**RAN["measured"], "wire": []}}

    assert [True, True, True] == list(demo.run_checks(RAN).values())
    assert [False, True, True] == list(demo.run_checks(little).values()) == list(demo.run_checks(unseen).values())
    assert [True, True, False] == list(demo.run_checks(fuller).values())
    assert [True, False, True] == list(demo.run_checks(louder).values())


# --- children ----------------------------------------------------------------------------------------------------------------------------


def test_a_child_brings_its_part_home():
    """What a step found comes back; what it left in memory does not."""

    def step(word):
        sys.path.append(word)
        return replace(PART, text=f"{word} in process {os.getpid()}")

    found = demo._in_a_child(step, "hello")

    assert found.text.startswith("hello in process ")
    assert not found.text.endswith(f" {os.getpid()}")
    assert "hello" not in sys.path


def test_what_a_child_raises_is_raised_here():
    """Problems stay Problems, an interrupt stays one, and another fault is told in words."""

    def wrong():
        raise RuntimeError("rank 3 failed") from PlanError(Problem("a mistake"))

    def interrupted():
        raise KeyboardInterrupt

    def broken():
        raise ZeroDivisionError("by zero")

    with pytest.raises(PlanError, match="a mistake"):
        demo._in_a_child(wrong)
    with pytest.raises(KeyboardInterrupt):
        demo._in_a_child(interrupted)
    with pytest.raises(RuntimeError, match="ZeroDivisionError: by zero"):
        demo._in_a_child(broken)


def test_a_child_that_is_killed_is_named():
    """The step and the signal that ended it."""

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match=r"the process of die ended without a word \(exit code -9\)"):
        demo._in_a_child(die)


# --- for real ----------------------------------------------------------------------------------------------------------------------------


def environment():
    return os.environ | {"PYTHONPATH": str(Path(demo.__file__).parents[2])}


@pytest.mark.slow
@pytest.mark.proof
def test_the_demo_itself(tmp_path):
    """From any folder: all of it holds, and the report is there. Trained for half as long as the demo trains."""
    command = [sys.executable, "-m", "trainwright", "demo", "--json", "--steps", "60"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment())

    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["holds"]
    assert document["prove"]["ranks"] == 8
    assert document["prove"]["processes"]
    assert document["run"]["validation"]["below_unigram"] >= 0.5
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert ["plan", "pipeline", "memory", "proof", "run"] == [
        name for name in ("plan", "pipeline", "memory", "proof", "run") if f'<section id="{name}"' in page
    ]
    assert ["report.html"] == [file.name for file in tmp_path.iterdir()]
    assert "" == done.stderr


@pytest.mark.slow
def test_an_interrupt_ends_all_of_it(tmp_path):
    """Ctrl-C during the proof: 130, no traceback, no report, and no process that goes on."""
    command = [sys.executable, "-m", "trainwright", "demo"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    ) as started:
        assert any(line.startswith("2/3 prove") for line in started.stdout)
        os.killpg(started.pid, signal.SIGINT)
        _, said = started.communicate(timeout=60)

    assert 130 == started.returncode
    assert "Traceback" not in said
    assert [] == list(tmp_path.iterdir())
    with pytest.raises(ProcessLookupError):
        os.killpg(started.pid, 0)
