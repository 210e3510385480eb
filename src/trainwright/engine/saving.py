"""What a run saves so that it can be resumed to the last bit: the persistent buffers of each rank, the data cursor, the step.

Random numbers have no state: they depend on seed, step and place alone. The settings that a resumed run must share with the saved
one are saved too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from trainwright.engine import checkpoint
from trainwright.engine.data import Cursor
from trainwright.engine.store import Store
from trainwright.engine.world import World
from trainwright.ir.program import Program
from trainwright.plan.plan import Plan
from trainwright.problems import PlanError, Problem

KEPT = 3
"""Checkpoints that stay where the plan does not say."""


def persistent(program: Program, store: Store, position: int) -> dict[str, Tensor]:
    """The buffers of a rank that live across steps, by name: weights, master copy, optimizer state."""
    return {str(ref): store.tensor(ref) for ref in program.persistent(position)}


def save(world: World, folder: Path, cursor: Cursor, tensors: dict[str, Tensor], plan: Plan) -> Path:
    """Save all ranks' state before step `cursor.step`, and keep as many older ones as the plan says; every rank calls it."""
    meta: dict[str, Any] = {"num_sequences": cursor.num_sequences, "num_steps": plan.num_steps, "settings": shared_settings(plan)}
    keep = KEPT if plan.run.checkpoint is None else plan.run.checkpoint.keep
    return checkpoint.save(world, folder, cursor.step, tensors, meta, keep=keep)


def planned_steps(folder: Path, step: int) -> int | None:
    """How many steps the run was to have that saved the checkpoint of `step`; None where it did not say."""
    found = checkpoint.facts(folder, step).get("num_steps")
    return found if isinstance(found, int) else None


def restore(world: World, folder: Path, tensors: dict[str, Tensor], plan: Plan, step: int | None = None) -> Cursor:
    """Put the newest saved state (or that of `step`) into the buffers.

    Returns where the data go on. PlanError if the checkpoint is of another plan.
    """
    loaded = checkpoint.load(world, folder, step)
    problems = list(_differences(loaded, plan))
    if not problems and loaded.tensors.keys() != tensors.keys():
        problems.append(_other_plan("its buffers have other names", loaded.folder, None, None))
    if problems:
        raise PlanError(problems)
    for name, tensor in loaded.tensors.items():
        tensors[name].copy_(tensor)
    return Cursor(loaded.step, int(str(loaded.meta["num_sequences"])))


def shared_settings(plan: Plan) -> dict[str, Any]:
    """Settings that a resumed run must share with the saved one, by dotted path."""
    precision = asdict(plan.precision.resolved(plan.cluster.stack))
    model = {f"model.{name}": value for name, value in asdict(plan.model).items() if name != "name"}
    parallel = {f"parallel.{axis}.size": size for axis, size in plan.parallel.sizes.items()}
    return {
        **{name: str(value) for name, value in model.items()},
        **parallel,
        "parallel.zero.stage": plan.parallel.zero.stage,
        "parallel.pipeline.schedule": plan.parallel.pipeline.schedule,
        "parallel.pipeline.chunks": plan.parallel.pipeline.chunks,
        "optimizer.name": plan.optimizer.name,
        "run.seed": plan.run.seed,
        "run.data": plan.run.data,
        "batch.sequence_tokens": plan.batch.sequence_tokens,
        **{f"precision.{name}": str(value) for name, value in precision.items()},
    }


def _differences(loaded: checkpoint.Loaded, plan: Plan) -> Iterator[Problem]:
    saved = loaded.meta["settings"]
    assert isinstance(saved, dict)
    for path, value in shared_settings(plan).items():
        if saved.get(path) != value:
            yield _other_plan(f"{path} was {saved.get(path)}", loaded.folder, path, value)


def _other_plan(why: str, folder: Path, path: str | None, given: object) -> Problem:
    return Problem(
        f"the checkpoint {folder.name} is of another plan: {why}",
        file=str(folder),
        path=path,
        given=given,
        attempt="resume with the plan that saved it, or begin anew in another run.checkpoint.folder",
    )
