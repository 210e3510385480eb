"""feed: the feed-forward part, SwiGLU or GELU.

Sources: Shazeer 2020, GLU variants improve transformer (SwiGLU); Hendrycks and Gimpel 2016, Gaussian error linear units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainwright.engine.segments.linear import flat, linear, linear_input

if TYPE_CHECKING:
    from trainwright.engine.segments.call import Call, Tensors

NAME = "feed"
_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def forward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From h2 [b, s, h] -> f [b, s, h], to be summed over the tensor axis; `add` adds the bias.

    Backward needs h2 and saved.act [b, s, f / t]; SwiGLU also saved.gate_up [b, s, 2 f / t], GELU saved.pre [b, s, f / t].
    """
    inner = linear(inputs["h2"], call.fused(_weights(call)), call.optional(_biases(call)))
    if call.model.gated:
        gate, up = inner.chunk(2, dim=-1)
        act = torch.nn.functional.silu(gate).mul_(up)
    else:
        act = torch.nn.functional.gelu(inner, approximate=_APPROXIMATE[call.model.activation])
    outputs = {} if call.only_saved else {"f": linear(act, call.weights["down.weight"])}
    return call.kept(outputs, {"saved.gate_up" if call.model.gated else "saved.pre": inner, "saved.act": act})


def backward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From h2, saved, and df (dx if there is no dropout) [b, s, h] -> dh2."""
    df = inputs["df" if call.model.dropout > 0 else "dx"]
    call.sink.linear(("down.weight",), flat(inputs["saved.act"]), flat(df))
    dact = linear_input(df, call.weights["down.weight"])
    if call.model.gated:
        dinner = _swiglu_backward(dact, inputs["saved.gate_up"])
    else:
        approximate = _APPROXIMATE[call.model.activation]
        dinner = torch.ops.aten.gelu_backward.grad_input(dact, inputs["saved.pre"], approximate=approximate, grad_input=dact)
    del dact
    call.sink.linear(_weights(call), flat(inputs["h2"]), flat(dinner))
    if _biases(call)[0] in call.weights:
        call.sink.bias(_biases(call), flat(dinner))
    return {"dh2": linear_input(dinner, call.fused(_weights(call)))}


def _swiglu_backward(dact: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of gate_up [b, s, 2 f / t] from that of silu(gate) * up. Overwrites dact [b, s, f / t]."""
    gate, up = gate_up.chunk(2, dim=-1)
    dgate_up = torch.empty_like(gate_up)
    dgate, dup = dgate_up.chunk(2, dim=-1)
    torch.ops.aten.silu.out(gate, out=dup)
    dup.mul_(dact)
    torch.ops.aten.silu_backward.grad_input(dact.mul_(up), gate, grad_input=dgate)
    return dgate_up


def _weights(call: Call) -> tuple[str, ...]:
    return ("gate.weight", "up.weight") if call.model.gated else ("up.weight",)


def _biases(call: Call) -> tuple[str, ...]:
    return ("gate.bias", "up.bias") if call.model.gated else ("up.bias",)
