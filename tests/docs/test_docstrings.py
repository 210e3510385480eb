"""Every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"


def modules_with_examples() -> list[str]:
    paths = sorted(path for path in SOURCE.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))
    return [".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for path in paths]


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of(name):
    """A docstring's example is a promise."""
    failed, tried = doctest.testmod(import_module(name))

    assert tried > 0
    assert failed == 0
