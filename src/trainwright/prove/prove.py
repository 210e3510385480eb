"""Prove a plan.

Run it, small, on local ranks in float64, and hold it against the unsharded reference, the wire ledger and the memory ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trainwright.engine.data import Batches, PaddedFeed
from trainwright.engine.execute import Executor
from trainwright.ir.program import Program
from trainwright.plan.lower import lower
from trainwright.plan.plan import Plan
from trainwright.prove.compare import Comparison, compare, compare_parameters, relative_error
from trainwright.prove.diagnose import Cause
from trainwright.prove.explain import FirstDifference, causes, located, update_at_fault
from trainwright.prove.launch import Copies, RankReport, arrays, initial_parameters, launch, logical, masks_of
from trainwright.prove.reconcile import MemoryReport, WireReport, reconcile_memory, reconcile_wire
from trainwright.prove.reference import Batch, Reference, reference_steps
from trainwright.prove.shrink import Change, shrink

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

    def __repr__(self) -> str:
        """One line: model, mesh, what was found."""
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.plan.parallel.sizes.items() if size > 1) or "one rank"
        found = f"{'proved' if self.equal else 'NOT proved'}, worst relative error {self.worst_relative_error:.2g}"
        return f"Proof({self.plan.model.name} on {mesh}, {self.dtype}: {found})"

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
        memory_fine = self.memory.equal and self.memory.temporary_close
        return self.values_equal and not self.differing_replicas and self.wire.equal and memory_fine and os_fine

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
                "temporary_within_a_tenth": self.memory.temporary_close,
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
    if proof.equal:
        return proof
    return explained(proof, reference_batches(batches, 1)[0], reference, gradients)


def explained(proof: Proof, whole: Batch, reference: Reference, gradients: Copies) -> Proof:
    """A failed proof with the first difference and the likely causes."""
    found = causes(proof.plan, proof.reports, whole, reference.steps[0], gradients)
    difference, phase = proof.gradients.first_difference, "bwd"
    if difference is None and (difference := proof.parameters.first_difference) is not None:
        phase = "upd"
        found = found or (update_at_fault(),)
    first = located(proof.plan, difference, phase) if difference else None
    return replace(proof, first_difference=first, causes=found)


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


def differing(copies: Copies) -> tuple[str, ...]:
    """Tensors whose copies are not bit-identical."""
    return tuple(
        name for name, one in copies.items() if any(not np.array_equal(other, one[min(one)], equal_nan=True) for other in one.values())
    )
