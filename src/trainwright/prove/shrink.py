"""Make a plan small enough to be proved on a laptop, and keep what makes it that plan.

Kept: schedule, chunks, ZeRO stage and options, sequence parallelism, recompute policy, tying, biases, norms, the ratio of heads to
key-value
heads, whether the vocabulary divides, uneven cuts of the layers, the remainder of microbatches modulo positions, the optimizer. Changed:
sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainwright.plan.check import demand
from trainwright.plan.plan import Plan
from trainwright.problems import PlanError, Problem
from trainwright.spec import catalog
from trainwright.spec.batch import Batch
from trainwright.spec.model import Model
from trainwright.spec.optimizer import Optimizer
from trainwright.spec.precision import Precision

HEAD_WIDTH = 4
TOKENS = 8
LEARNING_RATE = 1e-2
CLIP_NORM = 0.05
MAX_RANKS = 64
"""More ranks than this are not run on one machine."""


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that was changed for the proof."""

    setting: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.setting} {self.before} -> {self.after}"


def shrink(plan: Plan, *, max_ranks: int | None = None, dtype: str = "fp64") -> tuple[Plan, tuple[Change, ...]]:
    """The plan on as few ranks as show its strategies (or on at most `max_ranks`), in small shapes; and what was changed."""
    sizes = small_sizes(plan, max_ranks)
    pipeline = plan.parallel.pipeline
    layers = small_layers(plan, sizes["pipeline"] * pipeline.chunks)
    model = small_model(plan, sizes, sum(layers))
    batch = small_batch(plan, sizes)
    tensor = replace(plan.parallel.tensor, size=sizes["tensor"])
    parallel = replace(
        plan.parallel,
        pipeline=replace(pipeline, size=sizes["pipeline"], layers=layers if len(set(layers)) > 1 else ()),
        data=replace(plan.parallel.data, size=sizes["data"]),
        zero=replace(plan.parallel.zero, size=sizes["zero"]),
        tensor=tensor,
    )
    recompute = replace(plan.recompute, blocks=min(plan.recompute.blocks, 1))
    cluster = catalog.cluster("local").with_devices(_product(sizes))
    small = replace(
        plan,
        model=model,
        batch=batch,
        parallel=parallel,
        recompute=recompute,
        cluster=cluster,
        precision=Precision(compute=dtype),
        optimizer=telling_optimizer(plan),
    )
    return demand(small), tuple(changes(plan, small))


def demand_ranks(plan: Plan, max_ranks: int | None, path: str = "max_ranks") -> None:
    """Raise PlanError for a number of ranks that cannot show all axes of the plan, or is too much for one machine. `path`: its name."""
    least = _product(small_sizes(plan, None))
    if max_ranks is None or least <= max_ranks <= MAX_RANKS:
        return
    used = " x ".join(f"{axis} 2" for axis, size in plan.parallel.sizes.items() if size > 1) or "one rank"
    few = f"fewer than {least} ranks do not show every axis of the plan ({used})" if least > 1 else "a proof needs a rank"
    nearest = min(max(max_ranks, least), MAX_RANKS)
    raise PlanError(
        Problem(
            few if max_ranks < least else "a proof runs on one machine",
            path=path,
            given=max_ranks,
            allowed=f"whole numbers from {least} to {MAX_RANKS}",
            attempt=f"{path} {nearest}",
        )
    )


def small_sizes(plan: Plan, max_ranks: int | None) -> dict[str, int]:
    """Every axis that is used becomes 2; then, while `max_ranks` allows, axes grow towards the plan's, the outermost first."""
    whole = plan.parallel.sizes
    sizes = {axis: min(size, 2) for axis, size in whole.items()}
    if max_ranks is None:
        return sizes
    grown = True
    while grown:
        grown = False
        for axis, size in whole.items():
            larger = next((one for one in range(sizes[axis] + 1, size + 1) if size % one == 0), None)
            if larger is not None and _product({**sizes, axis: larger}) <= max_ranks:
                sizes[axis] = larger
                grown = True
    return sizes


def small_layers(plan: Plan, num_stages: int) -> tuple[int, ...]:
    """One block a stage; a stage that had more than the smallest keeps one more."""
    whole = plan.stage_layers
    picked = [whole[round(stage * (len(whole) - 1) / max(num_stages - 1, 1))] for stage in range(num_stages)]
    least = min(picked)
    blocks = 2 if plan.recompute.policy == "blocks" and plan.recompute.blocks < least else 1
    return tuple(blocks + min(count - least, 1) for count in picked)


def small_model(plan: Plan, sizes: dict[str, int], num_layers: int) -> Model:
    """The same architecture in the smallest widths that divide."""
    model, t = plan.model, sizes["tensor"]
    ratio = model.num_heads // model.num_kv_heads
    num_kv_heads = max(t, 2) if model.num_kv_heads > 1 else 1
    num_heads = ratio * num_kv_heads
    tokens = TOKENS * t
    width = num_heads * HEAD_WIDTH if model.width == model.num_heads * model.head_width else 2 * num_heads * HEAD_WIDTH
    divides = model.vocab % plan.size("tensor") == 0
    return replace(
        model,
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=HEAD_WIDTH,
        ffn_width=3 * t * max(width // (2 * t), 1),
        vocab=32 * t - (0 if divides else 1),
        max_positions=max(tokens, 16),
    )


def small_batch(plan: Plan, sizes: dict[str, int]) -> Batch:
    """The least number of microbatches, at least 2 P, that divides by P if the plan's does and leaves a remainder if the plan's does.

    At most two sequences each.
    """
    positions = sizes["pipeline"]
    remainder = min(plan.num_microbatches % plan.size("pipeline"), positions - 1)
    num_microbatches = 2 * positions + remainder
    sequences = min(plan.batch.microbatch_sequences, 2)
    return Batch(
        sequence_tokens=TOKENS * sizes["tensor"],
        global_sequences=num_microbatches * sequences * sizes["data"] * sizes["zero"],
        microbatch_sequences=sequences,
    )


def telling_optimizer(plan: Plan) -> Optimizer:
    """The same optimizer, with steps large enough that a wrong one shows, and clipping at work from the first step if there is any."""
    optimizer = plan.optimizer
    return replace(
        optimizer,
        lr=max(optimizer.lr, LEARNING_RATE),
        warmup_steps=min(optimizer.warmup_steps, 1),
        clip_norm=min(optimizer.clip_norm, CLIP_NORM),
    )


def changes(before: Plan, after: Plan) -> list[Change]:
    """The settings that differ, in the words of the plan file."""
    found: list[Change] = []

    def note(setting: str, one: object, other: object) -> None:
        if one != other:
            found.append(Change(setting, one, other))

    for axis in before.parallel.order:
        note(f"parallel.{axis}.size", before.size(axis), after.size(axis))
    note("parallel.pipeline.layers", before.parallel.pipeline.layers, after.parallel.pipeline.layers)
    for name in ("num_layers", "width", "num_heads", "num_kv_heads", "head_width", "ffn_width", "vocab", "max_positions"):
        note(f"model.{name}", getattr(before.model, name), getattr(after.model, name))
    for name in ("sequence_tokens", "global_sequences", "microbatch_sequences"):
        note(f"batch.{name}", getattr(before.batch, name), getattr(after.batch, name))
    note("microbatches", before.num_microbatches, after.num_microbatches)
    for name in ("lr", "warmup_steps", "clip_norm"):
        note(f"optimizer.{name}", getattr(before.optimizer, name), getattr(after.optimizer, name))
    note("recompute.blocks", before.recompute.blocks, after.recompute.blocks)
    note("precision.compute", before.precision.compute, after.precision.compute)
    return found


def _product(sizes: dict[str, int]) -> int:
    total = 1
    for size in sizes.values():
        total *= size
    return total
