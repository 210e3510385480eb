"""Check: everything that is wrong with a Plan, found at once.

`check` looks at the plan alone; `check_run` looks at the files that a run needs. Neither stops at the first Problem.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from trainwright.plan.plan import Plan, cut_layers
from trainwright.problems import PlanError, Problem
from trainwright.schedules import SCHEDULES
from trainwright.spec.bounds import choice_problems
from trainwright.spec.formats import LANDED
from trainwright.strategies.recompute import POLICIES
from trainwright.units import Bytes

_ADJUSTABLE: Final = ("zero", "data", "pipeline", "tensor")  # the axes whose size is the first to change when the product is wrong
_MOST_SHOWN: Final = 12


@dataclass(frozen=True, slots=True)
class Check:
    """A law that a plan must keep, and the settings it speaks of: where one of those is already wrong, the law says nothing."""

    find: Callable[[Plan], Iterator[Problem]]
    needs: tuple[str, ...]

    def applies(self, wrong: frozenset[str]) -> bool:
        """No setting that this check reads is wrong already."""
        return not any(_overlap(need, path) for need in self.needs for path in wrong)


def check(plan: Plan, wrong: frozenset[str] = frozenset()) -> Iterator[Problem]:
    """Every Problem of a plan, once each. `wrong` are dotted paths known to be wrong already: nothing is said about them again."""
    seen: set[tuple[str | None, str]] = set()
    for law in CHECKS:
        if not law.applies(wrong):
            continue
        for problem in law.find(plan):
            mark = (problem.path, problem.message)
            if mark not in seen and not _covered(problem, wrong):
                seen.add(mark)
                yield problem


def check_run(plan: Plan) -> Iterator[Problem]:
    """Files that a run needs: readable text that is long enough, a tokenizer that exists, a folder for checkpoints. Writes nothing."""
    yield from _corpus(plan)
    yield from _tokenizer(plan)
    yield from _checkpoint_folder(plan)


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _covered(problem: Problem, wrong: frozenset[str]) -> bool:
    path = (problem.path or "").replace("[", ".").replace("]", "")
    return any(path == one or path.startswith(f"{one}.") for one in wrong)


# --- the mesh ---------------------------------------------------------------------------------------------------------------------


def _product(plan: Plan) -> Iterator[Problem]:
    """The sizes multiply to the number of devices."""
    wanted = plan.cluster.num_devices
    if plan.num_devices == wanted:
        return
    used = {axis: size for axis, size in plan.parallel.sizes.items() if size > 1}
    product = " x ".join(f"{axis} {size}" for axis, size in used.items()) or "every axis 1"
    nodes = f"nodes x devices_per_node = {plan.cluster.num_nodes} x {plan.cluster.devices_per_node}"
    yield Problem(
        f"the sizes multiply to {plan.num_devices} ranks ({product}), but the cluster has {wanted} devices ({nodes})",
        path="parallel",
        given=used or {"zero": 1},
        allowed=f"sizes whose product is {wanted}",
        attempt=_product_attempt(plan, wanted),
    )


def _product_attempt(plan: Plan, wanted: int) -> str:
    in_use = [axis for axis in _ADJUSTABLE if plan.size(axis) > 1]
    for axis in (*in_use, "zero"):
        others = plan.num_devices // plan.size(axis)
        if wanted % others == 0:
            return f"parallel.{axis}.size = {wanted // others}"
    if plan.num_devices % plan.cluster.devices_per_node == 0:
        return f"cluster.nodes = {plan.num_devices // plan.cluster.devices_per_node}"
    return f"cluster.nodes = 1, cluster.devices_per_node = {plan.num_devices}"


# --- tensor -----------------------------------------------------------------------------------------------------------------------


def _tensor_divides(plan: Plan) -> Iterator[Problem]:
    """Each rank of the tensor axis takes whole heads, whole key-value heads and a whole part of the feed-forward width."""
    size, model = plan.size("tensor"), plan.model
    parts = {"heads": model.num_heads, "key-value heads": model.num_kv_heads, "columns of the feed-forward width": model.ffn_width}
    broken = [f"{count} {noun}" for noun, count in parts.items() if count % size]
    if broken:
        allowed = _divisors(math.gcd(*parts.values()))
        yield Problem(
            f'tensor size {size} does not divide the {" and the ".join(broken)} of "{model.name}"',
            path="parallel.tensor.size",
            given=size,
            allowed=allowed,
            attempt=_tensor_attempt(plan, allowed),
        )


def _tensor_attempt(plan: Plan, allowed: tuple[int, ...]) -> str:
    """The largest size that works and does not exceed the given one, with the ZeRO size that keeps the product."""
    size, zero = plan.size("tensor"), plan.size("zero")
    best = max(one for one in allowed if one <= size)
    attempt = f"parallel.tensor.size = {best}"
    if plan.num_devices == plan.cluster.num_devices and zero * size % best == 0:
        attempt += f", with parallel.zero.size = {zero * size // best} in place of {zero}"
    return attempt


def _sequence_divides(plan: Plan) -> Iterator[Problem]:
    """Under sequence parallelism each rank takes an equal piece of the sequence."""
    size, tokens = plan.size("tensor"), plan.batch.sequence_tokens
    if plan.parallel.tensor.sequence and tokens % size:
        below, above = tokens // size * size, -(-tokens // size) * size
        yield Problem(
            f"a sequence of {tokens} tokens does not divide into {size} equal pieces, as tensor.sequence = true needs",
            path="batch.sequence_tokens",
            given=tokens,
            allowed=f"multiples of {size}, such as {below or above} and {above if below else 2 * above}",
            attempt=f"batch.sequence_tokens = {below or above}, or parallel.tensor.sequence = false",
        )


# --- pipeline ---------------------------------------------------------------------------------------------------------------------


def _layers(plan: Plan) -> Iterator[Problem]:
    """Every virtual stage holds at least one block, and together they hold all."""
    if plan.parallel.pipeline.layers:
        yield from _given_layers(plan)
    elif cut_layers(plan.model.num_layers, plan.num_stages) is None:
        yield _uncut_layers(plan)


def _given_layers(plan: Plan) -> Iterator[Problem]:
    layers, total, stages = plan.parallel.pipeline.layers, plan.model.num_layers, plan.num_stages
    if len(layers) == stages and sum(layers) == total:
        return
    even, left = divmod(total, stages)
    attempt = [even + (stage < left) for stage in range(stages)]
    yield Problem(
        f"layers has {len(layers)} entries that add up to {sum(layers)}, "
        f'but "{plan.model.name}" has {total} layers and the plan {stages} stages',
        path="parallel.pipeline.layers",
        given=layers,
        allowed=f"{stages} numbers, one a stage, that add up to {total}",
        attempt=f"parallel.pipeline.layers = {attempt}" if even and stages <= _MOST_SHOWN else "leave layers out",
    )


def _uncut_layers(plan: Plan) -> Problem:
    pipeline, total = plan.parallel.pipeline, plan.model.num_layers
    allowed = tuple(size for size in range(1, total + 1) if cut_layers(total, size * pipeline.chunks) is not None)
    nearest_size = min(allowed, key=lambda size: (abs(size - pipeline.size), size), default=1)
    by_hand = (
        f", or parallel.pipeline.layers = [...] with {plan.num_stages} numbers that add up to {total}" if plan.num_stages <= total else ""
    )
    chunks = f" x {pipeline.chunks} chunks" if pipeline.chunks > 1 else ""
    return Problem(
        f'pipeline size {pipeline.size}{chunks} does not divide the {total} layers of "{plan.model.name}"',
        path="parallel.pipeline.size",
        given=pipeline.size,
        allowed=allowed or "none with this many chunks",
        attempt=f"parallel.pipeline.size = {nearest_size}{by_hand}" if allowed else f"parallel.pipeline.chunks = 1{by_hand}",
    )


def _known_schedule(plan: Plan) -> Iterator[Problem]:
    name = plan.parallel.pipeline.schedule
    if name not in SCHEDULES:
        yield SCHEDULES.unknown(name, path="parallel.pipeline.schedule")


def _schedule(plan: Plan) -> Iterator[Problem]:
    """The schedule can do what is asked of it; it says itself what that is."""
    pipeline = plan.parallel.pipeline
    if pipeline.schedule in SCHEDULES and plan.num_microbatches:
        schedule = SCHEDULES.get(pipeline.schedule)
        given = {"size": pipeline.size, "schedule": pipeline.schedule, "chunks": pipeline.chunks}
        for problem in schedule.check(pipeline.size, plan.num_microbatches, pipeline.chunks):
            yield replace(problem, path="parallel.pipeline", given=given)


# --- batch ------------------------------------------------------------------------------------------------------------------------


def _batch_divides(plan: Plan) -> Iterator[Problem]:
    """Each replica gets the same whole number of microbatches, at least one."""
    batch, replicas = plan.batch, plan.num_replicas
    together = replicas * batch.microbatch_sequences
    if batch.global_sequences % together == 0:
        return
    below, above = batch.global_sequences // together * together, -(-batch.global_sequences // together) * together
    short = batch.global_sequences < together
    verdict = "fewer than one microbatch for each replica" if short else "no whole number of microbatches for each replica"
    yield Problem(
        f"{batch.global_sequences} sequences are {verdict}: "
        f"{replicas} replicas (data x zero) take {batch.microbatch_sequences} each at a time",
        path="batch.global_sequences",
        given=batch.global_sequences,
        allowed=f"multiples of {together}, such as {below or above} and {above if below else 2 * above}",
        attempt=f"batch.global_sequences = {above if short or batch.global_sequences - below > above - batch.global_sequences else below}",
    )


def _positions(plan: Plan) -> Iterator[Problem]:
    """A table of learned positions has a last row."""
    model, tokens = plan.model, plan.batch.sequence_tokens
    if model.positions == "learned" and tokens > model.max_positions:
        yield Problem(
            f'"{model.name}" has learned positions up to {model.max_positions}, a sequence of {tokens} tokens has more',
            path="batch.sequence_tokens",
            given=tokens,
            allowed=f"a whole number from 1 to {model.max_positions}",
            attempt=f"batch.sequence_tokens = {model.max_positions}",
        )


# --- options ----------------------------------------------------------------------------------------------------------------------


def _zero_stage(plan: Plan) -> Iterator[Problem]:
    stage = plan.parallel.zero.stage
    if stage not in {1, 2, 3}:
        yield Problem(
            f"ZeRO has the stages 1, 2 and 3, not {stage}",
            path="parallel.zero.stage",
            given=stage,
            allowed=(1, 2, 3),
            attempt="parallel.zero.stage = 3",
        )


def _choices(plan: Plan) -> Iterator[Problem]:
    """Options that are one of a few words."""
    zero = plan.parallel.zero
    yield from choice_problems("parallel.zero.gradients", zero.gradients, ("sharded", "whole"))
    yield from choice_problems("parallel.zero.free", zero.free, ("before-reduce", "after-reduce"))
    yield from choice_problems("recompute.policy", plan.recompute.policy, POLICIES)
    yield from choice_problems("parallel.context.method", plan.parallel.context.method, ("ring",))


def _recompute_blocks(plan: Plan) -> Iterator[Problem]:
    """`blocks` goes with the policy of that name, and a position has only so many."""
    policy, blocks, total = plan.recompute.policy, plan.recompute.blocks, plan.model.num_layers
    if policy == "blocks" and not 1 <= blocks <= total:
        yield Problem(
            f'recompute policy "blocks" needs a number of blocks, and "{plan.model.name}" has {total}',
            path="recompute.blocks",
            given=blocks,
            allowed=f"a whole number from 1 to {total}",
            attempt=f"recompute.blocks = {min(max(blocks, 1), total)}",
        )
    elif policy != "blocks" and blocks:
        yield Problem(
            f'recompute policy "{policy}" takes no number of blocks',
            path="recompute.blocks",
            given=blocks,
            allowed='blocks only with policy = "blocks", or alone',
            attempt=f'leave blocks or policy = "{policy}" out',
        )


def _not_landed(plan: Plan) -> Iterator[Problem]:
    """Axes that a plan can name and the engine cannot yet run."""
    for axis in ("context", "expert"):
        size = getattr(plan.parallel, axis).size
        if size > 1:
            yield Problem(
                f"{axis} parallelism has not landed yet",
                path=f"parallel.{axis}.size",
                given=size,
                allowed=(1,),
                attempt=f"parallel.{axis}.size = 1, with a larger {'tensor or zero' if axis == 'context' else 'zero'} size",
            )


def _device_format(plan: Plan) -> Iterator[Problem]:
    """The device multiplies in the format of compute."""
    device, compute = plan.cluster.device, plan.precision.compute
    if compute in LANDED and not device.supports(compute):
        allowed = tuple(one for one in ("bf16", "fp32", "fp64") if device.supports(one))
        yield Problem(
            f'the device "{device.name}" has no rate for {compute}',
            path="precision.compute",
            given=compute,
            allowed=allowed,
            attempt=f'precision.compute = "{allowed[0]}"' if allowed else None,
        )


def _strategy(name: str) -> Check:
    """What the strategy itself has to say about the plan."""

    def find(plan: Plan) -> Iterator[Problem]:
        strategy = getattr(plan.parallel, name) if hasattr(plan.parallel, name) else getattr(plan, name)
        ask = getattr(strategy, "check", None)
        if ask is not None:
            yield from ask(plan)

    return Check(find, ("model", "batch", "cluster", "parallel" if name != "recompute" else "recompute"))


CHECKS: Final = (
    Check(lambda plan: plan.model.check(), ("model",)),
    Check(_product, (*(f"parallel.{axis}.size" for axis in ("pipeline", "data", "zero", "context", "tensor")), "cluster")),
    Check(_layers, ("model", "parallel.pipeline")),
    Check(_known_schedule, ("parallel.pipeline.schedule",)),
    Check(_schedule, ("batch", "parallel.pipeline", "parallel.data.size", "parallel.zero.size")),
    Check(_tensor_divides, ("model", "parallel.tensor.size")),
    Check(_sequence_divides, ("batch.sequence_tokens", "parallel.tensor")),
    Check(lambda plan: plan.batch.check(), ("batch",)),
    Check(_batch_divides, ("batch", "parallel.data.size", "parallel.zero.size")),
    Check(_positions, ("model", "batch.sequence_tokens")),
    Check(_zero_stage, ("parallel.zero.stage",)),
    Check(_choices, ()),
    Check(_recompute_blocks, ("model", "recompute")),
    Check(_not_landed, ()),
    Check(lambda plan: plan.precision.check(), ()),
    Check(_device_format, ("cluster", "precision.compute")),
    Check(lambda plan: plan.optimizer.check(), ()),
    Check(lambda plan: plan.run.check(), ()),
    *(_strategy(name) for name in ("pipeline", "data", "zero", "context", "expert", "tensor", "recompute")),
)


# --- files of a run ---------------------------------------------------------------------------------------------------------------


def _corpus(plan: Plan) -> Iterator[Problem]:
    """`text:PATH` is readable text with at least one sequence and its next token. `text:stdlib` always is."""
    written = plan.run.data.removeprefix("text:")
    if written == "stdlib":
        return
    path = plan.path(written)
    unreadable = _unreadable(path)
    if unreadable is not None:
        yield Problem(
            f"the text {path} {unreadable}",
            path="run.data",
            given=plan.run.data,
            allowed='"text:stdlib", or "text:" followed by a file or folder that can be read; paths are relative to the plan file',
            attempt='run.data = "text:stdlib"',
        )
        return
    needed = plan.batch.sequence_tokens + 1
    num_bytes = _size_up_to(path, needed)
    if num_bytes < needed:
        yield Problem(
            f"the text {path} has {num_bytes} bytes, fewer than one sequence of {plan.batch.sequence_tokens} tokens and the one to predict",
            path="run.data",
            given=plan.run.data,
            allowed=f"a file or folder of at least {needed} bytes",
            attempt=f"batch.sequence_tokens = {num_bytes - 1}" if num_bytes > 1 else 'run.data = "text:stdlib"',
        )


def _unreadable(path: Path) -> str | None:
    """Why a file or folder of text cannot be read, as the end of a sentence; None if it can."""
    try:
        if not path.exists():
            return "does not exist"
        if not path.is_dir() and not path.is_file():
            return "is neither a file nor a folder"
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    except ValueError as error:
        return f"is no path: {error}"
    return None if os.access(path, os.R_OK) else "may not be read by this user"


def _size_up_to(path: Path, enough_bytes: Bytes) -> int:
    """Bytes of a file, or of all files in a folder and below; stops counting when there are enough."""
    total = 0
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            total += file.stat().st_size
        if total >= enough_bytes:
            break
    return total


def _tokenizer(plan: Plan) -> Iterator[Problem]:
    if plan.run.tokenizer is None:
        return
    path = plan.path(plan.run.tokenizer)
    reason = _unreadable(path) or ("is a folder" if path.is_dir() else None)
    if reason is not None:
        yield Problem(
            f"the tokenizer {path} {reason}",
            path="run.tokenizer",
            given=plan.run.tokenizer,
            allowed="the path of a tokenizer.json, relative to the plan file",
            attempt="leave run.tokenizer out: bytes are the tokens then",
        )


def _checkpoint_folder(plan: Plan) -> Iterator[Problem]:
    if plan.run.checkpoint is None:
        return
    folder = plan.path(plan.run.checkpoint.folder)
    reason = _unwritable(folder)
    if reason is not None:
        yield Problem(
            f"checkpoints cannot be written to {folder}: {reason}",
            path="run.checkpoint.folder",
            given=plan.run.checkpoint.folder,
            allowed="a folder that this user may write to, or a new one in such a folder",
            attempt='run.checkpoint.folder = "checkpoints"',
        )


def _unwritable(folder: Path) -> str | None:
    """Why a folder cannot be written to, or made; None if it can. Looks at the nearest folder that exists, and makes nothing."""
    if "\0" in str(folder):
        return "its name holds a NUL character"
    try:
        there = folder
        while not there.exists() and there != there.parent:
            there = there.parent
        if not there.is_dir():
            return f"{there} is not a folder"
    except OSError as error:
        return error.strerror or "it cannot be looked at"
    except ValueError as error:
        return str(error)
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} may not be written to by this user"


def _divisors(count: int) -> tuple[int, ...]:
    return tuple(one for one in range(1, count + 1) if count % one == 0)


def demand(plan: Plan) -> Plan:
    """The same plan, if nothing is wrong with it. Raises PlanError with every Problem otherwise."""
    found = [problem.at(*plan.source.place(problem.path or "")) for problem in check(plan)]
    if found:
        raise PlanError(found)
    return plan
