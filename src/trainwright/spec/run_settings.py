"""RunSettings: what a run needs beyond the plan's mathematics: steps, data, seed, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainwright.problems import Problem
from trainwright.spec.bounds import count_problems

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Saved every so many steps, into a folder; a relative folder is relative to the plan file. Only the newest `keep` stay."""

    every: int
    folder: str = "checkpoints"
    keep: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The `[run]` table.

    tokens                if given, sets the number of steps: ceil(tokens / tokens of a step).
    data                  "text:stdlib" (the source files of Python's standard library) or "text:PATH", a file or a folder.
    tokenizer             path of a tokenizer.json; None means bytes are the tokens.
    validation_fraction   of the text, kept out of training.
    """

    seed: int = 0
    steps: int = 100
    tokens: int | None = None
    data: str = "text:stdlib"
    tokenizer: str | None = None
    validation_fraction: float = 0.05
    validate_every: int = 50
    checkpoint: Checkpoint | None = None

    def num_steps(self, tokens_per_step: int) -> int:
        """Return the steps of the run: as given, or enough to see `tokens` of them."""
        return self.steps if self.tokens is None else -(-self.tokens // tokens_per_step)

    def check(self) -> Iterator[Problem]:
        """Values that make no sense; whether files exist is looked at when the run starts."""
        yield from count_problems("run.steps", self.steps)
        yield from count_problems("run.validate_every", self.validate_every)
        yield from count_problems("run.seed", self.seed, least=0)
        if self.tokens is not None:
            yield from count_problems("run.tokens", self.tokens, most=10**18)
        if self.checkpoint is not None:
            yield from count_problems("run.checkpoint.every", self.checkpoint.every)
            yield from count_problems("run.checkpoint.keep", self.checkpoint.keep)
        if not 0.0 <= self.validation_fraction < 1.0:
            yield Problem(
                "the validation fraction must leave text to train on",
                path="run.validation_fraction",
                given=self.validation_fraction,
                allowed="from 0 up to, not including, 1",
                attempt="run.validation_fraction = 0.05",
            )
        if not self.data.startswith("text:") or self.data == "text:":
            yield Problem(
                f'data "{self.data}" is of no kind that can be read',
                path="run.data",
                given=self.data,
                allowed='"text:stdlib", or "text:" followed by a file or folder',
                attempt=f'run.data = "text:{self.data or "corpus/"}"',
            )
