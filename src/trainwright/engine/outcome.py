"""What came of a run: losses, speed, and what each rank measured, folded from its events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from trainwright.ir.event import Event
from trainwright.ir.timeline import ON_THE_WIRE
from trainwright.units import Bytes, Seconds

NUM_WARM_UP = 2
"""Steps at the beginning that are left out of speeds: buffers are touched for the first time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one rank sent in a step, by axis and operation: how often, the tensors' bytes, the bytes handed to others."""

    axis: str
    op: str
    count: int
    payload_bytes: Bytes
    sent_bytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one rank measured: means over the steps that were recorded. The four parts add up to step_s.

    compute_s        forward and backward, the reading of the batch included
    exposed_wire_s   waiting for an exchange, or for a rank that is behind
    update_s         norm of the gradients, optimizer
    other_s          the rest of the step: the executor itself, the posting of exchanges
    peak_bytes       most bytes of live buffers after any action
    """

    rank: int
    position: int
    step_s: Seconds
    compute_s: Seconds
    exposed_wire_s: Seconds
    update_s: Seconds
    other_s: Seconds
    peak_bytes: Bytes
    wire: tuple[Traffic, ...]
    num_recorded: int = 1

    @classmethod
    def of(cls, rank: int, position: int, steps: Sequence[tuple[Seconds, Sequence[Event]]], peak_bytes: Bytes) -> Measured:
        """Fold the recorded steps, each its duration and events."""
        num_steps = max(1, len(steps))
        parts = time_parts(event for _, events in steps for event in events)
        step_s = sum(duration_s for duration_s, _ in steps) / num_steps
        shares = {name: seconds / num_steps for name, seconds in parts.items()}
        return cls(
            rank=rank,
            position=position,
            step_s=step_s,
            compute_s=shares["compute"],
            exposed_wire_s=shares["wire"],
            update_s=shares["update"],
            other_s=max(0.0, step_s - sum(shares.values())),
            peak_bytes=peak_bytes,
            wire=traffic(steps[0][1]) if steps else (),
            num_recorded=len(steps),
        )

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Measured:
        """What another rank told as JSON."""
        return cls(**{**said, "wire": tuple(Traffic(**one) for one in said["wire"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at the validation text: after how many steps, and the loss in nat per byte."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run, or the part of it that this call did: steps `first_step` + 1 to `first_step` + len(losses), counted from 1.

    losses are in nat per token. `planned_before` is the number of steps that the resumed run was to have, as its checkpoint says.
    """

    first_step: int
    num_steps: int
    losses: tuple[float, ...]
    step_s: tuple[Seconds, ...]
    tokens_per_step: int
    bytes_per_token: float
    looks: tuple[Look, ...]
    unigram_entropy: float
    ranks: tuple[Measured, ...]
    folder: str
    checkpoint: str | None = None
    trace: str | None = None
    planned_before: int | None = None

    @property
    def median_step_s(self) -> Seconds:
        """The median of all steps, warm-up left out."""
        return median(self.step_s[NUM_WARM_UP:] or self.step_s)

    def measured(self, position: int = 0) -> dict[str, Any]:
        """What was measured, as the JSON document holds it.

        Time is that of the first rank of a pipeline position: means over its recorded steps, so that the parts add up to the step; the
        median of all steps stands beside. Wire is the mean of the position's ranks, memory that of the fullest rank.
        """
        speaker = next(one for one in self.ranks if one.position == position)
        return {
            "step_s": speaker.step_s,
            "median_step_s": self.median_step_s,
            "num_recorded_steps": speaker.num_recorded,
            "tokens_per_s": self.tokens_per_step / speaker.step_s,
            "memory": {"peak_bytes": max(one.peak_bytes for one in self.ranks)},
            "wire": self.wire(position),
            "sent_bytes_per_step": sum(one.sent_bytes for rank in self.ranks for one in rank.wire),
            "time": {
                "compute_s": speaker.compute_s,
                "exposed_wire_s": speaker.exposed_wire_s,
                "update_s": speaker.update_s,
                "other_s": speaker.other_s,
            },
            "rank": speaker.rank,
            "peak_bytes_by_rank": [one.peak_bytes for one in self.ranks],
        }

    def wire(self, position: int) -> list[dict[str, Any]]:
        """What a rank of a position sent in a step: the mean, since an all_reduce of few numbers does not divide evenly."""
        ranks = [one for one in self.ranks if one.position == position]
        sent: dict[tuple[str, str], Bytes] = defaultdict(int)
        for rank in ranks:
            for row in rank.wire:
                sent[row.axis, row.op] += row.sent_bytes
        return [
            {
                "axis": row.axis,
                "op": row.op,
                "count": row.count,
                "payload_bytes": row.payload_bytes,
                "sent_bytes_per_rank": _mean(sent[row.axis, row.op], len(ranks)),
            }
            for row in ranks[0].wire
        ]


def _mean(total: int, count: int) -> float:
    """A whole number where it is one."""
    return total / count if total % count else total // count


def time_parts(events: Iterable[Event]) -> dict[str, Seconds]:
    """Seconds that one rank spent in compute, in waiting for the wire, and in updates."""
    parts = {"compute": 0.0, "wire": 0.0, "update": 0.0}
    for event in events:
        if event.lane == "compute":
            part = "wire" if event.kind.startswith("wait_") else "update" if event.site.phase == "upd" else "compute"
            parts[part] += event.elapsed_s
    return parts


def traffic(events: Iterable[Event]) -> tuple[Traffic, ...]:
    """What the events of one step of one rank sent, by axis and operation."""
    found: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for event in events:
        if event.kind in ON_THE_WIRE:
            totals = found[event.group, event.kind]
            for place, amount in enumerate((1, event.payload_bytes, event.sent_bytes)):
                totals[place] += amount
    return tuple(
        Traffic(axis=axis, op=op, count=count, payload_bytes=payload, sent_bytes=sent)
        for (axis, op), (count, payload, sent) in sorted(found.items())
    )
