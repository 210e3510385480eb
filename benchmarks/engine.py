"""The engine beside plain PyTorch: training steps of small decoders on the CPU, one thread a process.

    python benchmarks/engine.py [--rounds 15] [--quick] [--models llama gpt] [--json FILE]

Two processes are forked and live through the whole run. Every row is set up once, with the same initial weights and the same batch;
then, in each round, every row takes a step, in an order that is shuffled anew. Rows of one process leave the other one waiting.
Ratios are taken within a round, and the median over the rounds is given (in brackets: the ratio of the two minima). Wall time is the
slower rank's; CPU-seconds are those of all threads of all ranks that take part. Losses of all rows must agree.

Exits with 1 if a row computes something else, or if the engine on one process is below 0.97 of the plain loop.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from plain import Decoder, Loop, Wrap, data_parallel, fully_sharded
from torch import Tensor

from trainwright.engine.data import Batch
from trainwright.engine.execute import Executor
from trainwright.engine.place import Place
from trainwright.engine.record import Recorder
from trainwright.engine.state import assemble, flat_pieces, initial_store
from trainwright.engine.transport_threads import Switchboard
from trainwright.engine.wire import Wire
from trainwright.engine.world import World, run_processes
from trainwright.plan.lower import lower
from trainwright.plan.plan import Parallel, Plan
from trainwright.spec import catalog
from trainwright.spec.batch import Batch as BatchSize
from trainwright.spec.model import Model
from trainwright.spec.optimizer import Optimizer
from trainwright.spec.precision import Precision
from trainwright.strategies.data import Data
from trainwright.strategies.pipeline import Pipeline
from trainwright.strategies.recompute import Recompute
from trainwright.strategies.tensor import Tensor as TensorParallel
from trainwright.strategies.zero import Zero

BAR = 0.97
"""What the engine must reach on one process: its speed over that of the plain loop."""

TOLERANCE = 1e-4
"""By how much losses may differ, relative: float32 after a few steps."""

LLAMA = Model(
    name="llama", num_layers=8, width=256, num_heads=8, num_kv_heads=8, head_width=32, ffn_width=1024, vocab=1024, max_positions=256
)
GPT = replace(LLAMA, name="gpt", norm="layernorm", positions="learned", activation="gelu_tanh", bias=True, tied=True)
MODELS = {"llama": LLAMA, "gpt": GPT}

SEQUENCES, TOKENS = 4, 256
NUM_WARMUP = 2
PLAIN, ONE, FLOOR = "plain loop", "engine", "2 processes, no exchange"


@dataclass(frozen=True, slots=True)
class OneBatch:
    """The same tokens at every step; a rank sees its rows of them."""

    whole: Batch
    microbatch_sequences: int
    num_replicas: int

    def batch(self, step: int, replica: int, microbatch: int) -> Batch:
        """Rows of one replica's microbatch."""
        del step
        first = (microbatch * self.num_replicas + replica) * self.microbatch_sequences
        rows = slice(first, first + self.microbatch_sequences)
        return Batch(tokens=self.whole.tokens[rows], targets=self.whole.targets[rows], first_sequence=first)

    def global_batch(self, step: int) -> Batch:
        """All rows."""
        del step
        return self.whole

    def num_valid_tokens(self, step: int) -> int:
        """All targets count."""
        del step
        return self.whole.targets.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to train.

    `step` takes a step and gives its loss (of the rank's own rows where `is_part`), `num_ranks` take part, `beside` names the peer that
    does the same.
    """

    name: str
    num_ranks: int
    step: Callable[[], float]
    beside: str = ""
    is_part: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One row as one rank saw it: (loss, wall seconds, CPU-seconds) a round; nothing where it did not take part."""

    name: str
    num_ranks: int
    beside: str
    is_part: bool
    rounds: list[tuple[float, float, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one row, a value a round."""

    name: str
    num_ranks: int
    beside: str
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def batch_of(vocab: int) -> Batch:
    """Tokens that have something to learn: each is a function of the one before it, with some noise."""
    numbers = random.Random(0)
    rows = []
    for _ in range(SEQUENCES):
        row = [numbers.randrange(vocab)]
        for _ in range(TOKENS):
            row.append((5 * row[-1] + numbers.randrange(3)) % vocab)
        rows.append(row)
    tokens = torch.tensor(rows)
    return Batch(tokens=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous(), first_sequence=0)


def plan_of(model: Model, parallel: Parallel | None = None, *, sequences: int = SEQUENCES, microbatches: int = 1) -> Plan:
    """The plan of a row."""
    parallel = parallel or Parallel()
    replicas = parallel.data.size * parallel.zero.size
    devices = replicas * parallel.tensor.size * parallel.pipeline.size
    return Plan(
        model=model,
        cluster=catalog.cluster("local").with_devices(devices),
        batch=BatchSize(sequence_tokens=TOKENS, global_sequences=sequences, microbatch_sequences=sequences // (replicas * microbatches)),
        precision=Precision(compute="fp32"),
        parallel=parallel,
        recompute=Recompute(),
        optimizer=Optimizer(lr=3e-4, decay="none"),
    )


def alone() -> World:
    """A world of one rank."""
    return World(rank=0, size=1, wire=Wire(Switchboard(1).transport(0)))


def engine_row(name: str, plan: Plan, world: World, whole: Batch, *, beside: str = "", record: bool = False, is_part: bool = False) -> Row:
    """The engine under a plan, in one world or in one of its own."""
    world = world if plan.num_devices > 1 else alone()
    program = lower(plan)
    store = initial_store(plan, program, world.rank)
    recorder = Recorder(world.rank, Place(plan, world.rank).coordinate("pipeline"), on=record)
    feed = OneBatch(whole, plan.batch.microbatch_sequences, plan.num_replicas)
    executor = Executor(plan, program, world, feed, store, recorder)
    steps = iter(range(1 << 30))

    def step() -> float:
        before = store.live_bytes
        number = next(steps)
        loss = executor.step(number, 1 << 30).loss
        if record:
            recorder.take(number, before)
        return loss

    return Row(name=name, num_ranks=2 if is_part else plan.num_devices, step=step, beside=beside, is_part=is_part)


def initial(plan: Plan) -> dict[str, Tensor]:
    """The engine's initial weights by logical name."""
    store = initial_store(plan, lower(plan), 0)
    return {name: copies[min(copies)] for name, copies in assemble(plan, {0: dict(flat_pieces(store, "weights"))}).items()}


def plain_row(name: str, plan: Plan, batch: Batch, weights: dict[str, Tensor], *, wrap: Wrap | None = None, tuned: bool = False) -> Row:
    """The plain loop, on one process or wrapped for two; a wrapped one sees this rank's rows only."""
    module = Decoder(plan.model, num_tokens=TOKENS, tuned=tuned)
    module.load(weights)
    loop = Loop(wrap(module) if wrap else module, plan.optimizer, fused=tuned)
    return Row(name=name, num_ranks=2 if wrap else 1, step=lambda: loop.step(batch.tokens, batch.targets), is_part=bool(wrap))


def rows_of(model: Model, world: World) -> list[Row]:
    """Everything that is measured, in the order of the table."""
    whole, plan = batch_of(model.vocab), plan_of(model)
    weights = initial(plan)
    half = OneBatch(whole, SEQUENCES // 2, 2).batch(0, world.rank, 0)
    pipeline = plan_of(model, Parallel(pipeline=Pipeline(size=2)), microbatches=SEQUENCES)
    two = {
        "data 2": Parallel(data=Data(size=2)),
        "zero-3 2": Parallel(zero=Zero(size=2)),
        "tensor 2": Parallel(tensor=TensorParallel(size=2)),
    }
    beside = {"data 2": "DDP", "zero-3 2": "FSDP2"}
    return [
        plain_row(PLAIN, plan, whole, weights),
        plain_row("plain loop, tuned", plan, whole, weights, tuned=True),
        engine_row(ONE, plan, world, whole, beside=PLAIN),
        engine_row("engine, recorder on", plan, world, whole, beside=PLAIN, record=True),
        engine_row(FLOOR, plan_of(model, sequences=SEQUENCES // 2), world, half, is_part=True),
        *(engine_row(name, plan_of(model, parallel), world, whole, beside=beside.get(name, "")) for name, parallel in two.items()),
        engine_row("pipeline 2, 1f1b, 4 microbatches", pipeline, world, whole),
        plain_row("DDP", plan, half, weights, wrap=data_parallel),
        plain_row("FSDP2", plan, half, weights, wrap=fully_sharded),
    ]


def measure(model: Model, world: World, num_rounds: int) -> list[Seen]:
    """What one rank sees of each row, warming up included."""
    rows = rows_of(model, world)
    seen = {row.name: Seen(name=row.name, num_ranks=row.num_ranks, beside=row.beside, is_part=row.is_part) for row in rows}
    order = random.Random(1)
    for _ in range(NUM_WARMUP + num_rounds):
        for row in order.sample(rows, len(rows)):
            gc.collect()
            world.barrier()
            if world.rank >= row.num_ranks:
                continue
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            loss = row.step()
            end_s, end_cpu_s = time.perf_counter(), time.process_time()
            seen[row.name].rounds.append((loss, end_s - start_s, end_cpu_s - start_cpu_s))
    world.barrier()
    return list(seen.values())


def joined(ranks: list[list[Seen]]) -> tuple[list[Timing], list[str]]:
    """The slower wall time and all the CPU-seconds of each row, without the rounds of warming up; and which losses are wrong."""
    wanted = [loss for loss, _, _ in ranks[0][0].rounds]
    timings, wrong = [], []
    for seen in zip(*ranks, strict=True):
        row = seen[0]
        timing = Timing(name=row.name, num_ranks=row.num_ranks, beside=row.beside)
        timings.append(timing)
        rounds = [one.rounds for one in seen[: row.num_ranks]]
        for number, (want, *shares) in enumerate(zip(wanted, *rounds, strict=True)):
            losses = [loss for loss, _, _ in shares]
            loss = statistics.fmean(losses) if row.is_part else losses[0]
            if row.name != FLOOR and abs(loss - want) > TOLERANCE * abs(want):
                wrong.append(f"{row.name}: loss {loss:.6f} at step {number}, {PLAIN} {want:.6f}")
            if number >= NUM_WARMUP:
                timing.wall_s.append(max(wall_s for _, wall_s, _ in shares))
                timing.cpu_s.append(sum(cpu_s for _, _, cpu_s in shares))
    return timings, wrong


def ratio(of: list[float], by: list[float]) -> tuple[float, float]:
    """Median of the ratios within rounds, and the ratio of the minima."""
    return statistics.median(a / b for a, b in zip(of, by, strict=True)), min(of) / min(by)


def over(of: list[float], by: list[float]) -> str:
    """A ratio as the table shows it."""
    median, least = ratio(of, by)
    return f"{median:.3f} ({least:.3f})"


def table(model: Model, timings: list[Timing]) -> list[str]:
    """The rows of one model as text."""
    named = {timing.name: timing for timing in timings}
    plain, one, floor = named[PLAIN], named[ONE], named[FLOOR]
    lines = [
        f"{model.name}: {model.num_layers} blocks, width {model.width}, {SEQUENCES} x {TOKENS} tokens, vocabulary {model.vocab}, float32",
        "one process".ljust(34) + "wall ms   CPU ms   speed over the plain loop: wall      CPU",
    ]
    for timing in timings:
        if timing.num_ranks == 1:
            speeds = f"{over(plain.wall_s, timing.wall_s):>30}{over(plain.cpu_s, timing.cpu_s):>17}"
            lines.append(f"{timing.name:34}{millis(timing)}{speeds}")
    heads = "wall ms   CPU ms   speed-up over engine   CPU above engine   CPU above floor   wall speed over peer"
    lines.append("two processes".ljust(34) + heads)
    for timing in timings:
        if timing.num_ranks == 2:
            above, above_floor = (100 * (ratio(timing.cpu_s, base.cpu_s)[0] - 1) for base in (one, floor))
            peer = f"{over(named[timing.beside].wall_s, timing.wall_s)} {timing.beside}" if timing.beside else ""
            lines.append(
                f"{timing.name:34}{millis(timing)}   {over(one.wall_s, timing.wall_s):>20}{above:+17.1f} %{above_floor:+15.1f} %   {peer}"
            )
    return lines


def millis(timing: Timing) -> str:
    """Medians of wall time and CPU-seconds."""
    return f"{1e3 * statistics.median(timing.wall_s):7.0f}{1e3 * statistics.median(timing.cpu_s):9.0f}"


def main() -> int:
    """Measure the models, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count (default 15)")
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's seconds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    document, status = {}, 0
    for name in arguments.models:
        model = MODELS[name]

        def body(world: World, model: Model = model) -> list[Seen]:
            return measure(model, world, 3 if arguments.quick else arguments.rounds)

        timings, wrong = joined(run_processes(body, 2))
        document[name] = [asdict(timing) for timing in timings]
        print("\n".join(table(model, timings)))
        print("\n".join(wrong) or "losses of all rows agree")
        named = {timing.name: timing for timing in timings}
        reached = ratio(named[PLAIN].cpu_s, named[ONE].cpu_s)[0]
        print(f"engine on one process: {reached:.3f} of the plain loop in CPU-seconds, {BAR} asked\n")
        status |= bool(wrong) or reached < BAR
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
