"""Batch: how many tokens one step of training sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainwright.problems import Problem
from trainwright.spec.bounds import count_problems

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences of one length; microbatch_sequences of them go through a model replica at a time."""

    sequence_tokens: int
    global_sequences: int
    microbatch_sequences: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens of one step, over all replicas."""
        return self.sequence_tokens * self.global_sequences

    def check(self) -> Iterator[Problem]:
        """Sizes that are no counts, and a microbatch larger than the batch."""
        sizes = (self.sequence_tokens, self.global_sequences, self.microbatch_sequences)
        for name, value in zip(("sequence_tokens", "global_sequences", "microbatch_sequences"), sizes, strict=True):
            yield from count_problems(f"batch.{name}", value)
        if self.microbatch_sequences > self.global_sequences >= 1:
            yield Problem(
                f"a microbatch of {self.microbatch_sequences} sequences is larger than the batch of {self.global_sequences}",
                path="batch.microbatch_sequences",
                given=self.microbatch_sequences,
                allowed=f"1 to {self.global_sequences}",
                attempt="batch.microbatch_sequences = 1",
            )
