"""Where a parameter lives: its block, segment, stage, position and first rank, from its name."""

from __future__ import annotations

import numpy as np

from trainwright.plan.plan import Plan
from trainwright.schedules import SCHEDULES


def bare(name: str) -> str:
    """A parameter's name within its unit: `b3.q.weight` -> `q.weight`."""
    head, _, rest = name.partition(".")
    return rest if head[:1] == "b" and head[1:].isdigit() else name


def place_of(name: str) -> tuple[int | None, str]:
    """Block and segment that a parameter belongs to."""
    inner = bare(name)
    block = int(name[1:].partition(".")[0]) if inner != name else None
    part = inner.partition(".")[0]
    segments = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "feed", "up": "feed", "down": "feed", "head": "logits", "positions": "enter"}
    if inner == "feed.bias":
        return block, "add"
    return block, "norm2" if inner == "out.bias" else segments.get(part, part)


def stage_of(plan: Plan, name: str) -> int:
    """The virtual stage that holds a parameter (of a tied one, the first)."""
    block, segment = place_of(name)
    if block is None:
        return 0 if segment in {"embed", "enter"} else plan.num_stages - 1
    ends = np.cumsum(plan.stage_layers)
    return int(np.searchsorted(ends, block, side="right"))


def position_of(plan: Plan, stage: int) -> int:
    """The place on the pipeline axis of a virtual stage."""
    pipeline = plan.parallel.pipeline
    position: int = SCHEDULES.get(pipeline.schedule).position_of(stage, pipeline.size, pipeline.chunks)
    return position


def rank_of(plan: Plan, name: str) -> int:
    """The first rank that holds a parameter."""
    return plan.rank_of({"pipeline": position_of(plan, stage_of(plan, name))})
