"""Figures re-evaluate to themselves, from numbers and from pointers into the document that holds them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.ir.figure import Figure, evaluate, lookup

DOCUMENT = {"memory": {"parts": [{"bytes": 3}, {"bytes": 4}], "a/b": 5, "c~d": 6}}


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("a + b * 2", 11),
        ("(a + b) * 2", 14),
        ("a - -b", 7),
        ("b ** 2 / a", 16 / 3),
        ("b // a", 1),
        ("ceil(b / a)", 2),
        ("ceil(6 / a)", 2),
        ("min(a, b) + max(a, b, 9)", 12),
        ("sum([a, b, 1])", 8),
        ("max([a, b])", 4),
    ],
)
def test_formulas_are_arithmetic(formula, expected):
    """Sums, products, powers, rounding up, and sums of lists."""
    assert expected == evaluate(formula, {"a": 3, "b": 4})


def test_inputs_may_point_into_the_document():
    """RFC 6901: ~1 is a slash, ~0 a tilde, numbers index lists."""
    inputs = {"one": "/memory/parts/0/bytes", "two": "/memory/parts/1/bytes"}

    assert 7 == evaluate("one + two", inputs, DOCUMENT)
    assert 5 == lookup(DOCUMENT, "/memory/a~1b")
    assert 6 == lookup(DOCUMENT, "/memory/c~0d")
    with pytest.raises(KeyError):
        evaluate("one", {"one": "/memory/nothing"}, DOCUMENT)


@pytest.mark.parametrize("formula", ["a.real", "open(a)", "[x for x in a]", "a if a else a", "'text'", "a % a", "lambda: a", "a @ a"])
def test_what_is_no_arithmetic_is_refused(formula):
    """A formula cannot run anything."""
    with pytest.raises(ValueError, match="is no arithmetic"):
        evaluate(formula, {"a": 3})


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_ceil_of_whole_numbers_is_exact(one, other):
    """Rounding up a quotient of integers loses nothing where the division itself is exact."""
    assert -(-one // other) == evaluate("ceil(a // b) + min(1, a - a // b * b)", {"a": one, "b": other})


def test_a_figure_says_what_it_rests_on():
    """Its entry holds all that is needed to compute it again."""
    figure = Figure(value=6, unit="bytes", formula="a * b", inputs={"a": 2, "b": 3}, source="counted", not_counted="padding")
    entry = figure.provenance()

    assert figure.value == evaluate(entry["formula"], entry["inputs"])
    assert {"unit": "bytes", "source": "counted", "not_counted": "padding"}.items() <= entry.items()
