"""Charts as SVG, drawn so that they fit any width without scaling their text.

A chart is as wide as its column and has a fixed height. Places along x are shares of the width, written in percent; along y they are
pixels. Curves and areas cannot be written in percent: they stand in an inner drawing that is stretched to the chart (`stretched`).
Colours are classes, so that the page's style sheet decides them, for light and for dark.

Glossary
    share   a place along x, from 0 at the left to 1 at the right
    step    a curve that keeps each value until the next one
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from math import floor, log10

from trainwright.units import Seconds

WIDTH = 1000
"""Units along x of the inner drawing."""

LINE_PIXELS = 14
"""Height of a line of a chart's own text."""


def element(name: str, *children: str, **attributes: object) -> str:
    """An element. Attributes whose value is None are left out; `_` at an end is dropped, inside it is a hyphen.

    >>> element("rect", x="5%", class_="forward", stroke_width=2)
    '<rect x="5%" class="forward" stroke-width="2"/>'
    """
    written = "".join(
        f' {key.strip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items() if value is not None
    )
    return f"<{name}{written}>{''.join(children)}</{name}>" if children else f"<{name}{written}/>"


def percent(share: float) -> str:
    """A share of the width.

    >>> percent(0.125), percent(1 / 3)
    ('12.5%', '33.333%')
    """
    return f"{100 * share:.3f}".rstrip("0").rstrip(".") + "%"


def number(value: float) -> str:
    """A coordinate, as short as a tenth of a unit allows.

    >>> number(3.0), number(3.14159)
    ('3', '3.1')
    """
    return f"{value:.1f}".removesuffix(".0")


def chart(height: float, *content: str, label: str) -> str:
    """A chart; `label` says in a sentence what it shows, for those who cannot see it."""
    return element("svg", *content, class_="chart", width="100%", height=number(height), role="img", aria_label=label)


def bar(begin: float, end: float, *, y: float, height: float, kind: str, title: str = "") -> str:
    """A bar between two shares of the width; `title` is shown when pointed at."""
    children = (element("title", escape(title)),) if title else ()
    return element(
        "rect", *children, x=percent(begin), y=number(y), width=percent(max(0.0, end - begin)), height=number(height), class_=kind
    )


def text(share: float, y: float, words: str, *, kind: str = "", anchor: str = "start", indent: float = 0) -> str:
    """A line of text whose base is at y; `indent` moves it by pixels."""
    return element(
        "text",
        escape(words),
        x=percent(share),
        y=number(y),
        class_=kind or None,
        text_anchor=None if anchor == "start" else anchor,
        dx=number(indent) if indent else None,
    )


def rule(y: float, *, kind: str) -> str:
    """A line across the chart."""
    return element("line", x1=0, x2="100%", y1=number(y), y2=number(y), class_=kind)


def upright(share: float, top: float, bottom: float, *, kind: str) -> str:
    """A line from top to bottom."""
    return element("line", x1=percent(share), x2=percent(share), y1=number(top), y2=number(bottom), class_=kind)


def stretched(*content: str, y: float, height: float) -> str:
    """An inner drawing of WIDTH x height units that fills the chart's width."""
    box = f"0 0 {WIDTH} {number(height)}"
    return element(
        "svg", *content, x=0, y=number(y), width="100%", height=number(height), viewBox=box, preserveAspectRatio="none", overflow="visible"
    )


def line(points: Iterable[tuple[float, float]], *, kind: str) -> str:
    """A curve through (share, y)."""
    path = " ".join(f"{number(WIDTH * share)},{number(y)}" for share, y in points)
    return element("polyline", points=path, class_=kind, fill="none", vector_effect="non-scaling-stroke")


def staircase(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of a step curve: each value is kept until the next.

    >>> staircase([(0.0, 5.0), (0.5, 2.0)])
    [(0.0, 5.0), (0.5, 5.0), (0.5, 2.0)]
    """
    corners = list(points[:1])
    for (_, before), (share, y) in pairwise(points):
        corners += [(share, before), (share, y)] if y != before else []
    if points and corners[-1][0] != points[-1][0]:
        corners.append(points[-1])
    return corners


def area(top: Sequence[tuple[float, float]], bottom: Sequence[tuple[float, float]], *, kind: str, title: str = "") -> str:
    """What lies between two curves."""
    corners = [*top, *reversed(bottom)]
    path = " ".join(f"{number(WIDTH * share)},{number(y)}" for share, y in corners)
    children = (element("title", escape(title)),) if title else ()
    return element("polygon", *children, points=path, class_=kind)


def ticks(largest: float, most: int = 5) -> list[float]:
    """Round values from 0 up to `largest`, at most `most` above 0.

    >>> ticks(11.5), ticks(0.8, most=4)
    ([0.0, 5.0, 10.0], [0.0, 0.2, 0.4, 0.6, 0.8])
    """
    if largest <= 0:
        return [0.0]
    scale = 10.0 ** floor(log10(largest / most))
    step = next(one * scale for one in (1, 2, 5, 10) if largest / (one * scale) <= most + 1e-9)
    return [round(step * place, 12) for place in range(floor(largest / step + 1e-9) + 1)]


def seconds_axis(duration_s: Seconds, y: float) -> str:
    """Marks of time below a chart whose width is `duration_s`; `y` is where the chart ends."""
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if duration_s >= 2 * size), ("ns", 1e-9))
    marks = [mark for mark in ticks(duration_s / size) if mark * size <= duration_s]
    drawn = []
    for mark in marks:
        share = mark * size / duration_s
        anchor = "start" if share < 0.02 else "end" if share > 0.97 else "middle"
        drawn += [upright(share, y, y + 4, kind="tick"), text(share, y + 16, f"{mark:g} {unit}", kind="mark", anchor=anchor)]
    return "".join([rule(y, kind="axis"), *drawn])
