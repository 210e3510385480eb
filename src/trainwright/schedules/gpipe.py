"""GPipe: every position runs all its forwards, then all its backwards.

    position 0   F0 F1 F2 .. .. .. .. B0 B1 B2
    position 1   .. F0 F1 F2 .. .. B0 B1 B2 ..
    position 2   .. .. F0 F1 F2 B0 B1 B2 .. ..

Every position keeps the activations of all M microbatches. Backwards run in the order of the forwards, so that gradients are
summed in the same order as under the other schedules.

Source: Huang et al. 2019, GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.ir.slot import Backward, Forward, Slot
from trainwright.schedules.placement import one_chunk_only, one_stage_a_position

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainwright.problems import Problem

NAME = "gpipe"
DEFAULT_CHUNKS = 1
USES_CHUNKS = False

position_of = one_stage_a_position


def check(
    num_positions: int,  # noqa: ARG001 - any will do
    num_microbatches: int,  # noqa: ARG001 - any will do
    chunks: int,
) -> Iterator[Problem]:
    """Refuse chunks; any number of microbatches is possible, fewer than positions too."""
    yield from one_chunk_only(NAME, chunks)


def order(
    position: int,
    num_positions: int,  # noqa: ARG001 - the order is the same on every position
    num_microbatches: int,
    chunks: int,  # noqa: ARG001 - always one
) -> Iterator[Slot]:
    """All forwards, then all backwards, both in the order of the microbatches."""
    for microbatch in range(num_microbatches):
        yield Forward(position, microbatch)
    for microbatch in range(num_microbatches):
        yield Backward(position, microbatch)
