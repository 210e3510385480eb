"""verify names what is wrong with a Program, and lets through what is right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plans import GPT, LLAMA, small_plan, title
from trainwright.engine.execute import Executor
from trainwright.engine.record import Recorder
from trainwright.engine.state import initial_store
from trainwright.engine.world import RankFailed, run_threads
from trainwright.ir.action import Alloc, Collective, Compute, Free, Operand, Recv, Send, Update, Wait, wait_for
from trainwright.ir.buffer import Buffer
from trainwright.ir.layout import Group, Layout, Partial, Shard
from trainwright.ir.program import Program, Role, Run
from trainwright.ir.ref import Ref
from trainwright.ir.site import Site
from trainwright.ir.verify import faults, verify
from trainwright.plan.lower import Lowering, lower, no_wire_buffers
from trainwright.problems import PlanError
from trainwright.prove.prove import proof_batches
from trainwright.schedules import one_f_one_b
from trainwright.strategies.data import Data
from trainwright.strategies.pipeline import Pipeline
from trainwright.strategies.recompute import Recompute
from trainwright.strategies.tensor import Tensor
from trainwright.strategies.zero import Zero

# By hand: one run of one template a position

X, Y, W, G, M = Ref("x", None, 0), Ref("y", None, 0), Ref("w"), Ref("g"), Ref("moment")
PARTIAL = Layout((("tensor", Partial()),))
CUT = Layout((("tensor", Shard(1)),))
TENSOR = Group(("tensor",))
WHOLE_PIPELINE = Group(("pipeline",))


def site(segment):
    return Site(segment=segment, phase="fwd")


def program(*positions, persistent=(), owes=()):
    return Program(
        sizes={"pipeline": len(positions), "tensor": 2},
        templates={str(number): tuple(actions) for number, actions in enumerate(positions)},
        roles=tuple(
            Role(
                position=number,
                multiplicity=2,
                runs=(Run(str(number), number, 0),),
                persistent={(number, ref): Layout() for ref in persistent},
            )
            for number in range(len(positions))
        ),
        first_block=dict.fromkeys(range(len(positions)), 0),
        buffers={name: Buffer(shape=(1,), format="fp64", part="activations", num_bytes=8) for name in ("x", "y", "w", "g", "moment")},
        owes=frozenset(owes),
    )


def found(*positions, **options):
    """The faults, without the words that say where in the schedule."""
    return [fault.rpartition("microbatch 0: ")[2].rpartition("stage 0: ")[2] for fault in faults(program(*positions, **options))]


def makes(*refs, layout=None, segment="make", reads=()):
    layout = layout or Layout()
    return Compute(
        site=site(segment),
        function="forward",
        reads=tuple(Operand(ref.tensor, ref) for ref in reads),
        writes=tuple(Operand(ref.tensor, ref, layout) for ref in refs),
    )


def uses(*refs, layout=None, segment="use"):
    return Compute(site=site(segment), function="forward", reads=tuple(Operand(ref.tensor, ref, layout or Layout()) for ref in refs))


def frees(*refs, segment="free"):
    return Free(site=site(segment), buffers=refs)


def sums(source=X, target=None, *, before=PARTIAL, after=None, segment="sum", group=TENSOR):
    return Collective(
        site=site(segment),
        op="all_reduce",
        group=group,
        source=source,
        target=target or source,
        before=before,
        after=after or Layout(),
        payload_bytes=8,
    )


def sends(segment="boundary", buffer=X, to=1):
    return Send(site=site(segment), to=to, channel="forward", buffer=buffer, payload_bytes=8)


def receives(segment="boundary", buffer=X, source=-1):
    return Recv(site=site(segment), source=source, channel="forward", buffer=buffer, payload_bytes=8)


def test_a_sound_program_has_no_fault():
    """Made, summed, waited for, used, freed."""
    actions = [makes(X, layout=PARTIAL), sums(), wait_for(sums()), uses(X), frees(X)]

    assert [] == found(actions)
    assert [] == verify(program(actions))


LIVES = {
    "used before it is made": ([uses(X)], "use/fwd forward: uses x@0 before it is produced"),
    "used after it is freed": ([makes(X), frees(X), uses(X)], "use/fwd forward: uses x@0 before it is produced"),
    "freed twice": ([makes(X), frees(X), frees(X, segment="again")], "again/fwd free: frees x@0, which is not live"),
    "made twice": ([makes(X), makes(X, segment="again"), frees(X)], "again/fwd forward: produces x@0, which is already live"),
    "allocated while live": (
        [makes(X), Alloc(site=site("room"), buffer=X), frees(X)],
        "room/fwd alloc: produces x@0, which is already live",
    ),
    "never freed": ([makes(X)], "x@0 is never freed"),
    "sent before it is made": ([sends()], "boundary/fwd send: uses x@0 before it is produced"),
    "summed before it is made": ([sums()], "sum/fwd all_reduce: uses x@0 before it is produced"),
    "added to before it begins": (
        [Compute(site=site("grad"), function="backward", accumulates=Operand("gradients", G))],
        "grad/fwd backward: adds to g before it is produced",
    ),
}


@pytest.mark.parametrize(("actions", "fault"), LIVES.values(), ids=LIVES)
def test_every_buffer_lives_from_its_making_to_its_one_end(actions, fault):
    """Use, free and make happen in this order only, and nothing is left over."""
    assert fault in found(actions)


LENT = {
    "read": [makes(X, layout=PARTIAL), sums(), uses(X), wait_for(sums()), frees(X)],
    "freed": [makes(X, layout=PARTIAL), sums(), frees(X), wait_for(sums())],
    "summed again": [
        makes(X, layout=PARTIAL),
        sums(),
        sums(segment="again"),
        wait_for(sums()),
        wait_for(sums(segment="again")),
        frees(X),
    ],
    "its target read": [
        makes(X, layout=PARTIAL),
        sums(target=Y),
        uses(Y),
        wait_for(sums(target=Y)),
        frees(X, Y),
    ],
    "its source freed": [makes(X, layout=PARTIAL), sums(target=Y), frees(X), wait_for(sums(target=Y)), frees(Y)],
    "added to": [
        makes(X, layout=PARTIAL),
        sums(),
        Compute(site=site("grad"), function="backward", accumulates=Operand("gradients", X)),
        wait_for(sums()),
        frees(X),
    ],
}


@pytest.mark.parametrize("actions", LENT.values(), ids=LENT)
def test_what_is_lent_to_an_exchange_is_not_touched(actions):
    """Until its Wait the buffer belongs to the wire."""
    assert any("is lent to the collective of sum/fwd, which nobody has waited for" in fault for fault in found(actions))


def test_what_is_sent_may_be_read_but_not_freed():
    """A Send reads its buffer; others may too."""
    sender = [makes(X), sends(), uses(X), wait_for(sends()), frees(X)]
    receiver = [receives(), wait_for(receives()), uses(X), frees(X)]
    hasty = [makes(X), sends(), frees(X), wait_for(sends())]

    assert [] == found(sender, receiver)
    assert any("x@0 is lent to the send of boundary/fwd" in fault for fault in found(hasty, receiver))


def test_what_is_received_may_not_be_read_before_its_wait():
    """Its contents exist after the Wait."""
    sender = [makes(X), sends(), wait_for(sends()), frees(X)]
    hasty = [receives(), uses(X), wait_for(receives()), frees(X)]

    assert any("use/fwd forward: x@0 is lent to the recv of boundary/fwd" in fault for fault in found(sender, hasty))


def test_every_exchange_is_waited_for_once():
    """One Wait too few, one too many, and two starts under one name."""
    summed = [makes(X, layout=PARTIAL), sums()]

    assert "nobody waits for the collective of sum/fwd" in found(summed)
    assert "sum/fwd wait_collective: waits for the collective of sum/fwd, which was never started" in found(
        [*summed, wait_for(sums()), wait_for(sums()), frees(X)]
    )
    assert any(
        "is started twice without a Wait between" in fault
        for fault in found([makes(X, Y, layout=PARTIAL), sums(), sums(Y), wait_for(sums()), frees(X, Y)])
    )


def test_a_buffer_lies_as_its_reader_needs_it():
    """Partial is not whole, a piece is not a partial sum."""
    assert "use/fwd forward: needs x@0 as replicate, but it is tensor=partial(sum)" in found([makes(X, layout=PARTIAL), uses(X), frees(X)])
    assert "use/fwd forward: needs x@0 as tensor=shard(1), but it is replicate" in found([makes(X), uses(X, layout=CUT), frees(X)])
    assert "sum/fwd all_reduce: takes x@0 as tensor=partial(sum), but it is tensor=replicate" in found(
        [makes(X), sums(), wait_for(sums()), frees(X)]
    )
    assert [] == found([makes(X, layout=PARTIAL), sums(after=CUT), wait_for(sums()), uses(X, layout=CUT), frees(X)])


def test_a_gradient_is_summed_before_it_is_used():
    """An update from a partial gradient names the axis; a strategy that is still to come may owe the sum."""
    update = Update(site=site("update"), weights=W, gradients=G, states=(M,), num_elements=1)
    actions = [makes(G, layout=Layout((("zero", Partial()),))), update, frees(G)]

    assert ["update/fwd update: updates from g, which is not yet summed over zero"] == found(actions, persistent=(W, M))
    assert [] == found(actions, persistent=(W, M), owes={"zero"})
    assert [] == found([makes(G), update, frees(G)], persistent=(W, M))
    assert any("uses moment before it is produced" in fault for fault in found([makes(G), update, frees(G)], persistent=(W,)))


def test_weights_that_are_left_in_pieces_are_gathered_before_the_next_step():
    """What an update leaves is what the next reader finds."""
    update = Update(site=site("update"), weights=W, gradients=G, states=(), num_elements=1, after=CUT)

    assert "use/fwd forward: needs w as replicate, but it is tensor=shard(1)" in found(
        [makes(G), update, uses(W), frees(G)], persistent=(W,)
    )


# Between positions


def test_sends_and_receives_pair():
    """A channel with more of one than of the other is named; a Wait on the odd one is a deadlock."""
    one = [makes(X), sends(), wait_for(sends()), frees(X)]
    two = [makes(Y), sends("more", Y), frees(Y)]
    receiver = [receives(), wait_for(receives()), frees(X)]

    assert "channel 0 -> 1 forward: 2 sends meet 1 receives" in found([*one, *two], receiver)
    waits = [*one, makes(Y), sends("more", Y), wait_for(sends("more", Y)), frees(Y)]
    assert "deadlock: position 0: s0/m0/more/fwd wait_send (position 1 has not come to its recv)" in [
        fault for fault in faults(program(waits, receiver)) if "deadlock" in fault
    ]


def test_all_positions_join_collectives_in_one_order():
    """Two sums over the pipeline in different orders are named with both positions."""

    def joins(*segments):
        names = {segment: Ref(segment, None, 0) for segment in segments}
        summed = [sums(ref, segment=segment, group=WHOLE_PIPELINE, before=OVER_PIPELINE) for segment, ref in names.items()]
        return [makes(*names.values(), layout=OVER_PIPELINE), *summed, *map(wait_for, summed), frees(*names.values())]

    assert [] == found(joins("one", "two"), joins("one", "two"))
    assert ["group pipeline: position 0 starts one/fwd all_reduce where position 1 starts two/fwd all_reduce"] == found(
        joins("one", "two"), joins("two", "one")
    )


OVER_PIPELINE = Layout((("pipeline", Partial()),))


def test_a_collective_that_one_position_never_joins_is_a_deadlock():
    """Who waits for whom is named."""
    joins = sums(group=WHOLE_PIPELINE, before=OVER_PIPELINE)

    (fault,) = found([makes(X, layout=OVER_PIPELINE), joins, wait_for(joins), frees(X)], [makes(X), frees(X)])

    assert "deadlock: position 0: s0/m0/sum/fwd wait_collective (position 1 has not joined pipeline)" == fault


# Lowered Programs


def with_actions(lowered, rewrite):
    return replace(lowered, templates={name: tuple(rewrite(actions)) for name, actions in lowered.templates.items()})


def sends_at_once(actions):
    """Wait for every send right behind it."""
    for action in actions:
        if not (isinstance(action, Wait) and action.kind == "send"):
            yield action
        if isinstance(action, Send):
            yield wait_for(action)


def receives_late(lowered):
    """Post every receive in front of its Wait, instead of a slot ahead."""
    templates = {}
    for name, actions in lowered.templates.items():
        if name.startswith("post "):
            templates[name] = ()
            continue
        shape = name.partition("/")[0]
        own = [
            one
            for post, ones in lowered.templates.items()
            for one in ones
            if isinstance(one, Recv) and post.partition("/")[0] == f"post {shape}"
        ]
        templates[name] = tuple(
            new for action in actions for new in ((own[0], action) if isinstance(action, Wait) and action.kind == "recv" else (action,))
        )
    return replace(lowered, templates=templates)


ONE_F_ONE_B = small_plan(Pipeline(size=2))
INTERLEAVED = small_plan(Pipeline(size=2, schedule="interleaved", chunks=2))


def test_blocking_sends_and_late_receives_deadlock_under_1f1b():
    """Stage 0 waits to hand over the second microbatch, stage 1 to hand back the first: both actions are named."""
    blocking = with_actions(receives_late(lower(ONE_F_ONE_B)), sends_at_once)

    (fault,) = faults(blocking)

    assert (
        "deadlock: position 0: s0/m1/fwd#pipeline wait_send (position 1 has not come to its recv); "
        "position 1: s1/m0/bwd#pipeline wait_send (position 0 has not come to its recv)"
    ) == fault


def test_early_receives_save_1f1b_but_not_the_interleaved_schedule():
    """With receives posted a slot ahead, 1f1b may even wait for each send at once; with chunks two stages still block each other."""
    assert [] == list(faults(with_actions(lower(ONE_F_ONE_B), sends_at_once)))
    (fault,) = faults(with_actions(lower(INTERLEAVED), sends_at_once))
    assert fault.startswith("deadlock: position 0: s2/m0/bwd#pipeline wait_send (position 1 has not come to its recv)")


@pytest.mark.parametrize(
    ("plan", "late", "hangs"),
    [(ONE_F_ONE_B, False, False), (ONE_F_ONE_B, True, True), (INTERLEAVED, False, True)],
    ids=["1f1b", "1f1b-late-receives", "interleaved"],
)
def test_what_is_refused_hangs_and_what_is_not_does_not(plan, late, hangs):
    """Executed on threads, where nothing is buffered either, a Program waits for ever exactly if it is refused."""
    lowered = receives_late(lower(plan)) if late else lower(plan)
    blocking = with_actions(lowered, sends_at_once)

    def body(world):
        batches = proof_batches(plan)
        executor = Executor(
            plan, blocking, world, batches, initial_store(plan, blocking, world.rank), Recorder(world.rank, world.rank, on=False)
        )
        return executor.step(0, 1).loss

    assert hangs == bool(list(faults(blocking)))
    if hangs:
        with pytest.raises(RankFailed):
            run_threads(body, 2, timeout_s=1.5)
    else:
        assert len(run_threads(body, 2, timeout_s=60)) == 2


# After every pass

PASSES = ("recompute", "pipeline", "data", "zero", "tensor")
LOWERED = [
    small_plan(model=GPT),
    *(small_plan(Zero(size=2, stage=stage), model=GPT) for stage in (1, 2, 3)),
    small_plan(Zero(size=2, reshard_after_forward=False), Recompute(policy="full")),
    small_plan(Data(size=2), Recompute(policy="selective")),
    small_plan(Tensor(size=2, sequence=True), model=GPT),
    small_plan(Data(size=2), Zero(size=2), Tensor(size=2, sequence=True), Recompute(policy="full"), model=GPT),
    *(
        small_plan(Pipeline(size=2, schedule=schedule, chunks=chunks), Zero(size=2), Tensor(size=2, sequence=True), model=model)
        for schedule, chunks, model in (("gpipe", 1, GPT), ("1f1b", 1, GPT), ("interleaved", 2, LLAMA))
    ),
]


def after(plan, num_passes):
    """The Program after some passes, with the names of the others as what it owes."""
    lowering = Lowering(plan, no_wire_buffers)
    lowering.passes = lowering.passes[:num_passes]
    return replace(lowering.program(), owes=frozenset(PASSES[num_passes:]))


@pytest.mark.parametrize("plan", LOWERED, ids=title)
def test_a_program_is_sound_after_every_pass(plan):
    """Only what the remaining strategies owe is missing. Runs post receives and settle sends: a pipeline comes first."""
    first = 2 if plan.size("pipeline") > 1 else 0
    for num_passes in range(first, len(PASSES) + 1):
        assert [] == list(faults(after(plan, num_passes))), PASSES[:num_passes]


@pytest.mark.parametrize(
    ("plan", "num_passes", "words"),
    [
        (small_plan(Data(size=2)), 2, "not yet summed over data"),
        (small_plan(Zero(size=2)), 3, "zero"),
        (small_plan(Tensor(size=2)), 4, "needs"),
        (small_plan(Tensor(size=2, sequence=True)), 4, "needs"),
    ],
    ids=["data", "zero", "tensor", "sequence"],
)
def test_a_pass_that_is_left_out_is_missed(plan, num_passes, words):
    """The same Program that owes nothing is refused, in words that name the axis."""
    assert any(words in fault for fault in faults(replace(after(plan, num_passes), owes=frozenset())))


@pytest.mark.parametrize("plan", LOWERED, ids=title)
def test_an_action_that_is_left_out_of_a_backward_is_missed(plan):
    """No Wait, no Free of an activation and no exchange over tensor can go without a fault."""
    lowered = lower(plan)
    name = next(name for name in lowered.templates if name.startswith("backward"))
    actions = lowered.templates[name]
    for index, action in enumerate(actions):
        if isinstance(action, Wait | Free):
            left = (*actions[:index], *actions[index + 1 :])
            assert list(faults(replace(lowered, templates={**lowered.templates, name: left}))), action


@pytest.mark.parametrize("plan", [small_plan(Data(size=2)), small_plan(Pipeline(size=2), Zero(size=2))], ids=title)
def test_an_update_before_the_norm_is_summed_is_refused(plan):
    """Clipping with one rank's part of the norm is wrong on every rank."""
    lowered = lower(plan)
    roles = []
    for role in lowered.roles:
        norm = next(run for run in role.runs if run.template == "norm")
        others = [run for run in role.runs if run is not norm]
        roles.append(replace(role, runs=(*others[:-1], norm, others[-1])))

    assert any("reads scalars, which is not yet summed over" in str(problem) for problem in replace(lowered, roles=tuple(roles)).verify())


def test_an_order_that_loses_a_microbatch_is_refused_when_lowered(monkeypatch):
    """A schedule promises every microbatch once a stage, in each direction."""
    order = one_f_one_b.order
    monkeypatch.setattr(one_f_one_b, "order", lambda *sizes: (slot for slot in order(*sizes) if slot.microbatch != 1))

    with pytest.raises(PlanError, match="Forward of stage 0, microbatch 1, comes 0 times"):
        lower(small_plan(Pipeline(size=2)))
