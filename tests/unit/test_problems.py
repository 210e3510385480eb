from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError

import pytest

from trainwright.problems import PlanError, Problem, nearest, raise_all

TENSOR = Problem(
    'tensor size 8 does not divide the 12 key-value heads of "toy-gqa"',
    file="plan.toml",
    line=14,
    path="parallel.tensor.size",
    given=8,
    allowed=(1, 2, 3, 4, 6, 12),
    attempt="parallel.tensor.size = 4, with parallel.zero.size = 4 in place of 2",
)


def test_a_problem_is_printed_as_the_style_page_shows():
    """Place and message, then given, allowed and try, aligned."""
    assert (
        'plan.toml:14  tensor size 8 does not divide the 12 key-value heads of "toy-gqa"\n'
        "  given    parallel.tensor.size = 8\n"
        "  allowed  1, 2, 3, 4, 6, 12\n"
        "  try      parallel.tensor.size = 4, with parallel.zero.size = 4 in place of 2"
    ) == str(TENSOR)


def test_json_holds_the_same_with_the_key_try():
    """The contract: file, line, path, given, allowed, try, and the message."""
    assert {
        "message": 'tensor size 8 does not divide the 12 key-value heads of "toy-gqa"',
        "file": "plan.toml",
        "line": 14,
        "path": "parallel.tensor.size",
        "given": 8,
        "allowed": [1, 2, 3, 4, 6, 12],
        "try": "parallel.tensor.size = 4, with parallel.zero.size = 4 in place of 2",
    } == TENSOR.to_json()


def test_unknown_parts_are_left_out():
    """A problem without a file, a line or advice says only what it knows."""
    assert str(Problem("the corpus is empty")) == "the corpus is empty"
    assert str(Problem("not TOML", file="plan.toml")) == "plan.toml  not TOML"


@pytest.mark.parametrize(
    ("expected", "value"),
    [
        ('"80G"', "80G"),
        ('"say \\"x\\""', 'say "x"'),
        ("true", True),
        ("0", 0),
        ("[1, 2]", [1, 2]),
        ("{ size = 2 }", {"size": 2}),
        ("nan", math.nan),
    ],
)
def test_a_given_value_is_shown_as_it_stands_in_a_plan_file(expected, value):
    """What was given can be found again in the file."""
    assert str(Problem("no", path="run.seed", given=value)) == f"no\n  given    run.seed = {expected}"


def test_a_long_or_broken_value_stays_on_one_line():
    """A megabyte of text in one setting does not flood the terminal."""
    text = str(Problem("no", path="run.data", given="line\n" * 100_000))

    assert len(text.splitlines()) == 2
    assert len(text) < 200


def test_nan_and_infinity_are_text_in_json():
    """JSON has no word for them; the document stays valid."""
    document = PlanError(Problem("no", given=[math.nan, math.inf, {"deep": -math.inf}])).to_json()

    assert json.loads(json.dumps(document, allow_nan=False))["problems"][0]["given"] == ["nan", "inf", {"deep": "-inf"}]


def test_an_error_carries_every_problem():
    """The user mends all of them at once."""
    error = PlanError([TENSOR, Problem("the corpus is empty")])

    assert str(error) == f"{TENSOR}\nthe corpus is empty"
    assert error.to_json()["schema"] == "trainwright/problems/1"
    assert len(error.to_json()["problems"]) == 2


def test_raise_all_is_silent_without_problems():
    """No problem, no error."""
    raise_all(iter(()))

    with pytest.raises(PlanError) as raised:
        raise_all(iter([TENSOR, TENSOR]))
    assert raised.value.problems == (TENSOR, TENSOR)


def test_a_place_is_added_but_never_replaced():
    """Whoever knows the place best speaks first."""
    placed = Problem("no", line=3).at("plan.toml", 9)

    assert (placed.file, placed.line) == ("plan.toml", 3)
    assert Problem("no").at("plan.toml", 9).line == 9


def test_a_problem_is_data():
    """Frozen and comparable."""
    with pytest.raises(FrozenInstanceError):
        TENSOR.line = 15
    assert TENSOR.at(None) == TENSOR


@pytest.mark.parametrize(
    ("expected", "name"),
    [
        ("tensor", "tensr"),
        ("tensor", "Tensor"),
        ("global_sequences", "global-sequence"),
        (None, "xyzzy"),
        (None, ""),
        ("tensor", "tensors"),
    ],
)
def test_the_nearest_name_is_the_one_that_was_meant(expected, name):
    """Upper case and dashes for underscores are near; what resembles nothing gets no advice."""
    assert expected == nearest(name, ["tensor", "data", "zero", "global_sequences"])
