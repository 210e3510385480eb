"""The toy family: layers with tanh between, half the squared distance to the target."""

from __future__ import annotations

from typing import Final

import numpy as np

from trainwright.prove.numeric.call import Call, Samples, Values
from trainwright.spec.families.toy import WEIGHT

NAME: Final = "toy"


def num_valid(samples: Samples) -> float:
    """The samples of a microbatch: the loss is their mean."""
    return float(len(samples.inputs))


def forward(segment: str, call: Call, inputs: Values) -> Values:
    """`sample` hands on the rows, `layer` multiplies, `loss` compares."""
    match segment:
        case "sample":
            return {"x": np.array(call.samples.inputs, dtype=np.float64)}
        case "layer":
            product = inputs["x"] @ call.weights[WEIGHT].T
            return {"y": product if _is_last(call) else np.tanh(product)}
        case "loss":
            return {"loss": np.array(0.5 * ((inputs["x"] - call.samples.targets) ** 2).sum() / call.num_valid)}
        case _:
            raise KeyError(segment)


def backward(segment: str, call: Call, inputs: Values) -> Values:
    """Through the distance and the layers; the derivative of tanh is 1 - y^2."""
    match segment:
        case "loss":
            return {"dx": (inputs["x"] - call.samples.targets) / call.num_valid}
        case "layer":
            dproduct = inputs["dy"] if _is_last(call) else inputs["dy"] * (1.0 - inputs["y"] ** 2)
            call.gradients[WEIGHT][...] += dproduct.T @ inputs["x"]
            return {"dx": dproduct @ call.weights[WEIGHT]}
        case _:
            raise KeyError(segment)


def _is_last(call: Call) -> bool:
    return call.block == call.model.num_layers - 1
