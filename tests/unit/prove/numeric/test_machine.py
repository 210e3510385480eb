"""The numpy interpreter and the torch executor perform the same Programs and get the same numbers, bytes and memory."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch

from trainwright.cost.wire import member_sent_bytes
from trainwright.engine.data import PaddedFeed
from trainwright.engine.execute import Executor
from trainwright.engine.record import Recorder
from trainwright.engine.state import assemble, flat_pieces, initial_store
from trainwright.engine.world import run_threads
from trainwright.ir.action import Collective, Send, kind
from trainwright.plan.lower import lower
from trainwright.plan.plan import Parallel, Plan
from trainwright.prove.compare import compare, compare_parameters, relative_error
from trainwright.prove.numeric.call import Samples
from trainwright.prove.numeric.exchange import Meeting, MismatchError, Transfer
from trainwright.prove.numeric.machine import DeadlockError, Machine
from trainwright.spec import catalog
from trainwright.spec.batch import Batch
from trainwright.spec.model import Model, RopeScaling
from trainwright.spec.optimizer import Optimizer
from trainwright.spec.precision import Precision
from trainwright.strategies.data import Data
from trainwright.strategies.pipeline import Pipeline
from trainwright.strategies.recompute import Recompute
from trainwright.strategies.tensor import Tensor
from trainwright.strategies.zero import Zero

NUM_STEPS = 3
TOLERANCE = 1e-12
LLAMA = {
    "name": "small",
    "num_layers": 4,
    "width": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_width": 4,
    "ffn_width": 24,
    "vocab": 61,
    "max_positions": 32,
}
GPT = LLAMA | {
    "num_kv_heads": 4,
    "tied": True,
    "positions": "learned",
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "bias": True,
}
STRETCHED = LLAMA | {
    "rope_scaling": RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32),
    "activation": "gelu",
    "norm": "layernorm",
}
SGD = Optimizer(name="sgd", lr=0.1, momentum=0.9)


def plan(model=None, *, microbatches=2, rows=1, recompute="none", optimizer=None, compute="fp64", **parallel):
    """A small plan; `rows` sequences a microbatch."""
    mesh = Parallel(**parallel)
    replicas = mesh.data.size * mesh.zero.size
    ranks = replicas * mesh.pipeline.size * mesh.tensor.size
    return Plan(
        model=Model(**(model or LLAMA)),
        cluster=catalog.cluster("local").with_devices(ranks),
        batch=Batch(sequence_tokens=8, global_sequences=microbatches * replicas * rows, microbatch_sequences=rows),
        precision=Precision(compute=compute),
        parallel=mesh,
        recompute=Recompute(policy=recompute),
        optimizer=optimizer or Optimizer(lr=0.01),
    )


def sequences(of):
    return PaddedFeed(
        vocab_size=of.model.vocab,
        sequence_tokens=of.batch.sequence_tokens,
        global_sequences=of.batch.global_sequences,
        num_replicas=of.num_replicas,
        microbatch_sequences=of.batch.microbatch_sequences,
        seed=1,
        lengths=(8, 3, 0, 5),
    )


def numpy_feed(of):
    source = sequences(of)

    def feed(step, replica, microbatch):
        batch = source.batch(step, replica, microbatch)
        return Samples(batch.tokens.numpy(), batch.targets.numpy())

    return feed


def first_copies(of, pieces):
    return {name: copies[min(copies)].numpy() for name, copies in assemble(of, pieces).items()}


def initial(of, program):
    return first_copies(of, {rank: dict(flat_pieces(initial_store(of, program, rank), "weights")) for rank in range(of.num_devices)})


def torch_run(of, program):
    """By rank: results, gradients of each step, final weights, events of the first step, peak bytes."""

    def body(world):
        store = initial_store(of, program, world.rank)
        recorder = Recorder(world.rank, of.coordinates(world.rank)["pipeline"])
        executor = Executor(of, program, world, sequences(of), store, recorder)
        before_bytes, results, gradients, events = store.live_bytes, [], [], ()
        for step in range(NUM_STEPS):
            seen: dict = {}
            results.append(
                executor.step(
                    step,
                    NUM_STEPS,
                    observe=lambda one, seen=seen: seen.update({r: t.clone() for r, t in flat_pieces(one.store, "gradients")}),
                )
            )
            gradients.append(seen)
            recorded = recorder.take(step, before_bytes)
            events = events or recorded
        return results, gradients, {ref: flat.clone() for ref, flat in flat_pieces(store, "weights")}, events, store.peak_bytes

    return run_threads(body, of.num_devices)


def told(event):
    """What an event says, but for its times."""
    return (
        event.rank,
        str(event.site),
        event.kind,
        event.lane,
        event.group,
        event.payload_bytes,
        event.sent_bytes,
        event.live_delta_bytes,
    )


PLANS = {
    "one rank": plan(),
    "gpt": plan(GPT),
    "stretched rope, exact gelu": plan(STRETCHED),
    "sgd": plan(optimizer=SGD, zero=Zero(size=2, stage=2)),
    "data 3": plan(data=Data(size=3)),
    "zero-1": plan(zero=Zero(size=2, stage=1)),
    "zero-2 whole, 3 ranks": plan(GPT, zero=Zero(size=3, stage=2, gradients="whole")),
    "zero-3": plan(zero=Zero(size=2)),
    "zero-3 kept, after-reduce": plan(zero=Zero(size=2, reshard_after_forward=False, free="after-reduce", overlap=False)),
    "tensor 2": plan(tensor=Tensor(size=2)),
    "tensor 2 sequence, two rows": plan(GPT, rows=2, tensor=Tensor(size=2, sequence=True)),
    "tensor 2 kept": plan(rows=2, tensor=Tensor(size=2, sequence=True, keep_gathered=True), recompute="selective"),
    "pipeline 2 tied": plan(GPT, pipeline=Pipeline(size=2), microbatches=3),
    "interleaved": plan(pipeline=Pipeline(size=2, schedule="interleaved", chunks=2), recompute="full"),
    "2 x 2 x 2": plan(pipeline=Pipeline(size=2), zero=Zero(size=2), tensor=Tensor(size=2, sequence=True), recompute="full"),
}


@pytest.mark.parametrize("of", PLANS.values(), ids=PLANS.keys())
def test_two_executors_agree(of):
    """Loss, norm and gradients of three steps, parameters after them; every event with its bytes; the peak."""
    program = lower(of)
    ranks = torch_run(of, program)
    machine = Machine(of, program, feed=numpy_feed(of), parameters=initial(of, program))

    for step in range(NUM_STEPS):
        result, theirs = machine.step(step, NUM_STEPS), ranks[0][0][step]
        assert relative_error(theirs.loss, result.loss) <= TOLERANCE
        assert relative_error(theirs.gradient_norm, result.gradient_norm) <= TOLERANCE
        assert max(one[0][step].num_valid_tokens for one in ranks) == result.num_valid
        found = compare(first_copies(of, {rank: one[1][step] for rank, one in enumerate(ranks)}), machine.gradients(), tolerance=TOLERANCE)
        assert found.equal, str(found.first_difference)
        if step == 0:
            assert [told(event) for one in ranks for event in one[3]] == [told(event) for event in machine.events]
    found = compare_parameters(
        first_copies(of, {rank: one[2] for rank, one in enumerate(ranks)}), machine.parameters(), tolerance=TOLERANCE
    )
    assert found.equal, str(found.first_difference)
    assert [one[4] for one in ranks] == machine.peak_bytes


@pytest.mark.parametrize("name", ["zero-2 whole, 3 ranks", "tensor 2 sequence, two rows", "2 x 2 x 2"])
def test_copies_are_the_same_bits(name):
    """Every rank that holds a parameter holds the same one."""
    of = PLANS[name]
    program = lower(of)
    machine = Machine(of, program, feed=numpy_feed(of), parameters=initial(of, program))
    machine.step(0, NUM_STEPS)

    for what in ("weights", "gradients"):
        differing = [key for key, copies in machine.copies(what).items() if any(not np.array_equal(copies[0], one) for one in copies)]
        assert differing == []


@pytest.mark.parametrize("name", ["data 3", "zero-3", "tensor 2 kept", "pipeline 2 tied", "2 x 2 x 2"])
def test_the_wire_carries_what_the_program_foretells(name):
    """Bytes handed over, for each (rank, site, kind): counted where arrays are copied, foretold from payloads and groups."""
    of = PLANS[name]
    program = lower(of)
    machine = Machine(of, program, feed=numpy_feed(of), parameters=initial(of, program))
    machine.step(0, NUM_STEPS)
    counted: Counter = Counter()
    for event in machine.events:
        if event.sent_bytes:
            counted[event.rank, str(dataclasses.replace(event.site, step=None)), event.kind] += event.sent_bytes
    foretold: Counter = Counter()
    for rank in machine.ranks:
        for action in rank.actions:
            if isinstance(action, Send):
                foretold[rank.number, str(action.site), "send"] += action.payload_bytes
            if isinstance(action, Collective):
                ranks = machine.members(rank, action.group)
                element_bytes = 8
                foretold[rank.number, str(action.site), action.op] += member_sent_bytes(
                    action.op, action.payload_bytes, len(ranks), index=ranks.index(rank.number), element_bytes=element_bytes
                )

    assert foretold == counted


def test_a_deadlock_names_each_waiting_action():
    """A stage that never sends leaves its neighbour waiting, and then itself."""
    of = PLANS["pipeline 2 tied"]
    program = lower(of)
    silent = {
        name: tuple(one for one in actions if not (isinstance(one, Send) and name.startswith("forward")))
        for name, actions in program.templates.items()
    }
    machine = Machine(of, dataclasses.replace(program, templates=silent), feed=numpy_feed(of), parameters=initial(of, program))

    with pytest.raises(DeadlockError) as caught:
        machine.step(0, NUM_STEPS)
    assert "rank 0: s0/m0/fwd#pipeline wait_send (no send was started here)" in str(caught.value)
    assert "rank 1: s1/m0/fwd#pipeline wait_recv (rank 0 has not come to its send)" in str(caught.value)


def test_a_group_whose_members_start_different_things_is_told_so():
    """Both members and both actions are named."""
    program = lower(PLANS["tensor 2"])
    one, *others = [action for action in program.actions(0) if isinstance(action, Collective) and str(action.group) == "tensor"]
    other = next(action for action in others if action.site != one.site)
    meeting = Meeting(group="tensor", ranks=(0, 1))
    meeting.join(Transfer(rank=0, action=one, source=np.zeros(4), target=np.zeros(4)))

    with pytest.raises(MismatchError) as caught:
        meeting.join(Transfer(rank=1, action=other, source=np.zeros(4), target=np.zeros(4)))
    assert f"rank 1 starts {other.site} {kind(other)} where rank 0 starts {one.site} {kind(one)}" in str(caught.value)


def test_other_formats_and_dropout_are_refused():
    """It computes in float64 and drops nothing."""
    of = plan(compute="fp32")
    with pytest.raises(ValueError, match="fp32"):
        Machine(of, lower(of), feed=numpy_feed(of), parameters={})
    of = plan(GPT | {"dropout": 0.1})
    program = lower(of)
    machine = Machine(of, program, feed=numpy_feed(of), parameters=initial(of, program))
    with pytest.raises(ValueError, match="dropout"):
        machine.step(0, NUM_STEPS)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
