"""A few seconds' measurement of this machine, so that a prediction of a local run speaks of it and not of a guess.

All ranks measure at once, as they will work: processes on cores of one machine share its memory and its caches. Matrix products
and memory are measured by themselves; attention, streaming operators and the host's own time on one block of the plan's model; the wire on
messages of the plan's size.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from trainwright.engine.data import PaddedFeed
from trainwright.engine.execute import Executor
from trainwright.engine.formats import DTYPES
from trainwright.engine.gathering import told_by_all
from trainwright.engine.record import Recorder
from trainwright.engine.state import initial_store
from trainwright.engine.transport_threads import Switchboard
from trainwright.engine.wire import WORLD, Wire
from trainwright.engine.world import World
from trainwright.ir.action import Compute, Update, kind
from trainwright.ir.event import Event
from trainwright.ir.site import Site
from trainwright.ir.work import OpKind
from trainwright.ir.work import Work as ActionWork
from trainwright.plan.lower import lower
from trainwright.plan.plan import Parallel, Plan
from trainwright.spec.cluster import Cluster
from trainwright.spec.device import Source
from trainwright.strategies.recompute import Recompute
from trainwright.units import Bytes, BytesPerSecond, Seconds

NUM_ROUNDS, LEAST_ROUNDS, NUM_WARM_UP = 9, 3, 1
PATIENCE_S = 4.0
MOST_VOCAB = 4096
MOST_TOKENS = 2048
GEMM_SIZE = 512
PRODUCT_FLOPS = 4e8
COPY_BYTES = 1 << 24
SMALL_MESSAGE_BYTES = 1 << 12
LARGE_MESSAGE_BYTES = (1 << 16, 1 << 23)
SHORTEST_S = 1e-6
LEAST_GEMM = 0.1
"""Products take at least this share of what is no attention, however slow the streaming seemed."""

NUM_EXCHANGES = 2

NO_WIRE = 1e9
"""The rate of a wire that one rank alone never uses."""

MEASURED = Source("measured on this machine by the run that this prediction is for", "verified")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one process gets of this machine while all ranks work.

    gemm_flops_per_s       by format, a product of square matrices
    gemm_efficiency        of that, what the products of the plan's block reach, with the arithmetic of norms and activations
    copy_bytes_per_s       read and written, by a copy
    streaming_efficiency   of that, what the optimizer reaches, by the bytes that the Program writes down for it
    attention_forward, attention_backward   share of gemm_flops_per_s
    host_s                 host time for each block and pass
    launch_s               time of the smallest operator
    wire_bytes_per_s       sent by each rank in a collective of all ranks; message_s is the time of a tiny one
    """

    gemm_flops_per_s: dict[str, float]
    gemm_efficiency: float
    copy_bytes_per_s: BytesPerSecond
    streaming_efficiency: float
    attention_forward: float
    attention_backward: float
    host_s: Seconds
    launch_s: Seconds
    wire_bytes_per_s: BytesPerSecond
    message_s: Seconds
    memory_bytes: Bytes


def measure(world: World, plan: Plan) -> Figures:
    """Measure, as one rank of the plan; all ranks return the same figures, the mean of what they saw."""
    torch.set_num_threads(1)
    own = dataclasses.asdict(_measured(world, plan))
    said = told_by_all(world, own)
    mean = {name: sum(one[name] for one in said) / len(said) for name in own if name not in {"gemm_flops_per_s", "memory_bytes"}}
    gemm = {fmt: sum(one["gemm_flops_per_s"][fmt] for one in said) / len(said) for fmt in own["gemm_flops_per_s"]}
    return Figures(gemm_flops_per_s=gemm, memory_bytes=min(one["memory_bytes"] for one in said), **mean)


def cluster_of(cluster: Cluster, figures: Figures) -> Cluster:
    """The local cluster with measured figures in place of the guesses."""
    names = ("memory_bytes", "memory_bytes_per_s", "peak_flops_per_s", "scale_up_bytes_per_s", "launch_s")
    device = dataclasses.replace(
        cluster.device,
        title="one process on one core of this machine, measured",
        memory_bytes=figures.memory_bytes,
        memory_bytes_per_s=figures.copy_bytes_per_s,
        peak_flops_per_s=figures.gemm_flops_per_s,
        scale_up_bytes_per_s=figures.wire_bytes_per_s,
        launch_s=figures.launch_s,
        sources={**cluster.device.sources, **dict.fromkeys(names, MEASURED)},
    )
    stack = dataclasses.replace(
        cluster.stack,
        source=MEASURED.text,
        gemm_efficiency=figures.gemm_efficiency,
        gemm_ramp_depth=0,
        weight_gradient_efficiency=1.0,
        memory_efficiency=figures.streaming_efficiency,
        attention_forward_efficiency=figures.attention_forward,
        attention_backward_efficiency=figures.attention_backward,
        half_rate_bytes=0.0,
        collective_latency_s=figures.message_s,
        ring_hop_s=0.0,
        host_fixed_s=figures.host_s,
    )
    return dataclasses.replace(cluster, device=device, stack=stack)


def roomy(cluster: Cluster, num_ranks: int) -> Cluster:
    """The local cluster, its guesses but for the memory: to see whether a plan fits before anything is measured."""
    share = machine_memory_bytes() // num_ranks
    return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, memory_bytes=share))


def _measured(world: World, plan: Plan) -> Figures:
    """Measure everything in turn, several rounds: what disturbs the machine for a while disturbs all of it alike."""
    compute = plan.precision.resolved(plan.cluster.stack).compute
    block, message_bytes = Block(block_plan(plan)), _message_bytes(plan)
    formats = tuple(dict.fromkeys((compute, "fp32")))
    works = {
        **{fmt: products(DTYPES[fmt]) for fmt in formats},
        "copy": copy(),
        "launch": launches(),
        "block": Work(block.step, 1),
        "message": Work(lambda: exchange(world, SMALL_MESSAGE_BYTES), NUM_EXCHANGES),
        "payload": Work(lambda: exchange(world, message_bytes), NUM_EXCHANGES),
    }
    seconds = in_turn(world, works)
    each_s = {name: seconds[name] / work.amount for name, work in works.items()}
    peak, copied = 1 / each_s[compute], 1 / each_s["copy"]
    times = block.times()
    streaming = times.plain_bytes / times.plain_s
    gemm_s = max(times.other_s - times.streamed_bytes / streaming - times.num_gemms * each_s["launch"], LEAST_GEMM * times.other_s)
    attention = {kind: times.flops[kind] / max(times.seconds[kind], SHORTEST_S) / peak for kind in _ATTENTION}
    sent_bytes = message_bytes * (world.size - 1) / world.size
    return Figures(
        gemm_flops_per_s={fmt: 1 / each_s[fmt] for fmt in formats},
        gemm_efficiency=(times.flops[OpKind.GEMM] + times.flops[OpKind.GEMM_WEIGHT]) / gemm_s / peak,
        copy_bytes_per_s=copied,
        streaming_efficiency=streaming / copied,
        attention_forward=attention[OpKind.ATTENTION_FORWARD],
        attention_backward=attention[OpKind.ATTENTION_BACKWARD],
        host_s=times.host_s,
        launch_s=each_s["launch"],
        wire_bytes_per_s=sent_bytes / max(each_s["payload"] - each_s["message"], SHORTEST_S) if sent_bytes else NO_WIRE,
        message_s=each_s["message"] if sent_bytes else 0.0,
        memory_bytes=machine_memory_bytes() // world.size,
    )


def in_turn(world: World, works: Mapping[str, Work]) -> dict[str, Seconds]:
    """Median seconds of each work; every round does all of them, on all ranks at once. A slow machine has fewer rounds."""
    seconds: dict[str, list[Seconds]] = {name: [] for name in works}
    begin_s = time.perf_counter()
    for number in range(NUM_ROUNDS):
        if world.largest(int(time.perf_counter() - begin_s >= PATIENCE_S and number >= LEAST_ROUNDS)):
            break
        for name, work in works.items():
            world.barrier()
            start_s = time.perf_counter()
            work.do()
            seconds[name].append(time.perf_counter() - start_s)
    return {name: median(each[NUM_WARM_UP:]) for name, each in seconds.items()}


# --- single kernels ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """Something to be timed, and how much it does: FLOPs, bytes, or a count."""

    do: Callable[[], object]
    amount: float


def products(dtype: torch.dtype) -> Work:
    """Products of square matrices, a few milliseconds of them; the right one is stored transposed, as a layer's weights are."""
    left, right = (torch.ones((GEMM_SIZE, GEMM_SIZE), dtype=dtype) for _ in range(2))
    flops = 2 * GEMM_SIZE**3
    times = max(1, round(PRODUCT_FLOPS / flops))
    return Work(lambda: [torch.mm(left, right.t()) for _ in range(times)], flops * times)


def copy(num_bytes: Bytes = COPY_BYTES) -> Work:
    """A copy that does not fit into the cache of a core; bytes read and written."""
    source = torch.zeros(num_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    return Work(lambda: target.copy_(source), 2 * num_bytes)


def launches(times: int = 200) -> Work:
    """Operators on one number."""
    one = torch.zeros(1, dtype=torch.float32)
    return Work(lambda: [one.add_(1.0) for _ in range(times)], times)


def machine_memory_bytes() -> Bytes:
    """Physical memory, or what a container may have of it."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdecimal() else physical


# --- one block of the model -------------------------------------------------------------------------------------------------------

_ATTENTION = (OpKind.ATTENTION_FORWARD, OpKind.ATTENTION_BACKWARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """Where the time of one step of a one-block model went.

    seconds, flops   by kind of operator; seconds of attention alone
    other_s          all segments but attention; they stream `streamed_bytes` beside `num_gemms` products
    plain_s          optimizer and norm of the gradients, which do nothing but stream `plain_bytes`
    host_s           between actions, for each of the block's passes
    """

    flops: dict[OpKind, float]
    seconds: dict[OpKind, Seconds]
    num_gemms: int
    streamed_bytes: Bytes
    other_s: Seconds
    plain_bytes: Bytes
    plain_s: Seconds
    host_s: Seconds


NUM_PASSES = 2
"""A block has a forward and a backward."""


def block_plan(plan: Plan) -> Plan:
    """A model of one block, as large as a tensor rank's part of the plan's, on one process."""
    size, model = plan.size("tensor"), plan.model
    sequences = min(plan.batch.microbatch_sequences, max(1, MOST_TOKENS // plan.batch.sequence_tokens))
    return dataclasses.replace(
        plan,
        model=dataclasses.replace(
            model,
            num_layers=1,
            num_heads=model.num_heads // size,
            num_kv_heads=model.num_kv_heads // size,
            ffn_width=model.ffn_width // size,
            vocab=min(-(-model.vocab // size), MOST_VOCAB),
        ),
        cluster=plan.cluster.with_devices(1),
        batch=dataclasses.replace(plan.batch, global_sequences=sequences, microbatch_sequences=sequences),
        parallel=Parallel(),
        recompute=Recompute(),
    )


class Block:
    """A one-block model and an executor of its own; `step` trains it on random tokens and is recorded."""

    def __init__(self, plan: Plan) -> None:
        """Make its buffers."""
        program, batch = lower(plan), plan.batch
        feed = PaddedFeed(
            vocab_size=plan.model.vocab,
            sequence_tokens=batch.sequence_tokens,
            global_sequences=batch.global_sequences,
            microbatch_sequences=batch.microbatch_sequences,
        )
        alone = World(rank=0, size=1, wire=Wire(Switchboard(1).transport(0)))
        self.recorder = Recorder(0, 0)
        self.executor = Executor(plan, program, alone, feed, initial_store(plan, program, 0), self.recorder)
        self.steps: list[tuple[Seconds, tuple[Event, ...]]] = []

    def step(self) -> None:
        """One step."""
        start_s = time.perf_counter()
        self.executor.step(len(self.steps), NUM_ROUNDS)
        elapsed_s = time.perf_counter() - start_s
        self.steps.append((elapsed_s, self.recorder.take(len(self.steps), 0)))

    def times(self) -> BlockTimes:
        """Where the time of a step goes."""
        work = {(one.site, kind(one)): one.work for one in self.executor.actions if isinstance(one, Compute | Update)}
        return _folded(self.steps[NUM_WARM_UP:], work)


def _folded(steps: Sequence[tuple[Seconds, tuple[Event, ...]]], work: Mapping[tuple[Site, str], ActionWork]) -> BlockTimes:
    """Typical times of a step: the median over steps of each event."""
    seconds: dict[tuple[Site, str], list[float]] = defaultdict(list)
    for _, events in steps:
        for event in events:
            seconds[event.site.at(step=None), event.kind].append(event.elapsed_s)
    typical = {key: median(values) for key, values in seconds.items()}
    host_s = median(elapsed_s - sum(event.elapsed_s for event in events) for elapsed_s, events in steps)
    flops: dict[OpKind, float] = defaultdict(float)
    attention_s: dict[OpKind, float] = defaultdict(float)
    other_s, streamed, num_gemms, plain_s, plain_bytes = 0.0, 0, 0, 0.0, 0
    for (site, what), ops in ((key, one.ops) for key, one in work.items() if one.ops):
        duration_s = typical[site.at(step=None), what]
        for op in ops:
            flops[op.kind] += op.flops
        attention = next((op.kind for op in ops if op.kind in _ATTENTION), None)
        if attention is not None:
            attention_s[attention] += duration_s
        elif site.phase == "upd":
            plain_s += duration_s
            plain_bytes += sum(op.num_bytes for op in ops)
        else:
            other_s += duration_s
            streamed += sum(op.num_bytes for op in ops if op.kind is OpKind.ELEMENTWISE)
            num_gemms += sum(op.kind is not OpKind.ELEMENTWISE for op in ops)
    return BlockTimes(
        flops=flops,
        seconds=attention_s,
        num_gemms=num_gemms,
        streamed_bytes=streamed,
        other_s=other_s,
        plain_bytes=plain_bytes,
        plain_s=plain_s,
        host_s=max(host_s, 0.0) / NUM_PASSES,
    )


# --- the wire ---------------------------------------------------------------------------------------------------------------------


def _message_bytes(plan: Plan) -> Bytes:
    """About what one exchange of the plan carries: a block's parameters."""
    model = plan.model
    elements = model.width * (2 * model.num_heads * model.head_width + 3 * model.ffn_width) // plan.size("tensor")
    least, most = LARGE_MESSAGE_BYTES
    return min(max(4 * elements, least), most)


def exchange(world: World, payload_bytes: Bytes) -> None:
    """An all_gather and a reduce_scatter of that many bytes: NUM_EXCHANGES."""
    each = max(1, payload_bytes // 4 // world.size)
    full, part = torch.zeros(each * world.size, dtype=torch.float32), torch.zeros(each, dtype=torch.float32)
    world.wire.start_all_gather(full, part, world.ranks, WORLD).wait()
    world.wire.start_reduce_scatter(part, full, world.ranks, WORLD).wait()
