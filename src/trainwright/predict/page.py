"""A JSON document in which every number says where it comes from.

Derived numbers are computed by evaluating the very formula that is shown, so that the entry gives the number exactly. The rest are
leaves: given as they are, or as a sum of parts that is only spelled out when somebody asks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from trainwright.ir.figure import Figure, evaluate

Number: TypeAlias = int | float
Spelled: TypeAlias = Callable[[], tuple[str, Mapping[str, Number | str]]]
"""Gives a formula and its inputs, when asked."""


@dataclass(slots=True)
class Page:
    """The document so far, and the reasons for its numbers."""

    document: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, Callable[[], Figure]] = field(default_factory=dict)

    def text(self, pointer: str, value: object) -> None:
        """Put something that is no number: text, null, or an empty list or table."""
        parent, name = self._place(pointer)
        if isinstance(parent, list):
            assert int(name) == len(parent), f"{pointer} skips an entry"
            parent.append(value)
        else:
            parent[name] = value

    def leaf(
        self, pointer: str, value: Number, *, unit: str = "", source: str = "", not_counted: str = "", spelled: Spelled | None = None
    ) -> None:
        """Put a number that is what it is, or whose formula `spelled` gives."""
        self.text(pointer, value)

        def why() -> Figure:
            formula, inputs = spelled() if spelled else ("value", {"value": value})
            return Figure(value=value, unit=unit, formula=formula, inputs=inputs, source=source, not_counted=not_counted)

        self.reasons[pointer] = why

    def figure(
        self, pointer: str, formula: str, inputs: Mapping[str, Number | str], *, unit: str = "", source: str = "", not_counted: str = ""
    ) -> Number:
        """Put a number that a formula gives; inputs are numbers, or pointers to numbers that stand already."""
        value: Number = evaluate(formula, inputs, self.document)
        self.leaf(pointer, value, unit=unit, source=source, not_counted=not_counted, spelled=lambda: (formula, inputs))
        return value

    def provenance(self) -> dict[str, Any]:
        """The reason for every number, by pointer."""
        return {pointer: why().provenance() for pointer, why in self.reasons.items()}

    def _place(self, pointer: str) -> tuple[Any, str]:
        """The table or list that holds an entry, made if it is missing, and the entry's name in it."""
        here: Any = self.document
        *path, name = (part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:])
        for part in path:
            here = here[int(part)] if isinstance(here, list) else here.setdefault(part, {})
        return here, name


def total(parts: Mapping[str, Number]) -> tuple[str, dict[str, Number | str]]:
    """A sum of named parts, as formula and inputs; names are made into identifiers.

    >>> total({"all_gather zero": 2, "send": 1})
    ('all_gather_zero + send', {'all_gather_zero': 2, 'send': 1})
    """
    inputs: dict[str, Number | str] = {}
    for name, value in parts.items():
        inputs[identifier(name, inputs)] = value
    return " + ".join(inputs) or "0", inputs


def weighted(terms: Mapping[str, tuple[Number, Number]]) -> tuple[str, dict[str, Number | str]]:
    """A sum of products, count times size, as formula and inputs.

    >>> weighted({"weights": (3, 8)})
    ('weights * weights_bytes', {'weights': 3, 'weights_bytes': 8})
    """
    inputs: dict[str, Number | str] = {}
    products = []
    for name, (count, size) in terms.items():
        mine = identifier(name, inputs)
        inputs |= {mine: count, f"{mine}_bytes": size}
        products.append(f"{mine} * {mine}_bytes")
    return " + ".join(products) or "0", inputs


def identifier(name: str, taken: Mapping[str, object]) -> str:
    """A name that a formula can use, not yet taken."""
    plain = re.sub(r"\W+", "_", name).strip("_") or "value"
    plain = f"n{plain}" if plain[0].isdigit() else plain
    while plain in taken:
        plain += "_"
    return plain
