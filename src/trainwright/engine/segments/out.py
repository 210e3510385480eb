"""out: mixes the heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.engine.segments.linear import flat, linear, linear_input

if TYPE_CHECKING:
    from torch import Tensor

    from trainwright.engine.segments.call import Call, Tensors

NAME = "out"


def forward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From c [b, s, H d / t] -> a [b, s, h], to be summed over the tensor axis; `norm2` adds the bias. Backward needs c."""
    return {"a": linear(inputs["c"], call.weights["out.weight"])}


def backward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From c, and da (dm if there is no dropout) [b, s, h] -> dc."""
    da = inputs["da" if call.model.dropout > 0 else "dm"]
    call.sink.linear(("out.weight",), flat(inputs["c"]), flat(da))
    return {"dc": linear_input(da, call.weights["out.weight"])}
