"""Weights: the parameters of one unit, as views of its flat buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

Place: TypeAlias = tuple[int, int, tuple[int, ...]]
"""Where a parameter lies in the flat buffer: start, stop (in elements) and its local shape."""


def span(table: Mapping[str, Place], names: tuple[str, ...]) -> Place:
    """The place of adjacent parameters read as one, stacked along dim 0.

    >>> span({"q": (4, 10, (2, 3)), "k": (10, 13, (1, 3))}, ("q", "k"))
    (4, 13, (3, 3))
    """
    start, stop, shape = table[names[0]]
    num_rows = shape[0]
    for name in names[1:]:
        next_start, next_stop, next_shape = table[name]
        assert next_start == stop, f"{name} does not follow the parameter before it"
        assert next_shape[1:] == shape[1:], f"{name} has rows of another width"
        stop, num_rows = next_stop, num_rows + next_shape[0]
    assert stop - start == num_rows * prod(shape[1:]), f"{names} do not fill their place"
    return start, stop, (num_rows, *shape[1:])


class Weights(Mapping[str, Tensor]):
    """Parameters by logical name, each a view of `flat` (one dimension), local to the tensor rank."""

    __slots__ = ("_flat", "_table", "_views")

    def __init__(self, flat: Tensor, table: Mapping[str, Place]) -> None:
        """Read the parameters of `table` out of `flat`. Views are made when first asked for."""
        self._flat = flat
        self._table = table
        self._views: dict[tuple[str, ...], Tensor] = {}

    @classmethod
    def none(cls) -> Weights:
        """No parameters."""
        return cls(torch.empty(0, dtype=torch.float32), {})

    def fused(self, names: tuple[str, ...]) -> Tensor:
        """Adjacent parameters as one view, stacked along dim 0."""
        view = self._views.get(names)
        if view is None:
            start, stop, shape = span(self._table, names)
            view = self._views[names] = self._flat[start:stop].view(shape)
        return view

    def __getitem__(self, name: str) -> Tensor:
        """The parameter `name`."""
        return self.fused((name,))

    def __contains__(self, name: object) -> bool:
        """Tell whether the unit has the parameter."""
        return name in self._table

    def __iter__(self) -> Iterator[str]:
        """Names, in the order of the flat buffer."""
        return iter(self._table)

    def __len__(self) -> int:
        """Number of parameters."""
        return len(self._table)
