"""peak: the largest score of each token, which keeps the exponentials of `sums` in range. A constant to backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.engine.segments.norm import wide

if TYPE_CHECKING:
    from torch import Tensor

    from trainwright.engine.segments.call import Call, Tensors

NAME = "peak"


def forward(call: Call, inputs: Tensors) -> dict[str, Tensor]:  # noqa: ARG001 - every segment takes both
    """From z [b, s, V / t] -> m [b, s], float32 or wider; the maximum over the tensor axis is still to be taken."""
    z = inputs["z"]
    return {"m": z.amax(dim=-1).to(wide(z.dtype))}


def backward(call: Call, inputs: Tensors) -> dict[str, Tensor]:  # noqa: ARG001 - every segment takes both
    """Nothing: the loss does not depend on m."""
    return {}
