"""enter: adds learned positions to the embeddings, then dropout. Absent from models with neither."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trainwright.engine.segments.call import Call, Tensors

NAME = "enter"


def forward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From e [b, u, h] -> x [b, u, h]."""
    e = inputs["e"]
    x = torch.add(e, call.weights["positions.table"][_places(call, e)]) if call.model.positions == "learned" else e.clone()
    return {"x": call.drop_(x, NAME) if call.model.dropout > 0 else x}


def backward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From dx [b, u, h] -> de if there is dropout (else de is dx, and not returned); gradient of the positions."""
    dx = inputs["dx"]
    de = call.drop_(dx.clone(), NAME) if call.model.dropout > 0 else dx
    if call.model.positions == "learned":
        call.sink.rows("positions.table", _places(call, de), de.sum(dim=0))
    return {"de": de} if call.model.dropout > 0 else {}


def _places(call: Call, stream: Tensor) -> slice:
    """Places of the tokens of a stream tensor within their sequences."""
    first = call.first_token(stream.shape[1])
    return slice(first, first + stream.shape[1])
