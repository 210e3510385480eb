"""Lesson: what a pipeline loses to filling and draining, and what each order of the same work keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.ir.figure import Figure
from trainwright.ir.slot import Forward
from trainwright.lessons.page import POSITION, Input, Labelled, Page, Step, Table, Text
from trainwright.schedules import SCHEDULES
from trainwright.schedules.timeline import Prices, draw

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainwright.schedules.timeline import Timeline

NAME = "pipeline"
TITLE = Text("Pipelines: who waits, and who keeps what", "流水线：谁在等待，谁保留了什么")
INPUTS = (
    Input(name="stages", default=4, most=64, meaning=Text("positions on the pipeline axis, P", "流水线位置数 P")),
    Input(name="microbatches", default=8, most=512, meaning=Text("microbatches of one step, M", "一步的微批次数 M")),
)

_CHUNKS = 2
_SHAPES = ((2, 4), (3, 5), (4, 2), (4, 8), (8, 4), (8, 32), (16, 64))
_WORDS = {"gpipe": Text("GPipe", "GPipe"), "1f1b": Text("1F1B", "1F1B"), "interleaved": Text("interleaved, 2 chunks", "交错，每位置 2 块")}


def page(*, stages: int, microbatches: int) -> Page:
    """Return the page for one shape. The interleaved schedule is shown where it is possible."""
    timelines = dict(_timelines(stages, microbatches))
    sizes = {"P": stages, "M": microbatches}
    steady = timelines["1f1b"]
    return Page(
        name=NAME,
        title=TITLE,
        text=(
            Text(
                "Every position runs one forward or one backward a tick, and a result reaches the next position at once. All microbatches "
                "see one version of the weights: they change after the last backward. Asynchronous versions are another contract.",
                "每个位置每拍执行一次前向或反向，结果立即到达下一位置。所有微批次看到同一版本的权重："
                "最后一次反向之后才更新。异步版本是另一种约定。",
            ),
            Text(
                "GPipe and 1F1B take equally long here, 2 (M + P - 1) ticks. What differs is how many microbatches' activations a "
                "position keeps: all M under GPipe, min(P - p, M) on position p under 1F1B. A peak counts microbatches of a chunk: "
                "where a position has several chunks, each microbatch counts once in each of them.",
                "这里 GPipe 与 1F1B 用时相同，都是 2(M+P-1) 拍。不同的是各位置保留多少份激活："
                "GPipe 保留全部 M 份，1F1B 的位置 p 保留 min(P-p, M) 份。"
                "峰值按块的微批次计数：一个位置有多个块时，同一个微批次在每块中各计一次。",
            ),
        ),
        inputs={"stages": stages, "microbatches": microbatches},
        figures={
            "makespan": _figure(
                Text("ticks until the last backward", "到最后一次反向的拍数"), steady.makespan, "ticks", "2 * (M + P - 1)", sizes
            ),
            "idle_slots": _figure(
                Text("idle slots, all positions", "空闲时隙，全部位置"), steady.idle_slots, "slots", "2 * P * (P - 1)", sizes
            ),
            "idle_fraction": _figure(Text("idle share", "空闲比例"), steady.idle_fraction, "1", "(P - 1) / (M + P - 1)", sizes),
            **{
                f"peak_kept_{name.replace('-', '_')}": _figure(
                    Text(f"kept microbatches on position 0, {name}", f"位置 0 保留的微批次数，{name}"),
                    timelines[name].visits[0].peak_kept,
                    "microbatches",
                    formula,
                    sizes,
                )
                for name, formula in (("gpipe", "M"), ("1f1b", "min(P, M)"))
            },
        },
        steps=tuple(_steps(steady)),
        tables=(_by_schedule(timelines), *(_by_position(name, timeline) for name, timeline in timelines.items()), _by_shape()),
        not_counted=(
            Text("positions with unequal work, and time on the wire", "各位置耗时不等，以及通信时间"),
            Text("sizes of tensors, recompute, buffers of sends", "张量大小、重算、发送缓冲"),
            Text("a tick is an order, not a latency", "拍表示先后，不是时延"),
        ),
        sources=(
            "Huang et al. 2019, GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
            "Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, section 2.2",
        ),
    )


def _timelines(stages: int, microbatches: int) -> Iterator[tuple[str, Timeline]]:
    for name in _WORDS:
        schedule = SCHEDULES.get(name)
        chunks = _CHUNKS if schedule.USES_CHUNKS else 1
        if not list(schedule.check(stages, microbatches, chunks)):
            part = 1 if chunks == 1 else 1 / chunks  # a chunk is a share of the position's work
            yield name, draw(schedule, stages, microbatches, chunks, Prices(forward=part, backward=part))


def _figure(label: Text, value: float, unit: str, formula: str, sizes: dict[str, int]) -> Labelled:
    inputs = {name: size for name, size in sizes.items() if name in formula}
    return Labelled(
        label=label,
        figure=Figure(
            value=value,
            unit=unit,
            formula=formula,
            inputs=inputs,
            source="the schedule, walked on a clock; the formula holds for positions with equal work",
            not_counted="time on the wire",
        ),
    )


def _by_schedule(timelines: dict[str, Timeline]) -> Table:
    return Table(
        title=Text("The schedules side by side", "各调度对比"),
        columns=(
            Text("schedule", "调度"),
            Text("makespan", "完成拍数"),
            Text("idle", "空闲"),
            Text("idle share", "空闲比例"),
            Text("least possible", "下界"),
            Text("largest peak, in whole positions", "最大保留（折合整个位置）"),
        ),
        rows=tuple(
            (
                _WORDS[name],
                _plain(timeline.makespan),
                _plain(timeline.idle_slots),
                round(timeline.idle_fraction, 4),
                "" if timeline.lower_bound is None else _plain(timeline.lower_bound),
                _plain(max(visits.peak_kept for visits in timeline.visits) * timeline.num_positions / len(timeline.stage_positions)),
            )
            for name, timeline in timelines.items()
        ),
    )


def _plain(value: float) -> float:
    """A whole number as one: an interleaved schedule counts in halves."""
    return int(value) if value == int(value) else value


def _by_position(name: str, timeline: Timeline) -> Table:
    title = _WORDS[name]
    return Table(
        title=Text(f"Positions under {title.en}", f"{title.zh} 的各位置"),
        columns=(Text("position", "位置"), Text("forwards", "前向次数"), Text("backwards", "反向次数"), Text("peak kept", "保留峰值")),
        rows=tuple((visits.position, visits.num_forwards, visits.num_backwards, visits.peak_kept) for visits in timeline.visits),
    )


def _by_shape() -> Table:
    """Other shapes, so that the pattern shows."""
    rows = []
    for stages, microbatches in _SHAPES:
        timeline = draw(SCHEDULES.get("1f1b"), stages, microbatches, 1, Prices())
        peaks = ", ".join(str(visits.peak_kept) for visits in timeline.visits)
        rows.append((stages, microbatches, timeline.makespan, timeline.idle_slots, peaks))
    return Table(
        title=Text("1F1B at other shapes", "其他规模下的 1F1B"),
        columns=("P", "M", Text("makespan", "完成拍数"), Text("idle", "空闲"), Text("peaks, position by position", "各位置峰值")),
        rows=tuple(rows),
    )


def _steps(timeline: Timeline) -> Iterator[Step]:
    """Every slot by its tick, with what its position keeps once the slot has begun (forward) or ended (backward)."""
    kept = [0] * timeline.num_positions
    slots = zip(timeline.starts.tolist(), timeline.positions.tolist(), timeline.slots, strict=True)
    for start, position, slot in sorted(slots, key=lambda each: each[:2]):
        is_forward = isinstance(slot, Forward)
        kept[position] += 1 if is_forward else -1
        letter, direction = ("F", Text("forward", "前向")) if is_forward else ("B", Text("backward", "反向"))
        yield Step(
            event=Text(
                f"tick {start}: {letter}{slot.microbatch}, {direction.en} of microbatch {slot.microbatch}",
                f"第 {start} 拍：{letter}{slot.microbatch}，微批次 {slot.microbatch} 的{direction.zh}",
            ),
            rank=position,
            place=POSITION,
            buffers={"tick": start, "kept": kept[position]},
        )
