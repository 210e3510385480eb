"""Linear layers on the last dimension, as matrix products of two dimensions."""

from __future__ import annotations

import torch
from torch import Tensor


def flat(x: Tensor) -> Tensor:
    """Return x [..., n] as a matrix [rows, n]; a view if x is contiguous."""
    return x.reshape(-1, x.shape[-1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight' (+ bias): x [b, s, in], weight [out, in] -> [b, s, out]."""
    product = torch.mm(flat(x), weight.t()) if bias is None else torch.addmm(bias, flat(x), weight.t())
    return product.view(*x.shape[:-1], weight.shape[0])


def linear_input(dy: Tensor, weight: Tensor) -> Tensor:
    """Gradient of the input of `linear`: dy [b, s, out] -> [b, s, in]."""
    return torch.mm(flat(dy), weight).view(*dy.shape[:-1], weight.shape[1])
