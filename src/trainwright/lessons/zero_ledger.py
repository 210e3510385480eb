"""Lesson: when a sharded parameter exists in full, and what that does to the peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from trainwright.ir.action import Action, Collective, Compute, Free, Update, Wait
from trainwright.ir.figure import Figure
from trainwright.ir.ref import Ref
from trainwright.lessons.page import Cell, Input, Labelled, Page, Step, Table, Text
from trainwright.plan.lower import lower
from trainwright.plan.plan import Parallel, Plan
from trainwright.prove.numeric.call import Array, Samples
from trainwright.prove.numeric.machine import Machine
from trainwright.prove.numeric.rank import Rank
from trainwright.spec import catalog
from trainwright.spec.batch import Batch
from trainwright.spec.families.toy import WEIGHT, toy_model
from trainwright.spec.optimizer import Optimizer
from trainwright.spec.precision import Precision
from trainwright.strategies.zero import Zero

NAME = "zero-ledger"
TITLE = Text("Sharded parameters: when is a layer whole?", "参数分片：完整参数何时出现？")
INPUTS = (
    Input(
        name="reshard_after_forward",
        default=1,
        least=0,
        most=1,
        meaning=Text(
            "1: a layer's whole weights go after its forward, 0: they stay until its backward", "1：前向后释放完整参数；0：保留到反向"
        ),
    ),
    Input(name="prefetch", default=0, least=0, most=1, meaning=Text("1: gather the next layer one ahead", "1：提前聚合下一层")),
    Input(
        name="free_before_reduce",
        default=1,
        least=0,
        most=1,
        meaning=Text("1: the whole weights go before the gradient is reduced, 0: after", "1：归约梯度之前释放完整参数；0：之后释放"),
    ),
)

PARTS = ("weights", "optimizer", "gathered", "gradients")
NUM_RANKS, NUM_LAYERS, WIDTH = 2, 2, 2
NUM_STEPS = 3
ELEMENT_BYTES = 4
"""The ledger is in elements; in bytes an element counts as float32. The numbers themselves are computed in float64."""

WEIGHTS: dict[str, Array] = {
    f"b0.{WEIGHT}": np.array([[0.6, -0.2], [0.1, 0.5]]),
    f"b1.{WEIGHT}": np.array([[0.4, 0.3], [-0.5, 0.2]]),
}
SAMPLES = (
    Samples(np.array([[1.0, -0.5]]), np.array([[0.5, -0.25]])),
    Samples(np.array([[-0.25, 0.75]]), np.array([[-0.5, 0.5]])),
)
"""One sample for each rank: a row and the row that it should become."""

ORDERS: dict[str, tuple[Text, bool, int]] = {
    "release": (Text("release", "释放"), True, 0),
    "release_prefetch": (Text("release, prefetch", "释放，预取"), True, 1),
    "keep": (Text("keep", "保留"), False, 0),
    "keep_prefetch": (Text("keep, prefetch", "保留，预取"), False, 1),
}
"""Name -> words, reshard_after_forward, prefetch."""

FREES = ("before-reduce", "after-reduce")

_GATHERS = {True: "2 * L", False: "L"}
_PEAKS = {
    "release": "2 * L * n / P + 2 * n + (L - 1) * n / P",
    "release_prefetch": "2 * L * n / P + 3 * n",
    "keep": "2 * L * n / P + L * n + n",
    "keep_prefetch": "2 * L * n / P + L * n + n",
}
_SIZES = {"L": NUM_LAYERS, "n": WIDTH * WIDTH, "P": NUM_RANKS}


@dataclass(slots=True, kw_only=True)
class Entry:
    """One event of a rank: live elements by part afterwards, and the numbers that it brought about."""

    event: Text
    elements: dict[str, int]
    values: list[float] = field(default_factory=list)

    @property
    def live(self) -> int:
        """All live elements that the ledger counts."""
        return sum(self.elements.values())


@dataclass(slots=True)
class Ledger:
    """Both ranks' events of one step, as the interpreter performs it."""

    entries: dict[int, list[Entry]] = field(default_factory=dict)
    waiting: dict[tuple[int, object], tuple[Entry, Ref]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def watch(self, rank: Rank, action: Action) -> None:
        """See an action that has just been done."""
        if isinstance(action, Wait):
            started = self.waiting.pop((rank.number, action.site), None)
            if started is not None:
                entry, target = started
                entry.values = _numbers(rank.array(target))
            return
        seen = _seen(rank, action)
        if seen is None:
            return
        event, values = seen
        elements = {part: rank.part_bytes(part) // np.dtype(np.float64).itemsize for part in PARTS}
        entry = Entry(event=event, elements=elements, values=values)
        self.entries.setdefault(rank.number, []).append(entry)
        if isinstance(action, Collective):
            self.waiting[rank.number, action.site] = entry, action.target
            self.counts[action.op] = self.counts.get(action.op, 0) + (rank.number == 0)

    @property
    def peak(self) -> int:
        """The most that a rank holds after any event."""
        return max(entry.live for entries in self.entries.values() for entry in entries)


def toy_plan(*, reshard_after_forward: bool, prefetch: int, free: str) -> Plan:
    """Two ranks that share two layers of 2 x 2."""
    zero = Zero(size=NUM_RANKS, reshard_after_forward=reshard_after_forward, prefetch=prefetch, free=free, overlap=False)
    return _plan(zero)


def whole_plan() -> Plan:
    """One rank that holds everything and sees both samples, one after the other."""
    return _plan(Zero())


def _plan(zero: Zero) -> Plan:
    return Plan(
        model=toy_model(NUM_LAYERS, WIDTH),
        cluster=catalog.cluster("local").with_devices(zero.size),
        batch=Batch(sequence_tokens=1, global_sequences=NUM_RANKS),
        precision=Precision(compute="fp64"),
        parallel=Parallel(zero=zero),
        optimizer=Optimizer(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.0, clip_norm=0.0, decay="none"),
    )


def run(plan: Plan, ledger: Ledger | None = None, num_steps: int = 1) -> Machine:
    """Perform steps; the ledger sees the first. Each rank, or each microbatch of a single rank, has a sample of its own."""

    def feed(step: int, replica: int, microbatch: int) -> Samples:
        del step
        return SAMPLES[replica + microbatch]

    machine = Machine(plan, lower(plan), feed=feed, parameters=WEIGHTS, watch=ledger.watch if ledger else None)
    machine.step(0, NUM_STEPS)
    machine.watch = None
    for step in range(1, num_steps):
        machine.step(step, NUM_STEPS)
    return machine


def ledger_of(*, reshard_after_forward: bool, prefetch: int, free: str) -> Ledger:
    """The ledger of one step."""
    ledger = Ledger()
    run(toy_plan(reshard_after_forward=reshard_after_forward, prefetch=prefetch, free=free), ledger)
    return ledger


def page(*, reshard_after_forward: int, prefetch: int, free_before_reduce: int) -> Page:
    """Return the page; the steps show the order that the inputs choose."""
    releases = bool(reshard_after_forward)
    free = FREES[0] if free_before_reduce else FREES[1]
    ledgers = {
        (name, order): ledger_of(reshard_after_forward=release, prefetch=ahead, free=order)
        for (name, (_, release, ahead)), order in product(ORDERS.items(), FREES)
    }
    chosen = next(name for name, (_, release, ahead) in ORDERS.items() if (release, ahead) == (releases, prefetch))
    ledger = ledgers[chosen, free]
    sharded = run(toy_plan(reshard_after_forward=releases, prefetch=prefetch, free=free), num_steps=NUM_STEPS)
    whole = run(whole_plan(), num_steps=NUM_STEPS)
    return Page(
        name=NAME,
        title=TITLE,
        text=(
            Text(
                "Two ranks, two layers of 2 × 2 with tanh between, SGD with momentum. Each rank keeps half of every matrix and half of "
                "its momentum, and its own sample. A layer is gathered before it is used, in forward and again in backward; the ranks' "
                "gradients are summed and each rank keeps its half. The loss is the mean of both ranks' ½‖Y − target‖², so the half is "
                "in the gradients already.",
                "两个进程，两层 2×2 矩阵，中间 tanh，带动量的 SGD。每个进程保存每个矩阵的一半、对应动量的一半，以及自己的样本。"
                "一层在使用前聚齐，前向一次、反向再一次；梯度求和后每个进程保留自己的一半。"
                "损失是两个进程的 ½‖Y−target‖² 的平均，因此 1/2 已在梯度里。",
            ),
            Text(
                "Freed after forward, a layer is gathered twice. The peak comes late, in backward of layer 1: the 8 elements that always "
                "stay, whole W1 (4), its gradient (4), and the reduced piece of layer 2's gradient (2): 18. A layer that is kept saves a "
                "gather, one that is gathered ahead hides it. Under either, W1 is whole already while backward of layer 2 runs, and the "
                "peak moves there: 8, both matrices (8) and the gradient of layer 2 (4), but no reduced piece yet: 20. It is a matrix "
                "more and a reduced piece less, so 2 elements, not 4.",
                "前向后释放：每层聚合两次。峰值出现得晚，在第 1 层反向：始终存在的 8 个元素，完整 W1（4）及其梯度（4），"
                "再加第 2 层梯度归约后的分片（2），共 18。保留省下一次聚合，提前聚合隐藏一次聚合。"
                "两者都使第 2 层反向时 W1 已经完整，峰值移到那里：8，加两个矩阵（8）和第 2 层的梯度（4），此时还没有归约后的分片，共 20。"
                "多一个矩阵、少一个归约分片，所以只多 2 个元素，而不是 4 个。",
            ),
            Text(
                "Both together cost no more than one of them: there are only two layers, and what is kept is whole already, so that "
                "nothing is left to gather ahead in backward. Weights that go only after the gradient is reduced cost two elements more: "
                "the reduced piece stands beside them.",
                "两者同用也不更多：只有两层，保留的层已经完整，反向时没有可以提前聚合的。"
                "归约之后才释放完整参数则再多两个元素：归约结果与完整参数同时存在。",
            ),
            Text(
                "These are the actions of the same strategy that plans and trains real models; an interpreter performs them here on numpy "
                "arrays and counts what it holds.",
                "这些动作来自规划与训练真实模型的同一个策略；这里由解释器在 numpy 数组上执行，并统计它实际持有的内容。",
            ),
        ),
        inputs={"reshard_after_forward": reshard_after_forward, "prefetch": prefetch, "free_before_reduce": free_before_reduce},
        figures=_figures(ledgers, ledger, _difference(sharded, whole)),
        steps=tuple(_steps(ledger)),
        tables=(_by_order(ledgers), _by_part(ledger), _update(sharded, whole)),
        not_counted=(
            Text("activations, and the loss", "激活与损失"),
            Text("buffers of the wire, fragments of an allocator", "通信缓冲区、分配器碎片"),
            Text("time: gathering ahead is an order here, not a speed", "时间：提前聚合在这里只是次序，不是速度"),
            Text(
                "a fifth order, PyTorch's default: the root group alone stays gathered after forward",
                "第五种次序，即 PyTorch 的默认做法：只有根分组在前向后保持聚齐",
            ),
        ),
        sources=(
            "Rajbhandari et al. 2020, ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
            "Zhao et al. 2023, PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, section 3",
            "PyTorch documentation, torch.distributed.fsdp.fully_shard (reshard_after_forward)",
        ),
    )


# --- events ----------------------------------------------------------------------------------------------------------------------


def _numbers(array: Array) -> list[float]:
    return [round(float(value), 4) for value in array.reshape(-1)]


def _seen(rank: Rank, action: Action) -> tuple[Text, list[float]] | None:
    """How the ledger calls an action, and the numbers to show; None for what changes nothing that it counts."""
    if action.site.block is None:
        return None
    layer = action.site.block + 1
    match action:
        case Collective(op="all_gather"):
            return Text(f"all-gather W{layer}", f"聚齐 W{layer}"), []
        case Collective(op="reduce_scatter"):
            return Text(f"reduce-scatter g{layer}", f"归约散播 g{layer}"), []
        case Compute(function="forward", writes=writes):
            return Text(f"forward of layer {layer}", f"第 {layer} 层前向"), _numbers(rank.array(writes[0].ref))
        case Compute(function="backward", accumulates=gradients) if gradients is not None:
            return Text(f"backward of layer {layer}", f"第 {layer} 层反向"), _numbers(rank.array(gradients.ref))
        case Update(weights=weights):
            return Text(f"update of W{layer}'s piece", f"更新 W{layer} 分片"), _numbers(rank.array(weights))
        case Free(buffers=buffers):
            names = [_FREED[ref.tensor] for ref in buffers if ref.tensor in _FREED]
            return (Text(f"free {names[0].en}{layer}", f"释放{names[0].zh}{layer}"), []) if names else None
    return None


_FREED = {"gathered": Text("whole W", "完整 W"), "local": Text("whole g", "完整 g"), "gradients": Text("reduced g", "归约后的 g")}


def _steps(ledger: Ledger) -> Iterator[Step]:
    """Event by event: both ranks hold equally much, and different numbers."""
    first = ledger.entries[0][0]
    persistent = first.live - first.elements["gathered"]
    yield Step(
        event=Text("begin: pieces of weights and momentum", "开始：权重与动量的分片"), buffers={"live": persistent, "peak": persistent}
    )
    peak = persistent
    for entries in zip(*(ledger.entries[rank] for rank in range(NUM_RANKS)), strict=True):
        peak = max(peak, entries[0].live)
        buffers: dict[str, Any] = {"live": entries[0].live, "peak": peak}
        values = [entry.values for entry in entries]
        if values[0] == values[1]:
            buffers |= {"value": values[0]} if values[0] else {}
        else:
            buffers |= {f"rank {rank}": value for rank, value in enumerate(values)}
        yield Step(event=entries[0].event, buffers=buffers)


# --- figures and tables ----------------------------------------------------------------------------------------------------------


def _figures(ledgers: dict[tuple[str, str], Ledger], chosen: Ledger, difference: float) -> dict[str, Labelled]:
    figures: dict[str, Labelled] = {}
    for name, (words, release, _) in ORDERS.items():
        figures[f"all_gathers_{name}"] = _figure(
            Text(f"all-gathers in a step, {words.en}", f"每步聚合次数，{words.zh}"),
            ledgers[name, FREES[0]].counts["all_gather"],
            "all-gathers",
            _GATHERS[release],
        )
    for (name, (words, _, _)), free in product(ORDERS.items(), FREES):
        early = free == FREES[0]
        more = "" if early else " + n / P"
        figures[f"peak_{name}_{free.replace('-', '_')}"] = _figure(
            Text(
                f"peak, {words.en}; weights freed {free.partition('-')[0]} reducing",
                f"峰值，{words.zh}；归约{'前' if early else '后'}释放完整参数",
            ),
            ledgers[name, free].peak,
            "elements",
            _PEAKS[name] + more,
        )
    figures["peak_bytes"] = Labelled(
        label=Text("peak of the order below, 4 bytes an element", "下面这种次序的峰值，每元素 4 字节"),
        figure=Figure(
            value=chosen.peak * ELEMENT_BYTES,
            unit="bytes",
            formula="elements * e",
            inputs={"elements": chosen.peak, "e": ELEMENT_BYTES},
            source="the steps below",
            not_counted="activations",
        ),
    )
    figures["largest_difference"] = Labelled(
        label=Text(f"largest difference from the unsharded weights after {NUM_STEPS} steps", f"{NUM_STEPS} 步后与不分片权重的最大差"),
        figure=Figure(
            value=difference,
            unit="1",
            formula="0",
            source="both run by the interpreter in float64; equal to the last bit",
            not_counted="nothing",
        ),
    )
    return figures


def _figure(label: Text, value: int, unit: str, formula: str) -> Labelled:
    names = formula.replace("(", " ").replace(")", " ").split()
    return Labelled(
        label=label,
        tabled=True,
        figure=Figure(
            value=value,
            unit=unit,
            formula=formula,
            inputs={name: size for name, size in _SIZES.items() if name in names},
            source="the strategy's own actions, performed; the formula holds for two layers of n elements on P ranks",
            not_counted="activations, wire buffers",
        ),
    )


def _by_order(ledgers: dict[tuple[str, str], Ledger]) -> Table:
    return Table(
        title=Text("The four orders", "四种次序"),
        columns=(
            Text("order", "次序"),
            Text("all-gathers", "聚合"),
            Text("reduce-scatters", "归约散播"),
            Text("peak, weights freed before reducing", "峰值（归约前释放）"),
            Text("peak, after", "峰值（归约后释放）"),
        ),
        rows=tuple(
            (
                words,
                *(ledgers[name, FREES[0]].counts[op] for op in ("all_gather", "reduce_scatter")),
                *(ledgers[name, free].peak for free in FREES),
            )
            for name, (words, _, _) in ORDERS.items()
        ),
    )


def _by_part(ledger: Ledger) -> Table:
    rows: list[tuple[Cell, ...]] = [(entry.event, *(entry.elements[part] for part in PARTS), entry.live) for entry in ledger.entries[0]]
    return Table(
        title=Text("Live elements of a rank after each event", "每个事件之后一个进程的存活元素数"),
        columns=(
            Text("event", "事件"),
            Text("pieces of W", "W 分片"),
            Text("momentum", "动量"),
            Text("whole W", "完整 W"),
            Text("gradients", "梯度"),
            Text("live", "存活"),
        ),
        rows=tuple(rows),
    )


def _update(sharded: Machine, whole: Machine) -> Table:
    """Weights after the last step, shared out and not."""
    together, alone = sharded.parameters(), whole.parameters()
    return Table(
        title=Text(f"The weights after {NUM_STEPS} steps", f"{NUM_STEPS} 步之后的权重"),
        columns=(
            Text("matrix", "矩阵"),
            Text("at the start", "开始"),
            Text("sharded", "分片"),
            Text("unsharded", "不分片"),
            Text("largest difference", "最大差"),
        ),
        rows=tuple(
            (
                f"W{number + 1}",
                *(str(_numbers(one[name])) for one in (WEIGHTS, together, alone)),
                float(np.abs(together[name] - alone[name]).max()),
            )
            for number, name in enumerate(WEIGHTS)
        ),
    )


def _difference(sharded: Machine, whole: Machine) -> float:
    together, alone = sharded.parameters(), whole.parameters()
    return max(float(np.abs(together[name] - alone[name]).max()) for name in WEIGHTS)
