"""The optimizer's update of a flat piece, written from its definition."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainwright.prove.numeric.call import Array
from trainwright.spec.families.segment import Unit
from trainwright.spec.optimizer import Optimizer


def decays(unit: Unit, num_shards: int) -> NDArray[np.bool_]:
    """Which elements of a unit's flat buffer weight decay shrinks: those of matrices."""
    mask = np.zeros(unit.padded(num_shards), dtype=bool)
    for span in unit.spans:
        mask[span.start : span.stop] = len(span.parameter.shape) > 1
    return mask


def update(
    optimizer: Optimizer,
    weights: Array,
    gradients: Array,
    states: tuple[Array, ...],
    *,
    decayed: NDArray[np.bool_],
    norm: float,
    step: int,
    lr: float,
) -> None:
    """One step in place, the gradients clipped to the optimizer's norm.

    adamw   m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, p -= lr m' / (sqrt(v') + eps) with m' = m / (1 - b1^t), v' alike
    sgd     m = momentum m + g, p -= lr m
    Both shrink p by lr * weight_decay first.
    """
    clip = optimizer.clip_norm
    g = gradients * (clip / norm) if 0 < clip < norm else gradients
    weights -= lr * optimizer.weight_decay * weights * decayed
    if optimizer.name == "sgd":
        velocity = g
        if states:
            (velocity,) = states
            velocity[...] = optimizer.momentum * velocity + g
        weights -= lr * velocity
        return
    (mean, square), (beta1, beta2) = states, optimizer.betas
    mean[...] = beta1 * mean + (1 - beta1) * g
    square[...] = beta2 * square + (1 - beta2) * g * g
    weights -= lr * (mean / (1 - beta1 ** (step + 1))) / (np.sqrt(square / (1 - beta2 ** (step + 1))) + optimizer.eps)
