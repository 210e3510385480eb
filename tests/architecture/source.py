"""The source of the package as syntax trees, for the tests of this folder."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).parents[2] / "src" / "trainwright"


@dataclass(frozen=True, kw_only=True)
class Module:
    """One file: its dotted name, its path, its tree."""

    name: str
    path: Path
    tree: ast.Module

    def at(self, node: ast.AST) -> str:
        """Tell where a node stands."""
        return f"{self.path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 1)}"

    def imports(self) -> Iterator[tuple[ast.AST, str]]:
        """Every module that an import statement names, wherever it stands."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.at(node)}: imports are written out in full"
                assert node.module is not None
                if node.module == "trainwright":
                    yield from ((node, f"trainwright.{alias.name}") for alias in node.names)
                else:
                    yield node, node.module


@cache
def modules() -> tuple[Module, ...]:
    """All files of the package, in the order of their names."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return tuple(Module(name=_dotted(path), path=path, tree=ast.parse(path.read_text(encoding="utf-8"))) for path in paths)


def modules_under(name: str) -> tuple[Module, ...]:
    """The files of one folder, at any depth."""
    return tuple(module for module in modules() if module.name == name or module.name.startswith(f"{name}."))


def _dotted(path: Path) -> str:
    parts = ["trainwright", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
