"""Sharded training equals unsharded training: values, bytes on the wire, bytes in memory, for every strategy and their combinations.

Each plan is executed for three steps on as many ranks as it has, over sequences of unequal length, with clipping at work.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from plans import GPT, LLAMA, small_plan, title
from trainwright.engine.world import read_wchar
from trainwright.plan.check import check
from trainwright.prove.prove import OS_TOLERANCE, prove_small
from trainwright.spec.optimizer import Optimizer
from trainwright.strategies.data import Data
from trainwright.strategies.pipeline import Pipeline
from trainwright.strategies.recompute import Recompute
from trainwright.strategies.tensor import Tensor
from trainwright.strategies.zero import Zero

pytestmark = pytest.mark.proof

POLICIES = ("none", "full", "selective")
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
DROPPING_LLAMA, DROPPING_GPT = replace(LLAMA, dropout=0.1), replace(GPT, dropout=0.2)


def pipeline(size, schedule):
    return Pipeline(size=size, schedule=schedule, chunks=SCHEDULES[schedule])


def recompute(policy):
    return Recompute(policy=policy)


REPLICAS = [
    *(small_plan(Data(size=2), recompute(policy), model=model) for policy, model in zip(POLICIES, (LLAMA, GPT, DROPPING_GPT), strict=True)),
    *(small_plan(Zero(size=2, stage=stage), recompute(policy)) for stage in (1, 2, 3) for policy in POLICIES),
    *(small_plan(Zero(size=3, stage=stage)) for stage in (1, 2, 3)),
    small_plan(Zero(size=3, stage=3), model=GPT),
    small_plan(Data(size=2), Zero(size=2), num_microbatches=3),
    small_plan(Data(size=3), num_microbatches=1),
]

OPTIONS = [
    *(small_plan(Zero(size=2, prefetch=ahead), num_microbatches=2) for ahead in (0, 2)),
    small_plan(Zero(size=2, reshard_after_forward=False), recompute("full"), num_microbatches=2),
    small_plan(Zero(size=2, stage=2, gradients="whole"), num_microbatches=3),
    small_plan(Zero(size=2, gradients="whole"), num_microbatches=3, model=GPT),
    small_plan(Zero(size=2, free="after-reduce"), num_microbatches=2),
    small_plan(Zero(size=2, free="after-reduce", overlap=False), num_microbatches=2),
    small_plan(Zero(size=2, overlap=False), num_microbatches=2, model=GPT),
    small_plan(Zero(size=2), Recompute(policy="blocks", blocks=1), num_microbatches=2),
]

TENSOR = [
    *(
        small_plan(Tensor(size=2, sequence=sequence), recompute(policy), model=model, num_microbatches=2)
        for sequence in (False, True)
        for policy in POLICIES
        for model in (LLAMA, GPT)
    ),
    small_plan(Tensor(size=2, sequence=True, keep_gathered=True), model=GPT, num_microbatches=2),
    small_plan(Tensor(size=2, sequence=True, keep_gathered=True), recompute("full"), num_microbatches=2),
    small_plan(Tensor(size=2, sequence=True), model=DROPPING_GPT, num_microbatches=2),
    small_plan(Tensor(size=2), model=DROPPING_LLAMA, num_microbatches=2),
    small_plan(Tensor(size=2, sequence=True), num_microbatches=2, microbatch_sequences=2, model=GPT),
]

PIPELINE = [
    *(small_plan(pipeline(2, schedule), recompute(policy), model=GPT) for schedule in SCHEDULES for policy in POLICIES),
    *(small_plan(pipeline(4, schedule), model=GPT) for schedule in SCHEDULES),
    *(small_plan(pipeline(size, schedule), num_microbatches=5) for size, schedule in product((2, 4), ("gpipe", "1f1b"))),
    small_plan(pipeline(4, "1f1b"), num_microbatches=2, model=GPT),
    small_plan(Pipeline(size=2, layers=(1, 3)), model=DROPPING_GPT, microbatch_sequences=2),
]

COMBINED = [
    *(small_plan(Zero(size=2), Tensor(size=2, sequence=sequence), num_microbatches=2) for sequence in (False, True)),
    small_plan(Zero(size=2), Tensor(size=2, sequence=True), recompute("full"), model=GPT, num_microbatches=2),
    small_plan(Data(size=2), Tensor(size=2, sequence=True), recompute("selective"), model=GPT, num_microbatches=2),
    small_plan(pipeline(2, "1f1b"), Data(size=2), model=GPT),
    small_plan(pipeline(2, "1f1b"), Zero(size=2, stage=2), model=GPT, microbatch_sequences=2),
    *(small_plan(pipeline(2, schedule), Zero(size=2), Tensor(size=2, sequence=True), model=GPT) for schedule in SCHEDULES),
]

SLOW = [
    *(small_plan(Zero(size=3, stage=stage), recompute(policy)) for stage in (1, 2, 3) for policy in POLICIES[1:]),
    *(small_plan(pipeline(4, schedule), recompute(policy), model=GPT) for schedule in SCHEDULES for policy in POLICIES[1:]),
    *(
        small_plan(pipeline(2, schedule), Zero(size=2), Tensor(size=2, sequence=sequence), recompute(policy), model=model)
        for schedule in SCHEDULES
        for sequence, model in ((False, LLAMA), (True, GPT), (True, LLAMA))
        for policy in POLICIES
    ),
    *(small_plan(Zero(size=size, stage=stage), recompute(policy), model=GPT) for size in (2, 3) for stage in (1, 2) for policy in POLICIES),
    *(small_plan(Zero(size=2), Tensor(size=2, sequence=True), recompute(policy), microbatch_sequences=2) for policy in POLICIES),
    small_plan(pipeline(2, "1f1b"), Data(size=2), Zero(size=2), Tensor(size=2, sequence=True), model=DROPPING_GPT),
]

FLOAT32 = [
    small_plan(Data(size=2), compute="fp32"),
    small_plan(Zero(size=3), compute="fp32", model=GPT, num_microbatches=2),
    small_plan(Tensor(size=2, sequence=True), compute="fp32", model=GPT, num_microbatches=2),
    small_plan(pipeline(2, "1f1b"), Data(size=2), compute="fp32", model=GPT),
    small_plan(Zero(size=2), Tensor(size=2), compute="fp32", num_microbatches=2),
]

SGD = Optimizer(name="sgd", lr=0.5, momentum=0.9, clip_norm=0.05)


def assert_proved(proof):
    """All that a proof asks, each by itself, so that a failure says which."""
    norm = proof.reports[0].results[0].gradient_norm

    assert () == proof.causes
    assert proof.worst_relative_error <= proof.tolerance.gradients
    assert proof.parameters.worst_relative_error <= proof.tolerance.parameters
    assert () == proof.differing_replicas
    assert ((), (), ()) == (proof.wire.missing, proof.wire.extra, proof.wire.wrong)
    assert proof.wire.predicted_bytes == proof.wire.measured_bytes
    assert () == proof.memory.wrong
    assert proof.memory.persistent_equal
    assert proof.memory.predicted_peak_bytes == proof.memory.measured_peak_bytes
    assert proof.memory.temporary_close
    assert norm > proof.plan.optimizer.clip_norm > 0
    assert proof.equal


def named(plans):
    return pytest.mark.parametrize("plan", plans, ids=title)


@named([*REPLICAS, *OPTIONS])
def test_replicas_equal_the_reference(plan):
    """Data and zero cut the batch, gradients, states and weights; sizes do not divide."""
    assert_proved(prove_small(plan))


@named(TENSOR)
def test_cut_matrices_equal_the_reference(plan):
    """Each rank has a part of every matrix, and with sequence a part of the tokens."""
    assert_proved(prove_small(plan))


@named(PIPELINE)
def test_pipelines_equal_the_reference(plan):
    """Stages pass activations on, in whatever order the schedule gives; a tied embedding stands at both ends."""
    assert_proved(prove_small(plan))


@named(COMBINED)
def test_strategies_combine(plan):
    """What holds for each strategy alone holds for their product."""
    assert_proved(prove_small(plan))


@pytest.mark.slow
@named(SLOW)
def test_the_rest_of_the_matrix(plan):
    """Three ranks and four stages with each recompute policy; pipeline 2, zero-3 2 and tensor 2 under each schedule with each policy."""
    assert_proved(prove_small(plan))


@named(FLOAT32)
def test_float32_equals_the_reference_up_to_its_rounding(plan):
    """Gradients to 2e-5, replicas to the last bit."""
    proof = prove_small(plan)

    assert proof.tolerance.gradients == 2e-5
    assert_proved(proof)


@named(
    [
        small_plan(Zero(size=2), optimizer=SGD, model=GPT),
        small_plan(pipeline(2, "gpipe"), Data(size=2), optimizer=SGD),
        small_plan(Zero(size=3, stage=1), optimizer=replace(SGD, momentum=0.0), num_microbatches=1),
    ]
)
def test_gradient_descent_equals_the_reference(plan):
    """Momentum is cut as the moments of AdamW are; without it nothing is kept."""
    assert_proved(prove_small(plan))


@pytest.mark.parametrize("lengths", [(8,), (1, 0, 0, 0), (8, 1, 3, 0, 2, 7, 5)], ids=str)
def test_sequences_of_any_lengths_count_by_their_tokens(lengths):
    """Full sequences, a single token in the whole of many microbatches, and unequal counts give the mean over tokens."""
    plan = small_plan(Pipeline(size=2), Data(size=2), model=GPT)

    assert_proved(prove_small(plan, lengths=lengths))


PROCESSES = [
    small_plan(Data(size=2), model=replace(LLAMA, width=64, head_width=16, ffn_width=128, vocab=256)),
    small_plan(
        pipeline(2, "1f1b"), Zero(size=2), Tensor(size=2, sequence=True), model=replace(GPT, width=64, head_width=16, ffn_width=128)
    ),
]


@named(PROCESSES)
def test_processes_send_what_threads_send(plan):
    """Over gloo the operating system's own counter agrees with the ledger to a thousandth."""
    proof = prove_small(plan, processes=True)

    assert_proved(proof)
    if read_wchar() is not None:
        assert proof.wire.os_error is not None
        assert proof.wire.os_error <= OS_TOLERANCE


@pytest.mark.parametrize(
    "strategies",
    [(Data(size=2),), (Zero(size=2), Tensor(size=2, sequence=True)), (Pipeline(size=2),)],
    ids=["data", "zero-tensor", "pipeline"],
)
def test_recomputing_changes_no_bit(strategies):
    """What is computed again is what was dropped, dropout included; all gradients and weights stay as they were."""
    proofs = {
        policy: prove_small(small_plan(*strategies, recompute(policy), model=DROPPING_GPT, num_microbatches=1)) for policy in POLICIES
    }

    for policy in ("full", "selective"):
        for mine, plain in zip(proofs[policy].reports, proofs["none"].reports, strict=True):
            assert plain.results == mine.results
            for name in ("after", "before"):
                assert same_bits(getattr(plain, name), getattr(mine, name))
            assert all(same_bits(one, other) for one, other in zip(plain.gradients, mine.gradients, strict=True))


def same_bits(one, other):
    return one.keys() == other.keys() and all(one[ref].equal(other[ref]) for ref in one)


MESHES = [
    (2, ()),
    (2, (Zero(size=2), Tensor(size=2, sequence=True))),
    (1, (Pipeline(size=2), Data(size=2), Tensor(size=2))),
]


def test_dropout_does_not_see_the_mesh():
    """However the batch of 8 sequences is spread, every element meets the same random number, and the loss is the same."""
    masks, losses = [], []
    for width, strategies in MESHES:
        replicas = 2 if len(strategies) else 1
        plan = small_plan(
            *strategies, model=DROPPING_GPT, microbatch_sequences=width, num_microbatches=8 // (replicas * width), optimizer=SGD
        )
        proof = prove_small(plan, lengths=(5, 8, 0, 7, 3))
        assert proof.equal
        masks.append(rows_of(proof))
        losses.append([result.loss for result in proof.reports[0].results])

    assert all(masks[0] == other for other in masks[1:])
    assert all(pytest.approx(losses[0], rel=1e-12) == other for other in losses[1:])


def rows_of(proof):
    """Every row of every mask as bytes, by (place, sequence, token); copies must agree."""
    rows = {}
    for drawn in (one for report in proof.reports for one in report.masks):
        for sequence, tokens in enumerate(drawn.values):
            for token, row in enumerate(tokens):
                key = (drawn.place, drawn.first_sequence + sequence, drawn.first_token + token)
                assert rows.setdefault(key, row.numpy().tobytes()) == row.numpy().tobytes()
    return rows


# A sample of everything at once


def sampled_plans(count, seed):
    """Random plans over the whole product of options, those left out that a check refuses."""
    draw = random.Random(seed)
    plans = []
    while len(plans) < count:
        schedule = draw.choice(list(SCHEDULES))
        plan = small_plan(
            pipeline(draw.choice([1, 2, 2, 4]) if schedule != "interleaved" else 2, schedule),
            Data(size=draw.choice([1, 1, 2])),
            Zero(
                size=draw.choice([1, 2, 2, 3]),
                stage=draw.choice([1, 2, 3, 3]),
                reshard_after_forward=draw.choice([True, True, False]),
                prefetch=draw.choice([0, 1, 2]),
                free=draw.choice(["before-reduce", "after-reduce"]),
                gradients=draw.choice(["sharded", "sharded", "whole"]),
                overlap=draw.choice([True, True, False]),
            ),
            Tensor(size=draw.choice([1, 2]), sequence=draw.choice([True, False]), keep_gathered=draw.choice([True, False, False])),
            draw.choice([*map(recompute, POLICIES), Recompute(policy="blocks", blocks=1)]),
            model=draw.choice([LLAMA, GPT, DROPPING_LLAMA, DROPPING_GPT]),
            num_microbatches=draw.choice([2, 3, 4, 5]),
            microbatch_sequences=draw.choice([1, 1, 2]),
            optimizer=draw.choice([None, None, SGD]),
            seed=draw.randrange(100),
        )
        if plan.num_devices <= 8 and not list(check(plan)):
            plans.append(plan)
    return plans


@pytest.mark.slow
@pytest.mark.parametrize("plan", sampled_plans(count=40, seed=2024), ids=title)
def test_a_sample_of_everything(plan):
    """No option of one strategy breaks another."""
    assert_proved(prove_small(plan))


def test_every_plan_of_this_file_could_be_written():
    """No plan is proved that its check would refuse."""
    plans = [*REPLICAS, *OPTIONS, *TENSOR, *PIPELINE, *COMBINED, *SLOW, *FLOAT32, *PROCESSES]

    assert [] == [problem for plan in plans for problem in check(plan)]
