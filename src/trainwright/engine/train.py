"""Training: steps of the executor over real text, with metrics, validation, checkpoints, and a record of some steps.

`corpus_of` reads the text once, before ranks are started; `train` is what every rank does.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from trainwright.engine import checkpoint, saving
from trainwright.engine.data import Batches, Corpus, Cursor, Feed, load_corpus
from trainwright.engine.evaluate import Evaluation
from trainwright.engine.execute import Executor, StepResult
from trainwright.engine.gathering import told_by_all
from trainwright.engine.metrics import Metrics
from trainwright.engine.outcome import NUM_WARM_UP, Look, Measured, Outcome
from trainwright.engine.place import Place
from trainwright.engine.progress import Progress
from trainwright.engine.record import Recorder
from trainwright.engine.state import initial_store
from trainwright.engine.tokenizer import FileTokenizer
from trainwright.engine.trace import trace, trace_events
from trainwright.engine.world import World
from trainwright.ir.action import Collective, Send
from trainwright.ir.event import Event
from trainwright.ir.program import Program
from trainwright.plan.lower import lower
from trainwright.plan.plan import Plan
from trainwright.problems import PlanError, Problem
from trainwright.units import Bytes, Seconds

FIRST_RECORDED = (2, 3, 4)
RECORDED_EVERY = 50
"""Which steps are recorded: the first after warm-up, then one in so many."""

MOST_TRACED = 8
"""Recorded steps that go into a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a run is done, beyond what its plan says.

    folder       where metrics and traces go; it exists
    resume       go on from the newest checkpoint
    stop_after   stop when so many steps are done, counted from the beginning of the run; None: all of them
    profile      write a trace of the recorded steps
    """

    folder: Path
    resume: bool = False
    stop_after: int | None = None
    profile: bool = False
    progress: bool = True


def corpus_of(plan: Plan) -> Corpus:
    """The text that a plan names, as tokens. PlanError if it cannot be read, or has tokens that the model does not know."""
    tokenizer = None if plan.run.tokenizer is None else FileTokenizer(plan.path(plan.run.tokenizer))
    corpus = load_corpus(
        plan.run.data,
        sequence_tokens=plan.batch.sequence_tokens,
        validation_fraction=plan.run.validation_fraction,
        tokenizer=tokenizer,
        folder=plan.source.folder,
    )
    if corpus.vocab_size > plan.model.vocab:
        path = "run.data" if plan.run.tokenizer is None else "run.tokenizer"
        given = plan.run.data if plan.run.tokenizer is None else plan.run.tokenizer
        raise PlanError(
            Problem(
                f"the text has {corpus.vocab_size} different tokens, the model knows {plan.model.vocab}",
                path=path,
                given=given,
                allowed=f"tokens below {plan.model.vocab}",
                attempt="a model with a larger vocab, or another run.tokenizer",
            ).at(*plan.source.place(path))
        )
    return corpus


def prepare_checkpoints(plan: Plan, *, resume: bool) -> None:
    """Before ranks start: the folder can be written, and holds a checkpoint exactly if the run is to be resumed. PlanError otherwise."""
    path = "run.checkpoint.folder"
    if plan.run.checkpoint is None:
        if resume:
            problem = Problem("the plan saves no checkpoints, so there is none to resume from", path="run.checkpoint")
            raise PlanError(problem.at(*plan.source.place("run")))
        return
    folder = plan.path(plan.run.checkpoint.folder)
    newest = checkpoint.latest(folder)
    if newest is not None and not resume:
        message = f"the folder holds the checkpoint of step {newest} already"
        attempt = "--resume, to go on from it, or another folder: --run.checkpoint.folder NAME"
        raise PlanError(Problem(message, path=path, given=str(folder), attempt=attempt).at(*plan.source.place(path)))
    if newest is None and resume:
        message = "there is no checkpoint to resume from"
        raise PlanError(Problem(message, path=path, given=str(folder), attempt="run without --resume").at(*plan.source.place(path)))
    if newest is not None and newest >= plan.num_steps:
        message = f"the checkpoint is of step {newest}, and the run has {plan.num_steps} steps: nothing is left to do"
        raise PlanError(Problem(message, path="run.steps", given=plan.run.steps, attempt=f"--run.steps {2 * newest}"))
    checkpoint.prepare(folder)


def prepare_wire(plan: Plan, program: Program, world: World) -> None:
    """Name every group and channel of the Program to the wire, in one order on every rank."""
    found = [action for actions in program.templates.values() for action in actions if isinstance(action, Collective)]
    groups = {
        (Place(plan, rank).members(group), str(group))
        for group in {action.group for action in found}
        for rank in world.ranks
        if all(plan.coordinates(rank)[axis] in places for axis, places in group.only)
    }
    channels: set[tuple[int, int, str]] = set()
    for position in range(len(program.roles)):
        for action in program.actions(position):
            if isinstance(action, Send):
                ranks = plan.ranks_of({"pipeline": position})
                channels |= {(rank, Place(plan, rank).peer(action.to), action.channel) for rank in ranks}
    world.wire.prepare(sorted(groups), sorted(channels))


@dataclass(slots=True, kw_only=True)
class Rank:
    """One rank of a run: its buffers, its executor, what it has recorded."""

    plan: Plan
    world: World
    program: Program
    executor: Executor
    recorder: Recorder
    position: int
    base_bytes: Bytes
    recorded: list[tuple[Seconds, tuple[Event, ...]]] = field(default_factory=list)
    peak_bytes: Bytes = 0

    @classmethod
    def of(cls, plan: Plan, world: World, batches: Batches) -> Rank:
        """A rank with its initial weights."""
        if world.device == "cpu":
            torch.set_num_threads(1)
        program = lower(plan)
        prepare_wire(plan, program, world)
        store = initial_store(plan, program, world.rank, world.device)
        position = Place(plan, world.rank).coordinate("pipeline")
        recorder = Recorder(world.rank, position, on=False)
        executor = Executor(plan, program, world, batches, store, recorder)
        base = store.live_bytes
        return cls(plan=plan, world=world, program=program, executor=executor, recorder=recorder, position=position, base_bytes=base)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The buffers that live across steps."""
        return saving.persistent(self.program, self.executor.store, self.position)

    def step(
        self, step: int, num_steps: int, *, recorded: bool = False, observe: Callable[[Executor], None] | None = None
    ) -> tuple[StepResult, Seconds]:
        """One step, and how long it took."""
        store = self.executor.store
        self.recorder.on = recorded
        store.peak_bytes = store.live_bytes
        start_s = time.perf_counter()
        result = self.executor.step(step, num_steps, observe)
        elapsed_s = time.perf_counter() - start_s
        if recorded:
            self.peak_bytes = max(self.peak_bytes, store.peak_bytes)
            self.recorded.append((elapsed_s, self.recorder.take(step, self.base_bytes)))
        return result, elapsed_s

    def measured(self) -> Measured:
        """What this rank has measured."""
        return Measured.of(self.world.rank, self.position, self.recorded, self.peak_bytes)


def train(world: World, plan: Plan, corpus: Corpus, options: Options) -> Outcome:
    """Do the run, as one rank of it; all ranks return the same Outcome. Raises PlanError where the loss is no number any more."""
    feed = feed_of(plan, corpus)
    rank = Rank.of(plan, world, feed)
    cursor = Cursor()
    folder = None if plan.run.checkpoint is None else plan.path(plan.run.checkpoint.folder)
    planned: int | None = None
    if options.resume:
        assert folder is not None, "prepare_checkpoints has looked"
        cursor = saving.restore(world, folder, rank.state, plan)
        planned = saving.planned_steps(folder, cursor.step)
        feed = feed_of(plan, corpus, cursor)
        rank.executor.batches = feed
    evaluation = Evaluation.of(plan, world, corpus, rank.executor.store)
    return _Training(plan, world, corpus, options, rank, feed, evaluation, folder, planned).run(cursor.step)


def feed_of(plan: Plan, corpus: Corpus, start: Cursor | None = None) -> Feed:
    """The training text in the batches of a plan."""
    return Feed(
        text=corpus.train,
        sequence_tokens=plan.batch.sequence_tokens,
        global_sequences=plan.batch.global_sequences,
        num_replicas=plan.num_replicas,
        microbatch_sequences=plan.batch.microbatch_sequences,
        seed=plan.run.seed,
        start=start or Cursor(),
    )


@dataclass(slots=True)
class _Training:
    """The loop over steps, with all that happens beside them."""

    plan: Plan
    world: World
    corpus: Corpus
    options: Options
    rank: Rank
    feed: Feed
    evaluation: Evaluation | None
    saved_to: Path | None
    planned_before: int | None = None
    losses: list[float] = field(default_factory=list)
    step_s: list[Seconds] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    newest: Path | None = None

    @property
    def is_first(self) -> bool:
        """Of all ranks, one speaks."""
        return self.world.rank == 0

    def run(self, first_step: int) -> Outcome:
        """All steps from `first_step` (0-based) on."""
        num_steps = self.plan.num_steps
        end = num_steps if self.options.stop_after is None else min(num_steps, self.options.stop_after)
        metrics_file = self.options.folder / "metrics.jsonl" if self.is_first else None
        shown = self.is_first and self.options.progress
        with Metrics(metrics_file) as metrics, Progress(num_steps, first_step, shown=shown) as progress:
            for step in range(first_step, end):
                result, elapsed_s = self.rank.step(step, num_steps, recorded=is_recorded(step - first_step, end - first_step))
                self.note(result, elapsed_s, metrics)
                progress.step(step + 1, self.said(result))
                if self.evaluation is not None and ((step + 1) % self.plan.run.validate_every == 0 or step + 1 == end):
                    self.look(step + 1, metrics)
                self.save_after(step + 1, end)
        return self.outcome(first_step)

    def note(self, result: StepResult, elapsed_s: Seconds, metrics: Metrics) -> None:
        """Keep what a step gave. PlanError if the loss is not a number: nothing good can follow."""
        self.losses.append(result.loss)
        self.step_s.append(elapsed_s)
        metrics.write(
            step=result.step + 1,
            loss=result.loss,
            loss_per_byte=result.loss / self.corpus.train_bytes_per_token,
            gradient_norm=result.gradient_norm,
            lr=result.lr,
            tokens_per_s=self.tokens_per_step / elapsed_s,
            step_s=elapsed_s,
        )
        if not (math.isfinite(result.loss) and math.isfinite(result.gradient_norm)):
            what = f"loss {result.loss}, gradient norm {result.gradient_norm}"
            raise PlanError(
                Problem(
                    f"the run has diverged at step {result.step + 1}: {what}",
                    path="optimizer.lr",
                    given=self.plan.optimizer.lr,
                    attempt="a smaller optimizer.lr, or a longer optimizer.warmup_steps",
                )
            )

    def said(self, result: StepResult) -> str:
        """The words beside the progress bar."""
        text = f"loss {result.loss / self.corpus.train_bytes_per_token:.3f} nat/byte"
        return text + (f", validation {self.looks[-1].loss:.3f}" if self.looks else "")

    def look(self, num_done: int, metrics: Metrics) -> None:
        """Look at the validation text."""
        assert self.evaluation is not None
        loss = self.evaluation.loss()
        self.looks.append(Look(step=num_done, loss=loss))
        metrics.write(step=num_done, validation_loss_per_byte=loss)

    def save_after(self, num_done: int, end: int) -> None:
        """Save a checkpoint where one is due; the last step is always saved."""
        settings = self.plan.run.checkpoint
        if settings is None or self.saved_to is None or (num_done % settings.every and num_done != end):
            return
        self.newest = saving.save(self.world, self.saved_to, self.feed.cursor(num_done), self.rank.state, self.plan)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks in a step."""
        return self.plan.batch.global_sequences * self.plan.batch.sequence_tokens

    def outcome(self, first_step: int) -> Outcome:
        """Gather what all ranks have measured."""
        said = told_by_all(self.world, asdict(self.rank.measured()))
        return Outcome(
            first_step=first_step,
            num_steps=self.plan.num_steps,
            planned_before=self.planned_before,
            losses=tuple(self.losses),
            step_s=tuple(self.step_s),
            tokens_per_step=self.tokens_per_step,
            bytes_per_token=self.corpus.train_bytes_per_token,
            looks=tuple(self.looks),
            unigram_entropy=self.corpus.unigram_entropy,
            ranks=tuple(map(Measured.from_json, said)),
            folder=str(self.options.folder),
            checkpoint=None if self.newest is None else str(self.newest),
            trace=self.traced() if self.options.profile else None,
        )

    def traced(self) -> str:
        """Write the trace of all ranks; its path."""
        own = trace_events(event for _, events in self.rank.recorded[:MOST_TRACED] for event in events)
        by_rank = told_by_all(self.world, own)
        path = self.options.folder / "trace.json"
        if self.is_first:
            path.write_text(json.dumps(trace(by_rank)), encoding="utf-8")
        return str(path)


def is_recorded(number: int, num_steps: int) -> bool:
    """Whether the step of that number (from 0) is recorded; where all steps are warm-up, the last of them."""
    if num_steps <= NUM_WARM_UP:
        return number == num_steps - 1
    return number in FIRST_RECORDED or (number > 0 and number % RECORDED_EVERY == 0)
