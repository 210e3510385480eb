"""What a segment is given, and what a rank is fed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainwright.spec.model import Model

Array: TypeAlias = NDArray[np.float64]

Saved: TypeAlias = dict[str, Array]
"""What a forward leaves for its backward beside the buffers that are kept."""

Values: TypeAlias = dict[str, Any]
"""Arrays by the segment's own names for them; under "saved" lies a Saved."""


@dataclass(frozen=True, slots=True)
class Samples:
    """One microbatch of one replica. Decoder: tokens and next tokens, [b, s], a target below 0 is ignored. Toy: rows [b, h]."""

    inputs: NDArray[Any]
    targets: NDArray[Any]


Feed: TypeAlias = Callable[[int, int, int], Samples]
"""(step, replica, microbatch) -> Samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a segment on one rank.

    `weights` and `gradients` are views of flat buffers by parameter name, local to the tensor rank; a backward adds to `gradients`.
    `num_valid` is that of the whole step, over all ranks and microbatches.
    """

    model: Model
    samples: Samples
    weights: Mapping[str, Array]
    gradients: Mapping[str, Array]
    block: int | None
    num_valid: float
    tensor_index: int = 0
    num_tensor: int = 1
    sequence: bool = False
