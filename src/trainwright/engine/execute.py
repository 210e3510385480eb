"""The executor: performs a Program's actions on one rank, whatever strategies made them.

It knows kinds of actions, buffers and layouts, and never which strategy asked. Buffers we hold: flat buffers of parameters and of
gradients (views
of them are made for each call of a segment), activations, what segments save, scalars of the step. All of them live in a Store.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from trainwright.engine.data import Batch, Batches
from trainwright.engine.formats import DTYPES
from trainwright.engine.meter import TemporaryMeter
from trainwright.engine.optimizer import Shard, clip_scale, decay_ranges, update_rule
from trainwright.engine.place import Place
from trainwright.engine.record import Recorder
from trainwright.engine.segments import Call, Gradients, Tables, Weights, segment
from trainwright.engine.segments.weights import Place as Span
from trainwright.engine.store import Store
from trainwright.engine.wire import Pending
from trainwright.engine.world import World
from trainwright.ir.action import (
    Action,
    Alloc,
    Collective,
    Compute,
    Free,
    Move,
    Operand,
    Recv,
    Save,
    Send,
    Update,
    Wait,
)
from trainwright.ir.layout import Partial
from trainwright.ir.layout import Shard as Cut
from trainwright.ir.program import Program
from trainwright.ir.ref import Ref
from trainwright.ir.site import Site
from trainwright.plan.lower import SCALARS, VALID, family_of
from trainwright.plan.plan import Plan
from trainwright.spec.families.segment import Unit
from trainwright.units import Bytes

NO_WEIGHTS = Weights(torch.empty(0), {})

SQUARED_ROW = 4096
"""Gradients whose squares are summed in float32 before they are added up in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step gave.

    The loss over the global batch (nat per token), the gradients' norm before clipping, the rate, the tokens that counted.
    """

    step: int
    loss: float
    gradient_norm: float
    lr: float
    num_valid_tokens: int


@dataclass(slots=True)
class _Started:
    """An exchange on its way: its Pending, and what is left to do when it has arrived."""

    pending: Pending
    finish: Callable[[], None] | None = None
    staged_bytes: Bytes = 0


class Executor:
    """One rank. `batches` gives its tokens; `recorder` sees every action."""

    def __init__(self, plan: Plan, program: Program, world: World, batches: Batches, store: Store, recorder: Recorder) -> None:
        """Ready to run `program`; the persistent buffers are in `store` already."""
        self.plan, self.program, self.world, self.batches = plan, program, world, batches
        self.store, self.recorder = store, recorder
        self.place = Place(plan, world.rank)
        self.position = self.place.position
        self.actions: tuple[Action, ...] = tuple(program.actions(self.position))
        self.units: Mapping[str, Unit] = family_of(plan).units
        self.tables = {name: span_table(unit) for name, unit in self.units.items()}
        self.rule = update_rule(plan.optimizer)
        self.segment_tables = Tables()
        self.started: dict[tuple[Site, str], _Started] = {}
        self.sinks: dict[Ref, Gradients] = {}
        self.views: dict[Ref, tuple[Tensor, Weights]] = {}
        self.microbatches: dict[int, Batch] = {}
        self.groups: dict[object, tuple[int, ...]] = {}
        self.step_number = 0
        self.num_steps = 1
        self.observe: Callable[[Executor], None] | None = None
        self.metering = False
        self.temporary_bytes = 0

    # --- a step ----------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, step: int, num_steps: int, observe: Callable[[Executor], None] | None = None) -> StepResult:
        """Perform one step. `observe` is called once, when the gradients are complete and nothing is updated yet."""
        self.step_number, self.num_steps, self.observe = step, num_steps, observe
        self.microbatches = {}
        result: StepResult | None = None
        for action in self.actions:
            if isinstance(action, Free) and SCALARS in action.buffers:
                result = self.result()
            self.temporary_bytes = 0
            started_s = time.perf_counter()
            sent_bytes = self.perform(action)
            self.store.mark()
            self.recorder.saw(action, started_s, time.perf_counter(), sent_bytes, self.store.live_bytes, self.temporary_bytes)
        assert result is not None
        assert not self.started, f"nobody waited for {list(self.started)}"
        return result

    def result(self) -> StepResult:
        """Read the step's scalars, before they go."""
        squares, loss = self.store.tensor(SCALARS).tolist()
        valid = int(self.store.tensor(VALID).item()) if VALID in self.store else 0
        lr = self.plan.optimizer.lr_at(self.step_number, self.num_steps)
        return StepResult(step=self.step_number, loss=loss, gradient_norm=math.sqrt(squares), lr=lr, num_valid_tokens=valid)

    def perform(self, action: Action) -> int:
        """Do one action; the bytes that it has sent."""
        match action:
            case Compute():
                self.compute(action)
            case Collective():
                self.start_collective(action)
            case Send():
                tensor = self.store.tensor(action.buffer)
                pending = self.world.wire.start_send(tensor, self.place.peer(action.to), action.channel)
                self.started[action.site, "send"] = _Started(pending)
            case Recv():
                self.store.put(action.buffer, self.empty(action.buffer))
                pending = self.world.wire.start_recv(self.store.tensor(action.buffer), self.place.peer(action.source), action.channel)
                self.started[action.site, "recv"] = _Started(pending)
            case Wait():
                return self.finish(action)
            case Alloc():
                self.store.put(action.buffer, self.empty(action.buffer))
            case Free():
                for ref in action.buffers:
                    self.forget(ref)
            case Update():
                self.update(action)
            case Move() | Save():
                msg = f"{action.site}: no strategy makes a {type(action).__name__} yet, and this executor does not perform it"
                raise ValueError(msg)
            case _:
                assert_never(action)
        return 0

    def empty(self, ref: Ref) -> Tensor:
        """A new tensor for a buffer."""
        buffer = self.program.buffers[ref.tensor]
        return torch.empty(buffer.shape, dtype=DTYPES[buffer.format], device=self.world.device)

    def forget(self, ref: Ref) -> None:
        """End a buffer's life, with the views of it."""
        self.views.pop(ref, None)
        self.close(ref)
        self.store.drop(ref)

    def close(self, ref: Ref) -> None:
        """Somebody other than a backward looks at a gradient buffer: what was never written is zero from here on."""
        if (sink := self.sinks.pop(ref, None)) is not None:
            sink.close()

    # --- compute ---------------------------------------------------------------------------------------------------------------

    def compute(self, action: Compute) -> None:
        """Run a function of a segment, or one of the engine's own."""
        match action.function:
            case "forward" | "backward":
                self.run_segment(action)
            case "start":
                self.store.put(SCALARS, torch.zeros(2, dtype=torch.float64, device=self.world.device))
            case "count":
                self.count()
            case "collect":
                self.collect(action)
            case "accumulate":
                (reduced,) = action.reads
                assert action.accumulates is not None
                self.store.tensor(action.accumulates.ref).add_(self.store.tensor(reduced.ref))
            case "square":
                self.square(action.reads[0].ref)
            case _:
                msg = f"{action.site}: no function is called {action.function!r}"
                raise ValueError(msg)

    def run_segment(self, action: Compute) -> None:
        """Forward or backward of the segment that the site names."""
        assert action.site.segment is not None
        part = segment(action.site.segment)
        call = self.call(action)
        inputs: dict[str, Tensor] = {}
        for operand in action.reads:
            if operand.name == "saved":
                inputs |= {f"saved.{name}": tensor for name, tensor in self.store.several(operand.ref).items()}
            else:
                inputs[operand.name] = self.store.tensor(operand.ref)
        run = part.forward if action.function == "forward" else part.backward
        outputs = self.metered(run, call, inputs) if self.metering else run(call, inputs)
        for operand in action.writes:
            if operand.name == "saved":
                saved = {name.removeprefix("saved."): one for name, one in outputs.items() if name.startswith("saved.")}
                self.store.put(operand.ref, saved)
            else:
                self.store.put(operand.ref, outputs[operand.name])

    def metered(
        self, run: Callable[[Call, Mapping[str, Tensor]], dict[str, Tensor]], call: Call, inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run a function and note what it holds inside."""
        known = [held for ref in self.store if isinstance(held := self.store.held(ref), Tensor) and held.is_floating_point()]
        if known:
            self.segment_tables.warm(self.plan.model, self.plan.batch.sequence_tokens, known[0])
        batch = [tensor for tensor in (call.tokens, call.targets) if tensor is not None]
        meter = TemporaryMeter([*known, *inputs.values(), *batch, *self.segment_tables.tensors()])
        with meter:
            outputs = run(call, inputs)
        self.temporary_bytes = meter.peak_bytes(outputs[name] for name in self.wanted(outputs, call))
        return outputs

    @staticmethod
    def wanted(outputs: Mapping[str, Tensor], call: Call) -> list[str]:
        """The outputs that go into the store."""
        return [name for name in outputs if call.keep_saved or not name.startswith("saved.")]

    def call(self, action: Compute) -> Call:
        """All that a segment may look at."""
        microbatch = action.site.microbatch
        assert microbatch is not None
        batch = self.batch(microbatch)
        first = batch.first_sequence
        return Call(
            model=self.plan.model,
            weights=self.weights(action.weights) if action.weights else NO_WEIGHTS,
            gradients=self.sink(action.accumulates, fresh=action.fresh) if action.accumulates and action.function == "backward" else None,
            tensor_index=self.place.column,
            num_tensor=self.place.num_columns,
            sequence=self.place.cuts_sequence,
            tokens=batch.tokens,
            targets=batch.targets,
            num_valid_tokens=self.store.tensor(VALID) if VALID in self.store else 1.0,
            block=action.site.block,
            step=self.step_number,
            seed=self.plan.run.seed,
            sequence_ids=range(first, first + batch.tokens.shape[0]),
            keep_saved=action.keeps,
            only_saved=action.keeps and all(one.name == "saved" for one in action.writes),
            tables=self.segment_tables,
        )

    def batch(self, microbatch: int) -> Batch:
        """This rank's tokens of one microbatch, read when first asked for."""
        if microbatch not in self.microbatches:
            batch = self.batches.batch(self.step_number, self.place.replica, microbatch)
            if self.world.device != "cpu":
                batch = Batch(
                    tokens=batch.tokens.to(self.world.device),
                    targets=batch.targets.to(self.world.device),
                    first_sequence=batch.first_sequence,
                )
            self.microbatches[microbatch] = batch
        return self.microbatches[microbatch]

    def unit_name(self, ref: Ref) -> str:
        """The unit that a flat buffer belongs to."""
        name, dot, _ = ref.tensor.partition(".")
        return name if dot else "block"

    def weights(self, operand: Operand) -> Weights:
        """The parameters in a flat buffer; views are kept as long as the buffer lives."""
        flat = self.store.tensor(operand.ref)
        known = self.views.get(operand.ref)
        if known is None or known[0] is not flat:
            known = (flat, Weights(flat, self.tables[self.unit_name(operand.ref)]))
            self.views[operand.ref] = known
        return known[1]

    def sink(self, operand: Operand, *, fresh: bool) -> Gradients:
        """Where a backward adds its gradients; a fresh buffer comes to life here."""
        if fresh:
            self.store.put(operand.ref, self.empty(operand.ref))
        sink = self.sinks.get(operand.ref)
        if sink is None:
            sink = Gradients(self.store.tensor(operand.ref), self.tables[self.unit_name(operand.ref)], fresh=fresh)
            self.sinks[operand.ref] = sink
        return sink

    def count(self) -> None:
        """The valid tokens of this rank's part of the batch."""
        counts = (int((self.batch(one).targets >= 0).sum()) for one in range(self.plan.num_microbatches))
        self.store.put(VALID, torch.tensor([float(sum(counts))], dtype=torch.float64, device=self.world.device))

    def collect(self, action: Compute) -> None:
        """Add a microbatch's part of the loss; of ranks that hold the same one, the first counts it."""
        if self.place.column == 0:
            self.store.tensor(SCALARS)[1] += self.store.tensor(action.reads[0].ref).double()

    def square(self, ref: Ref) -> None:
        """Add the squares of the gradients that this rank owns: each logical element is owned by one rank of all."""
        self.close(ref)
        gradients = self.store.tensor(ref)
        first, last = self.owned(ref, gradients.numel())
        self.store.tensor(SCALARS)[0] += sum_of_squares(gradients[first:last])

    def owned(self, ref: Ref, num_elements: int) -> tuple[int, int]:
        """The range of a gradient buffer that this rank counts: none on later data replicas, not what an earlier tensor rank holds too."""
        return self.place.owned(num_elements, self.units[self.unit_name(ref)].num_replicated)

    # --- exchanges -------------------------------------------------------------------------------------------------------------

    def members(self, action: Collective) -> tuple[int, ...]:
        """The ranks of an exchange."""
        if action.group not in self.groups:
            self.groups[action.group] = self.place.members(action.group)
        return self.groups[action.group]

    def start_collective(self, action: Collective) -> None:
        """Start an exchange of activations (along a dimension) or of a flat buffer."""
        self.close(action.source)
        ranks, channel, wire = self.members(action), str(action.group), self.world.wire
        source = self.store.tensor(action.source)
        if action.target != action.source:
            self.store.put(action.target, self.empty(action.target))
        target = self.store.tensor(action.target)
        staged: Tensor | None = None
        finish: Callable[[], None] | None = None
        match action.op:
            case "all_reduce":
                part = source.view(-1)[slice(*action.span)] if action.span else source
                partial = next(action.before[axis] for axis in action.group.axes)
                op = partial.op if isinstance(partial, Partial) else "sum"
                pending = wire.start_all_reduce(part, ranks, op, channel)
            case "all_gather":
                dim = cut_dim(action.before[action.group.axes[0]])
                own = source.chunk(len(ranks), dim)[ranks.index(self.world.rank)] if action.source == action.target else source
                if contiguous_pieces(target, dim):
                    pending = wire.start_all_gather(target, own, ranks, channel)
                else:
                    staged = torch.empty((len(ranks), *own.shape), dtype=own.dtype, device=own.device)
                    pending = wire.start_all_gather(staged, own, ranks, channel)
                    finish = gathered(target, staged, dim)
            case "reduce_scatter":
                dim = cut_dim(action.after[action.group.axes[0]])
                full = source
                if not contiguous_pieces(source, dim):
                    staged = torch.stack(source.chunk(len(ranks), dim))
                    full = staged
                pending = wire.start_reduce_scatter(target, full, ranks, channel)
            case _:
                msg = f"{action.site}: no exchange is called {action.op!r}"
                raise ValueError(msg)
        staged_bytes = staged.untyped_storage().nbytes() if staged is not None else 0
        self.started[action.site, "collective"] = _Started(pending, finish, staged_bytes)
        self.store.on_the_wire(pending.held_bytes + staged_bytes)

    def finish(self, action: Wait) -> int:
        """Wait for an exchange; the bytes that this rank has sent for it."""
        started = self.started.pop((action.site, action.kind))
        started.pending.wait()
        if started.finish is not None:
            started.finish()
        self.store.on_the_wire(-started.pending.held_bytes - started.staged_bytes)
        return started.pending.sent_bytes

    # --- update ----------------------------------------------------------------------------------------------------------------

    def update(self, action: Update) -> None:
        """One optimizer step on a flat buffer, or on this rank's slice of it."""
        if self.observe is not None:
            observe, self.observe = self.observe, None
            observe(self)
        gradients, weights = self.store.tensor(action.gradients), self.store.tensor(action.weights)
        begin, end = self.place.slice_of(gradients.numel())
        own = weights[begin:end] if weights.numel() > gradients.numel() else weights
        spans = self.units[self.unit_name(action.weights)].spans
        decay = decay_ranges([(span.start, span.parameter.local_shape) for span in spans if span.parameter.decays], begin, end)
        norm = math.sqrt(self.store.tensor(SCALARS)[0].item())
        shard = Shard(
            weights=own,
            gradient=gradients,
            moments=tuple(self.store.tensor(ref) for ref in action.states),
            master=self.store.tensor(action.master) if action.master else None,
            decay=decay,
        )
        lr = self.plan.optimizer.lr_at(self.step_number, self.num_steps)
        self.rule.update(shard, lr=lr, step=self.step_number, clip_scale=clip_scale(norm, self.plan.optimizer.clip_norm))


def span_table(unit: Unit) -> dict[str, Span]:
    """Where each parameter of a unit lies: start, stop, local shape."""
    return {span.parameter.name: (span.start, span.stop, span.parameter.local_shape) for span in unit.spans}


def sum_of_squares(flat: Tensor) -> Tensor:
    """In float64, without a float64 copy of narrower numbers: rows are summed in float32, which errs by less than one of its digits."""
    if flat.dtype == torch.float64:
        return torch.dot(flat, flat)
    whole = len(flat) - len(flat) % SQUARED_ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, SQUARED_ROW), dim=1, dtype=torch.float32).double()
    rest = flat[whole:].double()
    return torch.dot(rows, rows) + torch.dot(rest, rest)


def cut_dim(placement: object) -> int:
    """The dimension that an exchange gathers or scatters along."""
    assert isinstance(placement, Cut), f"{placement} is no cut"
    return placement.dim


def contiguous_pieces(tensor: Tensor, dim: int) -> bool:
    """Whether equal pieces along `dim` lie one after another in memory."""
    return math.prod(tensor.shape[:dim]) == 1


def gathered(target: Tensor, staged: Tensor, dim: int) -> Callable[[], None]:
    """What puts gathered pieces (stacked along a new first dimension) into their places."""

    def finish() -> None:
        torch.cat(tuple(staged), dim, out=target)

    return finish
