"""Bounds: checks that a value in a declaration is a count, lies in a range, or is one of a few names."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Final

from trainwright.problems import Problem, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_COUNT: Final = 2**31 - 1


def count_problems(path: str, value: object, *, least: int = 1, most: int = MAX_COUNT) -> Iterator[Problem]:
    """One Problem unless value is a whole number from least to most. True is no number here."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return
    yield Problem(
        f"{path} must be a whole number from {least} to {most}",
        path=path,
        given=value,
        allowed=f"whole numbers from {least} to {most}",
        attempt=f"{path} = {_nearest_count(value, least, most)}",
    )


def range_problems(
    path: str,
    value: object,
    *,
    least: float,
    suggestion: float,
    most: float = math.inf,
    open_below: bool = False,
    open_above: bool = False,
) -> Iterator[Problem]:
    """One Problem unless value is a finite number from least to most; an open end is itself excluded."""
    if isinstance(value, int | float) and _finite(value):
        above = value > least or (value == least and not open_below)
        below = value < most or (value == most and not open_above)
        if above and below:
            return
    lower = f"{'above' if open_below else 'from'} {least:g}"
    upper = "" if math.isinf(most) else f" to {'below ' if open_above else ''}{most:g}"
    yield Problem(
        f"{path} must be a finite number {lower}{upper}",
        path=path,
        given=value,
        allowed=f"{lower}{upper}",
        attempt=f"{path} = {suggestion:g}",
    )


def _finite(value: float) -> bool:
    """A number that a float can hold: no truth value, no NaN or infinity, no whole number beyond."""
    return not isinstance(value, bool) and -sys.float_info.max <= value <= sys.float_info.max


def _nearest_count(value: object, least: int, most: int) -> int:
    if isinstance(value, int | float) and _finite(value):
        return min(max(round(value), least), most)
    return least


def choice_problems(path: str, value: str, allowed: tuple[str, ...]) -> Iterator[Problem]:
    """One Problem unless value is among the allowed names."""
    if value not in allowed:
        yield Problem(
            f'"{value}" is not one of the values of {path}',
            path=path,
            given=value,
            allowed=allowed,
            attempt=f'{path} = "{nearest(value, allowed) or allowed[0]}"',
        )
