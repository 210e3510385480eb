"""Memory over time: what the fullest role holds through its step, by part, and measured beside predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from trainwright.export.report.page import PREDICTED, SIMULATED, Section, badge, details, figure, legend, table
from trainwright.export.report.spans import Numbers, Spans, Times, spans
from trainwright.export.report.svg import (
    LINE_PIXELS,
    area,
    bar,
    chart,
    rule,
    seconds_axis,
    staircase,
    stretched,
    text,
    ticks,
    upright,
)
from trainwright.ir.buffer import PARTS
from trainwright.predict.memory import TEMPORARY
from trainwright.predict.predict import Prediction
from trainwright.units import GIB, KIB, MIB, Bytes, Seconds, show_bytes

HEIGHT: Final = 260
NUM_COLUMNS: Final = 500
ORDER: Final = ("weights", "master", "optimizer", "gathered", "gradients", "activations", "temporary", "wire_buffers")
"""From the bottom: what lives across steps lies below what comes and goes."""

WORDS: Final = {"wire_buffers": "wire buffers"}


def section(prediction: Prediction) -> Section:
    """Memory over the predicted step, of the fullest role."""
    memory = prediction.memory
    fullest = memory.fullest
    of = spans(prediction.simulation, fullest.position)
    moments, held = by_column(of, inside(prediction, fullest.position), prediction.step_s)
    top_bytes = top_of_picture_bytes(fullest.peak_bytes, memory.capacity_bytes)
    picture = stacked(moments, held, top_bytes, fullest.persistent_bytes, memory.capacity_bytes, prediction.step_s)
    far = "" if memory.capacity_bytes <= top_bytes else f" The device has {show_bytes(memory.capacity_bytes)}: far above this picture."
    used = {part: WORDS.get(part, part) for part in ORDER if held[:, PARTS.index(part)].any()}
    marks = {"persistent": "persistent", **({"capacity": "capacity"} if not far else {})}
    caption = (
        f"Live bytes of a rank of position {fullest.position}, the fullest: "
        f"sizes {badge(PREDICTED, 'buffers of the Program')}, times {badge(SIMULATED)}. "
        f"Peak {show_bytes(fullest.peak_bytes)}; {show_bytes(fullest.persistent_bytes)} of it persist between steps. "
        f"Each column shows its fullest moment, with what is held inside actions.{far}"
    )
    body = figure(legend({**used, **marks}) + picture, caption)
    body += details("The peak of every role, as a table", roles_table(prediction))
    return Section(anchor="memory", title="Memory over time", body=body)


def inside(prediction: Prediction, position: int) -> Numbers:
    """Live bytes by part at the fullest moment of every action of a position, [num_actions, num_parts]."""
    memory = prediction.memory
    held = memory.curve(position).copy()
    held[:, TEMPORARY] += np.concatenate([memory.courses[run.template].temporary for run in prediction.program.roles[position].runs])
    return held


def by_column(of: Spans, held: Numbers, step_s: Seconds) -> tuple[Times, Numbers]:
    """The fullest moment of each of NUM_COLUMNS slices of the step: where the slice begins, and what is held by part.

    An action counts at the moment when the role comes to it: an exchange that is issued now takes its buffers now.
    """
    on_clock = ~np.isin(of.kind, [of.kinds.index(name) for name in of.wires])
    begins = np.maximum.accumulate(np.where(on_clock, of.starts, 0.0))
    column = np.minimum((begins / step_s * NUM_COLUMNS).astype(np.int64), NUM_COLUMNS - 1)
    total = held.sum(axis=1)
    order = np.lexsort((-total, column))
    used, firsts = np.unique(column[order], return_index=True)
    return used / NUM_COLUMNS, held[order[firsts]]


def top_of_picture_bytes(peak_bytes: Bytes, capacity_bytes: Bytes) -> Bytes:
    """The top of a picture: room above the peak, up to the capacity where that is near."""
    return round(1.06 * max(peak_bytes, capacity_bytes if capacity_bytes < 1.8 * peak_bytes else 0, 1))


def stacked(moments: Times, held: Numbers, top_bytes: Bytes, persistent_bytes: Bytes, capacity_bytes: Bytes, step_s: Seconds) -> str:
    """Areas by part, the persistent bytes and, where it is near, the capacity."""
    base = np.zeros(len(held))
    drawn = []

    def corners(values: Times) -> list[tuple[float, float]]:
        points = [(float(share), HEIGHT * (1 - float(value) / top_bytes)) for share, value in zip(moments, values, strict=True)]
        return staircase([*points, (1.0, points[-1][1])])

    for part in ORDER:
        own = held[:, PARTS.index(part)]
        if own.any():
            over = base + own
            title = f"{WORDS.get(part, part)}: {show_bytes(int(own.min()))} to {show_bytes(int(own.max()))}"
            drawn.append(area(corners(over), corners(base), kind=part, title=title))
            base = over
    lines = [rule(level(persistent_bytes, top_bytes), kind="persistent")]
    if capacity_bytes <= top_bytes:
        lines.append(rule(level(capacity_bytes, top_bytes), kind="capacity"))
    return chart(
        HEIGHT + 22,
        stretched(*drawn, y=0, height=HEIGHT),
        *lines,
        *byte_marks(top_bytes),
        seconds_axis(step_s, HEIGHT),
        label=f"live bytes by part over one step, at most {show_bytes(int(held.sum(axis=1).max()))}",
    )


def level(amount_bytes: float, top_bytes: float) -> float:
    """The height at which an amount of bytes stands, from the top."""
    return HEIGHT * (1 - amount_bytes / top_bytes)


def byte_marks(top_bytes: float) -> Iterator[str]:
    """Lines at round amounts, named inside the picture."""
    unit, size = next(((unit, size) for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)) if top_bytes >= size), ("B", 1))
    for mark in ticks(top_bytes / size, most=5)[1:]:
        y = level(mark * size, top_bytes)
        yield rule(y, kind="grid")
        yield text(0, max(y - 3, LINE_PIXELS - 3), f"{mark:g} {unit}", kind="mark halo", indent=3)


def roles_table(prediction: Prediction) -> str:
    """Parts of every role at its peak."""
    parts = [part for part in PARTS if any(role.parts[part] for role in prediction.memory.roles)]
    rows = [
        (
            f"position {role.position}",
            f"{role.num_ranks:,}",
            show_bytes(role.peak_bytes),
            *(show_bytes(role.parts[part]) if role.parts[part] else "–" for part in parts),
        )
        for role in prediction.memory.roles
    ]
    return table(("role", "ranks", "peak", *(WORDS.get(part, part) for part in parts)), rows, right=range(1, len(parts) + 3))


def bars(rows: Sequence[tuple[str, Mapping[str, Bytes], Bytes]], capacity_bytes: Bytes) -> str:
    """One stacked bar a role against the capacity. A row has a name, parts, and what the process takes beyond them (allocator, context)."""
    whole_bytes = max(capacity_bytes, *(sum(parts.values()) + beyond_bytes for _, parts, beyond_bytes in rows))
    height = BAR if len(rows) <= MOST_BARS // 2 else BAR // 2
    drawn = []
    y = 0.0
    for name, parts, beyond_bytes in rows:
        total_bytes = sum(parts.values())
        drawn.append(
            text(0, y + 12, f"{name}: {show_bytes(total_bytes)} live, {show_bytes(total_bytes + beyond_bytes)} reserved", kind="mark")
        )
        drawn.append(one_bar(parts, beyond_bytes, whole_bytes, y + 17, height))
        y += 17 + height + 6
    return chart(
        y + 20,
        *drawn,
        capacity_mark(capacity_bytes, whole_bytes, y),
        label="memory by part of each role against the capacity of the device",
    )


BAR: Final = 26
MOST_BARS: Final = 16


def one_bar(parts: Mapping[str, Bytes], beyond_bytes: Bytes, whole_bytes: Bytes, y: float, height: float) -> str:
    """One bar: the parts, then what is reserved beyond them, over the room that is left."""
    drawn = [bar(0, 1, y=y, height=height, kind="free")]
    at = 0
    for part in ORDER:
        if size := parts.get(part, 0):
            drawn.append(
                bar(
                    at / whole_bytes,
                    (at + size) / whole_bytes,
                    y=y,
                    height=height,
                    kind=part,
                    title=f"{WORDS.get(part, part)}: {show_bytes(size)}",
                )
            )
            at += size
    if beyond_bytes:
        title = f"allocator and context: {show_bytes(beyond_bytes)}"
        drawn.append(bar(at / whole_bytes, (at + beyond_bytes) / whole_bytes, y=y, height=height, kind="other", title=title))
    return "".join(drawn)


def capacity_mark(capacity_bytes: Bytes, whole_bytes: Bytes, y: float) -> str:
    """The capacity as a line through all bars."""
    share = capacity_bytes / whole_bytes
    return upright(share, 0, y, kind="capacity") + text(share, y + 14, f"capacity {show_bytes(capacity_bytes)}", kind="mark", anchor="end")
