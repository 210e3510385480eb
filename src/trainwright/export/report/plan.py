"""The plan and its verdict: the figures that decide, and what each rests on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from trainwright.export.report import memory
from trainwright.export.report.page import (
    ASSUMED,
    PREDICTED,
    SIMULATED,
    Section,
    badge,
    card,
    cards,
    details,
    figure,
    legend,
    paragraph,
    table,
)
from trainwright.export.report.svg import bar, chart, text
from trainwright.ir.figure import Figure, lookup
from trainwright.predict.document import SIMULATION
from trainwright.predict.predict import Prediction
from trainwright.units import show_bytes, show_count, show_seconds, show_usd, show_wire

TONES: Final = {"fits": "good", "risky": "warn", "does not fit": "bad"}

TIMES: Final = {
    "compute_s": "compute",
    "exposed_wire_s": "wire",
    "bubble_s": "bubble",
    "update_s": "update",
    "offload_s": "other",
    "other_s": "other",
}
"""Parts of a step's time to classes of the style sheet."""

TIME_WORDS: Final = {
    "compute_s": "compute",
    "exposed_wire_s": "exposed wire",
    "bubble_s": "bubble",
    "update_s": "update",
    "offload_s": "offload",
    "other_s": "other",
}

BAR: Final = 26


class Reasons:
    """What the numbers of a prediction's document rest on."""

    def __init__(self, prediction: Prediction) -> None:
        """Take the prediction whose document is asked about."""
        self.page = prediction.page

    def figure(self, pointer: str) -> Figure:
        """The number at a pointer with its formula and source."""
        return self.page.reasons[pointer]()

    def basis(self, pointer: str) -> str:
        """`simulated` if any input of a number is, else `predicted`."""
        figure = self.figure(pointer)
        if figure.source.startswith(SIMULATION):
            return SIMULATED
        inputs = [one for one in figure.inputs.values() if isinstance(one, str) and one != pointer and one in self.page.reasons]
        return SIMULATED if any(self.basis(one) == SIMULATED for one in inputs) else PREDICTED

    def source(self, pointer: str) -> str:
        """Where a number comes from, in words; its formula where no source is named."""
        figure = self.figure(pointer)
        return figure.source.removeprefix(SIMULATION) or f"= {figure.formula}" * (len(figure.formula) < 60)

    def card(self, label: str, pointer: str, value: str, *, note: str = "", tone: str = "") -> str:
        """The number as a card."""
        return card(label, value, basis=self.basis(pointer), note=note, source=self.source(pointer), tone=tone)

    def row(self, label: str, pointer: str, value: str) -> tuple[str, ...]:
        """The number as a row: what, how much, what it rests on, how it is made."""
        figure = self.figure(pointer)
        inputs = ", ".join(f"{name} = {self.said(value)}" for name, value in list(figure.inputs.items())[:6])
        made = f"{figure.formula}, with {inputs}" if len(figure.formula) < 200 and figure.inputs else ""
        left_out = f"; not counted: {figure.not_counted}" if figure.not_counted else ""
        return (label, value, badge(self.basis(pointer)), f"{figure.source}{left_out}", made)

    def said(self, value: float | str) -> str:
        """An input: a number, or the number that a pointer leads to."""
        found = lookup(self.page.document, value) if isinstance(value, str) else value
        return f"{found:,}" if isinstance(found, int) else f"{found:.4g}"


def section(prediction: Prediction) -> Section:
    """The section."""
    document = prediction.to_json()
    reasons = Reasons(prediction)
    body = _heads(document, reasons)
    body += paragraph(f"Bottleneck: {document['bottleneck']}.")
    body += "<h3>Where the time goes</h3>" + figure(
        legend(_time_legend([document["time"]])) + time_bars([("predicted step", document["time"])]),
        f"The step of the role that idles least, {badge(SIMULATED)}. The parts sum to the step.",
    )
    body += "<h3>Memory by role, against the device</h3>" + _memory(prediction)
    body += "<h3>On the wire, by axis</h3>" + _wire(document, reasons)
    body += details("Every key figure with its formula", _formulas(document, reasons))
    body += details("Assumptions, and what is left out", _assumptions(document))
    return Section(anchor="plan", title="Plan and verdict", body=body)


def mesh(sizes: Mapping[str, int]) -> str:
    """A mesh in words.

    >>> mesh({"pipeline": 2, "data": 1, "tensor": 4})
    'pipeline 2 × tensor 4'
    """
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"


def _heads(document: Mapping[str, Any], reasons: Reasons) -> str:
    """The figures that decide."""
    step_s, time, memory_, cost = document["step_s"], document["time"], document["memory"], document["cost"]
    interval = document["interval_s"]
    share = memory_["reserved_bytes"] / memory_["capacity_bytes"]
    money = f", {show_usd(cost['usd'])}" if cost["usd"] is not None else ""
    first, then = (
        ("the run", f"{cost['days']:,.1f} days, {cost['num_steps']:,} steps{money}")
        if cost["covers"] == "run"
        else ("a step", money.removeprefix(", "))
    )
    return cards(
        reasons.card(
            "Step time",
            "/step_s",
            show_seconds(step_s),
            note=f"{show_seconds(interval['p10'])} to {show_seconds(interval['p90'])}: 80% interval",
        ),
        reasons.card(
            "Tokens per second",
            "/tokens_per_s",
            show_count(document["tokens_per_s"]),
            note=f"{document['tokens_per_s_per_device']:,.0f} a device",
        ),
        reasons.card("Model FLOPs utilisation", "/mfu", f"{document['mfu']:.1%}", note=f"executed: {document['hfu']:.1%}"),
        reasons.card(
            "Memory",
            "/memory/peak_bytes",
            memory_["verdict"],
            note=f"peak {show_bytes(memory_['peak_bytes'])}, reserved {show_bytes(memory_['reserved_bytes'])}: "
            f"{share:.0%} of {show_bytes(memory_['capacity_bytes'])}",
            tone=TONES[memory_["verdict"]],
        ),
        reasons.card("Bubble", "/time/bubble_s", f"{time['bubble_s'] / step_s:.1%}", note=f"{show_seconds(time['bubble_s'])} of the step"),
        reasons.card(
            "Exposed wire",
            "/time/exposed_wire_s",
            f"{time['exposed_wire_s'] / step_s:.1%}",
            note=f"{show_seconds(time['exposed_wire_s'])} of the step",
        ),
        reasons.card(
            f"Device hours of {first}",
            "/cost/device_hours",
            f"{cost['device_hours']:,.0f}" if cost["device_hours"] >= 100 else f"{cost['device_hours']:.3g}",
            note=then,
        ),
    )


# --- time --------------------------------------------------------------------------------------------------------------------------------


def _time_legend(times: list[Mapping[str, float]]) -> dict[str, str]:
    return {TIMES[name]: TIME_WORDS[name] for name in TIME_WORDS if any(time.get(name) for time in times)}


def time_bars(rows: list[tuple[str, Mapping[str, float]]]) -> str:
    """One stacked bar a row, all on the scale of the longest."""
    longest_s = max(sum(time.values()) for _, time in rows) or 1.0
    drawn = []
    y = 0
    for name, time in rows:
        drawn.append(text(0, y + 12, f"{name}: {show_seconds(sum(time.values()))}", kind="mark"))
        at_s = 0.0
        for part in TIME_WORDS:
            duration_s = time.get(part, 0.0)
            if duration_s > 0:
                title = f"{TIME_WORDS[part]}: {show_seconds(duration_s)}, {duration_s / sum(time.values()):.1%}"
                begin, end = at_s / longest_s, (at_s + duration_s) / longest_s
                drawn.append(bar(begin, end, y=y + 17, height=BAR, kind=TIMES[part], title=title))
                if end - begin > 0.09:  # room for a word on a narrow screen
                    share = f"{duration_s / sum(time.values()):.0%}"
                    drawn.append(
                        text(
                            (begin + end) / 2, y + 17 + BAR / 2 + 4, share, kind="mark" if part == "bubble_s" else "inside", anchor="middle"
                        )
                    )
                at_s += duration_s
        y += 17 + BAR + 8
    said = "; ".join(f"{name} {show_seconds(sum(time.values()))}" for name, time in rows)
    return chart(y, *drawn, label=f"where the time of a step goes: {said}")


# --- memory and wire ---------------------------------------------------------------------------------------------------------------------


def _memory(prediction: Prediction) -> str:
    ledger = prediction.memory
    rows = [
        (
            f"position {role.position}, {role.num_ranks:,} ranks",
            role.parts,
            math.ceil(role.peak_bytes * ledger.allocator_factor) + ledger.context_bytes - role.peak_bytes,
        )
        for role in ledger.roles
    ]
    shown = rows if len(rows) <= memory.MOST_BARS else [*rows[: memory.MOST_BARS // 2], *rows[-memory.MOST_BARS // 2 :]]
    used = {part: memory.WORDS.get(part, part) for part in memory.ORDER if any(parts[part] for _, parts, _ in shown)}
    left_out = f" {len(rows) - len(shown)} positions in the middle are left out of the picture." if len(shown) < len(rows) else ""
    caption = (
        f"Each role at the instant of its peak: parts {badge(PREDICTED, 'buffers of the Program')}; "
        f"the grey end is what the allocator and the driver take "
        f"besides {badge(ASSUMED, 'allocator_factor and context_bytes: see assumptions')}.{left_out}"
    )
    picture = memory.bars(shown, ledger.capacity_bytes)
    return figure(legend({**used, "other": "allocator, context", "free": "free"}) + picture, caption) + memory.roles_table(prediction)


def _wire(document: Mapping[str, Any], reasons: Reasons) -> str:
    rows = document["wire"]
    if not rows:
        return paragraph("Nothing is sent: one device.")
    step_s = document["step_s"]
    body = [
        (
            row["axis"],
            row["op"],
            f"{row['count']:,}",
            show_wire(row["payload_bytes"]),
            show_wire(row["sent_bytes_per_rank"]),
            f"{show_seconds(row['exposed_s'])} ({row['exposed_s'] / step_s:.1%})",
        )
        for row in sorted(rows, key=lambda row: -row["exposed_s"])
    ]
    caption = "One rank of the role that idles least, in one step. Count and bytes are predicted, exposed time is simulated."
    head = ("axis", "operation", "count", "payload", "sent by a rank", "exposed")
    where = reasons.source("/wire/0/sent_bytes_per_rank")
    return table(head, body, caption=caption, right=range(2, 6)) + f'<p class="source">Sent bytes: {where}.</p>'


# --- behind the figures ------------------------------------------------------------------------------------------------------------------


def _formulas(document: Mapping[str, Any], reasons: Reasons) -> str:
    memory_, time = document["memory"], document["time"]
    rows = [
        reasons.row("parameters", "/plan/num_parameters", f"{document['plan']['num_parameters']:,}"),
        reasons.row("step", "/step_s", show_seconds(document["step_s"])),
        reasons.row("10th percentile", "/interval_s/p10", show_seconds(document["interval_s"]["p10"])),
        reasons.row("90th percentile", "/interval_s/p90", show_seconds(document["interval_s"]["p90"])),
        reasons.row("tokens per second", "/tokens_per_s", f"{document['tokens_per_s']:,.0f}"),
        reasons.row("model FLOPs of a step", "/model_flops_per_step", f"{document['model_flops_per_step']:.4g}"),
        reasons.row("MFU", "/mfu", f"{document['mfu']:.2%}"),
        reasons.row("executed FLOPs utilisation", "/hfu", f"{document['hfu']:.2%}"),
        reasons.row("peak memory", "/memory/peak_bytes", show_bytes(memory_["peak_bytes"])),
        reasons.row("reserved memory", "/memory/reserved_bytes", show_bytes(memory_["reserved_bytes"])),
        reasons.row("capacity", "/memory/capacity_bytes", show_bytes(memory_["capacity_bytes"])),
        *(reasons.row(f"time: {TIME_WORDS[name]}", f"/time/{name}", show_seconds(time[name])) for name in time),
        reasons.row("device hours", "/cost/device_hours", f"{document['cost']['device_hours']:,.6g}"),
    ]
    return table(("figure", "value", "rests on", "source", "formula"), rows, right=(1,))


def _assumptions(document: Mapping[str, Any]) -> str:
    return table(("name", "value", "source"), list(_assumed(document)))


def _assumed(document: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for one in document["assumptions"]:
        value = one["value"]
        yield (
            one["name"],
            f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value),
            one["source"],
        )
