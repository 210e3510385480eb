"""From wrong gradients to the likely cause, in words.

A proof that fails says more than "differs": most mistakes of a sharded training step leave a print in the numbers. Every gradient four
times too large with four microbatches; norms of a layer right on no rank, but summing to the reference; a norm of 17.2 where 13 is right.
Each recognizer below looks for one such print. It is handed tensors only: what went wrong is derived from the data, never from knowing what
was broken.

The recognizers take turns on the tensors that are still unexplained, the most certain print first. Some need more evidence than the
gradients themselves (what each microbatch contributed, the copies of each rank); they stay silent without it.

Words
    share     what some sequences (one data rank's microbatch) contribute to the reference's gradient; the shares sum to it
    copy      one rank's value of a tensor that several ranks hold whole, and that should be equal on all of them
    silent    a tensor whose reference gradient is rounding noise; nothing can be read from it
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Final, TypeAlias

import numpy as np

from trainwright.prove.compare import Array, compare, largest, relative_error

SILENT: Final = 1e-10
"""A tensor is silent if its largest gradient is below this part of the largest of all."""

Gradients: TypeAlias = Mapping[str, Array]
Found: TypeAlias = Mapping[str, Array | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A likely cause: a short name for programs, a sentence for people, and the tensors that it explains."""

    name: str
    text: str
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one microbatch of one data rank contributes: gradients of its summed token losses / valid tokens of the whole step."""

    data_rank: int
    microbatch: int
    num_tokens: int
    gradients: Gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known beside the gradients. Every field may be left out; the more there is, the more can be told.

    sizes           sizes of the mesh axes
    stages          the pipeline stage of each tensor
    positions       the place on the pipeline axis of each stage; where it is not given, every stage has one of its own
    sharded         the dimension in which the tensor axis cuts a tensor; tensors not named are replicated over it
    tied            the tensor that embedding and head share
    tied_uses       its reference gradient by use: (as embedding, as head)
    shares          the reference's gradient by data rank and microbatch
    copies          tensor -> rank -> that rank's copy of a gradient or parameter that should be equal on these ranks; the tensor axis is
                    the innermost of the mesh
    masks           place -> (reference, found): dropout masks of the global batch [G, s, h]
    reference_norm  gradient norm of the reference
    found_norms     rank -> the gradient norm that this rank clipped with
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    num_microbatches: int = 1
    stages: Mapping[str, int] = field(default_factory=dict)
    positions: Mapping[int, int] = field(default_factory=dict)
    sharded: Mapping[str, int] = field(default_factory=dict)
    tied: str | None = None
    tied_uses: tuple[Array, Array] | None = None
    shares: tuple[Share, ...] = ()
    copies: Mapping[str, Mapping[int, Array]] = field(default_factory=dict)
    masks: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)
    reference_norm: float | None = None
    found_norms: Mapping[int, float] = field(default_factory=dict)

    @property
    def num_tensor(self) -> int:
        """Size of the tensor axis."""
        return self.sizes.get("tensor", 1)

    def by_position(self, names: Iterable[str]) -> list[set[str]]:
        """The tensors of each pipeline position; those whose stage is not known stand together."""
        held: dict[int | None, set[str]] = {}
        for name in names:
            stage = self.stages.get(name)
            held.setdefault(None if stage is None else self.positions.get(stage, stage), set()).add(name)
        return [held[position] for position in sorted(held, key=lambda one: -1 if one is None else one)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a recognizer sees: the tensors that are wrong and not explained yet, with everything else for context.

    scale is the largest gradient of the reference, loud names the tensors that are not silent, in model order.
    """

    reference: Gradients
    found: Found
    wrong: tuple[str, ...]
    all_wrong: tuple[str, ...]
    evidence: Evidence
    tolerance: float
    scale: float
    loud: tuple[str, ...]

    @property
    def wrong_loud(self) -> tuple[str, ...]:
        """The wrong tensors that are not silent."""
        loud = set(self.loud)
        return tuple(name for name in self.wrong if name in loud)

    def fits(self, expected: Gradients, names: Iterable[str]) -> bool:
        """The found tensors of these names are the expected ones, up to rounding."""
        names = tuple(names)
        return (
            bool(names) and compare({name: expected[name] for name in names}, self.found, tolerance=self.tolerance).first_difference is None
        )


def diagnose(reference: Gradients, found: Found, evidence: Evidence | None = None, *, tolerance: float = 1e-9) -> list[Cause]:
    """Likely causes of the differences between two sets of gradients, the most certain first; empty if nothing is wrong.

    tolerance: relative error up to which tensors count as equal, and prints as clean (float64: 1e-9; float32: 1e-4).
    """
    comparison = compare(reference, found, tolerance=tolerance)
    wrong = tuple(name for name in reference if comparison.errors[name] > tolerance)
    sizes = {name: largest(value) for name, value in reference.items()}
    scale = max(sizes.values(), default=0.0)
    case = Case(
        reference=reference,
        found=found,
        wrong=wrong,
        all_wrong=wrong,
        evidence=evidence or Evidence(),
        tolerance=tolerance,
        scale=scale,
        loud=tuple(name for name, size in sizes.items() if size > SILENT * scale),
    )
    causes: list[Cause] = []
    for recognizer in RECOGNIZERS:
        for cause in recognizer(case):
            causes.append(cause)
            explained = set(cause.tensors)
            case = replace(case, wrong=tuple(name for name in case.wrong if name not in explained))
    if case.wrong and not any(cause.tensors for cause in causes):
        causes.append(_unexplained(case))
    return causes


def lost(case: Case) -> Iterator[Cause]:
    """Gradients that never came (None), or came as zeros, stage by stage."""
    gone = [name for name in case.wrong_loud if _is_lost(case.found.get(name))]
    if not gone:
        return
    by_stage = Counter(case.evidence.stages.get(name) for name in gone)
    where = ", ".join(
        f"{count} of {_num_on(case, stage)} on stage {stage}" if stage is not None else f"{count} of {len(case.reference)}"
        for stage, count in sorted(by_stage.items(), key=lambda item: -1 if item[0] is None else item[0])
    )
    text = (
        f"gradients are lost: {where} never came or are zero ({_listed(gone)}). The backward that produces them did not run, or its result "
        "was dropped: look at the weight half of a split backward, and at units freed before their gradients were taken"
    )
    yield Cause(name="lost-gradients", text=text, tensors=tuple(gone))


def masked_differently(case: Case) -> Iterator[Cause]:
    """Dropout masks that are not those of the reference."""
    for place, (expected, found) in case.evidence.masks.items():
        if expected.shape == found.shape and np.array_equal(expected != 0, found != 0):
            continue
        text = f"dropout at {place} depends on the mesh: its mask is not the one of a single device{_repetition(expected, found)}"
        text += ". Key the random numbers by seed, step, place and global index, not by rank or local index"
        yield Cause(name="dropout-depends-on-mesh", text=text, tensors=case.wrong)
        return


def permuted(case: Case) -> Iterator[Cause]:
    """The right rows (or columns) in the wrong order, within one tensor or among those that are stored fused."""
    for names in _fused_groups(case.wrong_loud):
        for dim in (0, 1):
            if all(_same_up_to_order(case, [name], dim) for name in names):
                what = "itself"
            elif len(names) > 1 and dim == 0 and _same_up_to_order(case, list(names), dim):
                what = "the others"
            else:
                continue
            kind = ("rows", "columns")[dim]
            text = f"{_listed(names)}: the {kind} are all there, in the wrong order" + (
                ""
                if what == "itself"
                else f" and in the wrong tensor: {' and '.join(name.split('.')[-2] for name in names)} are stored fused"
            )
            text += ". The layout was cut or joined as one matrix: cut each part by itself, then join the pieces of one rank"
            yield Cause(name="layout-permuted", text=text, tensors=tuple(names))
            break


def scaled(case: Case) -> Iterator[Cause]:
    """Clean multiples of the reference: all by one factor, or some tensors by factors of their own."""
    factors = {name: factor for name in case.wrong_loud if (factor := _clean_factor(case, name)) is not None}
    if not factors or set(factors) != set(case.wrong_loud):
        return  # other prints must explain the rest first
    groups: dict[float, list[str]] = {}
    for name, factor in factors.items():
        known = next((other for other in groups if math.isclose(other, factor, rel_tol=1e-6)), factor)
        groups.setdefault(known, []).append(name)
    for factor, names in groups.items():
        yield from _multiple(case, factor, tuple(names), alone=len(groups) == 1)


def weighted(case: Case) -> Iterator[Cause]:
    """The shares are all there, but do not count alike: means of means, lost microbatches, sums that were never made."""
    shares = case.evidence.shares
    if len(shares) < 2 or not case.wrong_loud:
        return
    for name, weights, text in _weightings(shares):
        if all(math.isclose(weight, 1) for weight in weights):
            continue
        for names in _by_stage(case):
            if set(names) <= set(case.wrong) and case.fits(_sum(shares, weights, names), names):
                where = "" if set(names) == set(case.loud) else f" ({_where(case, names)} only)"
                yield Cause(name=name, text=text + where, tensors=names)
                case = replace(case, wrong=tuple(other for other in case.wrong if other not in names))
    if case.wrong_loud and len(case.wrong_loud) == len(case.loud):
        yield from _fitted(case)


def tied(case: Case) -> Iterator[Cause]:
    """Only the tensor that embedding and head share is wrong."""
    name = case.evidence.tied
    if name is None or case.wrong_loud != (name,) or case.all_wrong != (name,):
        return
    text = f"only {name} is wrong, which embedding and head share"
    for use, gradient in zip(("embedding", "head"), case.evidence.tied_uses or (), strict=False):
        if case.fits({name: gradient}, [name]):
            text += (
                f"; it holds the gradient of its use as {use} alone: the copies of first and last stage were not summed before the update"
            )
            break
    else:
        factor = _clean_factor(case, name)
        if factor is not None:
            text += f"; it is {factor:.6g} x the reference: {'summed more than once' if factor > 1 else 'averaged where it must be summed'}"
        else:
            text += ": sum the gradients of both copies (first and last stage, after the sum over data ranks) before the update"
    yield Cause(name="tied-embedding", text=text, tensors=(name,))


def not_summed_over_tensor(case: Case) -> Iterator[Cause]:
    """Tensors that each tensor rank holds whole, each rank with the gradient of its own part of the sequence."""
    evidence, names = case.evidence, case.wrong_loud
    if evidence.num_tensor < 2 or not evidence.sharded or not names or any(name in evidence.sharded for name in names):
        return
    must = f"the gradients of tensors that are replicated over the tensor axis must be summed over its {evidence.num_tensor} ranks"
    proven = tuple(name for name in names if name in evidence.copies and _copies_sum_to(case, name))
    if proven:
        text = f"{_listed(proven)}: the copies of the ranks sum to the reference. Each rank saw its own part of the sequence; {must}"
        yield Cause(name="not-summed-over-tensor", text=text, tensors=proven)
    elif not evidence.copies and not any(_clean_factor(case, name) for name in names):
        text = f"only tensors that are replicated over the tensor axis are wrong ({_listed(names)}). With sequence parallelism {must}"
        yield Cause(name="not-summed-over-tensor", text=text, tensors=names)


def one_shard(case: Case) -> Iterator[Cause]:
    """Tensors that the tensor axis cuts, wrong in the part of one rank only."""
    size, sharded = case.evidence.num_tensor, case.evidence.sharded
    by_rank: dict[int, list[str]] = {}
    for name in case.wrong_loud if size > 1 else ():
        expected, found = case.reference[name], case.found.get(name)
        if name not in sharded or found is None or found.shape != expected.shape:
            continue
        allowed = case.tolerance * max(largest(expected), 0.01 * case.scale)
        parts = [largest(part) > allowed for part in np.array_split(found - expected, size, axis=sharded[name])]
        if sum(parts) == 1:
            by_rank.setdefault(parts.index(True), []).append(name)
    for rank, names in by_rank.items():
        text = f"{_listed(names)}: wrong in the part of tensor rank {rank} only, right in the others"
        yield Cause(name="one-tensor-rank", text=text, tensors=tuple(names))


def replicas_differ(case: Case) -> Iterator[Cause]:
    """Copies that should be equal bit by bit and are not."""
    explained = set(case.all_wrong) - set(case.wrong)
    unequal: dict[str, tuple[int, int, int]] = {}
    for name, copies in case.evidence.copies.items():
        ranks = sorted(copies) if name not in explained else []
        for rank in ranks[1:]:
            if not np.array_equal(copies[ranks[0]], copies[rank], equal_nan=True):
                num_unequal = int((copies[ranks[0]] != copies[rank]).sum()) if copies[ranks[0]].shape == copies[rank].shape else -1
                unequal[name] = (ranks[0], rank, num_unequal)
                break
    if unequal:
        name, (one, other, num_unequal) = next(iter(unequal.items()))
        entries = "shape" if num_unequal < 0 else f"{num_unequal} entries"
        text = (
            f"replicas differ: ranks {one} and {other} hold different copies of {name} ({entries}), {len(unequal)} tensors in all. "
            "Their gradients were not summed over all ranks that hold a copy, or each drew its own initial values"
        )
        yield Cause(name="replicas-differ", text=text, tensors=tuple(name for name in unequal if name in case.wrong))


def one_stage(case: Case) -> Iterator[Cause]:
    """Every wrong tensor lies on one stage, and other stages are right."""
    stages = {case.evidence.stages.get(name) for name in case.wrong_loud}
    others = {case.evidence.stages.get(name) for name in case.loud} - stages
    if len(stages) == 1 and None not in stages and others:
        stage = next(iter(stages))
        text = (
            f"only stage {stage} is wrong ({_listed(case.wrong_loud)}). What it passes on is right, so look at how it accumulates "
            "its own gradients, not at what it sends"
        )
        yield Cause(name="one-stage", text=text, tensors=case.wrong)


def norm(case: Case) -> Iterator[Cause]:
    """A gradient norm that is not the one of the gradients that were found."""
    evidence = case.evidence
    if not evidence.found_norms:
        return
    gradients = {name: value for name in case.reference if (value := case.found.get(name)) is not None and value.size}
    if set(gradients) != set(case.reference):
        gradients = dict(case.reference)
    right = _norm_of(gradients.values())
    if not case.all_wrong and evidence.reference_norm is not None:
        right = evidence.reference_norm
    norms = evidence.found_norms
    off = {rank: value for rank, value in norms.items() if relative_error(right, value) > case.tolerance}
    if not off:
        return
    rank, first = next(iter(off.items()))
    names = ", ".join(f"{each:.6g}" for each in dict.fromkeys(norms.values()))
    for name, candidates, text in _norm_hypotheses(gradients, evidence):
        if all(any(relative_error(candidate, each) <= case.tolerance for candidate in candidates) for each in off.values()):
            yield Cause(name=name, text=f"the gradient norm is {names}, {right:.6g} is right: {text}")
            return
    text = f"the gradient norm of rank {rank} is {first:.6g}, {right:.6g} is right (squared: {_ratio(first, right):.6g} x)"
    if len(set(norms.values())) > 1:
        text += "; the ranks do not agree, so each clips by a scale of its own: sum the squares over all ranks, every element once"
    yield Cause(name="norm-wrong", text=text)


RECOGNIZERS: Final[tuple[Callable[[Case], Iterator[Cause]], ...]] = (
    lost,
    masked_differently,
    permuted,
    tied,
    not_summed_over_tensor,
    weighted,
    scaled,
    replicas_differ,
    one_shard,
    one_stage,
    norm,
)


# Factors


def _clean_factor(case: Case, name: str) -> float | None:
    """The factor c of found = c x reference, None where that does not hold up to rounding."""
    expected, found = case.reference[name].astype(np.float64), case.found.get(name)
    if found is None or found.shape != expected.shape or not np.isfinite(found).all():
        return None
    factor = float((found * expected).sum() / (expected * expected).sum())
    allowed = case.tolerance * max(1.0, abs(factor)) * max(largest(expected), 0.01 * case.scale)
    return factor if largest(found - factor * expected) <= allowed else None


def _multiple(case: Case, factor: float, names: tuple[str, ...], *, alone: bool) -> Iterator[Cause]:
    evidence = case.evidence
    meaning = _meaning(factor, evidence)
    if alone and set(names) == set(case.loud):
        text = f"every gradient is {factor:.6g} x the reference{meaning}. Divide summed token losses by the valid tokens of the step, once"
        yield Cause(name="scaled", text=text, tensors=case.wrong)
        return
    cut = evidence.num_tensor > 1 and bool(evidence.sharded)
    if cut and not set(names) & set(evidence.sharded) and math.isclose(factor, evidence.num_tensor, rel_tol=1e-6):
        text = (
            f"{_listed(names)}: {factor:.6g} x the reference, the size of the tensor axis. They are replicated over it and every rank had "
            "the whole gradient already: they were summed once more"
        )
        yield Cause(name="summed-twice-over-tensor", text=text, tensors=names)
    elif cut and not set(names) & set(evidence.sharded) and math.isclose(factor * evidence.num_tensor, 1, rel_tol=1e-6):
        text = (
            f"{_listed(names)}: {factor:.6g} x the reference, 1 / the size of the tensor axis. They are replicated over it: their "
            "gradients must be summed over its ranks, and are averaged or taken from one"
        )
        yield Cause(name="not-summed-over-tensor", text=text, tensors=names)
    else:
        text = (
            f"scales are mixed: {factor:.6g} x the reference{meaning} on {_where(case, names)} ({_listed(names)}), not on the others. "
            "A division or a sum reached part of the model only"
        )
        yield Cause(name="mixed-scales", text=text, tensors=names)


def _meaning(factor: float, evidence: Evidence) -> str:
    """Which counts of the plan the factor is, or the inverse of."""
    counts = {f"the size of {axis}": size for axis, size in evidence.sizes.items() if size > 1}
    if evidence.num_microbatches > 1:
        counts = {"the number of microbatches": evidence.num_microbatches} | counts
    for num_counts in (1, 2):
        found = []
        for names in combinations(counts, num_counts):
            product = math.prod(counts[name] for name in names)
            if math.isclose(factor, product, rel_tol=1e-6):
                found.append(" times ".join(names))
            elif math.isclose(factor, 1 / product, rel_tol=1e-6):
                found.append("1 / " + " / ".join(names))
        if found:
            return ", which is " + " or ".join(found)
    return ""


# Shares


def _weightings(shares: tuple[Share, ...]) -> Iterator[tuple[str, tuple[float, ...], str]]:
    """(cause, weight of each share, sentence) of the usual ways to count shares wrongly."""
    total = sum(share.num_tokens for share in shares)
    ranks = sorted({share.data_rank for share in shares})
    microbatches = sorted({share.microbatch for share in shares})
    rank_tokens = Counter({rank: sum(share.num_tokens for share in shares if share.data_rank == rank) for rank in ranks})
    micro_tokens = Counter({micro: sum(share.num_tokens for share in shares if share.microbatch == micro) for micro in microbatches})
    counts = f"token counts {', '.join(str(share.num_tokens) for share in shares)}"
    advice = f"with unequal {counts} that is not the mean over tokens: divide by the valid tokens of the whole step"

    def mean(tokens: Callable[[Share], int], num_means: int) -> tuple[float, ...]:
        return tuple(total / (num_means * tokens(share)) if tokens(share) else 0.0 for share in shares)

    yield (
        "sum-of-means",
        mean(lambda share: rank_tokens[share.data_rank], 1),
        f"the sum of the means of the data ranks: each has divided by the tokens of its own; {advice}",
    )
    yield (
        "sum-of-means",
        mean(lambda share: micro_tokens[share.microbatch], 1),
        f"the sum of the means of the microbatches: each was divided by the tokens of its own; {advice}",
    )
    yield (
        "mean-of-means",
        mean(lambda share: share.num_tokens, len(shares)),
        f"the mean of the means of every microbatch and rank; {advice}",
    )
    yield (
        "mean-of-means",
        mean(lambda share: rank_tokens[share.data_rank], len(ranks)),
        f"the mean of the means of the data ranks; {advice}",
    )
    yield (
        "mean-of-means",
        mean(lambda share: micro_tokens[share.microbatch], len(microbatches)),
        f"the mean of the means of the microbatches; {advice}",
    )
    last = microbatches[-1]
    for micro in (last, *microbatches[:-1]) if len(microbatches) > 1 else ():
        only = "the last microbatch" if micro == last else f"microbatch {micro}"
        text = f"only {only} counts: gradients are overwritten where they must be added up over {len(microbatches)} microbatches"
        yield (
            ("last-microbatch-only" if micro == last else "one-microbatch-only"),
            tuple(float(s.microbatch == micro) for s in shares),
            text,
        )
    for micro in microbatches if len(microbatches) > 2 else ():
        text = f"microbatch {micro} is missing from the sum over {len(microbatches)} microbatches"
        yield "microbatch-lost", tuple(float(share.microbatch != micro) for share in shares), text
    for rank in ranks if len(ranks) > 1 else ():
        text = f"only data rank {rank} counts: gradients are not summed over the {len(ranks)} data ranks"
        yield "not-summed-over-data", tuple(float(share.data_rank == rank) for share in shares), text
    for rank in ranks if len(ranks) > 1 and len(microbatches) > 1 else ():
        text = f"only the last microbatch of data rank {rank} counts: neither added up over microbatches nor summed over data ranks"
        yield "last-microbatch-only", tuple(float(share.data_rank == rank and share.microbatch == last) for share in shares), text


def _sum(shares: tuple[Share, ...], weights: tuple[float, ...], names: Iterable[str]) -> dict[str, Array]:
    pairs = tuple(zip(shares, weights, strict=True))
    return {name: np.sum([weight * share.gradients[name] for share, weight in pairs], axis=0) for name in names}


def _fitted(case: Case) -> Iterator[Cause]:
    """Weights by least squares, for ways of counting that have no name."""
    names = case.wrong_loud
    shares = tuple(share for share in case.evidence.shares if any(share.gradients[name].any() for name in names))
    values = [case.found.get(name) for name in names]
    if not shares or any(value is None or value.shape != case.reference[name].shape for name, value in zip(names, values, strict=True)):
        return
    matrix = np.stack([np.concatenate([share.gradients[name].ravel() for name in names]) for share in shares], axis=1)
    target = np.concatenate([value.ravel() for value in values if value is not None])
    if not np.isfinite(target).all():
        return
    weights, _, rank, _ = np.linalg.lstsq(matrix, target, rcond=None)
    if rank < len(shares) or np.ptp(weights) <= 1e-6 * np.abs(weights).max():
        return  # ambiguous, or one common factor, which has a recognizer of its own
    if largest(matrix @ weights - target) <= 1e-6 * largest(target):
        listed = ", ".join(f"rank {s.data_rank} microbatch {s.microbatch}: {w:.6g}" for s, w in zip(shares, weights, strict=True))
        text = f"the microbatches do not count alike: in the found gradient they have the weights {listed}, where each should be 1"
        yield Cause(name="weighted-microbatches", text=text, tensors=names)


def _by_stage(case: Case) -> Iterator[tuple[str, ...]]:
    """All wrong tensors together, then those of each stage."""
    yield case.wrong_loud
    stages = dict.fromkeys(case.evidence.stages.get(name) for name in case.wrong_loud)
    if len(stages) > 1:
        for stage in stages:
            yield tuple(name for name in case.wrong_loud if case.evidence.stages.get(name) == stage)


# Copies, rows, masks


def _is_lost(value: Array | None) -> bool:
    return value is None or not value.any()


def _copies_sum_to(case: Case, name: str) -> bool:
    """The copies of the tensor ranks sum to the reference, on every replica by itself."""
    replicas: dict[int, list[Array]] = {}
    for rank, value in case.evidence.copies[name].items():
        replicas.setdefault(rank // case.evidence.num_tensor, []).append(value)
    totals = (np.sum(values, axis=0) for values in replicas.values())
    return all(compare({name: case.reference[name]}, {name: one}, tolerance=case.tolerance).first_difference is None for one in totals)


FUSED: Final = (("q", "k", "v"), ("gate", "up"))


def _fused_groups(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Wrong tensors that are stored as one, and every other wrong tensor by itself: `b0.q.weight`, `b0.k.weight`, `b0.v.weight`."""
    left = list(names)
    while left:
        block, _, last = left[0].partition(".")
        part, _, kind = last.partition(".")
        parts = next((parts for parts in FUSED if part in parts), (part,))
        group = tuple(name for each in parts if (name := f"{block}.{each}.{kind}") in left) or (left[0],)
        left = [name for name in left if name not in group]
        yield group


def _same_up_to_order(case: Case, names: list[str], dim: int) -> bool:
    """The rows (dim 0) or columns (dim 1) of the found tensors are those of the reference in another order."""
    expected, found = [case.reference[name] for name in names], [case.found.get(name) for name in names]
    if any(value is None or value.shape != ref.shape for ref, value in zip(expected, found, strict=True)) or expected[0].ndim <= dim:
        return False
    one = np.concatenate([np.moveaxis(value, dim, 0).reshape(value.shape[dim], -1) for value in expected])
    two = np.concatenate([np.moveaxis(value, dim, 0).reshape(value.shape[dim], -1) for value in found if value is not None])
    if len(one) < 2 or not np.isfinite(two).all():
        return False
    direction = np.cos(np.arange(1, one.shape[1] + 1, dtype=np.float64) ** 2)  # without symmetry: it tells rows apart
    one, two = (rows[np.argsort(rows @ direction, kind="stable")] for rows in (one, two))
    return largest(one - two) <= case.tolerance * max(largest(one), 0.01 * case.scale)


def _repetition(expected: Array, found: Array) -> str:
    """Says whether the found mask repeats along sequences or tokens where the expected one does not."""
    if expected.shape != found.shape:
        return f" (shape {found.shape}, expected {expected.shape})"
    for dim, what in ((0, "sequences"), (1, "tokens")):
        for num_parts in range(found.shape[dim], 1, -1) if found.ndim > dim else ():
            if found.shape[dim] % num_parts == 0 and _repeats(found, num_parts, dim) and not _repeats(expected, num_parts, dim):
                return f"; it is the same mask {num_parts} times along the {what}"
    return ""


def _repeats(mask: Array, num_parts: int, dim: int) -> bool:
    first, *others = np.split(mask, num_parts, axis=dim)
    return all(np.array_equal(first, other) for other in others)


# Norms


def _norm_of(gradients: Iterable[Array]) -> float:
    return math.sqrt(math.fsum(_square(value) for value in gradients))


def _square(value: Array) -> float:
    return float(np.square(value.astype(np.float64)).sum())


def _norm_hypotheses(gradients: Gradients, evidence: Evidence) -> Iterator[tuple[str, tuple[float, ...], str]]:
    """(cause, norms that it would produce, sentence). Every hypothesis that changes nothing here is left out."""
    squares = {name: _square(value) for name, value in gradients.items()}
    total = math.fsum(squares.values())
    if evidence.tied in squares:
        counted_twice = math.sqrt(total + squares[evidence.tied])
        yield "norm-counts-tied-twice", (counted_twice,), f"both copies of {evidence.tied} are counted. Count each logical element once"
    size = evidence.num_tensor
    replicated = math.fsum(square for name, square in squares.items() if name not in evidence.sharded)
    if size > 1:
        counted_often = math.sqrt(total + (size - 1) * replicated)
        text = f"tensors that are replicated over tensor are counted {size} times. Count each logical element once"
        yield "norm-counts-replicated", (counted_often,), text
    by_stage = evidence.by_position(squares)
    stage_norms = tuple(math.sqrt(math.fsum(squares[name] for name in names)) for names in by_stage)
    if len(stage_norms) > 1:
        text = "each stage clips by the norm of its own gradients. Sum the squares over the stages"
        yield "norm-of-one-stage", stage_norms, text
        yield "norm-sums-norms", (math.fsum(stage_norms),), "it is the sum of the norms of the stages. Sum squares, then take the root"
    if size > 1:
        text = "each rank clips by the norm of what it holds. Sum the squares of cut tensors over the tensor axis"
        for names in ([set(squares)], by_stage) if len(by_stage) > 1 else ([set(squares)],):
            for once in (False, True):
                norms = (norm for held in names for norm in _shard_norms(gradients, evidence, held, once=once))
                yield "norm-of-one-shard", tuple(norms), text
    norm = math.sqrt(total)
    for axis, count in [("microbatches", evidence.num_microbatches), *evidence.sizes.items()]:
        if count > 1:
            text = f"it is {{}} x too large, the square root of {count} ({axis}): equal replicas are counted more than once"
            yield "norm-counts-replicas", (norm * math.sqrt(count),), text.format(f"{math.sqrt(count):.6g}")
    for axis, count in [("microbatches", evidence.num_microbatches), *evidence.sizes.items()]:
        if count > 1:
            text = f"it is off by the factor {count} ({axis}): it was taken before the gradients had their final scale"
            yield "norm-scaled", (norm * count, norm / count), text


def _shard_norms(gradients: Gradients, evidence: Evidence, names: set[str], *, once: bool) -> Iterator[float]:
    """The norm of what each tensor rank holds of these tensors; with `once` the first rank alone counts what is replicated."""
    for rank in range(evidence.num_tensor):
        square = 0.0
        for name in names if rank == 0 or not once else names & evidence.sharded.keys():
            value = gradients[name]
            if name in evidence.sharded:
                value = np.array_split(value, evidence.num_tensor, axis=evidence.sharded[name])[rank]
            square += _square(value)
        yield math.sqrt(square)


def _ratio(value: float, right: float) -> float:
    return (value / right) ** 2 if right else math.inf


# Words


def _num_on(case: Case, stage: int) -> int:
    return sum(1 for name in case.reference if case.evidence.stages.get(name) == stage)


def _where(case: Case, names: Iterable[str]) -> str:
    """The stages of these tensors, if they are all of their stages."""
    names = set(names)
    stages = {case.evidence.stages.get(name) for name in names}
    if None not in stages and names == {name for name in case.loud if case.evidence.stages.get(name) in stages}:
        return ("stage " if len(stages) == 1 else "stages ") + ", ".join(str(stage) for stage in sorted(s for s in stages if s is not None))
    return f"{len(names)} tensors"


def _listed(names: Iterable[str], most: int = 4) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _unexplained(case: Case) -> Cause:
    """Nothing known fits: say how far the damage reaches, for it spreads backwards from where it was done."""
    order = list(case.reference)
    last = case.wrong[-1]
    text = f"{len(case.wrong)} of {len(order)} gradients are wrong ({_listed(case.wrong)})"
    if last != order[-1]:
        text += f"; those after {last} in model order are right, so the backward pass goes wrong there first"
    else:
        text += f"; the last one, {last}, is wrong already, so look at the forward pass and the loss first"
    return Cause(name="unknown", text=text, tensors=case.wrong)
