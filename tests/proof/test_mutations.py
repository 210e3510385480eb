"""Known mistakes of sharded training, made on purpose in a real run: the proof fails, and names the cause from the numbers alone.

Each mistake has been made in some training framework; the numbers in the names below count the kinds of mistake. Where our architecture
does not let a mistake happen as it did elsewhere, the nearest one with the same numerical effect is made, and said so.
"""

# ruff: noqa: D102, ARG002  # an executor's method is overridden to do wrong; its class says how

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from plans import GPT, small_plan
from trainwright.engine.execute import Executor
from trainwright.engine.segments import Gradients
from trainwright.engine.state import assemble, initial_flat
from trainwright.ir.action import Collective, Compute, Free, Operand, Wait, wait_for
from trainwright.ir.layout import Group, Layout, Replicate, Shard
from trainwright.ir.program import Program
from trainwright.ir.ref import Ref
from trainwright.ir.verify import faults
from trainwright.plan.lower import SCALARS, lower
from trainwright.plan.plan import Plan
from trainwright.prove import launch as launch_module
from trainwright.prove.prove import prove_small
from trainwright.prove.reconcile import reconcile_wire
from trainwright.strategies.data import Data
from trainwright.strategies.pipeline import Pipeline
from trainwright.strategies.tensor import Tensor
from trainwright.strategies.zero import Zero

pytestmark = pytest.mark.proof

DROPPING = replace(GPT, dropout=0.2)


# Faults of a Program


def rewritten(program, rewrite):
    """The Program with every action replaced by what `rewrite` gives for it."""
    templates = {name: tuple(new for one in actions for new in rewrite(one)) for name, actions in program.templates.items()}
    return replace(program, templates=templates)


def without(wanted: Callable[[Collective], bool]) -> Callable[[Program], Program]:
    """Leave out the collectives that are `wanted`, with their Waits."""

    def change(program):
        sites = {one.site for actions in program.templates.values() for one in actions if isinstance(one, Collective) and wanted(one)}
        assert sites, "there is no such collective"
        return rewritten(program, lambda one: () if isinstance(one, Collective | Wait) and one.site in sites else (one,))

    return change


def over(axes: tuple[str, ...], wanted: Callable[[Collective], bool]) -> Callable[[Program], Program]:
    """Make collectives over other axes than they should be."""

    def change(program):
        return rewritten(program, lambda one: (replace(one, group=Group(axes)),) if isinstance(one, Collective) and wanted(one) else (one,))

    return change


def is_norm(one):
    """The sum of squares (and of the loss) over all ranks."""
    return one.source == SCALARS


def is_valid_tokens(one):
    return one.site.segment == "valid"


def is_tied_sum(one):
    return one.site.tag == "pipeline"


def is_norm_weights_sum(one):
    """The sum over the cut sequence of gradients of what is replicated over tensor."""
    return (one.site.tag or "").startswith("tensor.sum")


def is_data_sum(one):
    return one.site.tag == "data" and one.site.phase == "bwd"


def squares_of_both_copies(program):
    """Count the squares of the last stage's copy of the tied table too."""

    def again(one):
        if isinstance(one, Compute) and one.function == "square" and one.reads[0].ref == Ref("head.gradients"):
            copy = replace(
                one, site=replace(one.site, segment="embed"), reads=(Operand("gradients", Ref("embed.gradients"), one.reads[0].layout),)
            )
            return (one, copy)
        return (one,)

    return rewritten(program, again)


def without_microbatch(number):
    """Leave out forward and backward of one microbatch."""

    def change(program):
        roles = tuple(replace(role, runs=tuple(run for run in role.runs if run.microbatch != number)) for role in program.roles)
        return replace(program, roles=roles)

    return change


def twice(function):
    """Run a function of the engine twice where it runs once."""

    def change(program):
        return rewritten(program, lambda one: (one, one) if isinstance(one, Compute) and one.function == function else (one,))

    return change


def no_more(function):
    """Never run a function of the engine."""
    return lambda program: rewritten(program, lambda one: () if isinstance(one, Compute) and one.function == function else (one,))


# Faults of an executor


def valid_tokens(batch):
    return int((batch.targets >= 0).sum())


class MeansOfRanks(Executor):
    """Each rank divides by its own tokens, and the ranks are averaged."""

    def call(self, action):
        own = sum(valid_tokens(self.batch(number)) for number in range(self.plan.num_microbatches))
        return replace(super().call(action), num_valid_tokens=max(own, 1) * self.plan.num_replicas)


class MeansOfMicrobatches(Executor):
    """The loss of each microbatch is a mean of its own, and these are averaged."""

    def call(self, action):
        own = valid_tokens(self.batch(action.site.microbatch))
        return replace(super().call(action), num_valid_tokens=max(own, 1) * self.plan.num_replicas * self.plan.num_microbatches)


class TimesMicrobatches(Executor):
    """Nobody divides by the number of microbatches where each one's loss is a mean."""

    def call(self, action):
        call = super().call(action)
        return replace(call, num_valid_tokens=call.num_valid_tokens / self.plan.num_microbatches)


class CountsWhatItHolds(Executor):
    """Each tensor rank counts the squares of all that it holds."""

    def owned(self, ref, num_elements):
        return (0, 0) if self.place.coordinate("data") else (0, num_elements)


class CountsEveryReplica(Executor):
    """Each data rank counts the squares of its copy."""

    def owned(self, ref, num_elements):
        return 0, num_elements


class SeedsByRank(Executor):
    """Dropout draws from a generator that each rank seeds with its number."""

    def call(self, action):
        call = super().call(action)
        return replace(call, seed=call.seed + self.world.rank)


class SameMaskEverywhere(Executor):
    """Dropout numbers the sequences of each microbatch from 0."""

    def call(self, action):
        call = super().call(action)
        return replace(call, sequence_ids=range(len(call.sequence_ids)))


class BeginsByRank(Executor):
    """Initial values depend on the rank that draws them."""

    def __init__(self, *args):
        super().__init__(*args)
        for ref in self.program.persistent(self.position):
            if ref.tensor.endswith("weights"):
                self.store.tensor(ref).mul_(1 + 0.1 * self.world.rank)


class CutsFusedAsOne(Executor):
    """Loads gate and up as if [gate; up] were one matrix that ranks have cut into as many slices as they are."""

    def __init__(self, *args):
        super().__init__(*args)
        unit, num = self.units["block"], self.plan.size("tensor")
        rank = self.place.coordinate("tensor")
        for block in range(self.plan.model.num_layers):
            flat = self.store.tensor(Ref("weights", block))
            whole = [initial_flat(self.plan, unit, block, index, flat.dtype) for index in range(num)]
            places = [self.tables["block"][name] for name in ("gate.weight", "up.weight")]
            stacked = torch.cat([one[start:stop] for start, stop, _ in places for one in whole])
            pieces = stacked.chunk(num)[rank].chunk(len(places))
            for (start, stop, _), piece in zip(places, pieces, strict=True):
                flat[start:stop] = piece


class Divides(Executor):
    """After some reductions the result is divided by the number of ranks, as an average would be."""

    def divides(self, action):
        return True

    def start_collective(self, action):
        super().start_collective(action)
        if not hasattr(self, "collectives"):
            self.collectives = {}
        self.collectives[action.site] = action

    def finish(self, action):
        sent = super().finish(action)
        started = self.collectives.get(action.site) if action.kind == "collective" else None
        if started is not None and started.op != "all_gather" and self.divides(started):
            self.store.tensor(started.target)[slice(*(started.span or (None,)))].div_(len(self.members(started)))
        return sent


class DividesBlocksOnly(Divides):
    """The factor was set for the blocks, not for embedding and head."""

    def divides(self, action):
        return (action.site.tag or "").startswith("zero") and action.site.block is not None


class AveragesNorms(Divides):
    """Gradients of norms are averaged over the tensor axis where they must be summed."""

    def divides(self, action):
        return is_norm_weights_sum(action)


class AveragesReplicas(Divides):
    """Gradients are averaged over replicas, although the loss was divided by all tokens already."""

    def divides(self, action):
        return is_data_sum(action)


class WipesGradients(Executor):
    """The last stage begins its gradients anew with every microbatch."""

    def run_segment(self, action):
        self.microbatch = action.site.microbatch
        super().run_segment(action)

    def sink(self, operand, *, fresh):
        sink = super().sink(operand, fresh=fresh)
        begun = self.__dict__.setdefault("begun", {})
        if self.position == self.plan.size("pipeline") - 1 and begun.get(operand.ref) != self.microbatch:
            begun[operand.ref] = self.microbatch
            sink = self.sinks[operand.ref] = Gradients(self.store.tensor(operand.ref), self.tables[self.unit_name(operand.ref)], fresh=True)
        return sink


class OverwritesReduced(Executor):
    """What has been reduced of a microbatch takes the place of what was there."""

    def compute(self, action):
        if action.function == "accumulate":
            self.store.tensor(action.accumulates.ref).copy_(self.store.tensor(action.reads[0].ref))
        else:
            super().compute(action)


class LosesHead(Executor):
    """The gradients of the head go nowhere."""

    def sink(self, operand, *, fresh):
        sink = super().sink(operand, fresh=fresh)
        if not operand.ref.tensor.startswith("head"):
            return sink
        return Gradients(torch.empty_like(self.store.tensor(operand.ref)), self.tables["head"], fresh=True)


# The table


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A mistake: the number of its kind, what it is, the plan it is made in, how, and what the proof must say."""

    kind: int
    what: str
    plan: Plan
    cause: str
    words: str = ""
    change: Callable[[Program], Program] | None = None
    executor: type[Executor] = Executor

    def __str__(self):
        return f"{self.kind}-{self.what}"


DATA = small_plan(Data(size=2))
TIED = small_plan(Pipeline(size=2), Zero(size=2), model=GPT, num_microbatches=2)
SEQUENCE = small_plan(Tensor(size=2, sequence=True), model=GPT, num_microbatches=2)
CUT = small_plan(Tensor(size=2), num_microbatches=2)
STAGES = small_plan(Pipeline(size=2))
INTERLEAVED = small_plan(Pipeline(size=2, schedule="interleaved", chunks=2))
ZERO = small_plan(Zero(size=2, stage=2))

MUTATIONS = [
    Mutation(
        kind=1, what="each-rank-divides-by-its-own-tokens", plan=DATA, executor=MeansOfRanks, cause="mean-of-means", words="data ranks"
    ),
    Mutation(kind=1, what="each-microbatch-is-a-mean", plan=DATA, executor=MeansOfMicrobatches, cause="mean-of-means", words="microbatch"),
    Mutation(kind=1, what="tokens-not-summed-over-ranks", plan=DATA, change=without(is_valid_tokens), cause="sum-of-means"),
    Mutation(kind=2, what="each-stage-clips-by-its-own-norm", plan=STAGES, change=without(is_norm), cause="norm-of-one-stage"),
    Mutation(kind=2, what="each-position-of-two-chunks-too", plan=INTERLEAVED, change=without(is_norm), cause="norm-of-one-stage"),
    Mutation(
        kind=2,
        what="norm-summed-over-data-only",
        plan=small_plan(Pipeline(size=2), Data(size=2), num_microbatches=2),
        change=over(("data",), is_norm),
        cause="norm-of-one-stage",
    ),
    Mutation(kind=3, what="replicated-squares-counted-twice", plan=CUT, executor=CountsWhatItHolds, cause="norm-counts-replicated"),
    Mutation(
        kind=3,
        what="the-same-where-zero-cuts-the-unit",
        plan=small_plan(Zero(size=2), Tensor(size=2, sequence=True), num_microbatches=2),
        executor=CountsWhatItHolds,
        cause="norm-counts-replicated",
    ),
    Mutation(kind=3, what="each-replica-counts-its-copy", plan=DATA, executor=CountsEveryReplica, cause="norm-counts-replicas"),
    Mutation(
        kind=4,
        what="copies-of-a-tied-table-not-summed",
        plan=TIED,
        change=without(is_tied_sum),
        cause="tied-embedding",
        words="its use as embedding alone",
    ),
    Mutation(kind=5, what="both-copies-of-a-tied-table-counted", plan=TIED, change=squares_of_both_copies, cause="norm-counts-tied-twice"),
    Mutation(
        kind=7,
        what="norms-not-summed-over-the-sequence",
        plan=SEQUENCE,
        change=without(is_norm_weights_sum),
        cause="not-summed-over-tensor",
    ),
    Mutation(
        kind=7,
        what="nor-on-any-of-two-replicas",
        plan=small_plan(Data(size=2), Tensor(size=2, sequence=True), num_microbatches=2),
        change=without(is_norm_weights_sum),
        cause="not-summed-over-tensor",
    ),
    Mutation(kind=7, what="norms-averaged-over-the-sequence", plan=SEQUENCE, executor=AveragesNorms, cause="not-summed-over-tensor"),
    Mutation(
        kind=9,
        what="dropout-keyed-by-rank",
        plan=small_plan(Data(size=2), model=DROPPING),
        executor=SeedsByRank,
        cause="dropout-depends-on-mesh",
    ),
    Mutation(
        kind=9,
        what="dropout-keyed-by-rank-under-sequence",
        plan=small_plan(Tensor(size=2, sequence=True), model=DROPPING),
        executor=SeedsByRank,
        cause="dropout-depends-on-mesh",
    ),
    Mutation(
        kind=9,
        what="the-same-mask-for-every-rank",
        plan=small_plan(Data(size=2), model=DROPPING),
        executor=SameMaskEverywhere,
        cause="dropout-depends-on-mesh",
        words="it is the same mask 8 times along the sequences",
    ),
    Mutation(kind=9, what="initial-values-keyed-by-rank", plan=CUT, executor=BeginsByRank, cause="initial-values-depend-on-mesh"),
    Mutation(
        kind=10,
        what="fused-gate-and-up-cut-as-one",
        plan=CUT,
        executor=CutsFusedAsOne,
        cause="layout-permuted",
        words="gate and up are stored fused",
    ),
    Mutation(
        kind=16,
        what="a-division-reaches-the-blocks-only",
        plan=small_plan(Zero(size=2), num_microbatches=3),
        executor=DividesBlocksOnly,
        cause="mixed-scales",
        words="0.5 x the reference, which is 1 / the size of zero",
    ),
    Mutation(kind=16, what="averaged-where-summed", plan=DATA, executor=AveragesReplicas, cause="scaled", words="1 / the size of data"),
    Mutation(
        kind=17,
        what="not-divided-by-microbatches",
        plan=STAGES,
        executor=TimesMicrobatches,
        cause="scaled",
        words="4 x the reference, which is the number of microbatches",
    ),
    Mutation(
        kind=19,
        what="a-stage-wipes-its-gradients",
        plan=STAGES,
        executor=WipesGradients,
        cause="last-microbatch-only",
        words="stage 1 only",
    ),
    Mutation(kind=19, what="everything-wiped", plan=small_plan(), executor=WipesGradients, cause="last-microbatch-only"),
    Mutation(kind=19, what="a-microbatch-is-left-out", plan=small_plan(), change=without_microbatch(1), cause="microbatch-lost"),
    Mutation(kind=21, what="reduced-gradients-overwritten", plan=ZERO, executor=OverwritesReduced, cause="last-microbatch-only"),
    Mutation(kind=21, what="the-same-in-stage-3", plan=small_plan(Zero(size=2)), executor=OverwritesReduced, cause="last-microbatch-only"),
    Mutation(kind=21, what="reduced-gradients-never-added", plan=ZERO, change=no_more("accumulate"), cause="one-microbatch-only"),
    Mutation(kind=21, what="reduced-gradients-added-twice", plan=ZERO, change=twice("accumulate"), cause="weighted-microbatches"),
    Mutation(kind=21, what="gradients-not-summed-over-replicas", plan=DATA, change=without(is_data_sum), cause="not-summed-over-data"),
    # 24 elsewhere: a norm over a list that mixes plain and distributed tensors. There is only one kind of tensor here;
    # what remains of the mistake is a norm over the plain local pieces.
    Mutation(
        kind=24, what="norm-of-what-a-rank-holds", plan=CUT, change=without(is_norm), executor=CountsWhatItHolds, cause="norm-of-one-shard"
    ),
    Mutation(kind=24, what="norm-of-what-a-rank-owns", plan=CUT, change=without(is_norm), cause="norm-of-one-shard"),
    Mutation(kind=18, what="gradients-lost-on-the-way", plan=STAGES, executor=LosesHead, cause="lost-gradients", words="on stage 1"),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_mistake_fails_the_proof_and_is_named(mutation):
    """The cause is among those that the proof gives, and its text says what a reader looks for."""
    proof = prove_small(mutation.plan, change=mutation.change, make_executor=mutation.executor)

    named = {cause.name: cause.text for cause in proof.causes}
    assert not proof.equal
    assert mutation.cause in named, named
    assert mutation.words in named[mutation.cause]


def joined_as_one(plan, pieces):
    """Assemble, and then join gate and up as if the ranks' fused matrices were slices of [gate; up]."""
    logical = assemble(plan, pieces)
    num = plan.size("tensor")
    for block in range(plan.model.num_layers):
        gate, up = logical[f"b{block}.gate.weight"], logical[f"b{block}.up.weight"]
        for copy in gate:
            fused = [part for pair in zip(gate[copy].chunk(num), up[copy].chunk(num), strict=True) for part in pair]
            gate[copy], up[copy] = torch.cat(fused).chunk(2)
    return logical


def test_a_fused_matrix_joined_as_one_is_named(monkeypatch):
    """Kind 10, at the other end: training is right, what is taken out of it is [W0 V0 W1 V1] where [W0 W1 V0 V1] is."""
    monkeypatch.setattr(launch_module, "assemble", joined_as_one)

    proof = prove_small(CUT)

    named = {cause.name: cause.text for cause in proof.causes}
    assert not proof.equal
    assert "gate and up are stored fused" in named["layout-permuted"]


# What goes over the wire, and what lies in memory


def test_a_collective_that_is_left_out_is_missing_from_the_wire():
    """The site is named, on every rank."""
    proof = prove_small(DATA, change=without(lambda one: is_data_sum(one) and one.site.block == 1))

    assert ((0, "s0/m3/b1/bwd#data", "all_reduce"), (1, "s0/m3/b1/bwd#data", "all_reduce")) == proof.wire.missing
    assert ((), ()) == (proof.wire.extra, proof.wire.wrong)
    assert not proof.wire.equal


def test_a_collective_that_nobody_planned_is_extra():
    """An exchange that changes no value is found out by its bytes."""

    def again(one):
        if isinstance(one, Wait) and one.site.tag == "data" and one.site.block == 1:
            more = Collective(
                site=replace(one.site, tag="data.again"),
                op="all_gather",
                group=Group(("data",)),
                source=Ref("valid"),
                target=Ref("scratch"),
                before=Layout((("data", Shard(0)),)),
                after=Layout().on("data", Replicate()),
                payload_bytes=16,
            )
            return (one, more, wait_for(more), Free(site=more.site, buffers=(Ref("scratch"),)))
        return (one,)

    def change(program):
        scratch = replace(program.buffers["valid"], shape=(2,), num_bytes=16)
        return replace(rewritten(program, again), buffers={**program.buffers, "scratch": scratch})

    proof = prove_small(DATA, change=change)

    assert proof.values_equal
    assert tuple((rank, "s0/m3/b1/bwd#data.again", "all_gather") for rank in (0, 1)) == proof.wire.extra
    assert not proof.equal


def test_fewer_bytes_than_planned_are_a_wrong_site():
    """Half a gradient is summed: the site is named with both counts."""

    def halved(one):
        if isinstance(one, Collective) and is_data_sum(one) and one.site.block == 0:
            return (replace(one, span=(0, one.payload_bytes // 16)),)
        return (one,)

    proof = prove_small(DATA, change=lambda program: rewritten(program, halved))

    predicted = lower(DATA).buffers["gradients"].num_bytes
    assert {(rank, "s0/m3/b0/bwd#data", "all_reduce", predicted, predicted // 2) for rank in (0, 1)} == set(proof.wire.wrong)
    assert not proof.equal


def test_a_prediction_of_other_bytes_is_a_wrong_site():
    """A Program that announces twice the bytes does not fit what was measured."""

    def doubled(one):
        return (replace(one, payload_bytes=2 * one.payload_bytes),) if isinstance(one, Collective) and is_norm(one) else (one,)

    proof = prove_small(DATA)
    report = reconcile_wire(DATA, rewritten(lower(DATA), doubled), proof.reports)

    assert proof.wire.equal
    assert [(rank, "scalars/upd#data", "all_reduce") for rank in (0, 1)] == [row[:3] for row in report.wrong]
    assert all(predicted == 2 * measured for *_, predicted, measured in report.wrong)


class HoldsMore(Executor):
    """Keeps one activation in a storage that is larger than it."""

    def run_segment(self, action):
        super().run_segment(action)
        if action.site.segment == "norm1" and action.function == "forward":
            ref = next(one.ref for one in action.writes if one.name == "h1")
            right = self.store.tensor(ref)
            self.store.drop(ref)
            self.store.put(ref, torch.cat([right, right])[: len(right)])


def test_a_buffer_that_is_larger_than_planned_fails_the_memory():
    """Values are right; the first action after which the bytes differ is named, with both counts."""
    proof = prove_small(DATA, make_executor=HoldsMore)

    (first, *_) = proof.memory.wrong
    assert proof.values_equal
    assert proof.wire.equal
    assert not proof.memory.equal
    assert (0, "s0/m0/b0.norm1/fwd", "forward") == first[:3]
    assert proof.program.buffers["h1"].num_bytes == first[4] - first[3]


def test_a_buffer_that_is_never_freed_is_refused():
    """Verify names it, with the place that it belongs to."""

    def leaks(one):
        if isinstance(one, Free):
            left = tuple(ref for ref in one.buffers if ref.tensor != "h2")
            return (replace(one, buffers=left),) if left else ()
        return (one,)

    found = list(faults(rewritten(lower(DATA), leaks)))

    assert any("b0.h2@0 is never freed" in fault for fault in found), found


def test_a_buffer_that_is_freed_too_early_is_refused():
    """Verify names the action that still needs it."""

    def hasty(one):
        if isinstance(one, Compute) and one.site.segment == "norm2" and one.function == "forward":
            return (one, Free(site=one.site, buffers=tuple(operand.ref for operand in one.writes if operand.name == "h2")))
        return (one,)

    found = list(faults(rewritten(lower(DATA), hasty)))

    assert any("b0.feed/fwd forward: uses b0.h2@0 before it is produced" in fault for fault in found), found
