"""Shelf: the TOML files of the catalog, found by kind and name."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Final

from trainwright.problems import PlanError, Problem, nearest

FOLDER: Final = Path(__file__).with_name("catalog")
KINDS: Final = ("model", "device", "cluster", "stack")


@cache
def names(kind: str) -> tuple[str, ...]:
    """Return the names of one kind, sorted: a file is one entry."""
    return tuple(sorted(path.stem for path in (FOLDER / f"{kind}s").glob("*.toml")))


def table(kind: str, name: str, path: str) -> dict[str, Any]:
    """Return the entry as it stands in its file. Raises PlanError for a name that the catalog lacks, with the nearest one."""
    if name not in names(kind):
        raise PlanError(unknown(kind, name, path))
    with (FOLDER / f"{kind}s" / f"{name}.toml").open("rb") as file:
        return tomllib.load(file)


def unknown(kind: str, name: str, path: str) -> Problem:
    """Say that the catalog has no such entry, and which it has; where several begin like the name, all of those are tried."""
    begin_alike = [entry for entry in names(kind) if name and entry.startswith(name.lower())]
    closest = nearest(name, names(kind))
    meant = " or ".join(f'"{entry}"' for entry in begin_alike or ([closest] if closest else []))
    return Problem(
        f'there is no {kind} "{name}" in the catalog',
        path=path,
        given=name,
        allowed=names(kind),
        attempt=f"{path} = {meant}" if meant else None,
    )
