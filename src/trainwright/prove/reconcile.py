"""Predicted beside measured, joined on (rank, site, kind): bytes on the wire, live bytes after every action, temporary bytes inside."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.cost.wire import member_sent_bytes
from trainwright.engine.place import Place
from trainwright.ir.action import Collective, Send, kind
from trainwright.ir.program import Program
from trainwright.ir.timeline import wire_ledger
from trainwright.plan.plan import Plan
from trainwright.predict.memory import live_deltas, temporary_of
from trainwright.prove.launch import RankReport
from trainwright.spec.formats import bytes_of
from trainwright.units import Bytes

Key = tuple[int, str, str]
"""(rank, site, kind)."""

TEMPORARY_TOLERANCE = 0.10
"""Temporary bytes inside a segment are predicted from its formulas, not from the allocator: held to a tenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireReport:
    """Bytes handed to others in one step, summed over ranks. `wrong` lists (rank, site, kind, predicted, measured) where they differ.

    `os_bytes` is what the operating system counted, less `header_bytes` for every message; None where it cannot be read.
    """

    predicted_bytes: Bytes
    measured_bytes: Bytes
    num_sites: int
    missing: tuple[Key, ...]
    extra: tuple[Key, ...]
    wrong: tuple[tuple[int, str, str, int, int], ...]
    os_bytes: float | None = None
    header_bytes: float = 0.0
    num_messages: int = 0

    @property
    def equal(self) -> bool:
        """Every site is there, with exactly the predicted bytes."""
        return not (self.missing or self.extra or self.wrong)

    @property
    def os_error(self) -> float | None:
        """Relative difference between the operating system's count and the ledger's."""
        if self.os_bytes is None or not self.measured_bytes:
            return None
        return abs(self.os_bytes - self.measured_bytes) / self.measured_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Live bytes after every action of every rank in the first step.

    `wrong` lists (rank, site, kind, predicted, measured), the first of each rank.

    Peaks are at action boundaries, of the fullest rank. `temporary` compares what segments hold inside: the largest of any action.
    """

    predicted_peak_bytes: Bytes
    measured_peak_bytes: Bytes
    persistent_equal: bool
    num_boundaries: int
    wrong: tuple[tuple[int, str, str, int, int], ...]
    predicted_temporary_bytes: Bytes
    measured_temporary_bytes: Bytes

    @property
    def equal(self) -> bool:
        """Exact at every boundary."""
        return self.persistent_equal and not self.wrong

    @property
    def temporary_close(self) -> bool:
        """The largest temporary is predicted within the tolerance."""
        slack = TEMPORARY_TOLERANCE * max(self.measured_temporary_bytes, 1)
        return abs(self.predicted_temporary_bytes - self.measured_temporary_bytes) <= slack


def predicted_wire(plan: Plan, program: Program) -> dict[Key, int]:
    """Bytes that each rank hands to others at each site of a step, under the local wire's direct exchange."""
    predicted: dict[Key, int] = defaultdict(int)
    for rank in range(plan.num_devices):
        place = Place(plan, rank)
        for action in program.actions(place.coordinate("pipeline")):
            if isinstance(action, Collective):
                members = place.members(action.group)
                element = bytes_of(program.buffers[action.source.tensor].format)
                sent = member_sent_bytes(action.op, action.payload_bytes, len(members), index=members.index(rank), element_bytes=element)
            elif isinstance(action, Send):
                sent = action.payload_bytes
            else:
                continue
            predicted[rank, str(action.site), kind(action)] += sent
    return dict(predicted)


def measured_wire(reports: Sequence[RankReport]) -> dict[Key, int]:
    """The same, as the wire counted it."""
    ledger = wire_ledger((event for report in reports for event in report.events), by=("rank", "site", "kind"))
    return {(rank, site, what): traffic.sent_bytes for (rank, site, what), traffic in ledger.items()}


def reconcile_wire(plan: Plan, program: Program, reports: Sequence[RankReport]) -> WireReport:
    """Join predicted and measured bytes."""
    predicted, measured = predicted_wire(plan, program), measured_wire(reports)
    both = sorted(predicted.keys() & measured.keys())
    counted = [report.os_bytes for report in reports]
    num_messages = sum(report.num_messages for report in reports)
    header = sum(report.header_bytes for report in reports) / max(len(reports), 1)
    os_bytes = None if any(one is None for one in counted) else sum(one or 0 for one in counted) - header * num_messages
    return WireReport(
        predicted_bytes=sum(predicted.values()),
        measured_bytes=sum(measured.values()),
        num_sites=len(predicted),
        missing=tuple(sorted(predicted.keys() - measured.keys())),
        extra=tuple(sorted(measured.keys() - predicted.keys())),
        wrong=tuple((*key, predicted[key], measured[key]) for key in both if predicted[key] != measured[key]),
        os_bytes=os_bytes,
        header_bytes=header,
        num_messages=num_messages,
    )


def reconcile_memory(plan: Plan, program: Program, reports: Sequence[RankReport]) -> MemoryReport:
    """Compare live bytes after every action."""
    wrong: list[tuple[int, str, str, int, int]] = []
    peaks: list[tuple[int, int]] = []
    temporaries: list[tuple[int, int]] = []
    persistent_equal = True
    num_boundaries = 0
    for report in reports:
        position = Place(plan, report.rank).coordinate("pipeline")
        actions = tuple(program.actions(position))
        persistent = sum(program.num_bytes(ref) for ref in program.persistent(position))
        persistent_equal &= persistent == report.persistent_bytes
        expected, found = persistent, report.persistent_bytes
        highest, differs = persistent, False
        for action, delta, event in zip(actions, live_deltas(program, actions), report.events, strict=True):
            expected, found = expected + delta, found + event.live_delta_bytes
            highest = max(highest, expected)
            num_boundaries += 1
            if expected != found and not differs:
                wrong.append((report.rank, str(action.site), kind(action), expected, found))
                differs = True
            temporaries.append((temporary_of(action), event.temporary_bytes))
        peaks.append((highest, report.peak_bytes))
    return MemoryReport(
        predicted_peak_bytes=max(peak for peak, _ in peaks),
        measured_peak_bytes=max(peak for _, peak in peaks),
        persistent_equal=persistent_equal,
        num_boundaries=num_boundaries,
        wrong=tuple(wrong),
        predicted_temporary_bytes=max(one for one, _ in temporaries),
        measured_temporary_bytes=max(one for _, one in temporaries),
    )
