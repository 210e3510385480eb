"""embed: looks up the rows of the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainwright.engine.segments.linear import flat

if TYPE_CHECKING:
    from trainwright.engine.segments.call import Call, Tensors

NAME = "embed"


def forward(call: Call, inputs: Tensors) -> dict[str, Tensor]:  # noqa: ARG001 - tokens come with the call
    """Return e [b, s, h], or x if nothing is added to it: rows of this rank's part of the vocabulary, 0 for tokens of other ranks."""
    table = call.weights["embed.tokens"]
    rows, other = _local(call, table.shape[0])
    values = table[rows] if other is None else table[rows].masked_fill_(other.unsqueeze(-1), 0)
    return {"e" if call.model.positions == "learned" or call.model.dropout > 0 else "x": values}


def backward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From de or dx [b, s, h] -> gradient of the table only."""
    dx = inputs["de" if "de" in inputs else "dx"]
    rows, other = _local(call, call.weights["embed.tokens"].shape[0])
    value = dx if other is None else torch.masked_fill(dx, other.unsqueeze(-1), 0)
    call.sink.rows("embed.tokens", rows.flatten(), flat(value))
    return {}


def _local(call: Call, num_rows: int) -> tuple[Tensor, Tensor | None]:
    """Row of each token in the local table, and which tokens belong to other ranks (their row is 0); None if all are ours."""
    assert call.tokens is not None
    if call.num_tensor == 1:
        return call.tokens, None
    rows = call.tokens - call.tensor_index * num_rows
    other = (rows < 0) | (rows >= num_rows)
    return rows.masked_fill_(other, 0), other
