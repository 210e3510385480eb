"""`trainwright run`, as a script sees it: processes, documents, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import trainwright
from trainwright import api
from trainwright.cli.main import main
from trainwright.engine.torchrun import launch_commands
from trainwright.plan.load import load

PLAN = """\
[model]
name = "tiny-gpt"
[cluster]
name = "local"
[batch]
sequence_tokens = 16
global_sequences = 4
[precision]
compute = "fp32"
[parallel]
zero = { size = 2, stage = 3 }
[run]
steps = 5
data = "text:words.txt"
validate_every = 2
"""


@pytest.fixture
def plan_file(tmp_path, monkeypatch):
    """A plan beside its text, in the current folder."""
    (tmp_path / "words.txt").write_text("".join(f"word {number * number % 97} of many\n" for number in range(400)), encoding="utf-8")
    path = tmp_path / "plan.toml"
    path.write_text(PLAN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return path


def test_a_run_on_two_processes_tells_what_it_did(plan_file, capsys):
    """One document: losses, validation, and measured beside predicted; bytes are equal."""
    assert main(["run", str(plan_file), "--json", "--out", "out", "--profile"]) == 0
    document = json.loads(capsys.readouterr().out)
    predicted, measured = document["predicted"], document["measured"]

    assert ("trainwright/run/1", 5, 5) == (document["schema"], document["num_steps"], len(document["losses"]))
    assert [2, 4, 5] == [look["step"] for look in document["validation"]["losses"]]
    assert predicted["memory"]["peak_bytes"] == measured["memory"]["peak_bytes"]
    assert {row["op"]: row["sent_bytes_per_rank"] for row in predicted["wire"]} == {
        row["op"]: row["sent_bytes_per_rank"] for row in measured["wire"]
    }
    assert predicted["step_s"] > 0
    assert measured["tokens_per_s"] == document["tokens_per_s"] > 0
    assert {"compute_s", "exposed_wire_s", "update_s", "other_s"} == measured["time"].keys()
    assert 5 + 3 == len((plan_file.parent / "out" / "metrics.jsonl").read_text().splitlines())
    assert {0, 1} == {entry["pid"] for entry in json.loads((plan_file.parent / "out" / "trace.json").read_text())["traceEvents"]}


def test_the_page_has_both_columns(plan_file, capsys):
    """Without a terminal there is no progress bar, and stderr is empty."""
    assert main(["run", str(plan_file), "--run.steps", "2"]) == 0
    out, err = capsys.readouterr()

    assert err == ""
    assert "predicted      measured" in out
    assert [] == [word for word in ("validation", "tokens/s", "peak memory", "sent, all_gather zero", "Not counted") if word not in out]
    assert (plan_file.parent / "runs" / "plan").is_dir()


def test_saved_and_resumed_from_the_command_line(plan_file, capsys):
    """The two halves have the losses of the whole."""
    saving = ["--run.checkpoint.every", "2", "--run.checkpoint.folder"]
    documents = []
    for words in ([*saving, "whole"], [*saving, "half", "--stop-after", "3"], [*saving, "half", "--resume"]):
        assert main(["run", str(plan_file), "--json", *words]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    whole, first, second = documents

    assert whole["losses"] == first["losses"] + second["losses"]
    assert (3, 5) == (second["first_step"], second["planned_steps"])
    assert second["checkpoint"].endswith("step-000000005")


def test_a_run_says_what_it_keeps_and_what_a_resumed_one_changes(plan_file, capsys):
    """How many checkpoints stay, and where the learning rate's schedule ends now; measured parts add up to the measured step."""
    saving = ["--run.checkpoint.every", "1", "--run.checkpoint.folder", "saved", "--run.checkpoint.keep", "2"]
    assert main(["run", str(plan_file), *saving, "--stop-after", "3"]) == 0
    assert "the newest 2 are kept" in capsys.readouterr().out
    assert ["step-000000002", "step-000000003"] == sorted(path.name for path in (plan_file.parent / "saved").iterdir())

    done = api.run(
        load(plan_file, {**dict(zip([word[2:] for word in saving[::2]], saving[1::2], strict=True)), "run.steps": 7}), resume=True
    )
    text, measured = "\n".join(done.lines()), done.to_json()["measured"]
    assert "planned 5 steps before: the learning-rate schedule now ends at 7" in text
    assert measured["step_s"] == pytest.approx(sum(measured["time"].values()))
    assert repr(done).startswith("Run(tiny-gpt on zero 2: ")
    assert len(repr(done).splitlines()[0]) == len(repr(done)) < 140


def test_a_check_gives_a_verdict_an_item(plan_file, capsys):
    """All three hold for a sound plan, and nothing is left behind."""
    assert main(["run", str(plan_file), "--check", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)

    assert (True, [True, True, True]) == (document["passed"], [one["holds"] for one in document["checks"]])
    assert {"plan.toml", "words.txt"} == {path.name for path in plan_file.parent.iterdir()}


def test_a_check_that_fails_ends_with_4(plan_file, capsys):
    """A rate of zero learns nothing."""
    assert main(["run", str(plan_file), "--check", "--optimizer.lr", "1e-30"]) == 4
    assert "NO  the loss of one batch falls" in capsys.readouterr().out


def test_a_plan_for_other_devices_is_not_run_here(capsys):
    """The message names both numbers."""
    words = ["--cluster.device", "h100-sxm", "--cluster.nodes", "1", "--cluster.devices_per_node", "8", "--parallel.zero.size", "8"]
    assert main(["run", "llama-3-8b", *words, "--json"]) == 2
    problem = json.loads(capsys.readouterr().out)["problems"][0]

    assert "needs 8 processes on h100-sxm, and this is 1" in problem["message"]
    assert "--print-launch" in problem["try"]


def test_a_wrong_number_of_launched_processes_is_refused(plan_file, capsys, monkeypatch):
    """Before anything is joined."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)

    assert main(["run", str(plan_file), "--json"]) == 2
    assert "torchrun started 3 processes, and the plan needs 2" in capsys.readouterr().out


def test_a_plan_that_does_not_fit_ends_with_3(plan_file, capsys):
    """With the prediction that says so; nothing is trained, no folder made."""
    assert main(["run", "gpt3-175b", "--json"]) == 3
    out, err = capsys.readouterr()

    assert "does not fit" in err
    assert ["largest", "try"] == [line.split()[0] for line in err.splitlines()[1:3]]
    assert json.loads(out)["memory"]["verdict"] == "does not fit"
    assert not (plan_file.parent / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run.data", "text:nowhere"], "does not exist"),
        (["--run.checkpoint.every", "1", "--run.checkpoint.folder", "plan.toml/x"], "cannot be written"),
        (["--out", "plan.toml"], "cannot be written"),
        (["--resume"], "saves no checkpoints"),
        (["--stop-after", "0"], "at least one step"),
        (["--batch.sequence_tokens", "512", "--run.data", "text:plan.toml"], "fewer than one sequence"),
        (["--batch.sequence_tokens", "200", "--run.data", "text:plan.toml"], "shorter than one sequence"),
    ],
)
def test_what_cannot_be_run_is_refused(plan_file, capsys, words, message):
    """Exit code 2, and nothing written."""
    before = {path.name for path in plan_file.parent.rglob("*")}

    assert main(["run", str(plan_file), "--json", *words]) == 2
    assert message in capsys.readouterr().out
    assert before == {path.name for path in plan_file.parent.rglob("*")}


def test_launch_commands_repeat_the_command_line(plan_file, capsys):
    """One line a node, settings included, without --print-launch itself."""
    cluster = ["--cluster.device", "h100-sxm", "--cluster.nodes", "2", "--cluster.devices_per_node", "8"]
    words = [*cluster, "--parallel.zero.size", "16", "--batch.global_sequences", "16"]
    assert main(["run", str(plan_file), "--print-launch", "--json", "--resume", *words]) == 0
    document = json.loads(capsys.readouterr().out)

    assert (16, 2) == (document["num_processes"], len(document["commands"]))
    for node, command in enumerate(document["commands"]):
        assert f"--node-rank {node} --nproc-per-node 8" in command
        assert f"-m trainwright run {plan_file.resolve()} --cluster.device=h100-sxm" in command
        assert command.endswith("--resume --json")
    assert launch_commands(load(plan_file), ["x"])[0].startswith("torchrun --standalone --nproc-per-node 2 ")


@pytest.mark.slow
def test_torchrun_starts_the_same_run(plan_file, root):
    """Only rank 0 speaks."""
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trainwright"]
    done = subprocess.run([*command, "run", str(plan_file), "--json"], capture_output=True, text=True, check=False, env=environment)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_steps"] == 5


def test_an_interrupted_run_ends_with_130(plan_file, root):
    """Its processes are gone, and no checkpoint is half written."""
    words = [
        "run",
        str(plan_file),
        "--run.steps",
        "100000",
        "--run.checkpoint.every",
        "1",
        "--run.checkpoint.folder",
        "saved",
        "--out",
        "out",
    ]
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    running = subprocess.Popen([sys.executable, "-m", "trainwright", *words], stderr=subprocess.PIPE, text=True, env=environment)
    metrics = plan_file.parent / "out" / "metrics.jsonl"
    while running.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 3):
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)

    assert (130, "interrupted") == (running.returncode, err.strip())
    steps = [path for path in (plan_file.parent / "saved").iterdir() if not path.name.startswith(".")]
    assert steps
    assert all((path / "manifest.json").is_file() for path in steps)


def test_the_same_from_python(plan_file):
    """A path, or a Plan; the run has the document that the command prints."""
    plan = trainwright.load(plan_file, **{"run.steps": 2})
    done = trainwright.run(plan)

    assert 2 == done.to_json()["num_steps"]
    assert trainwright.Plan is type(plan)
