"""1F1B: fill the pipeline, then alternate one forward and one backward, then drain it.

    position 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    position 1   .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    position 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

As long as GPipe at equal stages, but position p of P keeps only min(P - p, M) microbatches.

Source: Narayanan et al. 2019, PipeDream, and 2021, Efficient Large-Scale Language Model Training on GPU Clusters (the flushing
variant, PipeDream-Flush: all microbatches see one version of the weights).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.ir.slot import Backward, Forward, Slot
from trainwright.schedules.placement import one_chunk_only, one_stage_a_position

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainwright.problems import Problem

NAME = "1f1b"
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
    num_positions: int,
    num_microbatches: int,
    chunks: int,  # noqa: ARG001 - always one
) -> Iterator[Slot]:
    """Fill, alternate, drain: the order in which one position visits its microbatches."""
    num_warmup = min(num_positions - position - 1, num_microbatches)
    for microbatch in range(num_warmup):
        yield Forward(position, microbatch)
    for microbatch in range(num_microbatches - num_warmup):
        yield Forward(position, num_warmup + microbatch)
        yield Backward(position, microbatch)
    for microbatch in range(num_microbatches - num_warmup, num_microbatches):
        yield Backward(position, microbatch)
