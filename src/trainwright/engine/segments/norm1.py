"""norm1: the norm before attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.engine.segments.norm import normalise, normalise_backward

if TYPE_CHECKING:
    from torch import Tensor

    from trainwright.engine.segments.call import Call, Tensors

NAME = "norm1"


def forward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From x [b, u, h] -> h1 [b, u, h]. Backward needs x and saved.rstd (and saved.mean) [b, u]."""
    h1, saved = normalise(call, NAME, inputs["x"])
    return call.kept({"h1": h1}, saved)


def backward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From x, saved, dh1, and dm that came round the attention by the residual -> dx, all [b, u, h]."""
    return {"dx": normalise_backward(call, NAME, inputs["dh1"], inputs["x"], inputs, inputs["dm"])}
