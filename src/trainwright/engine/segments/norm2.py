"""norm2: ends the attention half of a block and begins the feed-forward half: bias, dropout, residual, norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.engine.segments.add import joined, joined_backward
from trainwright.engine.segments.norm import normalise, normalise_backward

if TYPE_CHECKING:
    from torch import Tensor

    from trainwright.engine.segments.call import Call, Tensors

NAME = "norm2"


def forward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From x, a -> x2 = x + dropout(a + bias) and h2 = norm(x2), all [b, u, h]. Backward needs x2 and saved.rstd (and saved.mean)."""
    x2 = joined(call, inputs["x"], inputs["a"], bias="out.bias", site="attention")
    h2, saved = normalise(call, NAME, x2)
    return call.kept({"x2": x2, "h2": h2}, saved)


def backward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From x2, saved, dh2 and the residual's dx -> dm, the gradient of x2, and da if there is dropout (else da is dm, not returned)."""
    dm = normalise_backward(call, NAME, inputs["dh2"], inputs["x2"], inputs, inputs["dx"])
    da = joined_backward(call, dm, bias="out.bias", site="attention")
    return {"dm": dm} if da is None else {"dm": dm, "da": da}
