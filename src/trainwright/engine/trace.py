"""Events as a Chrome trace, which Perfetto (https://ui.perfetto.dev) and chrome://tracing show.

One process a rank, one track a lane; times in microseconds. Format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainwright.ir.event import Event

_SKIPPED = {"free", "alloc"}


def trace_events(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The entries of one rank's events; each lane is named once."""
    entries: list[dict[str, Any]] = []
    lanes: dict[str, int] = {}
    for event in events:
        if event.kind in _SKIPPED:
            continue
        rank = event.rank or 0
        if event.lane not in lanes:
            lanes[event.lane] = len(lanes)
            entries.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": lanes[event.lane], "args": {"name": event.lane}})
        entries.append(
            {
                "ph": "X",
                "name": f"{event.site.segment or event.site.tag or 'block'} {event.kind}",
                "cat": event.lane,
                "pid": rank,
                "tid": lanes[event.lane],
                "ts": round(event.start_s * 1e6, 1),
                "dur": round(event.elapsed_s * 1e6, 1),
                "args": {"site": str(event.site), "flops": event.flops, "sent_bytes": event.sent_bytes},
            }
        )
    return entries


def trace(by_rank: Iterable[list[dict[str, Any]]]) -> dict[str, Any]:
    """The whole file: the entries of all ranks, each under its name."""
    entries: list[dict[str, Any]] = []
    for rank, own in enumerate(by_rank):
        entries.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        entries += own
    return {"traceEvents": entries, "displayTimeUnit": "ms"}
