"""A number that has a unit says so twice: in the end of its name and in its annotation."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from architecture.source import modules

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDING = {
    "Bytes": "_bytes",
    "Seconds": "_s",
    "Flops": "_flops",
    "BytesPerSecond": "_bytes_per_s",
    "FlopsPerSecond": "_flops_per_s",
    "Usd": "_usd",
}
LONGEST_FIRST = sorted(ENDING, key=lambda alias: -len(ENDING[alias]))
PLAIN = {alias: "int" if alias in {"Bytes", "Flops"} else "float" for alias in ENDING}
SHARE = re.compile(r"_per_(rank|role|stage|block|unit|step|microbatch|token|parameter|element)$")


def annotated(tree: ast.Module) -> Iterator[tuple[ast.AST, str, ast.expr]]:
    """Every (node, name, annotation): arguments, fields and variables, and functions for what they return."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name, annotation=ast.expr() as annotation):
                yield node, name, annotation
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                yield node, name, annotation
            case ast.FunctionDef(name=name, returns=ast.expr() as annotation):
                yield node, name, annotation


def single(annotation: ast.expr) -> str | None:
    """The one type of `X` and of `X | None`."""
    match annotation:
        case ast.Name(id=name):
            return name
        case ast.BinOp(left=ast.Name(id=name), op=ast.BitOr(), right=ast.Constant(value=None)):
            return name
    return None


def fault(name: str, annotation: ast.expr) -> str | None:
    """What is wrong with a name and its annotation.

    `sent_bytes_per_rank` counts bytes: a share keeps its unit. An average number of bytes may be a plain float, whole seconds a plain int.
    """
    name, kind = SHARE.sub("", f"_{name.lower()}"), single(annotation)
    if kind in ENDING and not name.endswith(ENDING[kind]):
        return f"`{name[1:]}: {kind}` must end in {ENDING[kind]}"
    promised = next((alias for alias in LONGEST_FIRST if name.endswith(ENDING[alias])), None)
    if promised is not None and kind == PLAIN[promised]:
        return f"`{name[1:]}: {kind}` must be annotated {promised}"
    return None


def test_units_end_names():
    """units.py itself is left out: there the aliases are the subject."""
    faults = [
        f"{module.at(node)}: {found}"
        for module in modules()
        if module.name != "trainwright.units"
        for node, name, annotation in annotated(module.tree)
        if (found := fault(name, annotation)) is not None
    ]

    assert faults == []


def test_the_lint_sees_planted_faults():
    """One fault of each kind is found, and the right spelling passes."""
    wrong = ("payload: Bytes", "hop_s: float", "size_bytes: int | None", "rate: FlopsPerSecond", "sent_bytes_per_rank: int")
    right = ("payload_bytes: Bytes", "hop_s: Seconds | None", "num_ranks: int", "mean_bytes: float", "link_bytes_per_s: BytesPerSecond")

    def judge(line: str) -> str | None:
        ((_, name, annotation),) = annotated(ast.parse(line))
        return fault(name, annotation)

    assert all(judge(line) for line in wrong)
    assert [None] * len(right) == [judge(line) for line in right]
