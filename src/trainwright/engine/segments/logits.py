"""logits: scores of this rank's part of the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainwright.engine.segments.linear import flat, linear, linear_input

if TYPE_CHECKING:
    from trainwright.engine.segments.call import Call, Tensors

NAME = "logits"


def forward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From h [b, s, h] -> z [b, s, V / t]; minus infinity beyond the end of the vocabulary. Backward needs h."""
    weight = call.weights[_weight(call)]
    z = linear(inputs["h"], weight)
    num_real = max(call.model.vocab - call.tensor_index * weight.shape[0], 0)
    if num_real < weight.shape[0]:
        z[..., num_real:] = -torch.inf
    return {"z": z}


def backward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From h, dz -> dh [b, s, h], to be summed over the tensor axis."""
    dz = inputs["dz"]
    call.sink.linear((_weight(call),), flat(inputs["h"]), flat(dz))
    return {"dh": linear_input(dz, call.weights[_weight(call)])}


def _weight(call: Call) -> str:
    return "embed.tokens" if call.model.tied else "head.weight"
