"""add: ends a block: bias, dropout, residual."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainwright.engine.segments.linear import flat

if TYPE_CHECKING:
    from trainwright.engine.segments.call import Call, Tensors

NAME = "add"


def forward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From x2, f -> x = x2 + dropout(f + bias), all [b, u, h]. Backward needs nothing."""
    return {"x": joined(call, inputs["x2"], inputs["f"], bias="feed.bias", site="feed")}


def backward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From dx -> df if there is dropout (else df is dx, and not returned); gradient of the bias."""
    df = joined_backward(call, inputs["dx"], bias="feed.bias", site="feed")
    return {} if df is None else {"df": df}


def joined(call: Call, residual: Tensor, branch: Tensor, *, bias: str, site: str) -> Tensor:
    """Return residual + dropout(branch + bias), all [b, u, h]."""
    offset = call.optional((bias,))
    if call.model.dropout == 0:
        joint = torch.add(residual, branch)
        return joint if offset is None else joint.add_(offset)
    dropped = branch.clone() if offset is None else torch.add(branch, offset)
    return call.drop_(dropped, site).add_(residual)


def joined_backward(call: Call, dy: Tensor, *, bias: str, site: str) -> Tensor | None:
    """Gradient of the branch of `joined`, or None where it is dy itself; the bias' gradient goes to the sink."""
    branch = call.drop_(dy.clone(), site) if call.model.dropout > 0 else None
    if bias in call.weights:
        call.sink.bias((bias,), flat(dy if branch is None else branch))
    return branch
