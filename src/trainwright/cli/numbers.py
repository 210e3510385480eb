"""Numbers from the command line, with a Problem where a text is none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from trainwright.problems import Problem

if TYPE_CHECKING:
    from trainwright.schedules.timeline import Ticks

Number = TypeVar("Number", int, float)
_LONGEST_TEXT = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One number that a user may give: its name on the command line and the least and largest value."""

    name: str
    least: float = 1
    most: float = 1_000_000

    def whole(self, given: str) -> int | Problem:
        """Read a whole number.

        >>> Setting(name="--stages").whole("4")
        4
        """
        text = given.strip()
        if not (text.isascii() and text.removeprefix("-").isdecimal()) or len(text) > _LONGEST_TEXT:
            return self._problem(f"{self.name} needs a whole number", given, "whole numbers")
        return self._in_range(int(text), given, "whole numbers")

    def number(self, given: str) -> Ticks | Problem:
        """Read a number; one without a point stays whole, so that sums of it are exact.

        >>> Setting(name="--forward", least=0).number("1"), Setting(name="--forward", least=0).number("1.5")
        (1, 1.5)
        """
        try:
            value = int(given) if given.strip().lstrip("-").isdecimal() else float(given)
        except ValueError:
            return self._problem(f"{self.name} needs a number", given, "numbers")
        if not math.isfinite(value):
            return self._problem(f"{self.name} needs a finite number", given, "numbers")
        return self._in_range(value, given, "numbers")

    def _in_range(self, value: Number, given: str, kind: str) -> Number | Problem:
        if self.least <= value <= self.most:
            return value
        nearest = self.least if value < self.least else self.most
        size = "small" if value < self.least else "large"
        return self._problem(
            f"{self.name} {given[:_LONGEST_TEXT]} is too {size}",
            given,
            kind,
            attempt=f"{self.name}{' ' if self.name.startswith('-') else '='}{nearest:.15g}",
        )

    def _problem(self, message: str, given: str, kind: str, attempt: str | None = None) -> Problem:
        return Problem(message, path=self.name, given=given, allowed=f"{kind} from {self.least:.15g} to {self.most:.15g}", attempt=attempt)
