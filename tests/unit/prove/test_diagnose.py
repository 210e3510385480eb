"""Each mistake is made on a small set of gradients and must be named from the numbers alone; a neighbour must not be named in its place."""

from __future__ import annotations

import math
from dataclasses import replace
from operator import attrgetter

import numpy as np
import pytest

from trainwright.prove.compare import compare
from trainwright.prove.diagnose import Evidence, Share, diagnose

SHAPES = {
    "embed.tokens": (12, 4),
    "b0.norm1.weight": (4,),
    "b0.q.weight": (8, 4),
    "b0.k.weight": (4, 4),
    "b0.v.weight": (4, 4),
    "b0.k.bias": (4,),
    "b0.out.weight": (4, 8),
    "b0.norm2.weight": (4,),
    "b0.gate.weight": (6, 4),
    "b0.up.weight": (6, 4),
    "b0.down.weight": (4, 6),
    "b1.norm1.weight": (4,),
    "b1.q.weight": (8, 4),
    "b1.down.weight": (4, 6),
    "final.weight": (4,),
    "head.weight": (12, 4),
}
SHARDED = {
    name: 1 if name.endswith(("out.weight", "down.weight")) else 0 for name in SHAPES if not name.endswith(("norm1.weight", "norm2.weight"))
}
del SHARDED["final.weight"]
STAGES = {name: 1 if name.startswith(("b1", "final", "head")) else 0 for name in SHAPES}
COUNTS = {(0, 0): 3, (0, 1): 5, (1, 0): 7, (1, 1): 2}
"""Valid tokens of (data rank, microbatch): all different."""


def random_gradients(seed):
    """Gradients of every tensor; that of the key bias is exactly zero up to rounding, as softmax makes it."""
    generator = np.random.default_rng(seed)
    gradients = {name: generator.standard_normal(shape) for name, shape in SHAPES.items()}
    gradients["b0.k.bias"] *= 1e-17
    return gradients


def shares(counts=None):
    counts = counts or COUNTS
    return tuple(
        Share(data_rank=rank, microbatch=micro, num_tokens=count, gradients=random_gradients(100 + 10 * rank + micro))
        for (rank, micro), count in counts.items()
    )


def combined(parts, weight):
    return {name: sum(weight(part) * part.gradients[name] for part in parts) for name in SHAPES}


SHARES = shares()
REFERENCE = combined(SHARES, lambda _: 1.0)
PLAN = Evidence(sizes={"data": 2, "pipeline": 2, "tensor": 2}, num_microbatches=2, stages=STAGES, sharded=SHARDED)
WITH_SHARES = replace(PLAN, shares=SHARES)


def altered(changes):
    return {name: changes(name, value) for name, value in REFERENCE.items()}


def only(found, evidence=PLAN):
    """The one cause that is named."""
    causes = diagnose(REFERENCE, found, evidence)
    assert len(causes) == 1, [cause.text for cause in causes]
    return causes[0]


def norm_of(*gradients):
    return math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))


def test_equal_gradients_have_no_cause():
    """Rounding, and whatever stands in the gradient of the key bias, is no mistake."""
    noise = altered(lambda name, value: value * (1 + 1e-14) if name != "b0.k.bias" else value[::-1])

    assert diagnose(REFERENCE, noise, replace(WITH_SHARES, found_norms={0: norm_of(*REFERENCE.values())})) == []


# How microbatches and ranks count


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (4.0, ["4 x the reference", "the number of microbatches times the size of data"]),
        (0.5, ["0.5 x", "1 / the number of microbatches"]),
        (3.0, ["3 x"]),
    ],
)
def test_a_common_factor_is_named_with_what_it_is_the_size_of(factor, words):
    """Every gradient off by one factor: a loss divided too often or too seldom."""
    cause = only(altered(lambda _, value: factor * value), WITH_SHARES)

    assert cause.name == "scaled"
    assert all(word in cause.text for word in words)


def test_four_microbatches_and_a_factor_of_four():
    """A pipeline that never divided by the number of microbatches."""
    cause = only(altered(lambda _, value: 4 * value), replace(PLAN, sizes={"pipeline": 2}, num_microbatches=4))

    assert "every gradient is 4 x the reference, which is the number of microbatches." in cause.text


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (attrgetter("num_tokens"), "every microbatch and rank"),
        (lambda part: sum(count for (rank, _), count in COUNTS.items() if rank == part.data_rank), "of the data ranks"),
        (lambda part: sum(count for (_, micro), count in COUNTS.items() if micro == part.microbatch), "of the microbatches"),
    ],
)
def test_a_mean_of_means_is_named_with_its_counts(group, words):
    """Each microbatch, rank or both is divided by its own tokens, and the means are averaged."""
    num_groups = 4 if "and" in words else 2
    cause = only(combined(SHARES, lambda part: 17 / (num_groups * group(part))), WITH_SHARES)

    assert cause.name == "mean-of-means"
    assert words in cause.text
    assert "3, 5, 7, 2" in cause.text


def test_with_equal_counts_a_mean_of_means_is_right():
    """Then the mean of means is the mean."""
    parts = shares(dict.fromkeys(COUNTS, 5))

    assert diagnose(REFERENCE, combined(parts, lambda _: 1.0), replace(PLAN, shares=parts)) == []


def test_only_the_last_microbatch_counts():
    """Gradients overwritten in place of added."""
    cause = only(combined(SHARES, lambda part: float(part.microbatch == 1)), WITH_SHARES)

    assert cause.name == "last-microbatch-only"


def test_accumulation_lost_on_one_stage_names_the_stage():
    """The stage's buffers were made anew between microbatches; the other stage is right."""
    lost = combined(SHARES, lambda part: float(part.microbatch == 1))
    cause = only(altered(lambda name, value: lost[name] if STAGES[name] == 1 else value), WITH_SHARES)

    assert cause.name == "last-microbatch-only"
    assert "stage 1 only" in cause.text


def test_a_microbatch_that_is_missing_is_named():
    """Of three microbatches the second was dropped."""
    parts = shares({(0, 0): 4, (0, 1): 4, (0, 2): 4})
    reference = combined(parts, lambda _: 1.0)
    causes = diagnose(reference, combined(parts, lambda part: float(part.microbatch != 1)), replace(PLAN, shares=parts))

    assert [cause.name for cause in causes] == ["microbatch-lost"]
    assert "microbatch 1 is missing" in causes[0].text


def test_gradients_that_stay_on_their_rank():
    """No sum over data ranks was made."""
    cause = only(combined(SHARES, lambda part: float(part.data_rank == 0)), WITH_SHARES)

    assert cause.name == "not-summed-over-data"
    assert "data rank 0" in cause.text


def test_weights_without_a_name_are_measured():
    """Least squares finds how the microbatches count."""
    weights = iter([1.0, 0.25, 1.0, 3.0])
    fixed = {(part.data_rank, part.microbatch): next(weights) for part in SHARES}
    cause = only(combined(SHARES, lambda part: fixed[part.data_rank, part.microbatch]), WITH_SHARES)

    assert cause.name == "weighted-microbatches"
    assert "rank 0 microbatch 1: 0.25" in cause.text
    assert "rank 1 microbatch 1: 3" in cause.text


# Tensors that are wrong by themselves


def test_a_factor_on_part_of_the_model_is_a_mixed_scale():
    """A divide factor that was set on the root unit only."""
    cause = only(altered(lambda name, value: value if name.startswith(("b0", "b1")) else value / 2))

    assert cause.name == "mixed-scales"
    assert set(cause.tensors) == {"embed.tokens", "final.weight", "head.weight"}


def replicated(name):
    return name not in SHARDED


def test_norms_that_were_not_summed_over_the_sequence_sum_to_the_reference():
    """The copies of the two tensor ranks prove it."""
    generator = np.random.default_rng(5)
    one = {name: generator.standard_normal(SHAPES[name]) for name in SHAPES if replicated(name)}
    copies = {name: {0: part, 1: REFERENCE[name] - part} for name, part in one.items()}
    cause = only(REFERENCE | one, replace(PLAN, copies=copies))

    assert cause.name == "not-summed-over-tensor"
    assert "sum to the reference" in cause.text
    assert set(cause.tensors) == set(one)


def test_norms_alone_wrong_are_suspected_of_it_without_copies():
    """Nothing else is wrong, and the tensor axis has two ranks."""
    generator = np.random.default_rng(5)
    cause = only(altered(lambda name, value: generator.standard_normal(value.shape) if replicated(name) else value))

    assert cause.name == "not-summed-over-tensor"


@pytest.mark.parametrize(("factor", "name"), [(0.5, "not-summed-over-tensor"), (2.0, "summed-twice-over-tensor")])
def test_norms_that_were_averaged_or_summed_too_often(factor, name):
    """The factor is the size of the tensor axis, or 1 / it, on replicated tensors only."""
    assert only(altered(lambda tensor, value: factor * value if replicated(tensor) else value)).name == name


def test_lost_gradients_are_counted_by_stage():
    """None and zeros are both lost; nine of eleven is the print of a split backward that was cut short."""
    found = altered(lambda name, value: {"b1.q.weight": None, "b1.down.weight": np.zeros_like(value)}.get(name, value))
    cause = only(found)

    assert cause.name == "lost-gradients"
    assert "2 of 5 on stage 1" in cause.text


def test_a_tensor_that_never_arrived_is_lost():
    """Its name is absent."""
    found = dict(REFERENCE)
    del found["head.weight"]

    assert only(found).tensors == ("head.weight",)


@pytest.mark.parametrize(("use", "words"), [(0, "as embedding alone"), (1, "as head alone")])
def test_a_tied_embedding_with_half_its_gradient(use, words):
    """First and last stage each hold the gradient of their own use."""
    lookup = np.random.default_rng(6).standard_normal(SHAPES["embed.tokens"])
    uses = (lookup, REFERENCE["embed.tokens"] - lookup)
    found = REFERENCE | {"embed.tokens": uses[use]}
    cause = only(found, replace(PLAN, tied="embed.tokens", tied_uses=uses))

    assert cause.name == "tied-embedding"
    assert words in cause.text


@pytest.mark.parametrize(("factor", "words"), [(2.0, "more than once"), (0.5, "averaged")])
def test_a_tied_embedding_summed_twice_or_averaged(factor, words):
    """Only the shared tensor is off, by a clean factor."""
    cause = only(REFERENCE | {"embed.tokens": factor * REFERENCE["embed.tokens"]}, replace(PLAN, tied="embed.tokens"))

    assert cause.name == "tied-embedding"
    assert words in cause.text


def test_a_fused_matrix_cut_as_one_is_a_permutation():
    """Two ranks cut [gate; up] as [W0 V0 W1 V1] where [W0 W1 V0 V1] is right."""
    gate, up = REFERENCE["b0.gate.weight"], REFERENCE["b0.up.weight"]
    fused = np.concatenate([gate[:3], up[:3], gate[3:], up[3:]])
    cause = only(REFERENCE | {"b0.gate.weight": fused[:6], "b0.up.weight": fused[6:]})

    assert cause.name == "layout-permuted"
    assert set(cause.tensors) == {"b0.gate.weight", "b0.up.weight"}
    assert "fused" in cause.text


def test_columns_of_the_wrong_order_are_a_permutation():
    """The heads of the output projection came back in another order."""
    cause = only(REFERENCE | {"b0.out.weight": REFERENCE["b0.out.weight"][:, [4, 5, 6, 7, 0, 1, 2, 3]]})

    assert cause.name == "layout-permuted"
    assert "columns" in cause.text


def test_one_wrong_stage_is_named():
    """Stage 0 wrong, stage 1 right, no cleaner print."""
    generator = np.random.default_rng(7)
    cause = only(altered(lambda name, value: generator.standard_normal(value.shape) if STAGES[name] == 0 else value))

    assert cause.name == "one-stage"
    assert "stage 0" in cause.text


def test_one_wrong_tensor_rank_is_named():
    """Rows of rank 1 are wrong, rows of rank 0 right; and columns where columns are cut."""
    found = {name: value.copy() for name, value in REFERENCE.items()}
    found["b0.q.weight"][4:] += np.random.default_rng(8).standard_normal((4, 4))
    found["b0.out.weight"][:, 4:] += np.random.default_rng(9).standard_normal((4, 4))
    cause = only(found)

    assert cause.name == "one-tensor-rank"
    assert "tensor rank 1" in cause.text
    assert set(cause.tensors) == {"b0.q.weight", "b0.out.weight"}


def test_replicas_that_differ_are_named_by_rank_and_tensor():
    """Even where the copy that was compared is right."""
    other = REFERENCE["b0.norm1.weight"].copy()
    other[2] = np.nextafter(other[2], 9)
    cause = only(REFERENCE, replace(PLAN, copies={"b0.norm1.weight": {0: REFERENCE["b0.norm1.weight"], 3: other}}))

    assert cause.name == "replicas-differ"
    assert "ranks 0 and 3 hold different copies of b0.norm1.weight (1 entries)" in cause.text


def test_what_fits_nothing_is_told_by_how_far_it_reaches():
    """Wrong from one tensor down, right above it: the backward pass goes wrong there."""
    generator = np.random.default_rng(11)
    names = list(SHAPES)[:11]
    found = altered(lambda name, value: generator.standard_normal(value.shape) if name in names else value)
    cause = only(found, Evidence())

    assert cause.name == "unknown"
    assert "those after b0.down.weight in model order are right" in cause.text


def test_a_wrong_gradient_where_the_reference_is_silent_is_still_reported():
    """A key bias whose gradient is not zero."""
    cause = only(REFERENCE | {"b0.k.bias": np.ones(4)}, Evidence())

    assert cause.name == "unknown"
    assert cause.tensors == ("b0.k.bias",)


# Dropout


def test_the_same_mask_on_every_data_rank_is_seen():
    """Each rank drew from the same local index."""
    generator = np.random.default_rng(12)
    expected = generator.integers(2, size=(4, 6, 8)).astype(float)
    found = np.concatenate([expected[:2], expected[:2]])
    generator = np.random.default_rng(13)
    cause = only(altered(lambda _, value: generator.standard_normal(value.shape)), replace(PLAN, masks={"b0.norm2": (expected, found)}))

    assert cause.name == "dropout-depends-on-mesh"
    assert "b0.norm2" in cause.text
    assert "the same mask 2 times along the sequences" in cause.text


def test_the_same_mask_on_every_part_of_the_sequence_is_seen():
    """Each tensor rank drew as if its part were the whole."""
    expected = np.random.default_rng(12).integers(2, size=(4, 6, 8)).astype(float)
    found = np.concatenate([expected[:, :3], expected[:, :3]], axis=1)
    causes = diagnose(REFERENCE, REFERENCE, replace(PLAN, masks={"enter": (expected, found)}))

    assert [cause.name for cause in causes] == ["dropout-depends-on-mesh"]
    assert "the same mask 2 times along the tokens" in causes[0].text


def test_equal_masks_are_no_cause():
    """Only which entries are dropped counts, not the scale."""
    mask = np.random.default_rng(12).integers(2, size=(4, 6, 8)).astype(float)

    assert diagnose(REFERENCE, REFERENCE, replace(PLAN, masks={"enter": (mask, 2 * mask)})) == []


# Norms


def norm_cause(found_norms, evidence=PLAN, reference=REFERENCE):
    causes = diagnose(reference, reference, replace(evidence, found_norms=found_norms))
    assert len(causes) == 1, [cause.text for cause in causes]
    return causes[0]


STAGED = {"w0": np.array([3.0]), "w1": np.array([4.0])}
STAGED_PLAN = Evidence(sizes={"pipeline": 2}, stages={"w0": 0, "w1": 1})


def test_each_stage_clipping_by_its_own_norm():
    """Stage gradients 3 and 4: the norm is 5, not 3 here and 4 there."""
    cause = norm_cause({0: 3.0, 1: 4.0}, STAGED_PLAN, STAGED)

    assert cause.name == "norm-of-one-stage"
    assert "5 is right" in cause.text


def test_norms_that_were_added():
    """3 + 4 = 7."""
    assert norm_cause({0: 7.0, 1: 7.0}, STAGED_PLAN, STAGED).name == "norm-sums-norms"


CUT = {"cut": np.array([3.0, 4.0]), "whole": np.array([12.0])}
CUT_PLAN = Evidence(sizes={"tensor": 2}, sharded={"cut": 0})


def test_replicated_tensors_counted_on_every_rank():
    """Shards 3 and 4, and 12 on both ranks: 13 is right."""
    cause = norm_cause(dict.fromkeys((0, 1), math.sqrt(9 + 16 + 2 * 144)), CUT_PLAN, CUT)

    assert cause.name == "norm-counts-replicated"
    assert "13 is right" in cause.text


def test_each_tensor_rank_clipping_by_what_it_holds():
    """12.4 on one rank and 12.6 on the other."""
    assert norm_cause({0: math.sqrt(9 + 144), 1: math.sqrt(16 + 144)}, CUT_PLAN, CUT).name == "norm-of-one-shard"


def test_a_tied_tensor_counted_on_both_stages():
    """Two copies, each 5 after the sum: 5 is right, 7.07 is not."""
    tied = {"embed.tokens": np.array([3.0, 4.0])}
    cause = norm_cause(dict.fromkeys((0, 1), math.sqrt(50)), Evidence(sizes={"pipeline": 2}, tied="embed.tokens"), tied)

    assert cause.name == "norm-counts-tied-twice"
    assert "7.07107" in cause.text


@pytest.mark.parametrize(
    ("factor", "name"), [(math.sqrt(3), "norm-counts-replicas"), (3.0, "norm-scaled"), (1 / 3, "norm-scaled"), (1.1, "norm-wrong")]
)
def test_other_norms_are_told_by_their_ratio(factor, name):
    """The ratio is the root of a size, a size, or has no meaning that is known."""
    cause = norm_cause({0: factor * norm_of(*REFERENCE.values())}, replace(PLAN, sizes={"data": 3}))

    assert cause.name == name


def test_a_norm_that_follows_from_wrong_gradients_is_no_second_cause():
    """Four times the gradients have four times the norm."""
    norm = 4 * norm_of(*REFERENCE.values())
    evidence = replace(PLAN, found_norms={0: norm}, reference_norm=norm / 4, num_microbatches=4)

    assert only(altered(lambda _, value: 4 * value), evidence).name == "scaled"


# Together


def test_two_mistakes_are_both_named():
    """A lost gradient, and norms not summed over the sequence."""
    found = altered(lambda name, value: None if name == "b1.q.weight" else value / 2 if replicated(name) else value)

    assert [cause.name for cause in diagnose(REFERENCE, found, PLAN)] == ["lost-gradients", "not-summed-over-tensor"]


def test_every_wrong_tensor_is_in_some_cause():
    """Whatever is altered, nothing that compare calls wrong is passed over in silence."""
    generator = np.random.default_rng(20)
    for _ in range(10):
        chosen = set(generator.choice(list(SHAPES), size=3, replace=False))
        found = {name: value + (name in chosen) * generator.standard_normal(value.shape) for name, value in REFERENCE.items()}
        wrong = {name for name, error in compare(REFERENCE, found).errors.items() if error > 1e-9}
        assert wrong == chosen
        assert diagnose(REFERENCE, found, WITH_SHARES)


def test_float32_gradients_need_a_wider_tolerance():
    """Rounding of 1e-7 must not hide a clean factor."""
    found = altered(lambda _, value: (4 * value).astype(np.float32))
    causes = diagnose(REFERENCE, found, replace(PLAN, num_microbatches=4), tolerance=1e-5)

    assert [cause.name for cause in causes] == ["scaled"]
    assert "the number of microbatches" in causes[0].text
