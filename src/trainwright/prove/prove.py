"""Prove a plan.

Run it, small, on local ranks in float64, and hold it against the unsharded reference, the wire ledger and the memory ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.engine.data import Batches, PaddedFeed
from trainwright.engine.execute import Executor
from trainwright.engine.formats import DTYPES
from trainwright.engine.random import Key, Piece, dropout_mask, init_parameter
from trainwright.engine.state import assemble
from trainwright.ir.program import Program
from trainwright.plan.lower import family_of, lower
from trainwright.plan.plan import Plan
from trainwright.prove.compare import Comparison, compare, compare_parameters, relative_error
from trainwright.prove.diagnose import Cause, Evidence, Share, diagnose
from trainwright.prove.launch import DROPS, RankReport, launch
from trainwright.prove.reconcile import MemoryReport, WireReport, reconcile_memory, reconcile_wire
from trainwright.prove.reference import Batch, Masks, Reference, contribution, parameter_shapes, reference_steps, tied_uses
from trainwright.prove.shrink import Change, shrink
from trainwright.schedules import SCHEDULES

NUM_STEPS = 3
OS_TOLERANCE = 1e-3
LENGTHS = (5, 8, 0, 7, 3)
"""Targets that count in each sequence of a proof, as eighths of the sequence: unequal over ranks and microbatches, one of them empty."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What counts as equal: gradients, loss and norm on their own scale; parameters after the last step."""

    gradients: float
    parameters: float


TOLERANCES = {"fp64": Tolerance(1e-12, 1e-9), "fp32": Tolerance(2e-5, 1e-3)}


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """Where a proof first failed."""

    site: str
    tensor: str
    rank: int
    expected: float
    found: float

    def to_json(self) -> dict[str, Any]:
        """As in the JSON document."""
        return {"site": self.site, "tensor": self.tensor, "rank": self.rank, "expected": self.expected, "found": self.found}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a proof found. `equal` says that all of it holds: values, replicas, wire bytes, memory."""

    plan: Plan
    changes: tuple[Change, ...]
    dtype: str
    processes: bool
    gradients: Comparison
    parameters: Comparison
    loss_error: float
    norm_error: float
    later_loss_error: float
    differing_replicas: tuple[str, ...]
    wire: WireReport
    memory: MemoryReport
    tolerance: Tolerance
    first_difference: FirstDifference | None = None
    causes: tuple[Cause, ...] = ()
    reports: tuple[RankReport, ...] = field(default=(), repr=False)
    program: Program | None = field(default=None, repr=False)

    @property
    def worst_relative_error(self) -> float:
        """Of loss, gradient norm and every gradient, in the first step."""
        return max(self.gradients.worst_relative_error, self.loss_error, self.norm_error)

    @property
    def values_equal(self) -> bool:
        """Loss, norm, gradients and parameters equal the reference's."""
        return (
            self.gradients.equal
            and self.parameters.equal
            and max(self.loss_error, self.norm_error) <= self.tolerance.gradients
            and self.later_loss_error <= self.tolerance.parameters
        )

    @property
    def equal(self) -> bool:
        """All that a proof asks."""
        os_fine = self.wire.os_error is None or self.wire.os_error <= OS_TOLERANCE
        return self.values_equal and not self.differing_replicas and self.wire.equal and self.memory.equal and os_fine

    def to_json(self) -> dict[str, Any]:
        """The document `trainwright/prove/1`."""
        return {
            "schema": "trainwright/prove/1",
            "equal": self.equal,
            "dtype": self.dtype,
            "ranks": self.plan.num_devices,
            "processes": self.processes,
            "changed": [str(change) for change in self.changes],
            "worst_relative_error": self.worst_relative_error,
            "worst_tensor": self.gradients.worst_tensor,
            "loss_error": self.loss_error,
            "gradient_norm_error": self.norm_error,
            "worst_parameter_error": self.parameters.worst_relative_error,
            "num_steps": NUM_STEPS,
            "tolerance": {"gradients": self.tolerance.gradients, "parameters": self.tolerance.parameters},
            "first_difference": self.first_difference.to_json() if self.first_difference else None,
            "num_tensors_compared": self.gradients.num_tensors_compared,
            "replicas_identical": not self.differing_replicas,
            "causes": [{"name": cause.name, "text": cause.text} for cause in self.causes],
            "wire": {
                "predicted_bytes": self.wire.predicted_bytes,
                "measured_bytes": self.wire.measured_bytes,
                "num_sites": self.wire.num_sites,
                "missing": [list(key) for key in self.wire.missing],
                "extra": [list(key) for key in self.wire.extra],
                "wrong": [list(row) for row in self.wire.wrong],
                "os_bytes": self.wire.os_bytes,
                "os_error": self.wire.os_error,
                "header_bytes_per_message": self.wire.header_bytes,
                "num_messages": self.wire.num_messages,
            },
            "memory": {
                "predicted_peak_bytes": self.memory.predicted_peak_bytes,
                "measured_peak_bytes": self.memory.measured_peak_bytes,
                "num_boundaries": self.memory.num_boundaries,
                "wrong": [list(row) for row in self.memory.wrong],
                "predicted_temporary_bytes": self.memory.predicted_temporary_bytes,
                "measured_temporary_bytes": self.memory.measured_temporary_bytes,
            },
        }


def prove(
    plan: Plan,
    *,
    max_ranks: int | None = None,
    processes: bool = False,
    dtype: str = "fp64",
    change: Callable[[Program], Program] | None = None,
    make_executor: Callable[..., Executor] = Executor,
) -> Proof:
    """Shrink `plan` and prove it. `change` and `make_executor` let a test put a fault in."""
    small, changed = shrink(plan, max_ranks=max_ranks, dtype=dtype)
    return prove_small(small, changed, processes=processes, change=change, make_executor=make_executor)


def prove_small(
    plan: Plan,
    changed: tuple[Change, ...] = (),
    *,
    processes: bool = False,
    change: Callable[[Program], Program] | None = None,
    make_executor: Callable[..., Executor] = Executor,
    lengths: tuple[int, ...] | None = None,
) -> Proof:
    """Prove a plan as it is, on as many local ranks as it has."""
    dtype = plan.precision.compute
    tolerance = TOLERANCES[dtype]
    program = lower(plan)
    executed = change(program) if change else program
    batches = proof_batches(plan, lengths)
    reports = launch(plan, executed, batches, num_steps=NUM_STEPS, processes=processes, make_executor=make_executor)
    reference = reference_of(plan, batches)
    gradients = logical(plan, reports, lambda report: report.gradients[0])
    expected = arrays(reference.steps[0].gradients)
    found = {name: copies[min(copies)] for name, copies in gradients.items()}
    compared = compare(expected, found, tolerance=tolerance.gradients)
    after = logical(plan, reports, lambda report: report.after)
    parameters = compare_parameters(
        arrays(reference.parameters), {name: copies[min(copies)] for name, copies in after.items()}, tolerance=tolerance.parameters
    )
    steps = reports[0].results
    proof = Proof(
        plan=plan,
        changes=changed,
        dtype=dtype,
        processes=processes,
        gradients=compared,
        parameters=parameters,
        loss_error=relative_error(reference.steps[0].loss, steps[0].loss),
        norm_error=relative_error(reference.steps[0].gradient_norm, steps[0].gradient_norm),
        later_loss_error=max(relative_error(one.loss, two.loss) for one, two in zip(reference.steps, steps, strict=True)),
        differing_replicas=differing({**gradients, **{f"{name} after": copies for name, copies in after.items()}}),
        wire=reconcile_wire(plan, program, reports),
        memory=reconcile_memory(plan, executed, reports),
        tolerance=tolerance,
        reports=tuple(reports),
        program=program,
    )
    return proof if proof.equal else explained(proof, batches, reference, gradients)


# --- what both sides work on --------------------------------------------------------------------------------------------------------


def proof_batches(plan: Plan, lengths: tuple[int, ...] | None = None) -> PaddedFeed:
    """Random tokens in sequences of unequal lengths."""
    tokens = plan.batch.sequence_tokens
    return PaddedFeed(
        vocab_size=plan.model.vocab,
        sequence_tokens=tokens,
        global_sequences=plan.batch.global_sequences,
        num_replicas=plan.num_replicas,
        microbatch_sequences=plan.batch.microbatch_sequences,
        seed=plan.run.seed,
        lengths=tuple(tokens * eighths // 8 for eighths in LENGTHS) if lengths is None else lengths,
    )


def reference_batches(batches: Batches, num_steps: int) -> list[Batch]:
    """The global batch of each step, for the reference."""
    wholes = [batches.global_batch(step) for step in range(num_steps)]
    return [Batch(tokens=whole.tokens, targets=whole.targets) for whole in wholes]


def masks_of(plan: Plan) -> Masks | None:
    """The dropout masks that any mesh must draw, for the reference to use: they depend on seed, step, place and element alone."""
    if not plan.model.dropout:
        return None

    def mask(step: int, place: str, shape: tuple[int, ...]) -> Tensor:
        block, _, last = place.rpartition(".")
        site = f"{block}.{DROPS[last]}" if block else DROPS[last]
        return dropout_mask(Key.of(plan.run.seed, step, site), Piece.whole(shape), plan.model.dropout, torch.float64)

    return mask


def reference_of(plan: Plan, batches: Batches) -> Reference:
    """The reference's steps, from the initial parameters that every mesh must begin with."""
    return reference_steps(
        model=plan.model,
        parameters=initial_parameters(plan),
        batches=reference_batches(batches, NUM_STEPS),
        optimizer=plan.optimizer,
        num_steps=NUM_STEPS,
        masks=masks_of(plan),
    )


def initial_parameters(plan: Plan) -> dict[str, Tensor]:
    """Every parameter whole, as seed and name determine it, in the reference's format and model order."""
    parameters = {span.parameter.name: span.parameter for unit in family_of(plan).units.values() for span in unit.spans}
    values = {}
    for name, shape in parameter_shapes(plan.model):
        one = parameters[bare(name)]
        dtype = DTYPES[plan.precision.compute]
        value = init_parameter(name, Piece.whole(shape), kind=one.initial, std=one.std, seed=plan.run.seed, dtype=dtype)
        values[name] = value.double()
    return values


def logical(plan: Plan, reports: list[RankReport], of: Callable[[RankReport], Mapping[Any, Tensor]]) -> dict[str, dict[int, np.ndarray]]:
    """Logical tensors with all their copies, as float64 arrays."""
    assembled = assemble(plan, {report.rank: of(report) for report in reports})
    return {name: {number: one.double().numpy() for number, one in copies.items()} for name, copies in assembled.items()}


def arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Tensors as arrays."""
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


def differing(copies: Mapping[str, Mapping[int, np.ndarray]]) -> tuple[str, ...]:
    """Tensors whose copies are not bit-identical."""
    return tuple(
        name for name, one in copies.items() if any(not np.array_equal(other, one[min(one)], equal_nan=True) for other in one.values())
    )


# --- when it fails -------------------------------------------------------------------------------------------------------------------


def explained(proof: Proof, batches: Batches, reference: Reference, gradients: Mapping[str, Mapping[int, np.ndarray]]) -> Proof:
    """The same proof with the first difference and the likely causes."""
    plan = proof.plan
    expected = arrays(reference.steps[0].gradients)
    found = {name: copies[min(copies)] for name, copies in gradients.items()}
    evidence = evidence_of(proof, batches, reference, gradients)
    difference = proof.gradients.first_difference or proof.parameters.first_difference
    first = None
    if difference is not None:
        block, segment = place_of(difference.tensor)
        first = FirstDifference(
            site=f"s{stage_of(plan, difference.tensor)}/{f'b{block}.' if block is not None else ''}{segment}/bwd",
            tensor=difference.tensor,
            rank=rank_of(plan, difference.tensor),
            expected=difference.expected,
            found=difference.found,
        )
    tolerance = 1e-9 if proof.dtype == "fp64" else 1e-4
    causes = (*beginnings(proof), *diagnose(expected, found, evidence, tolerance=tolerance))
    return replace(proof, first_difference=first, causes=causes)


def beginnings(proof: Proof) -> Iterator[Cause]:
    """Why the ranks did not begin with the parameters that every mesh must begin with, if they did not."""
    begun = logical(proof.plan, list(proof.reports), lambda report: report.before)
    expected = arrays(initial_parameters(proof.plan))
    wrong = {
        name: next(one for one in copies.values() if not np.array_equal(one, expected[name]))
        for name, copies in begun.items()
        if any(not np.array_equal(one, expected[name]) for one in copies.values())
    }
    if not wrong:
        return
    permuted = [one for one in diagnose({name: expected[name] for name in wrong}, wrong) if one.name == "layout-permuted"]
    if permuted:
        yield from (replace(one, text=f"initial values: {one.text}") for one in permuted)
        return
    text = (
        f"{len(wrong)} of {len(expected)} parameters do not begin as seed and name say, the first is {next(iter(wrong))}. "
        "Draw initial values by name and global index, not by rank"
    )
    yield Cause(name="initial-values-depend-on-mesh", text=text, tensors=tuple(wrong))


def evidence_of(proof: Proof, batches: Batches, reference: Reference, gradients: Mapping[str, Mapping[int, np.ndarray]]) -> Evidence:
    """All that a diagnosis may look at: where tensors live, what each microbatch contributed, every copy."""
    plan = proof.plan
    before = initial_parameters(plan)
    whole = reference_batches(batches, 1)[0]
    units = {span.parameter.name: span.parameter for unit in _units(plan).values() for span in unit.spans}
    return Evidence(
        sizes=plan.parallel.sizes,
        num_microbatches=plan.num_microbatches,
        stages={name: stage_of(plan, name) for name in gradients},
        positions={stage: position_of(plan, stage) for stage in range(plan.num_stages)},
        sharded={name: dim for name in gradients if (dim := units[bare(name)].tensor_dim) is not None},
        tied="embed.tokens" if plan.model.tied else None,
        tied_uses=_tied_uses(plan, before, whole),
        shares=tuple(_shares(plan, before, whole)),
        copies={name: copies for name, copies in gradients.items() if len(copies) > 1},
        masks=_masks(proof, whole),
        reference_norm=reference.steps[0].gradient_norm,
        found_norms={report.rank: report.results[0].gradient_norm for report in proof.reports},
    )


def _masks(proof: Proof, whole: Batch) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By place: the mask that any mesh must draw, and what the ranks drew; where copies disagree, the one that is wrong."""
    right = masks_of(proof.plan)
    if right is None:
        return {}
    shape = (*whole.tokens.shape, proof.plan.model.width)
    masks: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for drawn in (one for report in proof.reports for one in report.masks):
        if drawn.place not in masks:
            expected = right(0, drawn.place, shape).numpy()
            masks[drawn.place] = (expected, expected.copy())
        expected, found = masks[drawn.place]
        num_sequences, num_tokens, _ = drawn.values.shape
        box = (
            slice(drawn.first_sequence, drawn.first_sequence + num_sequences),
            slice(drawn.first_token, drawn.first_token + num_tokens),
        )
        found[box] = np.where(drawn.values.numpy() != expected[box], drawn.values.numpy(), found[box])
    return masks


def _units(plan: Plan) -> Mapping[str, Any]:
    return family_of(plan).units


def _tied_uses(plan: Plan, before: Mapping[str, Tensor], whole: Batch) -> tuple[np.ndarray, np.ndarray] | None:
    if not plan.model.tied:
        return None
    one, two = tied_uses(model=plan.model, parameters=before, batch=whole, masks=masks_of(plan))
    return one.numpy(), two.numpy()


def _shares(plan: Plan, before: Mapping[str, Tensor], whole: Batch) -> list[Share]:
    """What each microbatch of each replica contributes to the reference's gradient."""
    shares = []
    width = plan.batch.microbatch_sequences
    for microbatch in range(plan.num_microbatches):
        for replica in range(plan.num_replicas):
            first = (microbatch * plan.num_replicas + replica) * width
            rows = range(first, first + width)
            part = contribution(model=plan.model, parameters=before, batch=whole, sequences=rows, masks=masks_of(plan))
            valid = int((whole.targets[list(rows)] >= 0).sum())
            shares.append(Share(data_rank=replica, microbatch=microbatch, num_tokens=valid, gradients=arrays(part)))
    return shares


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
