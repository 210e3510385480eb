"""Errors are relative to the right scale, and the first difference is the first in model order."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trainwright.prove.compare import compare, compare_parameters, relative_error

REFERENCE = {"embed": np.array([[1.0, -4.0], [2.0, 0.0]]), "bias": np.array([1e-18, -1e-18]), "head": np.array([0.5, 0.25])}


def changed(**changes):
    return {name: changes.get(name, value) for name, value in REFERENCE.items()}


def test_a_copy_is_equal():
    """No error anywhere."""
    comparison = compare(REFERENCE, {name: value.copy() for name, value in REFERENCE.items()}, tolerance=0.0)

    assert comparison.equal
    assert comparison.worst_relative_error == 0.0
    assert comparison.first_difference is None
    assert comparison.num_tensors_compared == 3


def test_a_gradient_is_measured_on_its_own_scale():
    """0.05 off in a tensor whose largest entry is 0.5."""
    assert compare(REFERENCE, changed(head=np.array([0.5, 0.3]))).errors["head"] == pytest.approx(0.1)


def test_rounding_noise_of_a_zero_gradient_is_measured_on_the_floor():
    """The bias is noise: its scale is a hundredth of the largest gradient, 4."""
    comparison = compare(REFERENCE, changed(bias=np.array([0.0, 3e-18])))

    assert comparison.errors["bias"] == pytest.approx(4e-18 / 0.04)
    assert comparison.equal


def test_parameters_are_measured_on_one_scale():
    """0.05 off where the largest parameter is 4."""
    assert compare_parameters(REFERENCE, changed(head=np.array([0.5, 0.3]))).worst_relative_error == pytest.approx(0.05 / 4)


def test_the_first_difference_is_first_in_model_order_and_the_worst_is_named_too():
    """The head is further off, the embedding comes first; an entry within the tolerance is passed over."""
    found = changed(embed=np.array([[1.0 + 1e-15, -4.0], [2.5, 0.1]]), head=np.array([5.0, 0.25]))
    comparison = compare(REFERENCE, found)

    assert not comparison.equal
    assert comparison.worst_tensor == "head"
    assert comparison.worst_relative_error == pytest.approx(9.0)
    assert comparison.first_difference is not None
    assert (comparison.first_difference.tensor, comparison.first_difference.index) == ("embed", (1, 0))
    assert str(comparison.first_difference) == "embed[1, 0]: expected 2.0, found 2.5"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_is_infinitely_wrong(bad):
    """A tolerance never covers it."""
    comparison = compare(REFERENCE, changed(head=np.array([0.5, bad])), tolerance=1e300)

    assert comparison.worst_relative_error == math.inf
    assert comparison.first_difference is not None
    assert comparison.first_difference.index == (1,)


@pytest.mark.parametrize(("value", "reason"), [(None, "missing"), (np.zeros((2, 1)), "expected shape (2,), found (2, 1)")])
def test_missing_and_ill_shaped_tensors_are_named(value, reason):
    """None stands for a gradient that never came."""
    comparison = compare(REFERENCE, changed(head=value))

    assert comparison.errors["head"] == math.inf
    assert str(comparison.first_difference) == f"head: {reason}"


def test_a_tensor_that_the_reference_does_not_know_is_no_equality():
    """It may be a second copy under another name."""
    comparison = compare(REFERENCE, REFERENCE | {"extra": np.zeros(1)})

    assert comparison.unexpected == ("extra",)
    assert not comparison.equal


def test_all_zero_references_allow_only_zeros():
    """There is no scale to be relative to."""
    zeros = {"w": np.zeros(2)}

    assert compare(zeros, {"w": np.zeros(2)}).equal
    assert compare(zeros, {"w": np.array([0.0, 1e-300])}).worst_relative_error == math.inf


def test_empty_tensors_are_equal():
    """Nothing differs in nothing."""
    assert compare({"w": np.zeros(0)}, {"w": np.zeros(0)}).equal
    assert compare({}, {}).equal


def test_losses_and_norms_are_relative_to_the_reference():
    """Zero is matched only by zero."""
    assert relative_error(4.0, 5.0) == 0.25
    assert relative_error(0.0, 1e-300) == math.inf
    assert relative_error(math.nan, 1.0) == math.inf
    assert relative_error(math.inf, math.inf) == 0.0
