"""A run of 6 steps, and the same run stopped and resumed twice, are the same to the last bit; what is not restored is named.

Kinds 11 and 12 of the known mistakes; see test_mutations.
"""

from __future__ import annotations

import shutil
import zlib
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from plans import GPT, small_plan
from trainwright.engine import saving
from trainwright.engine.data import Corpus, Cursor
from trainwright.engine.train import Rank, feed_of
from trainwright.engine.world import run_threads
from trainwright.prove.launch import drawn_masks
from trainwright.prove.resume import History, diagnose_resume
from trainwright.strategies.data import Data
from trainwright.strategies.tensor import Tensor
from trainwright.strategies.zero import Zero

pytestmark = pytest.mark.proof

NUM_STEPS = 6
STOPS = (2, 4, 6)
MODEL = replace(GPT, dropout=0.2)
TOKENS = np.random.default_rng(7).integers(0, MODEL.vocab, size=8 * 60 + 1)
CORPUS = Corpus(
    name="numbers",
    train=TOKENS,
    validation=TOKENS[:9],
    vocab_size=MODEL.vocab,
    train_bytes=len(TOKENS),
    validation_bytes=9,
    unigram_entropy=1.0,
    num_documents=1,
)


@dataclass(frozen=True)
class Faults:
    """What a resumed run does wrong."""

    cursor: bool = False
    counts_since_resume: bool = False
    draws: bool = False
    moments: bool = False
    rounds: bool = False


def attempt(plan, folder, first, stop, faults):
    """Steps `first` to `stop` of a run on all ranks, from the newest checkpoint unless it is the beginning; a checkpoint at the end."""

    def body(world):
        feed = feed_of(plan, CORPUS)
        rank = Rank.of(plan, world, feed)
        if first:
            feed = feed_of(plan, CORPUS, restored(world, folder, rank.state, plan, faults))
            rank.executor.batches = feed
        samples, draws = [], []
        for step in range(first, stop):
            counted = step - first if faults.draws else step
            samples.append(tuple(feed.sequences(step, 0, plan.batch.global_sequences)))
            draws.append(zlib.crc32(b"".join(one.values.numpy().tobytes() for one in drawn_masks(rank.executor, counted))))
            rank.step(counted, NUM_STEPS)
        saving.save(world, folder, feed.cursor(stop), rank.state, plan)
        state = {f"rank {world.rank} {name}": value.to(exact(value)).numpy().copy() for name, value in rank.state.items()}
        return samples, draws, state

    by_rank = run_threads(body, plan.num_devices)
    return History(
        first_step=first,
        samples=tuple(by_rank[0][0]),
        draws=tuple(sum(draws) for draws in zip(*(one[1] for one in by_rank), strict=True)),
        state={name: value for _, _, state in by_rank for name, value in state.items()},
    )


def exact(value):
    """A format that numpy knows and that holds the value: float32 for bf16."""
    return torch.float32 if value.dtype == torch.bfloat16 else value.dtype


def restored(world, folder, state, plan, faults):
    """Restore, and then break what the faults say."""
    cursor = saving.restore(world, folder, state, plan)
    for name, value in state.items():
        if faults.moments and "moment" in name:
            value.zero_()
        if faults.rounds and "weights" in name:
            value.copy_(value.float())
    if faults.cursor:
        return Cursor(cursor.step, 0)
    if faults.counts_since_resume:
        return Cursor(cursor.step, cursor.num_sequences // len(STOPS[:-1]))
    return cursor


def histories(plan, folder):
    """The run that is never stopped, and the last part of the one that is resumed twice."""
    straight = attempt(plan, folder / "straight", 0, NUM_STEPS, Faults())
    for first, stop in pairwise((0, *STOPS)):
        resumed = attempt(plan, folder / "resumed", first, stop, Faults())
    return straight, resumed


PLANS = {
    "zero3": small_plan(Zero(size=2), model=MODEL, num_microbatches=2),
    "zero1": small_plan(Zero(size=2, stage=1), model=MODEL, num_microbatches=2, compute="bf16"),
    "data-tensor": small_plan(Data(size=2), Tensor(size=2, sequence=True), model=MODEL, num_microbatches=2, compute="fp32"),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_resumed_run_is_the_run_that_was_never_stopped(plan, tmp_path):
    """Samples, random numbers, weights, master copies and moments agree to the last bit after 2 + 2 + 2 steps and after 6."""
    straight, resumed = histories(plan, tmp_path)

    assert [] == diagnose_resume(straight, resumed)
    assert straight.samples[4:] == resumed.samples
    assert len({sample for step in straight.samples for sample in step}) == NUM_STEPS * plan.batch.global_sequences


@pytest.mark.parametrize(
    ("faults", "name", "words"),
    [
        (Faults(cursor=True), "data-cursor", "as if only 0 had been read"),
        (Faults(counts_since_resume=True), "data-cursor", "as if only 8 had been read"),
        (Faults(draws=True), "random-state", "those of step 0"),
        (Faults(moments=True), "state-not-restored", "samples and random numbers agree"),
        (Faults(rounds=True), "state-not-restored", "weights"),
    ],
    ids=["cursor", "cursor-of-the-last-resume", "draws", "moments", "rounded-weights"],
)
def test_what_is_not_restored_is_named(faults, name, words, stopped, tmp_path):
    """The cursor of the data, the random numbers, the state: each mistake has its own cause, and its consequences are no others."""
    straight, saved = stopped
    shutil.copytree(saved, tmp_path / "saved")
    resumed = attempt(PLANS["zero3"], tmp_path / "saved", STOPS[1], NUM_STEPS, faults)

    (cause,) = diagnose_resume(straight, resumed)

    assert name == cause.name
    assert words in cause.text


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The run that is never stopped, and the checkpoints of one that was stopped after 4 steps, having been resumed once."""
    folder = tmp_path_factory.mktemp("stopped")
    for first, stop in pairwise((0, *STOPS[:2])):
        attempt(PLANS["zero3"], folder / "saved", first, stop, Faults())
    return attempt(PLANS["zero3"], folder / "straight", 0, NUM_STEPS, Faults()), folder / "saved"


@pytest.mark.parametrize("num_after", [1, 3])
def test_every_sample_comes_once_though_the_ranks_change(num_after):
    """30 samples on 2 ranks, then 10 resumptions of other sizes: the next is always the one that nobody has read."""
    before = small_plan(Data(size=2), num_microbatches=3)
    after = small_plan(Data(size=num_after), num_microbatches=2)
    first = feed_of(before, CORPUS)
    cursor = first.cursor(5)
    read = [sample for step in range(5) for sample in rows(first, before, step)]
    straight = replace(first, global_sequences=1, num_replicas=1, microbatch_sequences=1)
    for _ in range(2):
        feed = feed_of(after, CORPUS, cursor)
        read += rows(feed, after, cursor.step)
        cursor = feed.cursor(cursor.step + 1)

    assert [straight.sequences(one, 0, 1)[0] for one in range(len(read))] == read
    assert cursor.num_sequences == len(set(read)) == len(read)


def rows(feed, plan, step):
    """The numbers of the samples that all ranks read in a step, in the order of their places, found by what they hold."""
    held = {}
    for replica in range(plan.num_replicas):
        for microbatch in range(plan.num_microbatches):
            batch = feed.batch(step, replica, microbatch)
            for row, tokens in enumerate(batch.tokens):
                held[batch.first_sequence + row] = NUMBERED[tuple(tokens.tolist())]
    return [held[place] for place in sorted(held)]


NUMBERED = {tuple(torch.from_numpy(TOKENS[8 * number : 8 * number + 8]).tolist()): number for number in range(60)}
