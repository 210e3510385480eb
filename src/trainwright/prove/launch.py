"""Run a small plan on local ranks, threads of this process or processes of their own, and bring home what they saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainwright.engine.data import Batches
from trainwright.engine.execute import Executor, StepResult
from trainwright.engine.formats import DTYPES
from trainwright.engine.place import Place
from trainwright.engine.random import Key, Piece, dropout_mask, init_parameter
from trainwright.engine.record import Recorder
from trainwright.engine.state import assemble, flat_pieces, initial_store
from trainwright.engine.world import World, read_wchar, run_processes, run_threads
from trainwright.ir.action import Compute
from trainwright.ir.event import Event
from trainwright.ir.program import Program
from trainwright.ir.ref import Ref
from trainwright.plan.lower import family_of
from trainwright.plan.plan import Plan
from trainwright.prove.compare import Array
from trainwright.prove.names import bare
from trainwright.prove.reference import Masks, parameter_shapes
from trainwright.units import Bytes

Pieces = dict[Ref, Tensor]

Copies = Mapping[str, Mapping[int, Array]]
"""Logical tensor -> number of the copy -> its value."""

DROPS = {"enter": "enter", "norm2": "attention", "add": "feed"}
"""Segments that drop out, and the word that each one's random numbers are keyed with."""

HEADER_ROUNDS = 64
"""Messages that the header of one message is measured with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnMask:
    """A piece of a dropout mask: the place in the model that draws it ("b0.norm2"), the first of its sequences and tokens, [b, u, h]."""

    place: str
    first_sequence: int
    first_token: int
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank saw: per step its results and gradients, the events and live bytes of the first step, its weights before and after.

    `os_bytes` is what the operating system counted as written during the first step (None if it cannot be read or the rank is a thread),
    `header_bytes` what a message costs beyond its content. `masks` are the dropout masks that it drew in the first step.
    """

    rank: int
    results: tuple[StepResult, ...]
    gradients: tuple[Pieces, ...]
    before: Pieces
    after: Pieces
    events: tuple[Event, ...]
    persistent_bytes: Bytes
    peak_bytes: Bytes
    num_messages: int
    os_bytes: Bytes | None = None
    header_bytes: float = 0.0
    masks: tuple[DrawnMask, ...] = ()


def launch(
    plan: Plan,
    program: Program,
    batches: Batches,
    *,
    num_steps: int,
    processes: bool,
    make_executor: Callable[..., Executor] = Executor,
) -> list[RankReport]:
    """All ranks' reports. Raises engine.world.RankFailed if a rank fails."""

    def body(world: World) -> RankReport:
        return _rank(plan, program, batches, world, num_steps, make_executor)

    run = run_processes if processes else run_threads
    return run(body, plan.num_devices)


def _rank(
    plan: Plan, program: Program, batches: Batches, world: World, num_steps: int, make_executor: Callable[..., Executor]
) -> RankReport:
    store = initial_store(plan, program, world.rank)
    recorder = Recorder(world.rank, Place(plan, world.rank).coordinate("pipeline"))
    executor = make_executor(plan, program, world, batches, store, recorder)
    persistent_bytes = store.live_bytes
    before = copied(dict(flat_pieces(store, "weights")))
    header = header_bytes(world) if world.is_process and world.size > 1 else 0.0
    results: list[StepResult] = []
    gradients: list[Pieces] = []
    events: tuple[Event, ...] = ()
    peak_bytes, os_bytes, num_messages = 0, None, 0
    for step in range(num_steps):
        seen: Pieces = {}
        executor.metering = step == 0
        started, sent_before = read_wchar() if world.is_process else None, world.wire.num_messages

        def look(one: Executor, seen: Pieces = seen) -> None:
            seen.update(copied(dict(flat_pieces(one.store, "gradients"))))

        results.append(executor.step(step, num_steps, look))
        if step == 0:
            ended = read_wchar() if world.is_process else None
            os_bytes = ended - started if started is not None and ended is not None else None
            num_messages = world.wire.num_messages - sent_before
            peak_bytes = store.peak_bytes
            events = recorder.take(0, persistent_bytes)
            recorder.on = False
        gradients.append(seen)
    return RankReport(
        rank=world.rank,
        results=tuple(results),
        gradients=tuple(gradients),
        before=before,
        after=copied(dict(flat_pieces(store, "weights"))),
        events=events,
        persistent_bytes=persistent_bytes,
        peak_bytes=peak_bytes,
        num_messages=num_messages,
        os_bytes=os_bytes,
        header_bytes=header,
        masks=tuple(drawn_masks(executor, 0)),
    )


def drawn_masks(executor: Executor, step: int) -> Iterator[DrawnMask]:
    """The dropout masks that a rank draws in a step, as its segments do: ones sent through them."""
    plan = executor.plan
    if not plan.model.dropout:
        return
    executor.step_number, executor.microbatches = step, {}
    for action in executor.actions:
        if not isinstance(action, Compute) or action.function != "forward" or action.site.phase != "fwd":
            continue
        segment, microbatch = action.site.segment, action.site.microbatch
        if segment not in DROPS or microbatch is None:
            continue
        call = executor.call(replace(action, weights=None, accumulates=None))
        cut = plan.size("tensor") if call.sequence else 1
        num_tokens = plan.batch.sequence_tokens // cut
        ones = torch.ones((plan.batch.microbatch_sequences, num_tokens, plan.model.width), dtype=torch.float64)
        block = action.site.block
        yield DrawnMask(
            place=segment if block is None else f"b{block}.{segment}",
            first_sequence=executor.batches.batch(step, executor.place.replica, microbatch).first_sequence,
            first_token=executor.place.coordinate("tensor") * num_tokens if cut > 1 else 0,
            values=call.drop_(ones, DROPS[segment]),
        )


def copied(pieces: Mapping[Ref, Tensor]) -> Pieces:
    """Copies, so that later steps do not change them."""
    return {ref: tensor.detach().clone() for ref, tensor in pieces.items()}


def header_bytes(world: World) -> float:
    """Bytes that a message costs beyond its content, both ends together: this rank's share of a ring of small messages."""
    content = torch.zeros(1, dtype=torch.float64)
    arrived = torch.empty(1, dtype=torch.float64)
    world.barrier()
    started = read_wchar()
    for _ in range(HEADER_ROUNDS):
        recv = world.wire.start_recv(arrived, (world.rank - 1) % world.size, "header")
        send = world.wire.start_send(content, (world.rank + 1) % world.size, "header")
        recv.wait()
        send.wait()
    ended = read_wchar()
    world.barrier()
    if started is None or ended is None:
        return 0.0
    return (ended - started) / HEADER_ROUNDS - content.numel() * content.element_size()


# --- what both sides begin with, and compare ---


def initial_parameters(plan: Plan) -> dict[str, Tensor]:
    """Every parameter whole, as seed and name determine it, in the reference's format and model order."""
    parameters = {span.parameter.name: span.parameter for unit in family_of(plan).units.values() for span in unit.spans}
    values = {}
    for name, shape in parameter_shapes(plan.model):
        one = parameters[bare(name)]
        dtype = DTYPES[plan.precision.compute]
        value = init_parameter(name, Piece.whole(shape), kind=one.initial, std=one.std, seed=plan.run.seed, dtype=dtype)
        values[name] = value.double()
    return values


def masks_of(plan: Plan) -> Masks | None:
    """The dropout masks that any mesh must draw, for the reference to use: they depend on seed, step, place and element alone."""
    if not plan.model.dropout:
        return None

    def mask(step: int, place: str, shape: tuple[int, ...]) -> Tensor:
        block, _, last = place.rpartition(".")
        site = f"{block}.{DROPS[last]}" if block else DROPS[last]
        return dropout_mask(Key.of(plan.run.seed, step, site), Piece.whole(shape), plan.model.dropout, torch.float64)

    return mask


def logical(plan: Plan, reports: Sequence[RankReport], of: Callable[[RankReport], Mapping[Ref, Tensor]]) -> Copies:
    """Logical tensors out of what `of` takes from each report, with all their copies, as float64 arrays."""
    assembled = assemble(plan, {report.rank: of(report) for report in reports})
    return {name: {number: one.double().numpy() for number, one in copies.items()} for name, copies in assembled.items()}


def arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Tensors as arrays."""
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}
