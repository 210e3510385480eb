"""Draws a schedule with letters: one row a position, time to the right.

Where every slot begins on a whole tick and the ticks fit the screen, each slot shows its microbatch, and with chunks a letter for
the chunk: `F3b` is the forward of microbatch 3 through chunk 1. Otherwise a column is a slice of time, and shows what runs in
its middle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainwright.schedules.timeline import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainwright.schedules.timeline import Timeline

LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_INPUT: "B", Kind.BACKWARD_WEIGHT: "W"}
COLOURS = {"F": "\x1b[30;46m", "B": "\x1b[30;42m", "W": "\x1b[30;43m"}
RESET = "\x1b[0m"
IDLE = "."
MOST_ROWS = 64


def gantt(timeline: Timeline, width: int, *, colour: bool = False) -> list[str]:
    """Return the rows of the picture, each at most `width` columns wide."""
    head = len(str(timeline.num_positions - 1)) + 2
    shown = range(min(timeline.num_positions, MOST_ROWS))
    bodies = _labelled(timeline, width - head, shown) or _sliced(timeline, width - head, shown)
    rows = [
        f"{position:>{head - 2}}  {_paint(cells) if colour else ''.join(cells).rstrip()}"
        for position, cells in zip(shown, bodies, strict=True)
    ]
    hidden = timeline.num_positions - len(shown)
    return [*rows, f"… and {hidden} more positions"] if hidden else rows


def _labelled(timeline: Timeline, width: int, shown: range) -> list[list[str]] | None:
    """One cell a tick, if slots begin and end on whole ticks and all cells fit."""
    if timeline.starts.dtype.kind != "i" or timeline.makespan * 3 > width:
        return None
    labels = list(_labels(timeline))
    cell = max(map(len, labels)) + 1
    if timeline.makespan * cell > width:
        return None
    rows = [[f"{IDLE * (cell - 1)} "] * int(timeline.makespan) for _ in shown]
    places = zip(labels, timeline.positions.tolist(), timeline.starts.tolist(), timeline.ends.tolist(), strict=True)
    for label, position, start, end in places:
        if position in shown and end > start:
            text = f"{label:{'-' if end - start > 1 else ' '}<{(end - start) * cell - 1}} "
            rows[position][start:end] = [text[first : first + cell] for first in range(0, len(text), cell)]
    return rows


def _labels(timeline: Timeline) -> Iterator[str]:
    num_positions = timeline.num_positions
    chunks = len(timeline.stage_positions) // num_positions
    for slot, kind in zip(timeline.slots, timeline.kinds.tolist(), strict=True):
        chunk = slot.stage // num_positions
        yield f"{LETTERS[Kind(kind)]}{slot.microbatch}{chr(ord('a') + chunk % 26) if chunks > 1 else ''}"


def _sliced(timeline: Timeline, width: int, shown: range) -> list[list[str]]:
    """One column a slice of time: the letter of the slot that runs in its middle."""
    middles = (np.arange(width) + 0.5) * (timeline.makespan / width)
    rows = []
    for position in shown:
        first, last = np.searchsorted(timeline.positions, [position, position + 1])
        slot = first + np.searchsorted(timeline.starts[first:last], middles, side="right") - 1
        runs = (slot >= first) & (timeline.ends[np.maximum(slot, first)] > middles)
        rows.append([LETTERS[Kind(timeline.kinds[number])] if there else IDLE for number, there in zip(slot, runs, strict=True)])
    return rows


def _paint(cells: list[str]) -> str:
    """Colour every cell by what runs in it; a cell without a letter of its own continues the one before."""
    painted, colour = [], ""
    for cell in cells:
        colour = "" if cell.startswith(IDLE) else COLOURS.get(cell[0], colour)
        painted.append(f"{colour}{cell}{RESET}" if colour else cell)
    return "".join(painted)
