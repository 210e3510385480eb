"""Data: plain replicas, each with its part of the batch; gradients are summed once a step.

The all-reduce of a unit starts as soon as the last microbatch's backward has passed it and overlaps what is left of that backward.
Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (a bucket here is a unit).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

from trainwright.ir.action import Action, Collective, wait_for
from trainwright.ir.layout import Group, Partial, Replicate
from trainwright.ir.ref import Ref
from trainwright.ir.site import Site
from trainwright.spec.formats import bytes_of
from trainwright.strategies.computes import gradient_layout
from trainwright.strategies.setting import Setting, gradients_of

NAME: Final = "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Options of `data`."""

    PLACE: ClassVar[int] = 2

    size: int = 1

    def rewrite(self, actions: Iterable[Action], setting: Setting) -> Iterator[Action]:
        """Sum the gradients of each unit over the data axis after its last backward."""
        listed = list(actions)
        if self.size == 1 or setting.kind != "backward" or not setting.last:
            yield from listed
            return
        last_use = {grad.ref: index for index, one in enumerate(listed) if (grad := gradients_of(one))}
        started: list[Collective] = []
        for index, action in enumerate(listed):
            yield action
            if (grad := gradients_of(action)) and last_use[grad.ref] == index:
                started.append(self._sum(action.site, grad.ref, setting))
                yield started[-1]
        yield from map(wait_for, started)

    def _sum(self, site: Site, gradients: Ref, setting: Setting) -> Collective:
        unit = setting.unit(gradients)
        payload = setting.num_gradient_elements(unit) * bytes_of(setting.precision.reduce)
        segment = None if unit.name == "block" else unit.name
        before = gradient_layout(unit, setting)
        return Collective(
            site=Site(block=site.block, segment=segment, phase="bwd", tag=NAME),
            op="all_reduce",
            group=Group((NAME,)),
            source=gradients,
            target=gradients,
            before=before.on(NAME, Partial()),
            after=before.on(NAME, Replicate()),
            payload_bytes=payload,
            wire_buffer_bytes=setting.wire_bytes("all_reduce", payload, (NAME,), setting.precision.reduce),
        )
