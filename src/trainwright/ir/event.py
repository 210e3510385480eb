"""What took place."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.ir.site import Site
from trainwright.units import Bytes, Flops, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An action that took place: where, on which lane of which rank, when, what it cost and what it changed.

    Predicted events carry their role (the pipeline position) and stand for all its ranks; `rank` is then None. `sent_bytes` is what this
    rank
    handed to others. `live_delta_bytes` is the change of live bytes at the action's end (a Free's is negative), `temporary_bytes` what
    was held inside besides.
    `blocked_s` is the part of a Wait's time in which nothing was computed.
    """

    position: int
    rank: int | None = None
    lane: str
    site: Site
    kind: str
    start_s: Seconds
    end_s: Seconds
    flops: Flops = 0
    payload_bytes: Bytes = 0
    sent_bytes: Bytes = 0
    group: str = ""
    live_delta_bytes: Bytes = 0
    temporary_bytes: Bytes = 0

    @property
    def elapsed_s(self) -> Seconds:
        """From start to end."""
        return self.end_s - self.start_s
