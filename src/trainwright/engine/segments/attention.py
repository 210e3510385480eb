"""Causal attention: softmax(q k' / sqrt(d)) v, with the logarithm of the softmax's denominator kept for backward.

q, out and their gradients are [b, H, s, d]; k and v [b, K, s, d] with H a multiple of K: query head i reads key-value head
i // (H / K). Their memory is [b, s, heads, d]. Three ways, by device and format:

- CPU: torch's flash kernel (bf16, float32, float64; the log-sum-exp is float32, float64 for float64).
- CUDA in 16-bit formats: torch's flash kernel.
- else: plain matrix products, which hold [b, H, s, s].
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainwright.engine.segments.norm import wide

_CPU_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - torch names its kernels so
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001
_CUDA_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001
_CUDA_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward  # noqa: SLF001


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output [b, H, s, d] and log-sum-exp [b, H, s] of the scaled scores."""
    if q.device.type == "cpu":
        out, lse = _CPU_FORWARD(q, k, v, 0.0, True)
    elif _has_flash(q):
        out, lse = _CUDA_FORWARD(q, k, v, 0.0, True)[:2]
    else:
        out, lse = attend_plainly(q, k, v)
    return out, lse


def attend_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    if q.device.type == "cpu":
        dq, dk, dv = _CPU_BACKWARD(dout, q, k, v, out, lse, 0.0, True)
    elif _has_flash(q):
        num_tokens = q.shape[2]
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that is off
        dq, dk, dv = _CUDA_BACKWARD(dout, q, k, v, out, lse, None, None, num_tokens, num_tokens, 0.0, True, unused, unused[:0])
    else:
        dq, dk, dv = attend_plainly_backward(dout, q, k, v, out, lse)
    return dq, dk, dv


def attend_plainly(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`attend` from matrix products."""
    scores = _scores(q, k)
    lse = scores.logsumexp(dim=-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_().to(v.dtype)
    out = weights @ _repeated(v, q.shape[1])
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse


def attend_plainly_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` from matrix products.

    Source: Dao et al. 2022, FlashAttention, appendix B.
    """
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    weights = _scores(q, k).sub_(lse.unsqueeze(-1)).exp_()
    dv = weights.to(v.dtype).transpose(-1, -2) @ dout
    dweights = (dout @ _repeated(v, num_heads).transpose(-1, -2)).to(lse.dtype)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1, keepdim=True)
    dscores = weights.mul_(dweights.sub_(delta)).mul_(q.shape[-1] ** -0.5).to(q.dtype)
    dq = dscores @ _repeated(k, num_heads)
    dk = dscores.transpose(-1, -2) @ q
    return dq, _summed(dk, num_kv_heads), _summed(dv, num_kv_heads)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """Scaled scores [b, H, s, s], minus infinity above the diagonal, in float32 or wider."""
    scores = (q @ _repeated(k, q.shape[1]).transpose(-1, -2)).to(wide(q.dtype)).mul_(q.shape[-1] ** -0.5)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
    return scores.masked_fill_(future, -torch.inf)


def _repeated(heads: Tensor, num_heads: int) -> Tensor:
    """[b, K, s, d] with every head repeated for the query heads that read it: [b, H, s, d]."""
    return heads.repeat_interleave(num_heads // heads.shape[1], dim=1)


def _summed(heads: Tensor, num_kv_heads: int) -> Tensor:
    """The gradient of `_repeated`."""
    return heads.view(len(heads), num_kv_heads, -1, *heads.shape[2:]).sum(dim=2)


def _has_flash(q: Tensor) -> bool:
    """Tell whether torch's CUDA flash kernel takes q."""
    return q.device.type == "cuda" and q.dtype in {torch.bfloat16, torch.float16} and q.shape[-1] % 8 == 0
