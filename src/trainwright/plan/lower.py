"""From a Plan to a Program: slots from the schedule, actions from the family's segments, rewritten by each strategy in turn.

Order of passes: recompute, pipeline, data, zero, tensor; the innermost comes last and so stays closest to the compute. Templates are made
once for
each shape of stage; the runs of a position name them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType

from trainwright.cost.wire import wire_buffer_bytes
from trainwright.ir.action import Action, Collective, Compute, Free, Operand, Update, wait_for
from trainwright.ir.buffer import Buffer
from trainwright.ir.layout import Group, Layout, Partial
from trainwright.ir.program import Program, Role, Run
from trainwright.ir.ref import Ref
from trainwright.ir.site import Site
from trainwright.ir.slot import Backward, Forward, Slot
from trainwright.ir.work import Op, OpKind, Work
from trainwright.plan.plan import Plan
from trainwright.problems import PlanError, Problem
from trainwright.schedules import SCHEDULES
from trainwright.spec.families import FAMILIES
from trainwright.spec.families.local import Local
from trainwright.spec.families.segment import Family, Segment, Unit
from trainwright.spec.formats import bytes_of
from trainwright.strategies.computes import backward_compute, forgetful, forward_compute, unit_ref
from trainwright.strategies.lifetimes import free_after_last_use
from trainwright.strategies.setting import Setting, StageShape, WireBuffer
from trainwright.strategies.zero import SHARDED_WEIGHTS, Zero
from trainwright.units import Bytes

STATES = {"adamw": ("moment1", "moment2"), "sgd": ("momentum",)}
"""Optimizer state of each parameter, by optimizer."""

SCALARS = Ref("scalars")
"""Two float64 numbers of a rank: the sum of squares of its gradients, and its part of the loss."""

VALID = Ref("valid")
"""One float64 number: the valid tokens of the global batch."""


def no_wire_buffers(op: str, payload_bytes: Bytes, num_ranks: int, element_bytes: Bytes) -> int:
    """A wire that holds nothing of its own (NCCL keeps fixed buffers, which are not part of a plan's memory here)."""
    del op, payload_bytes, num_ranks, element_bytes
    return 0


def lower(plan: Plan, *, check: bool = True, wire_buffer: WireBuffer | None = None) -> Program:
    """The Program of one optimizer step.

    `wire_buffer` says what the wire holds during an exchange: by default what the local wire holds if the cluster is local, else nothing.
    Raises PlanError if the Program is unsound, which no plan that passed the checks may bring about.
    """
    if wire_buffer is None:
        wire_buffer = wire_buffer_bytes if plan.cluster.device.name == "local" else no_wire_buffers
    program = Lowering(plan, wire_buffer).program()
    if check and (problems := program.verify()):
        raise PlanError(problems)
    return program


def lower_evaluation(plan: Plan) -> Program:
    """The Program of forward passes alone, over as many microbatches as a step has: for a loss on text that is not trained on."""
    lowering = Lowering(plan, wire_buffer_bytes)
    program = lowering.program(lowering.evaluation_runs)
    if problems := program.verify():
        raise PlanError(problems)
    return program


def family_of(plan: Plan) -> Family:
    """The model's family as one rank of the plan sees it."""
    tensor = plan.parallel.tensor
    family = FAMILIES.get(plan.model.family, path="model.family")
    local = Local(
        num_sequences=plan.batch.microbatch_sequences,
        sequence_tokens=plan.batch.sequence_tokens,
        num_tensor=tensor.size,
        sequence=tensor.sequence and tensor.size > 1,
        compute=plan.precision.resolved(plan.cluster.stack).compute,
    )
    described: Family = family.describe(plan.model, local)
    return described


@dataclass(frozen=True, slots=True)
class _Key:
    """What tells templates apart."""

    kind: str
    shape: StageShape | None = None
    first: bool = True
    last: bool = True
    evaluate: bool = False

    def __str__(self) -> str:
        if self.shape is None:
            return self.kind
        ends = ("/first" if self.first else "") + ("/last" if self.last else "") + ("/evaluate" if self.evaluate else "")
        return f"{self.kind}{self.shape}{ends}"


def astray(slots: Sequence[Slot], num_microbatches: int) -> str | None:
    """Why an order does not take every microbatch through every stage of a position once in each direction; None if it does."""
    visits = Counter((type(slot).__name__, slot.stage, slot.microbatch) for slot in slots)
    for kind in ("Forward", "Backward"):
        for stage in sorted({slot.stage for slot in slots}):
            for microbatch in range(num_microbatches):
                if (times := visits.pop((kind, stage, microbatch), 0)) != 1:
                    return f"{kind} of stage {stage}, microbatch {microbatch}, comes {times} times"
    return f"{next(iter(visits))} is no slot of {num_microbatches} microbatches" if visits else None


class Lowering:
    """One plan on its way to a Program."""

    def __init__(self, plan: Plan, wire_buffer: WireBuffer, family: Family | None = None) -> None:
        self.plan, self.wire_buffer = plan, wire_buffer
        self.family = family or family_of(plan)
        self.precision = plan.precision.resolved(plan.cluster.stack)
        self.sizes = dict(plan.parallel.sizes)
        self.zero = plan.parallel.zero
        self.pipeline = plan.parallel.pipeline
        self.sequence = plan.parallel.tensor.sequence and plan.parallel.tensor.size > 1
        self.buffers: dict[str, Buffer] = dict(self.family.activations)
        self.templates: dict[str, tuple[Action, ...]] = {}
        self.made: dict[_Key, str] = {}
        self.after_passes: dict[_Key, tuple[Action, ...]] = {}
        self.schedule: ModuleType = SCHEDULES.get(self.pipeline.schedule)
        with_pass = (one for one in (plan.recompute, *plan.parallel.strategies) if hasattr(one, "rewrite"))
        self.passes = tuple(sorted(with_pass, key=lambda one: one.PLACE))
        self.declare()

    # --- buffers ---------------------------------------------------------------------------------------------------------------

    def declare(self) -> None:
        """Say what each flat buffer of each unit is."""
        setting = self.setting(_Key("begin"))
        for name, unit in self.family.units.items():
            prefix = "" if name == "block" else f"{name}."
            for kind, buffer in (self.states(unit) | self.zero.buffers(unit, setting)).items():
                self.buffers[prefix + kind] = buffer
        scalar = Buffer(shape=(2,), format="fp64", part="temporary", num_bytes=16)
        self.buffers["scalars"] = scalar
        self.buffers["valid"] = replace(scalar, shape=(1,), num_bytes=8)

    def states(self, unit: Unit) -> dict[str, Buffer]:
        """Weights, gradients, master copy and optimizer state of a unit, in one rank's pieces."""
        whole = unit.padded(self.zero.size)
        shard = whole // self.zero.size
        weights = shard if self.zero.cuts_weights else whole

        def flat(num_elements: int, fmt: str, part: str, *, persistent: bool = True) -> Buffer:
            layout = SHARDED_WEIGHTS if num_elements == shard and self.zero.size > 1 else Layout()
            return Buffer(
                shape=(num_elements,), format=fmt, part=part, num_bytes=num_elements * bytes_of(fmt), persistent=persistent, layout=layout
            )

        precision = self.precision
        states = {name: flat(shard, precision.optimizer, "optimizer") for name in self.state_names}
        master = {"master": flat(shard, precision.master, "master")} if precision.has_master else {}
        return {
            "weights": flat(weights, precision.weights, "weights"),
            "gradients": flat(shard, precision.gradients, "gradients", persistent=False),
            **master,
            **states,
        }

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the optimizer's state buffers; plain SGD keeps none."""
        optimizer = self.plan.optimizer
        return () if optimizer.name == "sgd" and not optimizer.momentum else STATES[optimizer.name]

    # --- stages ----------------------------------------------------------------------------------------------------------------

    @cached_property
    def first_blocks(self) -> list[int]:
        """Number of each stage's first block."""
        layers = self.plan.stage_layers
        return [sum(layers[:stage]) for stage in range(len(layers))]

    @cached_property
    def shapes(self) -> tuple[StageShape, ...]:
        """The shape of every virtual stage."""
        layers = self.plan.stage_layers
        return tuple(StageShape(stage == 0, count, stage == len(layers) - 1) for stage, count in enumerate(layers))

    def shape(self, stage: int) -> StageShape:
        """The shape of a virtual stage."""
        return self.shapes[stage]

    def units(self, shape: StageShape) -> Iterator[tuple[str, int | None]]:
        """The units that a stage holds: name, and block (relative) for those of blocks. A tied embedding stands at both ends."""
        before, after = self.family.units_before, self.family.units_after
        if shape.has_embed:
            yield from ((name, None) for name in before)
        yield from (("block", block) for block in range(shape.num_blocks))
        if shape.has_head:
            yield from ((name, None) for name in after if name not in before)
            yield from ((name, None) for name in after if name in before and not shape.has_embed)

    def setting(self, key: _Key) -> Setting:
        """What the passes are told about a template."""
        return Setting(
            kind=key.kind,
            shape=key.shape or StageShape(has_embed=False, num_blocks=0, has_head=False),
            first=key.first,
            last=key.last,
            sizes=self.sizes,
            family=self.family,
            precision=self.precision,
            wire_buffer=self.wire_buffer,
            sequence=self.sequence,
            num_gradient_shards=self.zero.size,
            stream_tensors=self.family.stream if self.sequence else frozenset(),
            buffers=self.buffers,
        )

    # --- templates -------------------------------------------------------------------------------------------------------------

    def template(self, key: _Key, make: Callable[[Setting], Iterable[Action]] | None = None) -> str:
        """The name of a template, made when first asked for."""
        if key not in self.made:
            setting = self.setting(key)
            actions = tuple(make(setting)) if make else self.rewritten(key)
            self.made[key] = str(key)
            self.templates[str(key)] = actions
        return self.made[key]

    def rewritten(self, key: _Key) -> tuple[Action, ...]:
        """A forward or backward template: all passes, then the lifetimes, which need both directions."""
        if key.evaluate:
            return free_after_last_use(self.passed(key), (), of="forward")
        other = _Key("backward" if key.kind == "forward" else "forward", key.shape)
        mine, theirs = self.passed(key), self.passed(other)
        forward, backward = (mine, theirs) if key.kind == "forward" else (theirs, mine)
        return free_after_last_use(forward, backward, of=key.kind)

    def passed(self, key: _Key) -> tuple[Action, ...]:
        """A template's actions after every pass."""
        if key not in self.after_passes:
            self.after_passes[key] = tuple(self.passes_over(key))
        return self.after_passes[key]

    def passes_over(self, key: _Key) -> Iterable[Action]:
        """Each strategy's pass in turn."""
        setting = self.setting(key)
        actions: Iterable[Action] = self.base(setting)
        if key.evaluate:
            forward = [action for action in actions if isinstance(action, Compute)]
            actions = (forgetful(action, setting) if action.function == "forward" else action for action in forward)
        for strategy in self.passes:
            if isinstance(strategy, Zero) and key.evaluate:
                strategy = replace(strategy, reshard_after_forward=True)  # noqa: PLW2901  # nothing stays gathered for a backward
            actions = strategy.rewrite(actions, setting)
        return actions

    def base(self, setting: Setting) -> Iterator[Action]:
        """The segments of a stage, before any strategy."""
        match setting.kind:
            case "forward":
                yield from self.forward(setting)
            case "backward":
                yield from self.backward(setting)
            case "reduce":
                yield from self.squares(setting)
            case "apply":
                yield from self.updates(setting)

    def segments(self, shape: StageShape) -> Iterator[tuple[Segment, int | None]]:
        """The segments of a stage in forward order, each with its block."""
        if shape.has_embed:
            yield from ((segment, None) for segment in self.family.before)
        for block in range(shape.num_blocks):
            yield from ((segment, block) for segment in self.family.block)
        if shape.has_head:
            yield from ((segment, None) for segment in self.family.after)

    def forward(self, setting: Setting) -> Iterator[Action]:
        """Forward of each segment; then the microbatch's part of the loss is added to the step's."""
        for segment, block in self.segments(setting.shape):
            yield forward_compute(segment, block, setting)
        if setting.shape.has_head:
            loss = Ref("loss", None, 0)
            yield Compute(
                site=Site(segment="loss", phase="fwd"),
                function="collect",
                reads=(Operand("loss", loss),),
                accumulates=Operand("scalars", SCALARS, self.partial_everywhere),
            )

    def backward(self, setting: Setting) -> Iterator[Action]:
        """Backward of each segment, from the last."""
        touched: set[Ref] = set()
        for segment, block in reversed(list(self.segments(setting.shape))):
            gradients = unit_ref(segment.unit, "gradients", block) if segment.unit else None
            fresh = setting.first and gradients not in touched
            action = backward_compute(segment, block, setting, fresh=fresh)
            if action is not None:
                touched |= {gradients} if gradients else set()
                yield action

    @cached_property
    def partial_everywhere(self) -> Layout:
        """To be summed over every axis."""
        layout = Layout()
        for axis, size in self.sizes.items():
            layout = layout.on(axis, Partial()) if size > 1 else layout
        return layout

    def unit_site(self, unit: str, block: int | None) -> Site:
        """The site of what is done to a unit after the backward passes."""
        return Site(block=block, segment=None if unit == "block" else unit, phase="upd")

    def squares(self, setting: Setting) -> Iterator[Action]:
        """The sum of squares of each unit's gradients, every logical element counted on one rank alone."""
        for unit, block in self.units(setting.shape):
            if unit == "embed" and not setting.shape.has_embed:
                continue  # the copy of a tied table: the first stage counts it
            gradients = unit_ref(unit, "gradients", block)
            layout = self.summed_gradients
            num_bytes = self.buffers[gradients.tensor].num_bytes
            yield Compute(
                site=self.unit_site(unit, block),
                function="square",
                reads=(Operand("gradients", gradients, layout),),
                accumulates=Operand("scalars", SCALARS, self.partial_everywhere),
                work=Work((Op(name="square", kind=OpKind.ELEMENTWISE, num_bytes=num_bytes),)),
            )

    @cached_property
    def summed_gradients(self) -> Layout:
        """How gradients lie when they are complete."""
        return SHARDED_WEIGHTS if self.zero.size > 1 else Layout()

    def updates(self, setting: Setting) -> Iterator[Action]:
        """One optimizer step of each unit; the gradients go."""
        for unit, block in self.units(setting.shape):
            names = {kind: unit_ref(unit, kind, block) for kind in ("weights", "gradients", "master", *self.state_names)}
            gradients = self.buffers[names["gradients"].tensor]
            touched_bytes = gradients.num_bytes + sum(2 * self.buffers[names[one].tensor].num_bytes for one in self.state_names)
            own = gradients.shape[0] * bytes_of(self.precision.weights)
            master = 2 * self.buffers[names["master"].tensor].num_bytes if self.precision.has_master else own
            site = self.unit_site(unit, block)
            yield Update(
                site=site,
                weights=names["weights"],
                gradients=names["gradients"],
                states=tuple(names[one] for one in self.state_names),
                master=names["master"] if self.precision.has_master else None,
                scalars=SCALARS,
                num_elements=gradients.shape[0],
                work=Work((Op(name="update", kind=OpKind.ELEMENTWISE, num_bytes=touched_bytes + own + master),)),
            )
            yield Free(site=site, buffers=(names["gradients"],))

    # --- templates of a position as a whole --------------------------------------------------------------------------------------

    def begin(self, setting: Setting) -> Iterator[Action]:
        """Set the scalars to zero; where the loss is taken, count the valid tokens of the global batch."""
        scalars = Operand("scalars", SCALARS, self.partial_everywhere)
        yield Compute(site=Site(phase="fwd", segment="scalars"), function="start", writes=(scalars,))
        if not setting.kind.endswith("head"):
            return
        axes = tuple(axis for axis in self.sizes if axis in {"data", "zero"} and self.sizes[axis] > 1)
        layout = Layout()
        for axis in axes:
            layout = layout.on(axis, Partial())
        yield Compute(site=Site(phase="fwd", segment="valid"), function="count", writes=(Operand("valid", VALID, layout),))
        if axes:
            yield from self.summed(Site(phase="fwd", segment="valid", tag="+".join(axes)), axes, VALID, 8, layout)

    def norm(self, setting: Setting) -> Iterator[Action]:
        """Sum the scalars over all ranks."""
        del setting
        axes = tuple(axis for axis, size in self.sizes.items() if size > 1)
        if axes:
            yield from self.summed(Site(phase="upd", segment="scalars", tag="+".join(axes)), axes, SCALARS, 16, self.partial_everywhere)

    def end(self, setting: Setting) -> Iterator[Action]:
        """Let go of what belongs to the step."""
        counted = (VALID,) if setting.kind.endswith("head") else ()
        yield Free(site=Site(phase="upd", segment="scalars"), buffers=(SCALARS, *counted))

    def summed(self, site: Site, axes: tuple[str, ...], ref: Ref, payload_bytes: Bytes, before: Layout) -> Iterator[Action]:
        """An all-reduce of a few numbers."""
        ranks = 1
        for axis in axes:
            ranks *= self.sizes[axis]
        action = Collective(
            site=site,
            op="all_reduce",
            group=Group(axes),
            source=ref,
            target=ref,
            before=before,
            after=Layout(),
            payload_bytes=payload_bytes,
            wire_buffer_bytes=self.wire_buffer("all_reduce", payload_bytes, ranks, 8),
        )
        yield action
        yield wait_for(action)

    # --- runs ------------------------------------------------------------------------------------------------------------------

    def slots(self, position: int) -> list[Slot]:
        """What the schedule tells a position to do."""
        slots = list(self.schedule.order(position, self.pipeline.size, self.plan.num_microbatches, self.pipeline.chunks))
        if (strange := astray(slots, self.plan.num_microbatches)) is not None:
            raise PlanError(
                [Problem(f'schedule "{self.pipeline.schedule}", position {position}: {strange}', path="parallel.pipeline.schedule")]
            )
        return slots

    def key(self, slot: Slot, firsts: dict[tuple[str, int], int], lasts: dict[tuple[str, int], int]) -> _Key:
        """The template of a slot. Whether it is the first or last of its stage matters only where a pass makes a difference of it."""
        kind = "forward" if isinstance(slot, Forward) else "backward"
        first = firsts[kind, slot.stage] == slot.microbatch
        last = lasts[kind, slot.stage] == slot.microbatch
        if kind == "forward":
            matters = self.zero.cuts_weights and not self.zero.reshard_after_forward
            first, last = first or not matters, True
        return _Key(kind, self.shape(slot.stage), first, last)

    def runs(self, position: int) -> Iterator[Run]:
        """All that a position does in a step."""
        slots = self.slots(position)
        kinds = [("backward" if isinstance(slot, Backward) else "forward", slot.stage, slot.microbatch) for slot in slots]
        firsts: dict[tuple[str, int], int] = {}
        lasts: dict[tuple[str, int], int] = {}
        for kind, stage, microbatch in kinds:
            firsts.setdefault((kind, stage), microbatch)
            lasts[kind, stage] = microbatch
        stages = sorted({slot.stage for slot in slots})
        head = "+head" if any(self.shape(stage).has_head for stage in stages) else ""
        yield Run(self.template(_Key(f"begin{head}"), self.begin))
        yield from self.post(slots[0])
        for index, slot in enumerate(slots):
            if index + 1 < len(slots):
                yield from self.post(slots[index + 1])
            yield Run(self.template(self.key(slot, firsts, lasts)), slot.stage, slot.microbatch)
            if index:
                yield from self.settle(slots[index - 1])
        yield from self.settle(slots[-1])
        for stage in stages:
            yield Run(self.whole_pass("reduce", stage), stage)
        yield Run(self.template(_Key("norm"), self.norm))
        for stage in stages:
            yield Run(self.whole_pass("apply", stage), stage)
        yield Run(self.template(_Key(f"end{head}"), self.end))

    def whole_pass(self, kind: str, stage: int) -> str:
        """A template that runs once a step for a stage."""
        key = _Key(kind, self.shape(stage))
        return self.template(key, lambda _: self.passed(key))

    def post(self, slot: Slot) -> Iterator[Run]:
        """Post the receive of a slot."""
        yield from self.crossing("post", slot, self.pipeline.post)

    def settle(self, slot: Slot) -> Iterator[Run]:
        """Wait for the send of a slot."""
        yield from self.crossing("settle", slot, self.pipeline.settle)

    def crossing(self, what: str, slot: Slot, make: Callable[[Setting], Iterable[Action]]) -> Iterator[Run]:
        """A run of the actions that post or settle what crosses a stage's edge, if anything does."""
        kind = "forward" if isinstance(slot, Forward) else "backward"
        shape = self.shape(slot.stage)
        name = self.template(_Key(f"{what} {kind}", shape), lambda setting: make(replace(setting, kind=kind)))
        if self.templates[name]:
            yield Run(name, slot.stage, slot.microbatch)

    def evaluation_runs(self, position: int) -> Iterator[Run]:
        """The forward passes of a position alone, for a loss that nobody learns from."""
        slots = [slot for slot in self.slots(position) if isinstance(slot, Forward)]
        stages = sorted({slot.stage for slot in slots})
        head = "+head" if any(self.shape(stage).has_head for stage in stages) else ""
        yield Run(self.template(_Key(f"begin{head}"), self.begin))
        yield from self.post(slots[0])
        for index, slot in enumerate(slots):
            if index + 1 < len(slots):
                yield from self.post(slots[index + 1])
            yield Run(self.template(_Key("forward", self.shape(slot.stage), evaluate=True)), slot.stage, slot.microbatch)
            if index:
                yield from self.settle(slots[index - 1])
        yield from self.settle(slots[-1])
        yield Run(self.template(_Key("norm"), self.norm))
        yield Run(self.template(_Key(f"end{head}"), self.end))

    def program(self, runs: Callable[[int], Iterable[Run]] | None = None) -> Program:
        """All of it; `runs` gives what a position does, by default a training step."""
        multiplicity = self.plan.num_devices // self.pipeline.size
        roles = tuple(self.role(position, multiplicity, tuple((runs or self.runs)(position))) for position in range(self.pipeline.size))
        return Program(
            sizes=self.sizes,
            templates=self.templates,
            roles=roles,
            first_block=dict(enumerate(self.first_blocks)),
            buffers=self.buffers,
        )

    def role(self, position: int, multiplicity: int, runs: tuple[Run, ...]) -> Role:
        """A position with its persistent buffers."""
        stages = sorted({run.stage for run in runs if run.stage is not None})
        persistent = {
            (stage, unit_ref(unit, kind, block)): self.buffers[unit_ref(unit, kind, block).tensor].layout
            for stage in stages
            for unit, block in self.units(self.shape(stage))
            for kind in ("weights", *(("master",) if self.precision.has_master else ()), *self.state_names)
        }
        return Role(position=position, multiplicity=multiplicity, runs=runs, persistent=persistent)
