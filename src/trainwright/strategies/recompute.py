"""Recompute: keep less from the forward pass, and run parts of it again in the backward pass.

none       keep everything that backward needs.
selective  run the attention core again: its result and statistics are dropped (Korthikanti et al. 2022, "Reducing Activation
Recomputation").
full       keep only the input of each block (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").
blocks     full, for the first `blocks` blocks of each stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from trainwright.ir.action import Action, Compute
from trainwright.ir.site import Site
from trainwright.strategies.computes import forgetful, forward_compute
from trainwright.strategies.setting import Setting

NAME: Final = "recompute"
POLICIES: Final = ("none", "selective", "full", "blocks")
CORE: Final = ("core",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Options of `recompute`; `blocks` counts only under the policy "blocks"."""

    PLACE: ClassVar[int] = 0

    policy: str = "none"
    blocks: int = 0

    def again(self, segment: str, block: int | None) -> bool:
        """Whether forward of this segment (of the stage's block number `block`) runs again."""
        if block is None:
            return False
        return self._whole(block) or (self.policy == "selective" and segment in CORE)

    def _whole(self, block: int) -> bool:
        return self.policy == "full" or (self.policy == "blocks" and block < self.blocks)

    def rewrite(self, actions: Iterable[Action], setting: Setting) -> Iterator[Action]:
        """Forward keeps nothing where it will run again; backward runs it again just before the first reader of what it gives."""
        listed = list(actions)
        if setting.kind == "forward":
            yield from (self._forgetful(action, setting) for action in listed)
        elif setting.kind == "backward":
            yield from self._backward(listed, setting)
        else:
            yield from listed

    def _forgetful(self, action: Action, setting: Setting) -> Action:
        if isinstance(action, Compute) and action.site.segment and self.again(action.site.segment, action.site.block):
            return forgetful(action, setting)
        return action

    def _backward(self, actions: list[Action], setting: Setting) -> Iterator[Action]:
        done: set[int] = set()
        for action in actions:
            if (
                isinstance(action, Compute)
                and action.function == "backward"
                and (block := action.site.block) is not None
                and block not in done
            ):
                names = [one.name for one in setting.family.block if self.again(one.name, block)]
                before = "out" if self.policy == "selective" else action.site.segment
                if names and action.site.segment == before:
                    done.add(block)
                    yield from self._rerun(names, block, setting)
            yield action

    def _rerun(self, names: list[str], block: int, setting: Setting) -> Iterator[Action]:
        """Forward of the segments again; what no backward reads (the block's result, the last partial sum) is not made again."""
        for segment in setting.family.block:
            if segment.name in names and (segment.saved or segment.keeps or self._feeds(segment.name, names, setting)):
                action = forward_compute(segment, block, setting)
                if segment.name == _last_needed(setting):
                    saved = tuple(one for one in action.writes if one.name == "saved")
                    action = replace(action, writes=saved, work=segment.saving or action.work)
                yield replace(action, site=Site(block=block, segment=segment.name, phase="re"))

    @staticmethod
    def _feeds(name: str, names: list[str], setting: Setting) -> bool:
        results = {one.buffer for one in setting.family.segment(name).forward.writes if not one.next_block}
        return any(arg.buffer in results for other in names for arg in setting.family.segment(other).forward.reads)


def _last_needed(setting: Setting) -> str:
    """The last segment of a block that leaves something for backward."""
    return [one.name for one in setting.family.block if one.saved][-1]
