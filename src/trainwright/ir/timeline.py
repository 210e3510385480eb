"""Events in order, and what folds over them tell. Nothing keeps a second counter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trainwright.ir.event import Event
from trainwright.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of one step. `source` says where they come from: "predicted", "simulated" or "measured"."""

    source: str
    events: tuple[Event, ...]

    @property
    def start_s(self) -> Seconds:
        """Start of the first event."""
        return min((event.start_s for event in self.events), default=0.0)

    @property
    def makespan_s(self) -> Seconds:
        """From the first start to the last end."""
        return max((event.end_s for event in self.events), default=0.0) - self.start_s

    def busy_s(self, lane: str, position: int | None = None) -> Seconds:
        """Sum of the events' durations on one lane (of one position)."""
        return sum(event.elapsed_s for event in self.events if event.lane == lane and position in (None, event.position))

    def live_bytes(self, position: int, rank: int | None = None) -> list[tuple[Seconds, Bytes]]:
        """Live bytes beyond the persistent ones after each event of one rank, in the order of its actions."""
        live, curve = 0, []
        for event in self.events:
            if event.position == position and (rank is None or event.rank == rank):
                live += event.live_delta_bytes
                curve.append((event.end_s, live))
        return curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one (position, site, kind) put on the wire: how often, the tensor's bytes, and the bytes handed to others, summed over ranks."""

    count: int = 0
    payload_bytes: Bytes = 0
    sent_bytes: Bytes = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            count=self.count + other.count,
            payload_bytes=self.payload_bytes + other.payload_bytes,
            sent_bytes=self.sent_bytes + other.sent_bytes,
        )


Ledger = dict[tuple[Any, ...], Traffic]

ON_THE_WIRE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


def wire_ledger(events: Iterable[Event], *, by: tuple[str, ...] = ("position", "site", "kind")) -> Ledger:
    """Traffic by any fields of Event ("site" is compared as printed, without its step)."""
    ledger: Ledger = defaultdict(Traffic)
    for event in events:
        if event.kind in ON_THE_WIRE:
            key = tuple(str(event.site.at(step=None)) if name == "site" else getattr(event, name) for name in by)
            ledger[key] += Traffic(count=1, payload_bytes=event.payload_bytes, sent_bytes=event.sent_bytes)
    return dict(ledger)
