"""Tensor: each matrix is cut over ranks, and activations are exchanged where the cut would show.

Column-cut matrices (q, k, v, gate, up, head) need the whole sequence and give a piece of the features; row-cut ones (out, down, embedding)
give a partial sum. The pass knows none of this: each segment says how it needs its arguments and how it leaves its results, and
wherever the two differ on the tensor axis an exchange is put between (partial -> replicate: all_reduce; partial -> cut sequence:
reduce_scatter;
cut sequence -> replicate: all_gather).

sequence        the residual stream is cut along the sequence, so norms and kept activations are too (Korthikanti et al. 2022). Gradients
of what is
                replicated over tensor are then partial and summed before anything else reduces them.
keep_gathered   keep the gathered inputs of column-cut matrices for backward; False gathers them again (as Megatron-LM does), which costs
                wire and saves memory.

Source: Shoeybi et al. 2019, "Megatron-LM". Vocabulary rows are cut too; rows beyond the vocabulary are padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from trainwright.ir.action import Action, Collective, Compute, Operand, wait_for
from trainwright.ir.buffer import Buffer
from trainwright.ir.layout import Group, Layout, Partial, Placement, Replicate, Shard
from trainwright.ir.ref import Ref
from trainwright.ir.site import Site
from trainwright.spec.formats import bytes_of
from trainwright.strategies.setting import Setting
from trainwright.units import Bytes

NAME: Final = "tensor"
GROUP: Final = Group((NAME,))
GRADIENTS: Final = ("gradients", "local", "whole")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Options of `tensor`; see the head of the file."""

    PLACE: ClassVar[int] = 6

    size: int = 1
    sequence: bool = False
    keep_gathered: bool = False

    def rewrite(self, actions: Iterable[Action], setting: Setting) -> Iterator[Action]:
        """Put an exchange between every result and every argument that differ on the tensor axis."""
        if self.size == 1:
            yield from actions
        else:
            yield from _Walk(self, setting, list(actions)).actions()


class _Walk:
    """One template on its way through the pass."""

    def __init__(self, tensor: Tensor, setting: Setting, actions: list[Action]) -> None:
        self.tensor, self.setting, self.listed = tensor, setting, actions
        self.held: dict[Ref, Placement] = {}
        self.whole: set[Ref] = set()
        self.summed: set[Ref] = set()
        self.needed = self._needed()
        family = setting.family
        segments = (*family.before, *family.block, *family.after)
        self.forward_tensors = {result.buffer for segment in segments for result in segment.forward.writes}

    def _needed(self) -> dict[Ref, Placement]:
        """How the first reader of each buffer needs it on the tensor axis."""
        needed: dict[Ref, Placement] = {}
        for action in self.listed:
            if isinstance(action, Compute):
                for operand in action.reads:
                    needed.setdefault(operand.ref, operand.layout[NAME])
        return needed

    def actions(self) -> Iterator[Action]:
        """The rewritten template."""
        for action in self.listed:
            if isinstance(action, Compute):
                yield from self.compute(action)
            else:
                yield from self.gradient_sum(action)
                yield action

    def compute(self, action: Compute) -> Iterator[Action]:
        """Bring each argument into the layout it is needed in; then the action; then settle its partial results."""
        if action.function in {"square", "accumulate"}:
            for operand in action.reads:
                yield from self.sum_replicated(operand.ref, action.site)
            yield action
            return
        reads: list[Operand] = []
        for operand in action.reads:
            if self.must_gather(operand):
                full = suffixed(operand.ref, "full")
                if full not in self.whole and not self.kept_whole(operand):
                    yield from self.exchange("all_gather", action.site, operand, full)
                    self.whole.add(full)
                operand = replace(operand, ref=full)  # noqa: PLW2901  # the argument, now whole
            reads.append(operand)
        writes = [self.named(operand) for operand in action.writes]
        yield replace(action, reads=tuple(reads), writes=tuple(writes))
        for before, operand in zip(action.writes, writes, strict=True):
            if isinstance(before.layout[NAME], Partial):
                yield from self.settle(action.site, before, operand)
            else:
                self.held[before.ref] = before.layout[NAME]

    def must_gather(self, operand: Operand) -> bool:
        """Whether an argument is needed whole but lies in pieces along the sequence."""
        if not self.tensor.sequence or not isinstance(operand.layout[NAME], Replicate):
            return False
        if operand.ref in self.held:
            return isinstance(self.held[operand.ref], Shard)
        return operand.ref.tensor in self.setting.stream_tensors

    def kept_whole(self, operand: Operand) -> bool:
        """Whether the forward pass has left the gathered argument for this backward."""
        in_backward = self.tensor.keep_gathered and self.setting.kind == "backward"
        return in_backward and operand.ref not in self.held and operand.ref.tensor in self.forward_tensors

    def named(self, operand: Operand) -> Operand:
        """A partial result that becomes a piece is written under another name: it is larger than what it becomes."""
        if isinstance(operand.layout[NAME], Partial) and isinstance(self.needed.get(operand.ref), Shard):
            return replace(operand, ref=suffixed(operand.ref, "partial"))
        return operand

    def settle(self, site: Site, before: Operand, written: Operand) -> Iterator[Action]:
        """Sum a partial result, into every rank or into pieces along the sequence."""
        if written.ref == before.ref:
            self.held[before.ref] = Replicate()
            yield from self.exchange("all_reduce", site, written, written.ref)
        else:
            self.held[before.ref] = self.needed[before.ref]
            yield from self.exchange("reduce_scatter", site, written, before.ref)

    def exchange(self, op: str, site: Site, source: Operand, target: Ref) -> Iterator[Action]:
        """Start an exchange of an activation and wait for it."""
        setting = self.setting
        full = setting.full_buffer(source.ref.tensor)
        for ref in (source.ref, target):
            if ref.tensor.endswith((".full", ".partial")):
                setting.buffers[ref.tensor] = full
        placement = source.layout[NAME] if op != "all_gather" else self.held.get(source.ref, Shard(1))
        after: Placement = Shard(1) if op == "reduce_scatter" else Replicate()
        action = Collective(
            site=self.site(site, target),
            op=op,
            group=GROUP,
            source=source.ref,
            target=target,
            before=Layout(((NAME, placement),)),
            after=Layout(((NAME, after),)) if isinstance(after, Shard) else Layout(),
            payload_bytes=full.num_bytes,
            wire_buffer_bytes=setting.wire_bytes(op, full.num_bytes, (NAME,), full.format) + staged_bytes(op, full),
        )
        yield action
        yield wait_for(action)

    @staticmethod
    def site(site: Site, target: Ref) -> Site:
        """The site of the segment, tagged; a gather is named after what it gathers, for a segment may need two."""
        kind = target.tensor.removesuffix(".full") if target.tensor.endswith(".full") else ""
        return site.tagged(f"{NAME}.{kind}" if kind else NAME)

    # --- gradients of what is replicated over tensor -----------------------------------------------------------------------------

    def gradient_sum(self, action: Action) -> Iterator[Action]:
        """Before an exchange takes gradients that are partial over the cut sequence: sum those."""
        if isinstance(action, Collective) and action.source.tensor.rpartition(".")[2] in GRADIENTS:
            yield from self.sum_replicated(action.source, action.site)

    def sum_replicated(self, gradients: Ref, site: Site) -> Iterator[Action]:
        """Sum the head of a unit's gradient buffer, once, unless it has been summed earlier in the step."""
        setting = self.setting
        unit_gradients = gradients.tensor.rpartition(".")[2] in GRADIENTS
        if not self.tensor.sequence or not unit_gradients or gradients in self.summed:
            return
        if gradients.tensor.rpartition(".")[2] == "gradients" and (
            setting.size("zero") > 1 or (setting.size("data") > 1 and setting.kind == "reduce")
        ):
            return
        self.summed.add(gradients)
        unit = setting.unit(gradients)
        if not unit.num_replicated:
            return
        payload = unit.num_replicated * bytes_of(setting.precision.reduce)
        action = Collective(
            site=replace(site, tag=f"{NAME}.sum{'.' + site.tag.partition('.')[2] if site.tag and '.' in site.tag else ''}"),
            op="all_reduce",
            group=GROUP,
            source=gradients,
            target=gradients,
            before=Layout(((NAME, Partial()),)),
            after=Layout(),
            payload_bytes=payload,
            wire_buffer_bytes=setting.wire_bytes("all_reduce", payload, (NAME,), setting.precision.reduce),
            span=(0, unit.num_replicated),
        )
        yield action
        yield wait_for(action)


def staged_bytes(op: str, full: Buffer) -> Bytes:
    """Pieces along the sequence are not contiguous when a microbatch has several sequences: then they pass through a copy."""
    return full.num_bytes if op != "all_reduce" and full.shape[0] > 1 else 0


def suffixed(ref: Ref, suffix: str) -> Ref:
    """A buffer that stands beside another: `h1` -> `h1.full`."""
    return Ref(f"{ref.tensor}.{suffix}", ref.block, ref.microbatch)
