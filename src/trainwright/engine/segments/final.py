"""final: the norm before the head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.engine.segments.norm import normalise, normalise_backward

if TYPE_CHECKING:
    from torch import Tensor

    from trainwright.engine.segments.call import Call, Tensors

NAME = "final"


def forward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From x [b, u, h] -> h [b, u, h]. Backward needs x and saved.rstd (and saved.mean) [b, u]."""
    h, saved = normalise(call, NAME, inputs["x"])
    return call.kept({"h": h}, saved)


def backward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From x, saved, dh -> dx, all [b, u, h]."""
    return {"dx": normalise_backward(call, NAME, inputs["dh"], inputs["x"], inputs, None)}
