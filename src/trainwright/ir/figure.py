"""Numbers that say what they rest on."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_FUNCTIONS = {"min": min, "max": max, "sum": sum, "ceil": lambda value: -int(-value // 1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A value with its formula, the formula's inputs, where they come from, and what is left out.

    `formula` is a Python arithmetic expression over the names of `inputs` (+ - * / // **, min, max, ceil, sum, lists); an input
    is a number or an RFC 6901 pointer ("/memory/peak_bytes") into the document that holds the figure.
    """

    value: float | int
    unit: str
    formula: str
    inputs: Mapping[str, float | int | str] = field(default_factory=dict)
    source: str = ""
    not_counted: str = ""

    def provenance(self) -> dict[str, Any]:
        """The entry under `provenance` of a JSON document."""
        return {
            "formula": self.formula,
            "inputs": dict(self.inputs),
            "unit": self.unit,
            "source": self.source,
            "not_counted": self.not_counted,
        }


def lookup(document: Any, pointer: str) -> Any:  # noqa: ANN401  # a JSON document holds anything
    """The value at an RFC 6901 pointer."""
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        document = document[int(name)] if isinstance(document, list) else document[name]
    return document


def evaluate(formula: str, inputs: Mapping[str, Any], document: Any = None) -> Any:  # noqa: ANN401
    """The value of a formula; pointers among the inputs are looked up in `document`.

    >>> evaluate("ceil(a / 4) * 2", {"a": 9})
    6
    """
    values = {name: lookup(document, value) if isinstance(value, str) else value for name, value in inputs.items()}
    return _value(ast.parse(formula, mode="eval").body, values)


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:  # noqa: ANN401
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name(id=name):
            return values[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _arithmetic(op, _value(left, values), _value(right, values))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, values)
        case ast.Call(func=ast.Name(id=name), args=args) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(arg, values) for arg in args))  # type: ignore[operator]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item, values) for item in items]
        case _:
            msg = f"{ast.dump(node)} is no arithmetic"
            raise ValueError(msg)


def _arithmetic(op: ast.operator, left: Any, right: Any) -> Any:  # noqa: ANN401
    match op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.FloorDiv():
            return left // right
        case ast.Pow():
            return left**right
        case _:
            msg = f"{type(op).__name__} is no arithmetic of figures"
            raise ValueError(msg)
