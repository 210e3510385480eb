"""The loss on text that is kept out of training."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.engine.data import Corpus, Feed
from trainwright.engine.execute import Executor
from trainwright.engine.place import Place
from trainwright.engine.record import Recorder
from trainwright.engine.store import Store
from trainwright.engine.world import World
from trainwright.plan.lower import lower_evaluation
from trainwright.plan.plan import Plan

MOST_SEQUENCES = 64
"""Sequences of validation text that are looked at, always the same ones; a batch is never split, so it may be more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Forward passes over validation text with the weights of a Store that another executor trains."""

    executor: Executor
    num_batches: int
    bytes_per_token: float

    @classmethod
    def of(cls, plan: Plan, world: World, corpus: Corpus, store: Store) -> Evaluation | None:
        """Ready to look, or None where no text was kept out."""
        batch = plan.batch
        num_sequences = (len(corpus.validation) - 1) // batch.sequence_tokens
        if num_sequences < 1:
            return None
        feed = Feed(
            text=corpus.validation,
            sequence_tokens=batch.sequence_tokens,
            global_sequences=batch.global_sequences,
            num_replicas=plan.num_replicas,
            microbatch_sequences=batch.microbatch_sequences,
            seed=plan.run.seed,
        )
        recorder = Recorder(world.rank, Place(plan, world.rank).coordinate("pipeline"), on=False)
        return cls(
            executor=Executor(plan, lower_evaluation(plan), world, feed, store, recorder),
            num_batches=max(1, min(MOST_SEQUENCES, num_sequences) // batch.global_sequences),
            bytes_per_token=corpus.validation_bytes_per_token,
        )

    def loss(self) -> float:
        """Mean loss, in nat per byte of text; every rank calls it, and all get the same."""
        losses = [self.executor.step(number, self.num_batches).loss for number in range(self.num_batches)]
        return sum(losses) / len(losses) / self.bytes_per_token
