"""A few seconds' measurement of this machine, so that a prediction of a local run speaks of it and not of a guess.

All ranks measure at once, as they will work: processes on cores of one machine share its memory and its caches. Matrix products and memory are measured
by themselves; attention, streaming operators and the host's own time on one block of the plan's model; the wire on messages of the plan's size.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
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
from trainwright.ir.action import Compute
from trainwright.ir.event import Event
from trainwright.ir.site import Site
from trainwright.ir.work import Op, OpKind, Work
from trainwright.plan.lower import lower
from trainwright.plan.plan import Parallel, Plan
from trainwright.spec.cluster import Cluster
from trainwright.spec.device import Source
from trainwright.units import Bytes, Seconds

NUM_STEPS = 6
NUM_WARM_UP = 2
MOST_VOCAB = 4096
MOST_TOKENS = 2048
GEMM_SIZE = 512
COPY_BYTES = 1 << 24
SMALL_MESSAGE_BYTES = 1 << 12
LARGE_MESSAGE_BYTES = (1 << 16, 1 << 23)
REPEATED_S = 0.15
"""How long each kernel is repeated."""

MEASURED = Source("measured on this machine by the run that this prediction is for", "verified")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one process gets of this machine while all ranks work.

    gemm_flops_per_s       by format, a product of square matrices
    gemm_efficiency        of that, what the products of the plan's block reach
    weight_efficiency      rate of weight gradients relative to the other products
    copy_bytes_per_s       read and written, by a copy
    streaming_efficiency   of that, what norms, activations, sums reach, by the bytes that the Program writes down for them
    attention_forward, attention_backward   share of gemm_flops_per_s
    host_s                 host time for each block and pass
    launch_s               time of the smallest operator
    wire_bytes_per_s       sent by each rank in a collective of all ranks; message_s is the time of a tiny one
    """

    gemm_flops_per_s: dict[str, float]
    gemm_efficiency: float
    weight_efficiency: float
    copy_bytes_per_s: float
    streaming_efficiency: float
    attention_forward: float
    attention_backward: float
    host_s: Seconds
    launch_s: Seconds
    wire_bytes_per_s: float
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
        weight_gradient_efficiency=figures.weight_efficiency,
        memory_efficiency=figures.streaming_efficiency,
        attention_forward_efficiency=figures.attention_forward,
        attention_backward_efficiency=figures.attention_backward,
        half_rate_bytes=0.0,
        collective_latency_s=figures.message_s,
        ring_hop_s=0.0,
        host_fixed_s=figures.host_s,
    )
    return dataclasses.replace(cluster, device=device, stack=stack)


def _measured(world: World, plan: Plan) -> Figures:
    compute = plan.precision.resolved(plan.cluster.stack).compute
    world.barrier()
    gemm = {fmt: gemm_flops_per_s(GEMM_SIZE, GEMM_SIZE, GEMM_SIZE, DTYPES[fmt]) for fmt in dict.fromkeys((compute, "fp32"))}
    block = _block_plan(plan)
    tokens, width = block.batch.microbatch_sequences * block.batch.sequence_tokens, block.model.width
    rows = block.model.ffn_width
    dtype = DTYPES[compute]
    forward = gemm_flops_per_s(tokens, width, rows, dtype)
    weight = gemm_flops_per_s(rows, tokens, width, dtype, transposed=True)
    copy = copy_bytes_per_s()
    launch = launch_s()
    peak = gemm[compute]
    times = _block_times(block, world)
    attention = {kind: times.flops[kind] / max(times.seconds[kind], 1e-9) / peak for kind in _ATTENTION if times.flops[kind]}
    gemm_s = times.flops[OpKind.GEMM] / forward + times.flops[OpKind.GEMM_WEIGHT] / weight + times.num_gemms * launch
    streaming_s = max(times.other_s - gemm_s, 0.1 * times.other_s)
    rate, message_s = wire_rate(world, _message_bytes(plan))
    return Figures(
        gemm_flops_per_s=gemm,
        gemm_efficiency=forward / peak,
        weight_efficiency=weight / forward,
        copy_bytes_per_s=copy,
        streaming_efficiency=times.streamed_bytes / streaming_s / copy,
        attention_forward=attention.get(OpKind.ATTENTION_FORWARD, 1.0),
        attention_backward=attention.get(OpKind.ATTENTION_BACKWARD, 1.0),
        host_s=times.host_s,
        launch_s=launch,
        wire_bytes_per_s=rate,
        message_s=message_s,
        memory_bytes=memory_of_this_machine() // world.size,
    )


# --- single kernels ---------------------------------------------------------------------------------------------------------------


def repeated_s(work: Callable[[], object], least_s: Seconds = REPEATED_S) -> Seconds:
    """Median time of `work`, repeated for a while after one time that does not count."""
    work()
    seconds: list[float] = []
    end_s = time.perf_counter() + least_s
    while time.perf_counter() < end_s or not seconds:
        start_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start_s)
    return median(seconds)


def gemm_flops_per_s(m: int, k: int, n: int, dtype: torch.dtype, *, transposed: bool = False) -> float:
    """Rate of a product [m, k] x [k, n]; the right matrix is stored [n, k] as a layer's weights are, or with `transposed` the left one [k, m]."""
    left = torch.ones((k, m), dtype=dtype).t() if transposed else torch.ones((m, k), dtype=dtype)
    right = torch.ones((k, n), dtype=dtype) if transposed else torch.ones((n, k), dtype=dtype).t()
    return 2 * m * k * n / repeated_s(lambda: torch.mm(left, right))


def copy_bytes_per_s(num_bytes: Bytes = COPY_BYTES) -> float:
    """Bytes read and written in a second by a copy that does not fit into the cache of a core."""
    source = torch.zeros(num_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * num_bytes / repeated_s(lambda: target.copy_(source))


def launch_s() -> Seconds:
    """Time of an operator on one number."""
    one = torch.zeros(1, dtype=torch.float32)
    return repeated_s(lambda: [one.add_(1.0) for _ in range(100)], REPEATED_S / 3) / 100


def memory_of_this_machine() -> Bytes:
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
    """Where the time of one step of a one-block model went: attention by itself, all other segments together, and the host."""

    flops: dict[OpKind, float]
    seconds: dict[OpKind, Seconds]
    num_gemms: int
    streamed_bytes: Bytes
    other_s: Seconds
    host_s: Seconds


def _block_plan(plan: Plan) -> Plan:
    """A model of one block, as large as a tensor rank's part of the plan's, on one process."""
    size, model = plan.size("tensor"), plan.model
    most_sequences = max(1, MOST_TOKENS // plan.batch.sequence_tokens)
    sequences = min(plan.batch.microbatch_sequences, most_sequences)
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
        recompute=type(plan.recompute)(),
    )


def _block_times(plan: Plan, world: World) -> BlockTimes:
    program = lower(plan)
    alone = World(rank=0, size=1, wire=Wire(Switchboard(1).transport(0)))
    batch = plan.batch
    feed = PaddedFeed(
        vocab_size=plan.model.vocab,
        sequence_tokens=batch.sequence_tokens,
        global_sequences=batch.global_sequences,
        microbatch_sequences=batch.microbatch_sequences,
    )
    store = initial_store(plan, program, 0)
    recorder = Recorder(0, 0)
    executor = Executor(plan, program, alone, feed, store, recorder)
    world.barrier()
    steps: list[tuple[Seconds, tuple[Event, ...]]] = []
    for step in range(NUM_STEPS):
        start_s = time.perf_counter()
        executor.step(step, NUM_STEPS)
        steps.append((time.perf_counter() - start_s, recorder.take(step, 0)))
    work = {(one.site, one.function): one.work for one in executor.actions if isinstance(one, Compute)}
    return _folded(steps[NUM_WARM_UP:], work)


def _folded(steps: Sequence[tuple[Seconds, tuple[Event, ...]]], work: dict[tuple[Site, str], Work]) -> BlockTimes:
    """Typical times of a step: the median over steps of each event."""
    seconds: dict[tuple[Site, str], list[float]] = defaultdict(list)
    for _, events in steps:
        for event in events:
            seconds[event.site.at(step=None), event.kind].append(event.elapsed_s)
    typical = {key: median(values) for key, values in seconds.items()}
    host_s = median(elapsed_s - sum(event.elapsed_s for event in events) for elapsed_s, events in steps)
    flops: dict[OpKind, float] = defaultdict(float)
    attention_s: dict[OpKind, float] = defaultdict(float)
    other_s, streamed, num_gemms = 0.0, 0, 0
    for key, duration_s in typical.items():
        ops: Iterable[Op] = work[key].ops if key in work else ()
        kinds = {op.kind for op in ops}
        for op in ops:
            flops[op.kind] += op.flops
            num_gemms += op.kind in {OpKind.GEMM, OpKind.GEMM_WEIGHT}
            streamed += op.num_bytes if op.kind is OpKind.ELEMENTWISE else 0
        attention = next((kind for kind in _ATTENTION if kind in kinds), None)
        if attention is not None:
            attention_s[attention] += duration_s
            streamed -= sum(op.num_bytes for op in ops if op.kind is OpKind.ELEMENTWISE)
        elif ops:
            other_s += duration_s
    return BlockTimes(
        flops=flops, seconds=attention_s, num_gemms=num_gemms, streamed_bytes=streamed, other_s=other_s, host_s=max(host_s, 0.0) / 2
    )


# --- the wire ---------------------------------------------------------------------------------------------------------------------


def _message_bytes(plan: Plan) -> Bytes:
    """About what one exchange of the plan carries: a block's parameters."""
    model = plan.model
    elements = model.width * (2 * model.num_heads * model.head_width + 3 * model.ffn_width) // plan.size("tensor")
    least, most = LARGE_MESSAGE_BYTES
    return min(max(4 * elements, least), most)


def wire_rate(world: World, payload_bytes: Bytes) -> tuple[float, Seconds]:
    """Bytes that each rank sends in a second while all gather and reduce messages of that size; the time of a tiny exchange."""
    if world.size == 1:
        return 1e9, 0.0
    small_s, large_s = (_exchange_s(world, num_bytes) for num_bytes in (SMALL_MESSAGE_BYTES, payload_bytes))
    sent_bytes = payload_bytes * (world.size - 1) / world.size
    return sent_bytes / max(large_s - small_s, 1e-6), small_s


def _exchange_s(world: World, payload_bytes: Bytes, num_times: int = 12) -> Seconds:
    """Typical time of an all_gather and of a reduce_scatter, their mean. All ranks do the same number of them."""
    each = max(1, payload_bytes // 4 // world.size)
    full, part = torch.zeros(each * world.size, dtype=torch.float32), torch.zeros(each, dtype=torch.float32)
    seconds: list[float] = []
    for _ in range(num_times):
        world.barrier()
        start_s = time.perf_counter()
        world.wire.start_all_gather(full, part, world.ranks, WORLD).wait()
        world.wire.start_reduce_scatter(part, full, world.ranks, WORLD).wait()
        seconds.append((time.perf_counter() - start_s) / 2)
    return median(seconds[2:])
