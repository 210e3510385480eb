"""core: causal attention of the local heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainwright.engine.segments.attention import attend, attend_backward
from trainwright.engine.segments.rope import turn_back

if TYPE_CHECKING:
    from trainwright.engine.segments.call import Call, Tensors

NAME = "core"


def forward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From qkv [b, s, (H + 2 K) d / t] -> c [b, s, H d / t]. Backward needs both, and saved.lse [b, H / t, s]."""
    out, lse = attend(*(part.transpose(1, 2) for part in _parts(call, inputs["qkv"])))
    return call.kept({"c": out.transpose(1, 2).flatten(2)}, {"saved.lse": lse})


def backward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From qkv, c, saved.lse, dc -> dqkv, turned back: the gradient of queries, keys and values before their turn.

    It is turned back here, while it is copied out of the kernel's three results, because that costs nothing extra.
    """
    q, k, v = (part.transpose(1, 2) for part in _parts(call, inputs["qkv"]))
    dout, out = (_heads(call, inputs[name]).transpose(1, 2) for name in ("dc", "c"))
    gradients = [part.transpose(1, 2) for part in attend_backward(dout, q, k, v, out, inputs["saved.lse"])]
    dqkv = torch.empty_like(inputs["qkv"])
    dq, dk, dv = _parts(call, dqkv)
    if call.model.positions == "rope":
        tables = call.tables.rope(call.model, dqkv.shape[1], dqkv)
        turn_back(gradients[0], *tables, out=dq)
        turn_back(gradients[1], *tables, out=dk)
    else:
        dq.copy_(gradients[0])
        dk.copy_(gradients[1])
    dv.copy_(gradients[2])
    return {"dqkv": dqkv}


def _parts(call: Call, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of queries [b, s, H / t, d], keys and values [b, s, K / t, d]."""
    num_heads, num_kv_heads = call.model.num_heads // call.num_tensor, call.model.num_kv_heads // call.num_tensor
    q, k, v = torch.split(_heads(call, qkv), [num_heads, num_kv_heads, num_kv_heads], dim=2)
    return q, k, v


def _heads(call: Call, x: Tensor) -> Tensor:
    """View of x [b, s, n d] as [b, s, n, d]."""
    return x.view(*x.shape[:2], -1, call.model.head_width)
