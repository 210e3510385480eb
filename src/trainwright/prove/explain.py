"""When a proof fails: where it first differs, and the likely causes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from trainwright.plan.lower import family_of
from trainwright.plan.plan import Plan
from trainwright.prove.compare import Array, Difference
from trainwright.prove.diagnose import Cause, Evidence, Share, diagnose
from trainwright.prove.launch import Copies, RankReport, arrays, initial_parameters, logical, masks_of
from trainwright.prove.names import bare, place_of, position_of, rank_of, stage_of
from trainwright.prove.reference import Batch, Parameters, Step, contribution, tied_uses

TOLERANCES: Final = {"fp64": 1e-9, "fp32": 1e-4}
"""Relative error up to which a print in the numbers counts as clean."""


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


def located(plan: Plan, difference: Difference, phase: str) -> FirstDifference:
    """Where in the plan a difference lies: in a gradient (`phase` "bwd") or, where all gradients are right, in the update ("upd")."""
    block, segment = place_of(difference.tensor)
    return FirstDifference(
        site=f"s{stage_of(plan, difference.tensor)}/{f'b{block}.' if block is not None else ''}{segment}/{phase}",
        tensor=difference.tensor,
        rank=rank_of(plan, difference.tensor),
        expected=difference.expected,
        found=difference.found,
    )


def causes(plan: Plan, reports: Sequence[RankReport], whole: Batch, reference: Step, gradients: Copies) -> tuple[Cause, ...]:
    """Why the ranks' gradients differ from the reference's. `whole` is the global batch of the first step."""
    found = {name: copies[min(copies)] for name, copies in gradients.items()}
    evidence = evidence_of(plan, reports, whole, reference, gradients)
    tolerance = TOLERANCES[plan.precision.compute]
    return (*beginnings(plan, reports), *diagnose(arrays(reference.gradients), found, evidence, tolerance=tolerance))


def update_at_fault() -> Cause:
    """Gradients and their norm are right, and parameters after the update are not."""
    text = (
        "loss, gradient norm and every gradient are right, the updated parameters are not: the optimizer step is at fault "
        "(rate, clipping with a norm that was not yet summed, decay, moments, or a piece that was not updated or not gathered)"
    )
    return Cause(name="update", text=text)


def beginnings(plan: Plan, reports: Sequence[RankReport]) -> Iterator[Cause]:
    """Why the ranks did not begin with the parameters that every mesh must begin with, if they did not."""
    begun = logical(plan, reports, lambda report: report.before)
    expected = arrays(initial_parameters(plan))
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


def evidence_of(plan: Plan, reports: Sequence[RankReport], whole: Batch, reference: Step, gradients: Copies) -> Evidence:
    """All that a diagnosis may look at: where tensors live, what each microbatch contributed, every copy."""
    before = initial_parameters(plan)
    units = {span.parameter.name: span.parameter for unit in family_of(plan).units.values() for span in unit.spans}
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
        masks=_masks(plan, reports, whole),
        reference_norm=reference.gradient_norm,
        found_norms={report.rank: report.results[0].gradient_norm for report in reports},
    )


def _masks(plan: Plan, reports: Sequence[RankReport], whole: Batch) -> dict[str, tuple[Array, Array]]:
    """By place: the mask that any mesh must draw, and what the ranks drew; where copies disagree, the one that is wrong."""
    right = masks_of(plan)
    if right is None:
        return {}
    shape = (*whole.tokens.shape, plan.model.width)
    masks: dict[str, tuple[Array, Array]] = {}
    for drawn in (one for report in reports for one in report.masks):
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


def _tied_uses(plan: Plan, before: Parameters, whole: Batch) -> tuple[Array, Array] | None:
    if not plan.model.tied:
        return None
    one, two = tied_uses(model=plan.model, parameters=before, batch=whole, masks=masks_of(plan))
    return one.numpy(), two.numpy()


def _shares(plan: Plan, before: Parameters, whole: Batch) -> list[Share]:
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
