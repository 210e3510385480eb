"""Training: resumed runs, validation, what is written down, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isfinite

import pytest
import torch

from trainwright.engine import checkpoint
from trainwright.engine.data import Cursor, load_corpus
from trainwright.engine.evaluate import Evaluation
from trainwright.engine.gathering import told_by_all
from trainwright.engine.outcome import time_parts, traffic
from trainwright.engine.trace import trace, trace_events
from trainwright.engine.train import Options, Rank, corpus_of, feed_of, is_recorded, prepare_checkpoints, train
from trainwright.engine.trial import Verdict, complete, fall, trial
from trainwright.engine.world import RankFailed, run_threads
from trainwright.plan.load import read
from trainwright.predict.predict import predict
from trainwright.problems import PlanError

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
[optimizer]
lr = 3e-3
warmup_steps = 2
[run]
steps = 6
data = "text:words.txt"
validate_every = 4
checkpoint = { every = 2, folder = "saved" }
"""

MESHES = {
    "one": {},
    "zero": {"parallel.zero.size": 2, "parallel.zero.stage": 3},
    "bf16": {"precision.compute": "bf16", "parallel.data.size": 2},
    "pipeline": {"parallel.pipeline.size": 2, "parallel.tensor.size": 2},
}


@pytest.fixture
def plan_of(tmp_path):
    """A plan for a small model and a small text, with settings changed."""
    (tmp_path / "words.txt").write_text("".join(f"word {number * number % 97} of many\n" for number in range(400)), encoding="utf-8")

    def make(settings=None, folder="saved"):
        overrides = {"run.checkpoint.folder": str(tmp_path / folder)} | (settings or {})
        plan = read(PLAN, file=tmp_path / "plan.toml", overrides=overrides)
        return replace(plan, model=replace(plan.model, num_layers=2, width=16, num_heads=2, num_kv_heads=2, head_width=8, ffn_width=32))

    return make


@pytest.fixture
def do(tmp_path):
    """Run a plan on threads; what rank 0 tells."""

    def run(plan, **options):
        corpus = corpus_of(plan)
        return run_threads(lambda world: train(world, plan, corpus, Options(folder=tmp_path, progress=False, **options)), plan.num_devices)[
            0
        ]

    return run


def saved(plan, step):
    """Every rank's tensors of a checkpoint."""
    folder = plan.path(plan.run.checkpoint.folder)
    return run_threads(lambda world: checkpoint.load(world, folder, step).tensors, plan.num_devices)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_run_in_three_parts_is_the_run_in_one(plan_of, do, mesh):
    """6 steps are 2 + 2 + 2: losses, weights, master copies and moments agree to the last bit."""
    whole, parts = plan_of(MESHES[mesh], "whole"), plan_of(MESHES[mesh], "parts")
    straight = do(whole)
    pieces = [do(parts, stop_after=2), do(parts, stop_after=4, resume=True), do(parts, resume=True)]

    assert straight.losses == sum((piece.losses for piece in pieces), ())
    for expected, found in zip(saved(whole, 6), saved(parts, 6), strict=True):
        assert expected.keys() == found.keys()
        assert [] == [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]


def test_a_resumed_run_reads_on_where_it_stopped(plan_of):
    """The cursor counts sequences: those of step 3 are the same from the beginning and from a cursor, even for another batch before it."""
    plan = plan_of()
    corpus = corpus_of(plan)
    straight, resumed = feed_of(plan, corpus), feed_of(plan, corpus, Cursor(step=3, num_sequences=12))
    other = feed_of(plan, corpus, Cursor(step=6, num_sequences=12))

    assert straight.sequences(3, 0, 4) == resumed.sequences(3, 0, 4) == other.sequences(6, 0, 4)


def test_a_checkpoint_of_another_plan_is_refused(plan_of, do):
    """And each setting that differs is named."""
    do(plan_of(), stop_after=2)
    with pytest.raises(RankFailed) as caught:
        do(plan_of({"run.seed": 7, "optimizer.name": "sgd"}), resume=True)
    assert isinstance(caught.value.__cause__, PlanError)

    assert ["optimizer.name", "run.seed"] == sorted(problem.path for problem in caught.value.__cause__.problems)


def test_the_learning_rate_follows_the_whole_run(plan_of, do, tmp_path):
    """A run that stops early does not cool down early: metrics of a part are those of the whole."""
    do(plan_of(folder="whole"))
    whole = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (tmp_path / "metrics.jsonl").unlink()
    do(plan_of(folder="part"), stop_after=2)
    part = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in whole if "loss" in line]

    assert [1, 2, 3, 4, 5, 6] == [line["step"] for line in steps]
    assert [4, 6] == [line["step"] for line in whole if "validation_loss_per_byte" in line]
    assert [line["lr"] for line in steps[:2]] == [line["lr"] for line in part if "loss" in line]
    assert all(isfinite(value) for line in steps for value in line.values())


def test_the_validation_loss_is_the_loss_of_the_same_text(plan_of):
    """On text that is both trained on and kept out, the first step's loss is the validation loss before it."""
    plan = plan_of({"parallel.zero.size": 2, "run.validation_fraction": 0})
    corpus = load_corpus(plan.run.data, sequence_tokens=16, validation_fraction=0, folder=plan.source.folder)
    text = corpus.train[: 16 * plan.batch.global_sequences + 1]
    both = replace(corpus, train=text, validation=text, train_bytes=len(text), validation_bytes=len(text))

    def body(world):
        rank = Rank.of(plan, world, feed_of(plan, both))
        evaluation = Evaluation.of(plan, world, both, rank.executor.store)
        before = rank.executor.store.live_bytes
        looked = evaluation.loss()
        left = rank.executor.store.live_bytes - before
        return looked, left, rank.step(0, 6)[0].loss

    for looked, left, trained in run_threads(body, 2):
        assert trained == pytest.approx(looked, rel=1e-6)
        assert left == 0


def test_without_text_kept_out_there_is_no_validation(plan_of, do):
    """The run says nothing instead of something."""
    assert () == do(plan_of({"run.validation_fraction": 0}), stop_after=2).looks


@pytest.mark.parametrize("mesh", MESHES)
def test_what_was_sent_and_held_is_what_was_predicted(plan_of, do, mesh):
    """Bytes of every exchange of the critical position, and the peak of the fullest rank, are equal."""
    plan = plan_of(MESHES[mesh])
    outcome, prediction = do(plan), predict(plan)
    document = prediction.to_json()
    measured = outcome.measured(prediction.simulation.critical)
    expected = {(row["axis"], row["op"]): (row["count"], row["sent_bytes_per_rank"]) for row in document["wire"] if row["payload_bytes"]}

    assert expected == {(row["axis"], row["op"]): (row["count"], row["sent_bytes_per_rank"]) for row in measured["wire"]}
    assert max(role["boundary_peak_bytes"] for role in document["memory"]["roles"]) == measured["memory"]["peak_bytes"]


def test_a_run_that_diverges_stops_and_says_so(plan_of, do):
    """Bad input, not a fault of ours."""
    with pytest.raises(RankFailed, match="diverged") as caught:
        do(plan_of({"optimizer.lr": 1e9, "optimizer.clip_norm": 0, "run.steps": 40}))

    assert caught.value.__cause__.problems[0].path == "optimizer.lr"


def test_a_text_with_tokens_that_the_model_does_not_know_is_refused(plan_of):
    """Bytes need 256 of them."""
    plan = plan_of()
    with pytest.raises(PlanError, match="256 different tokens, the model knows 100"):
        corpus_of(replace(plan, model=replace(plan.model, vocab=100)))


def test_a_folder_with_checkpoints_is_not_begun_anew(plan_of, do):
    """Nor is an empty one resumed, nor a finished run."""
    plan = plan_of()
    with pytest.raises(PlanError, match="there is no checkpoint"):
        prepare_checkpoints(plan, resume=True)
    do(plan)
    with pytest.raises(PlanError, match="step 6 already"):
        prepare_checkpoints(plan, resume=False)
    with pytest.raises(PlanError, match="nothing is left to do"):
        prepare_checkpoints(plan, resume=True)


def test_some_steps_are_recorded():
    """Not those of warm-up, unless there are no others."""
    assert [2, 3, 4, 50, 100] == [number for number in range(120) if is_recorded(number, 120)]
    assert is_recorded(0, 1)
    assert [1] == [number for number in range(2) if is_recorded(number, 2)]


def test_the_parts_of_a_step_are_no_more_than_the_step(plan_of):
    """Compute, waiting and updates of one rank do not overlap."""
    plan = plan_of({"parallel.zero.size": 2})
    corpus = corpus_of(plan)

    def body(world):
        rank = Rank.of(plan, world, feed_of(plan, corpus))
        rank.step(0, 6, recorded=True)
        return rank.recorded[0]

    for step_s, events in run_threads(body, 2):
        parts = time_parts(events)
        assert 0 < min(parts.values())
        assert sum(parts.values()) <= step_s
        assert {"all_gather", "reduce_scatter", "all_reduce"} == {one.op for one in traffic(events)}


def test_a_trace_has_a_process_a_rank_and_a_track_a_lane(plan_of):
    """As Perfetto reads it: whole events with a beginning and a length."""
    plan = plan_of({"parallel.zero.size": 2})
    corpus = corpus_of(plan)

    def body(world):
        rank = Rank.of(plan, world, feed_of(plan, corpus))
        rank.step(0, 6, recorded=True)
        return told_by_all(world, trace_events(rank.recorded[0][1]))

    entries = trace(run_threads(body, 2)[0])["traceEvents"]

    assert {"rank 0", "rank 1"} == {entry["args"]["name"] for entry in entries if entry["name"] == "process_name"}
    assert {"compute", "wire:zero"} == {entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
    assert all(entry["dur"] >= 0 and entry["args"]["site"] for entry in entries if entry["ph"] == "X")


def test_every_rank_hears_what_all_say():
    """However long it is."""
    assert [[{"rank": rank, "text": "x" * rank * 40_000} for rank in range(3)]] * 3 == run_threads(
        lambda world: told_by_all(world, {"rank": world.rank, "text": "x" * world.rank * 40_000}), 3
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_a_sound_plan_passes_its_trial(plan_of, tmp_path, mesh):
    """The loss falls, what is saved comes back, every parameter has a gradient."""
    plan = plan_of(MESHES[mesh])
    corpus = corpus_of(plan)
    verdicts = run_threads(lambda world: trial(world, plan, corpus, tmp_path / "trial"), plan.num_devices)

    assert all(verdict.holds for verdict in verdicts[0]), verdicts[0]
    assert verdicts[0] == verdicts[-1]


def test_a_trial_sees_dead_and_broken_parameters():
    """A gradient may be zero on one rank and not on another; one that is zero on all, or not finite on one, is a fault."""
    said = [
        {"gradients": {"a": ["0.0", "1.0"], "b": ["0.0", "1.0"], "c": ["1.0", "1.0"]}},
        {"gradients": {"a": ["2.0", "1.0"], "c": ["nan", "0.0"]}},
    ]
    verdict = complete(said)

    assert (False, "c is not finite; b is zero") == (verdict.holds, verdict.seen)
    assert not fall([1.0, 0.9, 1.1]).holds
    assert not fall([1.0, float("nan")]).holds
    assert isinstance(verdict, Verdict)
