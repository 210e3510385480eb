"""Registry: the parts of a folder, by name.

A part is one file of a package (a strategy, a schedule, a collective algorithm) that declares `NAME = "..."`. The file is the
name with `-` as `_`, and a name that begins with a digit is spelled out: "1f1b" is `one_f_one_b.py`. Files without a
NAME are not parts. Names are read from the text of the files, so that listing loads none of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.problems import PlanError, Problem, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import ModuleType

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_DECLARED = re.compile(r"""^NAME\s*(?::[^=\n]*)?=\s*["']([^"'\n]+)["']""", re.MULTILINE)


def file_stem(name: str) -> str:
    """Return the file name, without `.py`, in which the part `name` must live.

    >>> file_stem("halving-doubling"), file_stem("1f1b")
    ('halving_doubling', 'one_f_one_b')
    """
    if not name[:1].isdigit():
        return name.replace("-", "_")
    pieces = re.findall(r"[0-9]|[^0-9_-]+", name)
    return "_".join(_DIGITS[int(piece)] if piece.isdecimal() else piece for piece in pieces)


@dataclass(frozen=True)  # not slotted: cached_property needs a __dict__
class Registry:
    """The parts of one package. `noun` is what a message calls one of them."""

    package: str
    noun: str = "part"

    @cached_property
    def files(self) -> Mapping[str, Path]:
        """The file of each part, by name, in the order of the names. Imports the package's parents, but no part."""
        spec = find_spec(self.package)
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        assert folders, f"{self.package} is not a package"
        sources = [source for folder in folders for source in Path(folder).glob("*.py")]
        declared = {source: _DECLARED.search(source.read_text(encoding="utf-8")) for source in sources}
        return dict(sorted((match.group(1), source) for source, match in declared.items() if match is not None))

    def names(self) -> tuple[str, ...]:
        """Return the names of all parts, sorted. Loads none of them."""
        return tuple(self.files)

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a part of this name."""
        return name in self.files

    def get(self, name: str, *, path: str | None = None) -> ModuleType:
        """Load the part `name`, and only its file.

        `path` is the setting that named it (`parallel.pipeline.schedule`), for the message.
        Raises PlanError for an unknown name, and ImportError, which names the file, for a part that cannot be loaded.
        """
        if name not in self.files:
            raise PlanError(self.unknown(name, path=path))
        source = self.files[name]
        try:
            return import_module(f"{self.package}.{source.stem}")
        except Exception as error:
            message = f'the {self.noun} "{name}" cannot be loaded from {source}: {type(error).__name__}: {error}'
            raise ImportError(message, name=name, path=str(source)) from error

    def unknown(self, name: str, *, path: str | None = None) -> Problem:
        """Return the Problem of asking for a part that does not exist, with the nearest name that does."""
        close = nearest(name, self.names())
        attempt = None if close is None else f'{path} = "{close}"' if path else f'"{close}"'
        return Problem(f'there is no {self.noun} named "{name}"', path=path, given=name, allowed=self.names(), attempt=attempt)

    def parts(self) -> Iterator[tuple[str, ModuleType]]:
        """Load every part, in the order of the names."""
        for name in self.names():
            yield name, self.get(name)
