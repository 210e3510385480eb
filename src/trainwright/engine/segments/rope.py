"""Rotary positions: each pair (i, i + d / 2) of a head is turned by an angle that grows with the token's place.

Source: Su et al. 2021, RoFormer; the pairing is that of Hugging Face's Llama ("rotate half").
"""

from __future__ import annotations

import torch
from torch import Tensor


def turn_(heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """Turn heads [b, s, n, d] in place; the tables are [s, 1, d / 2]. One temporary of half the size of heads."""
    left, right = heads.chunk(2, dim=-1)
    turned = left * sine
    left.mul_(cosine).addcmul_(right, sine, value=-1)
    right.mul_(cosine).add_(turned)


def turn_back(heads: Tensor, cosine: Tensor, sine: Tensor, *, out: Tensor) -> None:
    """Write heads, turned by the opposite angle, into out; both [b, s, n, d]. The gradient of `turn_`. No temporary."""
    left, right = heads.chunk(2, dim=-1)
    out_left, out_right = out.chunk(2, dim=-1)
    torch.mul(left, cosine, out=out_left).addcmul_(right, sine)
    torch.mul(right, cosine, out=out_right).addcmul_(left, sine, value=-1)
