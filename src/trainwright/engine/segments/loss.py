"""loss: mean cross-entropy of the step's tokens, as far as this microbatch contributes to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trainwright.engine.segments.call import Call, Tensors

NAME = "loss"


def forward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From r [2, b, s] -> loss []: sum of log r[0] - r[1] over the targets that count, divided by their number in the whole step.

    Summed over microbatches and data ranks it is the step's loss, in nats a token. Backward needs r.
    """
    r = inputs["r"]
    losses = torch.log(r[0]).sub_(r[1]).masked_fill_(_ignored(call), 0)
    return {"loss": losses.sum().div_(_num_valid(call))}


def backward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From r -> dr [2, b, s]."""
    r = inputs["r"]
    dr = torch.empty_like(r)
    torch.reciprocal(r[0], out=dr[0])
    dr[1].fill_(-1.0)
    return {"dr": dr.masked_fill_(_ignored(call), 0).div_(_num_valid(call))}


def _ignored(call: Call) -> Tensor:
    assert call.targets is not None
    return call.targets < 0


def _num_valid(call: Call) -> float:
    """At least 1: a step whose targets are all ignored has loss 0."""
    return max(float(call.num_valid_tokens), 1.0)
