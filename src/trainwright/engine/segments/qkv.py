"""qkv: queries, keys and values in one product; queries and keys turned by their positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.engine.segments.linear import flat, linear, linear_input
from trainwright.engine.segments.rope import turn_

if TYPE_CHECKING:
    from torch import Tensor

    from trainwright.engine.segments.call import Call, Tensors

NAME = "qkv"
WEIGHTS = ("q.weight", "k.weight", "v.weight")
BIASES = ("q.bias", "k.bias", "v.bias")


def forward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From h1 [b, s, h] -> qkv [b, s, (H + 2 K) d / t]: queries, keys, values, each head by head. Backward needs h1."""
    qkv = linear(inputs["h1"], call.fused(WEIGHTS), call.optional(BIASES))
    if call.model.positions == "rope":
        num_turned = (call.model.num_heads + call.model.num_kv_heads) // call.num_tensor
        heads = qkv.view(*qkv.shape[:2], -1, call.model.head_width)
        turn_(heads[:, :, :num_turned], *call.tables.rope(call.model, qkv.shape[1], qkv))
    return {"qkv": qkv}


def backward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From h1 and dqkv -> dh1 [b, s, h]. dqkv is the gradient before the turn: `core` has turned it back."""
    dqkv = inputs["dqkv"]
    call.sink.linear(WEIGHTS, flat(inputs["h1"]), flat(dqkv))
    if BIASES[0] in call.weights:
        call.sink.bias(BIASES, flat(dqkv))
    return {"dh1": linear_input(dqkv, call.fused(WEIGHTS))}
