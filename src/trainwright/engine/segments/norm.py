"""RMSNorm and LayerNorm over the last dimension.

bf16 is widened to float32 for statistics and normalisation; float32 and float64 stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trainwright.engine.segments.call import Call, Tensors


def wide(dtype: torch.dtype) -> torch.dtype:
    """The format for statistics, softmax and loss: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def normalise(call: Call, name: str, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return norm(x) of x [b, u, h] with the parameters `name`.weight and .bias, and what backward needs.

    That is saved.rstd and, for LayerNorm, saved.mean, each [b, u] in float32 or wider.
    """
    weight = call.weights[f"{name}.weight"]
    values = x.to(wide(x.dtype))
    if call.model.norm == "rmsnorm":
        rstd = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
        rstd.square_().div_(x.shape[-1]).add_(call.model.norm_eps).rsqrt_()
        y = torch.mul(values, rstd, out=values if values is not x else None)
        return y.to(x.dtype).mul_(weight), {"saved.rstd": rstd.squeeze(-1)}
    bias = call.optional((f"{name}.bias",))
    y, mean, rstd = torch.native_layer_norm(
        values, x.shape[-1:], weight.to(values.dtype), None if bias is None else bias.to(values.dtype), call.model.norm_eps
    )
    return y.to(x.dtype), {"saved.mean": mean.squeeze(-1), "saved.rstd": rstd.squeeze(-1)}


def normalise_backward(call: Call, name: str, dy: Tensor, x: Tensor, saved: Tensors, residual: Tensor | None) -> Tensor:
    """Gradient of x [b, u, h], plus `residual` if given; gradients of weight and bias go to the sink.

    RMSNorm is LayerNorm with mean 0, except that LayerNorm's gradient is also made orthogonal to the constant vector: the part that
    its kernel takes away, rstd * mean(dy * weight), is put back. One fast kernel serves both.
    """
    rstd = saved["saved.rstd"]
    mean = saved.get("saved.mean")
    values, gradient, weight = x.to(rstd.dtype), dy.to(rstd.dtype), call.weights[f"{name}.weight"].to(rstd.dtype)
    has_bias = f"{name}.bias" in call.weights
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        gradient,
        values,
        x.shape[-1:],
        (torch.zeros_like(rstd) if mean is None else mean).unsqueeze(-1),
        rstd.unsqueeze(-1),
        weight,
        weight if has_bias else None,  # only its presence matters
        [True, True, has_bias],
    )
    if mean is None:
        taken = torch.mv(gradient.reshape(-1, x.shape[-1]), weight).view_as(rstd).mul_(rstd).div_(x.shape[-1])
        dx.add_(taken.unsqueeze(-1))
    if residual is not None:
        dx.add_(residual)
    call.sink.add(f"{name}.weight", dweight)
    if has_bias:
        call.sink.add(f"{name}.bias", dbias)
    result: Tensor = dx.to(x.dtype)
    return result
