"""The pipeline picture: every position's step, and a look through the magnifying glass at one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from trainwright.export.report.page import SIMULATED, Section, badge, details, figure, legend, table
from trainwright.export.report.spans import COMPUTE, Numbers, Piece, Spans, busy_shares, columns, pieces, spans
from trainwright.export.report.svg import area as filled
from trainwright.export.report.svg import bar, chart, seconds_axis, stretched, text
from trainwright.ir.program import Run
from trainwright.predict.predict import Prediction
from trainwright.units import Seconds, show_seconds

MOST_PIECES: Final = 700
"""Bars of one position that are drawn one by one; with more, each column of the picture shows what fills most of it."""

NUM_COLUMNS: Final = 1000
MOST_ROWS: Final = 32
MOST_ROWS_WITH_WIRES: Final = 8
MOST_MAGNIFIED: Final = 260
"""Actions in the magnified piece."""

LONG_WAIT: Final = 0.25
"""A wait that would take such a share of the magnified piece ends it."""

LANE: Final = 20
STRIP: Final = 9

AXES: Final = ("pipeline", "data", "zero", "tensor")


def section(prediction: Prediction) -> Section:
    """The pipeline picture of the predicted step."""
    step_s = prediction.step_s
    roles = prediction.program.roles
    shown = [spans(prediction.simulation, position) for position in _rows(len(roles))]
    critical = prediction.simulation.critical
    glass = next((one for one in shown if one.position == critical), shown[0])
    multiplicity = roles[0].multiplicity
    hidden = f" {len(roles) - len(shown)} positions in the middle are left out." if len(shown) < len(roles) else ""
    strips = "The strips below a position are its wires, filled as high as they are busy." if len(shown) <= MOST_ROWS_WITH_WIRES else ""
    caption = (
        f"One step of {show_seconds(step_s)}, {badge(SIMULATED)}: "
        f"{len(roles)} position{'s' if len(roles) > 1 else ''} on the pipeline axis, "
        f"{multiplicity:,} ranks each do the same. A bar is the work on one microbatch; gaps are waiting. "
        f"{strips}{hidden}"
    )
    body = figure(_legend(shown) + _overview(shown, step_s), caption)
    body += _magnified(glass)
    body += details(
        "The same as a table", table(("position", "ranks", *COMPUTE, "wires", "idle"), _busy_rows(prediction, shown), right=range(1, 8))
    )
    return Section(anchor="pipeline", title="Pipeline", body=body)


def wire_class(kind: str) -> str:
    """The style sheet's class of a wire's lane."""
    axis = kind.removeprefix("wire:")
    return f"wire-{axis}" if axis in AXES else "wire-other"


def _rows(num_positions: int) -> Iterator[int]:
    """The positions to draw: all, or the first and last ones."""
    if num_positions <= MOST_ROWS:
        yield from range(num_positions)
    else:
        half = MOST_ROWS // 2
        yield from (*range(half), *range(num_positions - half, num_positions))


def _legend(shown: Sequence[Spans]) -> str:
    used = {of.kinds[kind] for of in shown for kind in np.unique(of.kind[of.ends > of.starts])}
    kinds = {name: name for name in COMPUTE if name in used}
    for wire in sorted(used):
        if wire.startswith("wire:"):
            kinds.setdefault(
                wire_class(wire),
                f"wire over {wire.removeprefix('wire:')}" if wire_class(wire) != "wire-other" else "wire over several axes",
            )
    return legend(kinds)


def _overview(shown: Sequence[Spans], step_s: Seconds) -> str:
    """All positions, one below the other."""
    with_wires = len(shown) <= MOST_ROWS_WITH_WIRES
    y = 0.0
    drawn = []
    for of in shown:
        if with_wires:
            drawn.append(text(0, y + 12, f"position {of.position}", kind="mark"))
            y += 17
        bars = pieces(of, gap_s=step_s / NUM_COLUMNS)
        if len(bars) > MOST_PIECES:
            bars = columns(of, step_s, NUM_COLUMNS)
        drawn += [bar(0, 1, y=y, height=LANE, kind="lane"), *(_drawn(one, step_s, y) for one in bars)]
        if not with_wires:
            drawn.append(text(0, y + 14, str(of.position), kind="mark halo", indent=3))
        y += LANE + 2
        for wire in _joined_wires(of) if with_wires else ():
            drawn.append(_strip(of, wire, step_s, y))
            y += STRIP + 2
        y += 6 if with_wires else 0
    label = f"Gantt chart of one step: {len(shown)} positions over {show_seconds(step_s)}"
    return chart(y + 22, *drawn, seconds_axis(step_s, y), label=label)


def _joined_wires(of: Spans) -> list[list[str]]:
    """The lanes that get a strip of their own, by class."""
    found: dict[str, list[str]] = {}
    for wire in of.wires:
        if wire_class(wire) != "wire-other":
            found.setdefault(wire_class(wire), []).append(wire)
    return list(found.values())


def _drawn(one: Piece, step_s: Seconds, y: float) -> str:
    title = (
        f"{one.kind} {named(one.run)}: {show_seconds(one.start_s)} to {show_seconds(one.end_s)}, {show_seconds(one.end_s - one.start_s)}"
    )
    return bar(one.start_s / step_s, one.end_s / step_s, y=y, height=LANE, kind=one.kind, title=title)


def named(run: Run) -> str:
    """A run as it is called in titles."""
    words = [f"stage {run.stage}" if run.stage is not None else "", f"microbatch {run.microbatch}" if run.microbatch is not None else ""]
    return ", ".join(filter(None, words)) or "of the step"


def _strip(of: Spans, wires: list[str], step_s: Seconds, y: float) -> str:
    """How busy a wire is over the step."""
    num_columns = NUM_COLUMNS // 4
    shares = np.minimum(busy_shares(of, wires, step_s, num_columns).sum(axis=0), 1.0)
    kind = wire_class(wires[0])
    base = y + STRIP
    edges = np.flatnonzero(np.diff(np.round(shares, 2))) + 1
    firsts, lasts = np.concatenate(([0], edges)), np.concatenate((edges, [num_columns]))
    top = [
        (place / num_columns, base - STRIP * float(shares[first]))
        for first, last in zip(firsts, lasts, strict=True)
        for place in (first, last)
    ]
    title = f"{kind.removeprefix('wire-')}: busy {float(shares.mean()):.0%} of the step"
    area = filled([(share, height - y) for share, height in top], [(0.0, STRIP), (1.0, STRIP)], kind=kind, title=title)
    return bar(0, 1, y=y, height=STRIP, kind="lane", title=title) + stretched(area, y=y, height=STRIP)


# --- through the magnifying glass --------------------------------------------------------------------------------------------------------


def _magnified(of: Spans) -> str:
    """Actions around the middle of the step where a forward ends and a backward begins."""
    places = of.of(*COMPUTE)
    if not len(places):
        return ""
    middle = _turn(of, places)
    first, last = _near(of, places, middle)
    if first == 0 and last == len(places) and len(places) < MOST_MAGNIFIED // 4:
        return ""
    begin_s, end_s = float(of.starts[places[first]]), float(of.ends[places[first:last]].max())
    lanes: dict[str, list[int]] = {"compute": [int(place) for place in places[first:last]]}
    for wire in of.wires:
        inside = [int(place) for place in of.of(wire) if of.ends[place] > begin_s and of.starts[place] < end_s]
        if inside:
            lanes[wire] = inside[:MOST_MAGNIFIED]
    drawn = []
    y = 0.0
    for name, members in lanes.items():
        drawn += [text(0, y + 12, name.replace("wire:", "wire over "), kind="mark"), bar(0, 1, y=y + 17, height=LANE, kind="lane")]
        drawn += [_action(of, place, begin_s, end_s, y + 17) for place in members]
        y += 17 + LANE + 5
    picture = chart(
        y + 22, *drawn, _clock(begin_s, end_s, y), label=f"the actions of position {of.position} for {show_seconds(end_s - begin_s)}"
    )
    caption = (
        f"The same step magnified, {badge(SIMULATED)}: position {of.position} from {show_seconds(begin_s)} "
        f"for {show_seconds(end_s - begin_s)}, action by action. "
        "Exchanges that stand below compute are overlapped; where compute has a gap, it waits for one. "
        "Point at a bar for its site."
    )
    return figure(picture, caption)


def _turn(of: Spans, places: Numbers) -> int:
    """The place near the middle where a forward run gives way to a backward one."""
    forward = of.kind[places] == of.kinds.index("forward")
    turns = np.flatnonzero(forward[:-1] & ~forward[1:] & (of.run[places][:-1] != of.run[places][1:])) + 1
    half = len(places) // 2
    return int(turns[np.argmin(np.abs(turns - half))]) if len(turns) else half


def _near(of: Spans, places: Numbers, middle: int) -> tuple[int, int]:
    """The actions around a place, up to the first long wait on each side."""
    first, last = max(0, middle - MOST_MAGNIFIED // 2), min(len(places), middle + MOST_MAGNIFIED // 2)
    starts, ends = of.starts[places[first:last]], of.ends[places[first:last]]
    long = np.flatnonzero(starts[1:] - ends[:-1] > LONG_WAIT * (ends - starts).sum()) + 1 + first
    before, after = long[long < middle], long[long > middle]
    return (int(before[-1]) if len(before) else first), (int(after[0]) if len(after) else last)


def _action(of: Spans, place: int, begin_s: Seconds, end_s: Seconds, y: float) -> str:
    start_s, stop_s = float(of.starts[place]), float(of.ends[place])
    shares = [(moment - begin_s) / (end_s - begin_s) for moment in (max(start_s, begin_s), min(stop_s, end_s))]
    name = of.kinds[of.kind[place]]
    title = f"{of.site(place)}: {show_seconds(stop_s - start_s)}"
    return bar(*shares, y=y, height=LANE, kind=wire_class(name) if name.startswith("wire:") else name, title=title)


def _clock(begin_s: Seconds, end_s: Seconds, y: float) -> str:
    """Marks of time since the beginning of the magnified piece."""
    return seconds_axis(end_s - begin_s, y)


# --- as a table --------------------------------------------------------------------------------------------------------------------------


def _busy_rows(prediction: Prediction, shown: Sequence[Spans]) -> Iterator[tuple[str, ...]]:
    step_s = prediction.step_s
    for of in shown:
        shares = busy_shares(of, COMPUTE, step_s, 1)[:, 0]
        wires = busy_shares(of, of.wires, step_s, 1)[:, 0].sum() if of.wires else 0.0
        work = [f"{float(share):.1%}" for share in shares]
        yield (
            str(of.position),
            f"{prediction.program.roles[of.position].multiplicity:,}",
            *work,
            f"{float(wires):.1%}",
            f"{max(0.0, 1.0 - float(shares.sum())):.1%}",
        )
