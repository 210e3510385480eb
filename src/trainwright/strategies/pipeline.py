"""Pipeline: the blocks are cut into stages, and activations travel from position to position.

A stage's input is received one slot ahead of the slot that needs it; what is sent is lent until the slot after. With chunks > 1 a position
holds several virtual stages. `layers` gives the blocks of each virtual stage; empty: evenly, or with one fewer at both ends.
Tied embeddings live at both ends; their gradients are summed between these two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

from trainwright.ir.action import Action, Collective, Compute, Free, Recv, Send, Wait, wait_for
from trainwright.ir.layout import Group, Layout, Partial
from trainwright.ir.ref import Ref
from trainwright.ir.site import Site
from trainwright.spec.formats import bytes_of
from trainwright.strategies.setting import Setting
from trainwright.units import Bytes

NAME: Final = "pipeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Options of `pipeline`; see the head of the file."""

    PLACE: ClassVar[int] = 1

    size: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    layers: tuple[int, ...] = ()

    def rewrite(self, actions: Iterable[Action], setting: Setting) -> Iterator[Action]:
        """Wait for the stage's input before its first action, send its output after the action that makes it."""
        if self.size == 1:
            yield from actions
            return
        if setting.kind == "reduce":
            yield from self._tied(actions, setting)
            return
        if setting.kind not in {"forward", "backward"}:
            yield from actions
            return
        crossing = Crossing(setting)
        if crossing.receives:
            yield Wait(site=crossing.site, kind="recv")
        for action in actions:
            yield action
            if crossing.sends and isinstance(action, Compute) and any(one.ref == crossing.output for one in action.writes):
                yield crossing.send()

    def post(self, setting: Setting) -> tuple[Action, ...]:
        """Post the receive of a slot's input."""
        crossing = Crossing(setting)
        return (crossing.recv(),) if self.size > 1 and crossing.receives else ()

    def settle(self, setting: Setting) -> tuple[Action, ...]:
        """Wait for a slot's send, and free what was sent."""
        crossing = Crossing(setting)
        if self.size == 1 or not crossing.sends:
            return ()
        return (Wait(site=crossing.site, kind="send"), Free(site=crossing.site, buffers=(crossing.output,)))

    def _tied(self, actions: Iterable[Action], setting: Setting) -> Iterator[Action]:
        """Sum the gradients of the two copies of a tied embedding."""
        if setting.tied and (setting.shape.has_embed or setting.shape.has_head):
            unit = setting.family.units["embed"]
            payload = setting.num_gradient_elements(unit) * bytes_of(setting.precision.reduce)
            group = Group((NAME,), ((NAME, (0, self.size - 1)),))
            action = Collective(
                site=Site(segment="embed", phase="bwd", tag=NAME),
                op="all_reduce",
                group=group,
                source=Ref("embed.gradients"),
                target=Ref("embed.gradients"),
                before=Layout(((NAME, Partial()),)),
                after=Layout(),
                payload_bytes=payload,
                wire_buffer_bytes=setting.wire_buffer("all_reduce", payload, 2, bytes_of(setting.precision.reduce)),
            )
            yield action
            yield wait_for(action)
        yield from actions


class Crossing:
    """What crosses the edges of a stage in one direction: `x` forward, `dx` backward."""

    def __init__(self, setting: Setting) -> None:
        shape = setting.shape
        forward = setting.kind == "forward"
        self.setting = setting
        self.receives = not (shape.has_embed if forward else shape.has_head)
        self.sends = not (shape.has_head if forward else shape.has_embed)
        self.direction = 1 if forward else -1
        name, first, last = ("x", 0, shape.num_blocks) if forward else ("dx", shape.num_blocks, 0)
        self.input, self.output = Ref(name, first, 0), Ref(name, last, 0)
        self.site = Site(phase="fwd" if forward else "bwd", tag=NAME)
        self.channel = "forward" if forward else "backward"

    @property
    def payload_bytes(self) -> Bytes:
        """Bytes of one boundary tensor on one rank."""
        return self.setting.buffers[self.input.tensor].num_bytes

    def send(self) -> Send:
        """Lend the output to the next position."""
        return Send(site=self.site, to=self.direction, channel=self.channel, buffer=self.output, payload_bytes=self.payload_bytes)

    def recv(self) -> Recv:
        """Post the input from the position before."""
        layout = self.setting.buffers[self.input.tensor].layout
        return Recv(
            site=self.site, source=-self.direction, channel=self.channel, buffer=self.input, payload_bytes=self.payload_bytes, layout=layout
        )
