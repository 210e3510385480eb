"""Problems: what is wrong with what a user gave, said so that it can be mended.

A check yields every Problem it finds; the edge raises them together as one PlanError.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, with what was given, what is allowed, what to try, and where.

    `path` is the dotted name of the setting (`parallel.tensor.size`), `given` its value as it was read; `given` without
    a path is printed as it stands. `allowed` is a sentence, or the allowed values themselves. `attempt` is what to try.

    >>> print(Problem("tensor size 8 does not divide 12 heads", path="parallel.tensor.size", given=8, allowed=(1, 2, 4)))
    tensor size 8 does not divide 12 heads
      given    parallel.tensor.size = 8
      allowed  1, 2, 4
    """

    message: str
    _: KW_ONLY
    file: str | None = None
    line: int | None = None
    path: str | None = None
    given: object = None
    allowed: str | tuple[object, ...] | None = None
    attempt: str | None = None

    def at(self, file: str | None, line: int | None = None) -> Self:
        """Return the same problem, placed in a file; a place already known is kept."""
        return replace(self, file=self.file or file, line=self.line if self.line is not None else line)

    def __str__(self) -> str:
        """Show the problem as the command line prints it: one line, then given, allowed and try, as far as known."""
        details = (("given", self._given_text()), ("allowed", self._allowed_text()), ("try", self.attempt))
        return "\n".join([self._headline(), *(f"  {name:<7}  {text}" for name, text in details if text)])

    def to_json(self) -> dict[str, Json]:
        """Return the problem as it stands in a `trainwright/problems/1` document."""
        allowed = self.allowed if self.allowed is None or isinstance(self.allowed, str) else [_plain(value) for value in self.allowed]
        return {
            "message": self.message,
            "file": self.file,
            "line": self.line,
            "path": self.path,
            "given": _plain(self.given),
            "allowed": allowed,
            "try": self.attempt,
        }

    def _headline(self) -> str:
        if self.file is None:
            return self.message
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}  {self.message}"

    def _given_text(self) -> str | None:
        if self.given is None:
            return None
        if self.path is None:
            return _one_line(str(self.given))
        return f"{self.path} = {_one_line(_toml(self.given))}"

    def _allowed_text(self) -> str | None:
        if self.allowed is None or isinstance(self.allowed, str):
            return self.allowed
        return ", ".join(str(value) for value in self.allowed)


class PlanError(Exception):
    """Input that cannot be used; carries every Problem that was found."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        """Take one Problem or several; none at all is our own mistake."""
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        assert self.problems, "a PlanError needs a Problem"
        super().__init__(self.problems)

    def __str__(self) -> str:
        """Show all problems, one after another."""
        return "\n".join(str(problem) for problem in self.problems)

    def to_json(self) -> dict[str, Json]:
        """Return the document that `--json` prints on stdout."""
        return {"schema": "trainwright/problems/1", "problems": [problem.to_json() for problem in self.problems]}


def raise_all(problems: Iterable[Problem]) -> None:
    """Raise one PlanError with all problems, if there are any."""
    found = tuple(problems)
    if found:
        raise PlanError(found)


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name that was probably meant, or None where nothing comes close.

    >>> nearest("tensr", ["tensor", "data"]), nearest("zebra", ["tensor", "data"])
    ('tensor', None)
    """
    from difflib import get_close_matches  # only a mistake needs it: a few milliseconds less at every start

    by_lower = {candidate.lower().replace("_", "-"): candidate for candidate in allowed}
    found = get_close_matches(name[:100].lower().replace("_", "-"), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


_LONGEST_LINE = 120


def _one_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _LONGEST_LINE else f"{flat[: _LONGEST_LINE - 3]}..."


def _toml(value: object) -> str:
    """Write a value as it would stand in a plan file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(item)}' for key, item in value.items())} }}"
    return str(value)


def _plain(value: object) -> Json:
    """Turn a value into what JSON can hold; NaN and infinity become text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)
