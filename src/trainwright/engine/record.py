"""The recorder: what an executor did, as Events."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from trainwright.ir.action import WAITED_KIND, Action, Collective, Compute, Recv, Send, Update, Wait, kind
from trainwright.ir.event import Event
from trainwright.ir.site import Site
from trainwright.units import Bytes, Flops, Seconds


@dataclass(slots=True)
class _Seen:
    """One action as it was seen; made an Event when the step is over."""

    action: Action
    start_s: Seconds
    end_s: Seconds
    sent_bytes: Bytes
    live_bytes: Bytes
    temporary_bytes: Bytes


@dataclass(slots=True)
class Recorder:
    """Sees every action of one rank. Off, it costs nothing. Events are made after the step, when nobody waits."""

    rank: int
    position: int
    on: bool = True
    seen: list[_Seen] = field(default_factory=list)

    def saw(
        self, action: Action, start_s: Seconds, end_s: Seconds, sent_bytes: Bytes, live_bytes: Bytes, temporary_bytes: Bytes = 0
    ) -> None:
        """Note an action that has just ended."""
        if self.on:
            self.seen.append(_Seen(action, start_s, end_s, sent_bytes, live_bytes, temporary_bytes))

    def take(self, step: int, live_before_bytes: Bytes) -> tuple[Event, ...]:
        """The events since the last call.

        An exchange is one event, from its start to the end of its Wait, in the place of the start; the Wait itself is an event on the
        compute
        lane that lasts as long as nothing was computed. `live_delta_bytes` is what changed at the action itself.
        """
        events: list[Event] = []
        open_at: dict[tuple[Site, str], int] = {}
        live = live_before_bytes
        for one in self.seen:
            event = self._event(one, step, one.live_bytes - live)
            live = one.live_bytes
            if isinstance(one.action, Collective | Send | Recv):
                open_at[one.action.site, WAITED_KIND[type(one.action)]] = len(events)
            elif isinstance(one.action, Wait):
                index = open_at.pop((one.action.site, one.action.kind))
                events[index] = replace(events[index], end_s=one.end_s, sent_bytes=one.sent_bytes)
            events.append(event)
        self.seen.clear()
        return tuple(events)

    def _event(self, one: _Seen, step: int, delta_bytes: Bytes) -> Event:
        action = one.action
        flops: Flops = action.work.flops if isinstance(action, Compute | Update) else 0
        payload = action.payload_bytes if isinstance(action, Collective | Send | Recv) else 0
        group = str(action.group) if isinstance(action, Collective) else "pipeline" if isinstance(action, Send | Recv) else ""
        return Event(
            position=self.position,
            rank=self.rank,
            lane=f"wire:{group}" if group else "compute",
            site=action.site.at(step=step),
            kind=kind(action),
            start_s=one.start_s,
            end_s=one.end_s,
            flops=flops,
            payload_bytes=payload,
            group=group,
            live_delta_bytes=delta_bytes,
            temporary_bytes=one.temporary_bytes,
        )
