"""What a pipeline schedule yields: which stage works on which microbatch next.

`stage` is the virtual stage. Backward is the whole backward pass; a schedule that splits it yields BackwardInput (gradient of
the input) and later BackwardWeight (gradients of the weights) in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Forward:
    """The forward pass of one stage for one microbatch."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Backward:
    """The whole backward pass of one stage for one microbatch."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """The half of a backward pass that the previous stage waits for."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """The half of a backward pass that only this stage's weights need."""

    stage: int
    microbatch: int


Slot: TypeAlias = Forward | Backward | BackwardInput | BackwardWeight
