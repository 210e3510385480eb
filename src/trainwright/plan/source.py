"""Source: where each setting of a plan was written.

`tomllib` gives the values of a TOML text but not their places, so `locate` walks the text a second time and notes the line of every key:
headers, dotted keys, inline tables and array elements alike. Paths are dotted (`parallel.tensor.size`, `optimizer.betas.1`),
lines count from 1.
"""

from __future__ import annotations

import bisect
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_SPACE: Final = re.compile(r"[ \t]*")
_BLANK: Final = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SCALAR: Final = re.compile(r"[^,\]\}\n#]*")
_STRING: Final = re.compile(r'"""(?:\\.|[^\\])*?"{3,5}|' r"'''.*?'{3,5}|" r'"(?:\\.|[^"\\\n])*"|' r"'[^'\n]*'", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The text a plan was read from.

    file        the plan file; None for a plan made in Python or from a bare model name.
    text        its TOML.
    lines       line of each setting by dotted path.
    overridden  dotted paths that the command line set; they have no line.
    model       the [model] table as written, cluster the [cluster] table: how `write.dump` names them again.
    """

    file: Path | None = None
    text: str = ""
    lines: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    overridden: frozenset[str] = frozenset()
    model: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    cluster: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def folder(self) -> Path:
        """The folder that the plan's paths are relative to: the plan file's, else the current one."""
        return Path() if self.file is None else self.file.parent

    def line(self, path: str) -> int | None:
        """Line of a setting, or of the nearest table around it; None if neither is in the file.

        >>> Source(lines={"parallel": 3, "parallel.tensor": 4}).line("parallel.tensor.size")
        4
        """
        while path:
            if path in self.overridden:
                return None
            if path in self.lines:
                return self.lines[path]
            path = path.rpartition(".")[0]
        return None

    def place(self, path: str) -> tuple[str | None, int | None]:
        """File and line of a setting as a Problem shows them; what the command line set says so in place of a file."""
        parts = path.split(".")
        if any(".".join(parts[:end]) in self.overridden for end in range(1, len(parts) + 1)):
            return "command line", None
        return (None if self.file is None else str(self.file)), self.line(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """A key written twice, which TOML forbids."""

    path: str
    first_line: int
    line: int


def locate(text: str) -> dict[str, int]:
    r"""Line of every key of a valid TOML text, by dotted path; of a key met several times (a dotted prefix) the first.

    >>> locate("[a]\nb = { c = 1 }\n")
    {'a': 1, 'a.b': 2, 'a.b.c': 2}
    """
    lines: dict[str, int] = {}
    for path, line, _ in _Walk(text).places():
        lines.setdefault(path, line)
    return lines


def duplicates(text: str) -> Iterator[Duplicate]:
    """Every key or header written twice. Works on a text that tomllib refuses, up to the first place that is no TOML at all.

    What stands below a key written twice is not reported again.
    """
    seen: dict[str, int] = {}
    twice: list[str] = []
    walk = _Walk(text).places()
    while True:
        try:
            path, line, defines = next(walk)
        except (StopIteration, ValueError, RecursionError):
            return
        if not defines or any(path.startswith(f"{one}.") for one in twice):
            continue
        if path in seen:
            twice.append(path)
            yield Duplicate(path=path, first_line=seen[path], line=line)
        else:
            seen[path] = line


class _Walk:
    """Walks a TOML text key by key. Raises ValueError where the text is no TOML."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._newlines = [place.start() for place in re.finditer("\n", text)]
        self._arrays: dict[tuple[str, ...], int] = {}

    def places(self) -> Iterator[tuple[str, int, bool]]:
        """(dotted path, line, whether this place defines it rather than passes through it) of each key in order."""
        table: tuple[str, ...] = ()
        while self._skip(_BLANK) < len(self._text):
            if self._text[self._at] == "[":
                table, found = self._header()
                yield from found
            else:
                yield from self._pair(table)

    def _header(self) -> tuple[tuple[str, ...], list[tuple[str, int, bool]]]:
        brackets = 2 if self._text.startswith("[[", self._at) else 1
        self._at += brackets
        keys = self._key()
        self._expect("]" * brackets)
        names = self._through_arrays(keys)
        line = self._line()
        found = [(".".join(names[:end]), line, False) for end in range(1, len(names))]
        if brackets == 1:
            return names, [*found, (".".join(names), line, True)]
        index = self._arrays.get(names, -1) + 1
        self._arrays[names] = index
        element = (*names, str(index))
        return element, [*found, (".".join(names), line, False), (".".join(element), line, True)]

    def _through_arrays(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """The path with the index of the newest element after each array of tables but the last name."""
        names: tuple[str, ...] = ()
        for position, key in enumerate(keys):
            names = (*names, key)
            if position < len(keys) - 1 and names in self._arrays:
                names = (*names, str(self._arrays[names]))
        return names

    def _pair(self, table: tuple[str, ...]) -> Iterator[tuple[str, int, bool]]:
        self._skip(_SPACE)
        line = self._line()
        names = table + self._key()
        self._expect("=")
        for end in range(len(table) + 1, len(names)):
            yield ".".join(names[:end]), line, False
        yield ".".join(names), line, True
        yield from self._value(names)

    def _value(self, names: tuple[str, ...]) -> Iterator[tuple[str, int, bool]]:
        self._skip(_SPACE)
        match self._text[self._at : self._at + 1]:
            case "[":
                yield from self._array(names)
            case "{":
                yield from self._inline_table(names)
            case '"' | "'":
                self._string()
            case _:
                self._skip(_SCALAR)

    def _array(self, names: tuple[str, ...]) -> Iterator[tuple[str, int, bool]]:
        self._at += 1
        index = 0
        while not self._closes("]"):
            element = (*names, str(index))
            yield ".".join(element), self._line(), True
            yield from self._value(element)
            self._separator("]")
            index += 1

    def _inline_table(self, names: tuple[str, ...]) -> Iterator[tuple[str, int, bool]]:
        self._at += 1
        while not self._closes("}"):
            yield from self._pair(names)
            self._separator("}")

    def _closes(self, bracket: str) -> bool:
        self._skip(_BLANK)
        if not self._text.startswith(bracket, self._at):
            return False
        self._at += 1
        return True

    def _separator(self, bracket: str) -> None:
        self._skip(_BLANK)
        if not self._text.startswith(bracket, self._at):
            self._expect(",")

    def _key(self) -> tuple[str, ...]:
        names: list[str] = []
        while True:
            self._skip(_SPACE)
            names.append(self._name())
            self._skip(_SPACE)
            if not self._text.startswith(".", self._at):
                return tuple(names)
            self._at += 1

    def _name(self) -> str:
        if self._text[self._at : self._at + 1] in {'"', "'"}:
            return str(tomllib.loads(f"name = {self._string()}")["name"])
        start = self._at
        if self._skip(_BARE, needed=True) == start:
            raise ValueError(start)
        return self._text[start : self._at]

    def _string(self) -> str:
        start = self._at
        self._skip(_STRING, needed=True)
        return self._text[start : self._at]

    def _expect(self, mark: str) -> None:
        self._skip(_SPACE)
        if not self._text.startswith(mark, self._at):
            raise ValueError(self._at)
        self._at += len(mark)

    def _skip(self, pattern: re.Pattern[str], *, needed: bool = False) -> int:
        found = pattern.match(self._text, self._at)
        if found is None:
            if needed:
                raise ValueError(self._at)
        else:
            self._at = found.end()
        return self._at

    def _line(self) -> int:
        return bisect.bisect_left(self._newlines, self._at) + 1
