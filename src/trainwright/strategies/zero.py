"""ZeRO: replicas that share the state among them.

stage 1   optimizer state is cut. Gradients accumulate whole and are reduce-scattered once a step; after the update the weights are
gathered.
stage 2   gradients are cut too: with gradients = "sharded" each microbatch is reduce-scattered, with "whole" they accumulate whole.
stage 3   weights are cut too: a unit is gathered before it is used, in forward and again in backward.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". A unit is a block; embedding,
positions and head are units of their own. Each unit's flat buffer is padded to a multiple of the axis.

reshard_after_forward   False: a unit stays gathered from its first forward of the step to its last backward.
prefetch                how many units ahead are gathered, within one pass of one stage.
free                    "before-reduce": the gathered weights go before the gradients are reduced (as PyTorch does); "after-reduce": after.
overlap                 the reduce-scatter runs beside the next unit's backward; False: it is waited for at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from trainwright.ir.action import Action, Collective, Compute, Free, Operand, Update, Wait, wait_for
from trainwright.ir.buffer import Buffer
from trainwright.ir.layout import Group, Layout, Partial, Replicate, Residency, Shard
from trainwright.ir.ref import Ref
from trainwright.ir.site import Site
from trainwright.spec.families.segment import Unit
from trainwright.spec.formats import bytes_of
from trainwright.strategies.computes import gradient_layout
from trainwright.strategies.setting import Setting, gradients_of, touched

NAME: Final = "zero"
GROUP: Final = Group((NAME,))
STAGES: Final = (1, 2, 3)
WEIGHTS_CUT: Final = 3
GRADIENTS_CUT: Final = 2
SHARDED_WEIGHTS: Final = Layout(((NAME, Shard(0)),), Residency.SHARDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """Options of `zero`; see the head of the file."""

    PLACE: ClassVar[int] = 3

    size: int = 1
    stage: int = 3
    reshard_after_forward: bool = True
    prefetch: int = 1
    free: str = "before-reduce"
    gradients: str = "sharded"
    overlap: bool = True

    @property
    def cuts_weights(self) -> bool:
        """Weights are stored in pieces."""
        return self.size > 1 and self.stage >= WEIGHTS_CUT

    @property
    def reduces_each_microbatch(self) -> bool:
        """Gradients are reduce-scattered after every backward, not once a step."""
        return self.size > 1 and self.stage >= GRADIENTS_CUT and self.gradients == "sharded"

    def buffers(self, unit: Unit, setting: Setting) -> dict[str, Buffer]:
        """The flat buffers that this strategy adds to a unit, by kind."""
        weights, reduce = setting.precision.weights, setting.precision.reduce
        whole = unit.padded(self.size)
        shard = whole // self.size

        def flat(num_elements: int, fmt: str, part: str) -> Buffer:
            return Buffer(shape=(num_elements,), format=fmt, part=part, num_bytes=num_elements * bytes_of(fmt))

        return {
            "gathered": flat(whole, weights, "gathered"),
            "local": flat(whole, reduce, "gradients"),
            "whole": flat(whole, reduce, "gradients"),
            "reduced": flat(shard, reduce, "gradients"),
        }

    def rewrite(self, actions: Iterable[Action], setting: Setting) -> Iterator[Action]:
        """Gather before use, free after; reduce-scatter what a backward adds; update only one's own piece."""
        if self.size == 1:
            yield from actions
        elif setting.kind in {"forward", "backward"}:
            yield from _Walk(self, setting, list(actions)).actions()
        elif setting.kind == "apply":
            yield from self._update(actions, setting)
        else:
            yield from actions

    def _update(self, actions: Iterable[Action], setting: Setting) -> Iterator[Action]:
        """Stages 1 and 2 hold whole weights: update one's own piece of them, then gather the pieces."""
        started: list[Collective] = []
        for action in actions:
            if not isinstance(action, Update) or self.cuts_weights:
                yield action
                continue
            pieces = Layout(((NAME, Shard(0)),))
            yield replace(action, after=pieces)
            payload = setting.unit(action.weights).padded(self.size) * bytes_of(setting.precision.weights)
            started.append(
                Collective(
                    site=action.site.tagged(NAME),
                    op="all_gather",
                    group=GROUP,
                    source=action.weights,
                    target=action.weights,
                    before=pieces,
                    after=Layout(),
                    payload_bytes=payload,
                )
            )
            yield started[-1]
        yield from map(wait_for, started)


@dataclass(slots=True)
class _Use:
    """Consecutive actions of a template that need one unit: indices of the first and last."""

    weights: Ref
    first: int
    last: int
    number: int


@dataclass(slots=True)
class _Late:
    """What is still to be done for a reduction that is on its way."""

    unit: Ref
    actions: list[Action] = field(default_factory=list)


class _Walk:
    """One forward or backward template on its way through the pass."""

    def __init__(self, zero: Zero, setting: Setting, actions: list[Action]) -> None:
        self.zero, self.setting, self.listed = zero, setting, actions
        self.phase = "fwd" if setting.kind == "forward" else "bwd"
        self.uses = self._uses()
        self.final_use = {use.weights: use.number for use in self.uses}
        self.num_gathered = 0
        self.gathered: set[Ref] = set()
        self.late: list[_Late] = []
        self.reduced: set[Ref] = set()
        self.written: set[Ref] = set()
        self.times: dict[tuple[str, Ref], int] = {}
        self.pending_gather: dict[Ref, Site] = {}

    def _uses(self) -> list[_Use]:
        uses: list[_Use] = []
        for index, action in enumerate(self.listed):
            if isinstance(action, Compute) and action.weights:
                if uses and uses[-1].weights == action.weights.ref:
                    uses[-1].last = index
                else:
                    uses.append(_Use(action.weights.ref, index, index, len(uses)))
        return uses

    def actions(self) -> Iterator[Action]:
        """The rewritten template."""
        starts = {use.first: use for use in self.uses}
        ends = {use.last: use for use in self.uses}
        for index, action in enumerate(self.listed):
            if index in starts:
                yield from self.before(starts[index])
            if not isinstance(action, Compute):
                yield from self.settle_for(action)
            yield self.renamed(action)
            if index in ends:
                yield from self.after(ends[index])
        for late in self.late:
            yield from late.actions
        self.late.clear()

    # --- weights ---------------------------------------------------------------------------------------------------------------

    def before(self, use: _Use) -> Iterator[Action]:
        """Gather this unit and those ahead, as far as they are not live already; wait for this one."""
        if not self.gathers():
            return
        while self.num_gathered < len(self.uses) and self.num_gathered <= use.number + self.zero.prefetch:
            ahead = self.uses[self.num_gathered]
            if ahead.weights in self.gathered and ahead.number != use.number:
                if self.zero.reshard_after_forward:
                    break
            elif ahead.weights not in self.gathered:
                yield self.gather(ahead)
            self.num_gathered += 1
        if (site := self.pending_gather.pop(use.weights, None)) is not None:
            yield Wait(site=site, kind="collective")

    def gathers(self) -> bool:
        """Whether this template gathers: always when units are freed after forward, else only in the step's first forward."""
        return self.zero.cuts_weights and (self.zero.reshard_after_forward or (self.setting.kind == "forward" and self.setting.first))

    def gather(self, use: _Use) -> Collective:
        """Start to gather a unit."""
        unit = self.setting.unit(use.weights)
        payload = unit.padded(self.zero.size) * bytes_of(self.setting.precision.weights)
        self.gathered.add(use.weights)
        action = Collective(
            site=self.site(use, "all_gather"),
            op="all_gather",
            group=GROUP,
            source=use.weights,
            target=self.setting.beside(use.weights, "gathered"),
            before=SHARDED_WEIGHTS,
            after=Layout(),
            payload_bytes=payload,
        )
        self.pending_gather[use.weights] = action.site
        return action

    def frees(self, use: _Use) -> bool:
        """Whether the gathered unit goes after this use."""
        if not self.zero.cuts_weights:
            return False
        if self.zero.reshard_after_forward:
            return True
        return self.setting.kind == "backward" and self.setting.last and self.final_use[use.weights] == use.number

    def free_weights(self, use: _Use) -> Iterator[Action]:
        """End the gathered unit's life."""
        if self.frees(use):
            self.gathered.discard(use.weights)
            yield Free(site=self.site(use, "free"), buffers=(self.setting.beside(use.weights, "gathered"),))

    def site(self, use: _Use, what: str) -> Site:
        """Where this strategy acts on a unit; numbered where it does so more than once in a template."""
        times = self.times.get((what, use.weights), 0)
        self.times[what, use.weights] = times + 1
        unit = self.setting.unit(use.weights)
        segment = None if unit.name == "block" else unit.name
        return Site(block=use.weights.block, segment=segment, phase=self.phase, tag=NAME + (f".{times}" if times else ""))

    # --- gradients -------------------------------------------------------------------------------------------------------------

    def renamed(self, action: Action) -> Action:
        """The same action on gathered weights, adding to the buffer that is reduced afterwards."""
        if not isinstance(action, Compute):
            return action
        if action.weights and self.zero.cuts_weights:
            action = replace(action, weights=replace(action.weights, ref=self.setting.beside(action.weights.ref, "gathered")))
        if gradients_of(action):
            kind = "local" if self.zero.reduces_each_microbatch else "whole"
            assert action.accumulates is not None
            ref = self.setting.beside(action.accumulates.ref, kind)
            fresh = ref not in self.written if self.zero.reduces_each_microbatch else action.fresh
            self.written.add(ref)
            action = replace(action, accumulates=replace(action.accumulates, ref=ref), fresh=fresh)
        return action

    def after(self, use: _Use) -> Iterator[Action]:
        """Free the weights and reduce the gradients, in the order that the plan asks for."""
        if not self.reduces(use):
            yield from self.free_weights(use)
            return
        early = self.zero.free == "before-reduce"
        if early:
            yield from self.free_weights(use)
        for late in self.late:
            yield from late.actions
        self.late.clear()
        yield from self.reduce(use)
        if not self.zero.overlap or not early:
            for late in self.late:
                yield from late.actions[:1]
                yield from self.free_weights(use) if not early else ()
                yield from late.actions[1:]
            self.late.clear()

    def reduces(self, use: _Use) -> bool:
        """Whether this use's gradients are reduced after it."""
        if self.setting.kind != "backward":
            return False
        adds = any(gradients_of(one) for one in self.listed[use.first : use.last + 1])
        if self.zero.reduces_each_microbatch:
            return adds
        return adds and self.setting.last and self.final_use[use.weights] == use.number

    def reduce(self, use: _Use) -> Iterator[Action]:
        """Start the reduce-scatter; what follows its Wait goes to `late`."""
        setting = self.setting
        unit = setting.unit(use.weights)
        whole = setting.beside(use.weights, "local" if self.zero.reduces_each_microbatch else "whole")
        gradients = setting.beside(use.weights, "gradients")
        adds = self.zero.reduces_each_microbatch and not (setting.first and gradients not in self.reduced)
        target = setting.beside(use.weights, "reduced") if adds else gradients
        self.reduced.add(gradients)
        self.written.discard(whole)
        payload = unit.padded(self.zero.size) * bytes_of(setting.precision.reduce)
        before = gradient_layout(unit, setting)
        after = before.on(NAME, Shard(0))
        action = Collective(
            site=self.site(use, "reduce_scatter"),
            op="reduce_scatter",
            group=GROUP,
            source=whole,
            target=target,
            before=before,
            after=after,
            payload_bytes=payload,
            wire_buffer_bytes=setting.wire_bytes("reduce_scatter", payload, (NAME,), setting.precision.reduce),
        )
        yield action
        late = _Late(use.weights, [wait_for(action)])
        freed: tuple[Ref, ...] = (whole,)
        if adds:
            site = self.site(use, "accumulate")
            operand = Operand("gradients", gradients, self.summed(after))
            late.actions.append(
                Compute(site=site, function="accumulate", reads=(Operand("reduced", target, self.summed(after)),), accumulates=operand)
            )
            freed = (whole, target)
        late.actions.append(Free(site=self.site(use, "free"), buffers=freed))
        self.late.append(late)

    @staticmethod
    def summed(layout: Layout) -> Layout:
        """The layout of a reduced gradient: what was partial over a cut sequence has been summed before."""
        return layout.on("tensor", Replicate()) if isinstance(layout["tensor"], Partial) else layout

    def settle_for(self, action: Action) -> Iterator[Action]:
        """Before somebody else's action on a gradient that is on its way: wait for it."""
        for late in list(self.late):
            if self.setting.beside(late.unit, "gradients") in touched(action):
                self.late.remove(late)
                yield from late.actions
