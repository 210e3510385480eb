"""Interleaved 1F1B: several chunks of the model on every position, visited in groups of P microbatches.

With chunks = V, position p holds the virtual stages p, P + p, 2P + p, … (looped placement). A pass through the pipeline takes
V short visits in place of one long one, so filling and draining cost (P - 1)/V visits' worth of the whole stage. The price:
V times the sends, and up to (V - 1)·P + 2(P - p - 1) + 1 kept chunks.

    P = 2, V = 2, M = 2; a capital letter is chunk 0, a small one chunk 1
    position 0   F0 F1 f0 f1 .. b0 .. b1 B0 B1
    position 1   .. F0 F1 f0 b0 f1 b1 B0 B1 ..

Source: Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, section 2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.ir.slot import Backward, Forward, Slot
from trainwright.problems import Problem
from trainwright.schedules.placement import looped

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "interleaved"
DEFAULT_CHUNKS = 2
USES_CHUNKS = True

position_of = looped


def check(num_positions: int, num_microbatches: int, chunks: int) -> Iterator[Problem]:
    """Microbatches come in whole groups of P; one chunk is 1f1b; one position has nothing to interleave."""
    if chunks < 2:
        yield Problem(
            f"the interleaved schedule needs at least 2 chunks on every position, not {chunks}",
            given=f"chunks = {chunks}",
            allowed="chunks = 2 or more",
            attempt='chunks = 2, or the schedule "1f1b"',
        )
    if num_positions < 2:
        yield Problem(
            "the interleaved schedule needs at least 2 pipeline positions",
            given=f"pipeline of size {num_positions}",
            allowed="2 or more positions",
            attempt='the schedule "1f1b"',
        )
    elif num_microbatches % num_positions:
        below = num_microbatches - num_microbatches % num_positions
        nearby = [count for count in (below, below + num_positions) if count]
        nearest = min(nearby, key=lambda count: (abs(count - num_microbatches), -count))
        yield Problem(
            f"the interleaved schedule visits microbatches in groups of {num_positions}, and {num_microbatches} is not a multiple of it",
            given=f"{num_microbatches} microbatches on {num_positions} positions",
            allowed=f"a multiple of {num_positions}, such as {' or '.join(map(str, nearby))}",
            attempt=f'{nearest} microbatches, or the schedule "1f1b"',
        )


def order(position: int, num_positions: int, num_microbatches: int, chunks: int) -> Iterator[Slot]:
    """Fill with forwards, alternate, drain; backwards visit the chunks of a group last to first."""
    visits = list(_visits(num_positions, num_microbatches, chunks))
    forwards = [Forward(chunk * num_positions + position, microbatch) for chunk, microbatch in visits]
    backwards = [Backward((chunks - 1 - chunk) * num_positions + position, microbatch) for chunk, microbatch in visits]
    num_warmup = min(2 * (num_positions - position - 1) + (chunks - 1) * num_positions, len(visits))
    yield from forwards[:num_warmup]
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):  # the last num_warmup backwards are left to drain
        yield forward
        yield backward
    yield from backwards[len(visits) - num_warmup :]


def _visits(num_positions: int, num_microbatches: int, chunks: int) -> Iterator[tuple[int, int]]:
    """(chunk, microbatch): group by group of P microbatches, within a group chunk by chunk."""
    for first in range(0, num_microbatches, num_positions):
        for chunk in range(chunks):
            for microbatch in range(first, first + num_positions):
                yield chunk, microbatch
