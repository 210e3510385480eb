"""Gradients: where backward puts the gradients of one unit's parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from trainwright.engine.segments.weights import Place, span

if TYPE_CHECKING:
    from collections.abc import Mapping


class Sink(Protocol):
    """What backward writes to. A sink may add at once or keep the operands and add later."""

    def linear(self, names: tuple[str, ...], x: Tensor, dy: Tensor) -> None:
        """Add dy' x to the weights `names`, stacked along dim 0; x is [n, in], dy [n, out]."""

    def bias(self, names: tuple[str, ...], dy: Tensor) -> None:
        """Add the sum of dy [n, out] over its rows to the biases `names`, stacked."""

    def add(self, name: str, value: Tensor) -> None:
        """Add a value of the parameter's shape."""

    def rows(self, name: str, index: Tensor | slice, value: Tensor) -> None:
        """Add value [n, width] to the rows that `index` names; a row may be named more than once."""


class Gradients:
    """Adds at once into views of a flat buffer.

    A fresh buffer holds garbage: the first write of a parameter overwrites it, and `close` zeroes what was never written, padding
    included. A buffer that is not fresh is added to. The format of `flat` may be wider than that of the values: a product is then
    formed in the format of its operands (one temporary the size of the weights) and widened before it is added.
    """

    def __init__(self, flat: Tensor, table: Mapping[str, Place], *, fresh: bool) -> None:
        """Write to `flat` (one dimension), where `table` says the parameters lie."""
        self._flat = flat
        self._table = table
        self._fresh = fresh
        self._written: set[str] = set()

    def linear(self, names: tuple[str, ...], x: Tensor, dy: Tensor) -> None:
        """See Sink."""
        target, first = self._target(names)
        if target.dtype == x.dtype:
            target.addmm_(dy.t(), x, beta=0 if first else 1)
        elif first:
            target.copy_(torch.mm(dy.t(), x))
        else:
            target.add_(torch.mm(dy.t(), x))

    def bias(self, names: tuple[str, ...], dy: Tensor) -> None:
        """See Sink."""
        target, first = self._target(names)
        if first:
            torch.sum(dy, 0, out=target, dtype=target.dtype)
        else:
            target.add_(torch.sum(dy, 0, dtype=target.dtype))

    def add(self, name: str, value: Tensor) -> None:
        """See Sink."""
        target, first = self._target((name,))
        if first:
            target.copy_(value)
        else:
            target.add_(value)

    def rows(self, name: str, index: Tensor | slice, value: Tensor) -> None:
        """See Sink."""
        target, first = self._target((name,))
        if first:
            target.zero_()
        if isinstance(index, slice):
            target[index].add_(value)
        else:
            target.index_add_(0, index, value.to(target.dtype))

    def close(self) -> None:
        """Zero what a fresh buffer still holds of garbage. After it, the buffer is no longer fresh."""
        if not self._fresh:
            return
        end = 0
        for name, (start, stop, _) in sorted(self._table.items(), key=lambda entry: entry[1][0]):
            self._flat[end:start].zero_()
            if name not in self._written:
                self._flat[start:stop].zero_()
            end = stop
        self._flat[end:].zero_()
        self._fresh = False

    def _target(self, names: tuple[str, ...]) -> tuple[Tensor, bool]:
        """The view of `names`, and whether its content is garbage."""
        start, stop, shape = span(self._table, names)
        target = self._flat[start:stop].view(shape)
        if not self._fresh:
            return target, False
        num_written = len(self._written.intersection(names))
        if 0 < num_written < len(names):
            for name in self._written.symmetric_difference(names).intersection(names):
                first, last, _ = self._table[name]
                self._flat[first:last].zero_()
        self._written.update(names)
        return target, num_written == 0
