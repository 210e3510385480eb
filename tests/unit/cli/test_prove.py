"""What `trainwright prove` refuses before it loads torch."""

from __future__ import annotations

import pytest

from trainwright.cli.main import main

MESH = ("--parallel.pipeline.size", "2", "--parallel.data.size", "2", "--parallel.zero.size", "1")


@pytest.mark.parametrize(("asked", "said"), [("0", "whole numbers from 4 to 64"), ("3", "--ranks 4"), ("65", "--ranks 64")])
def test_a_number_of_ranks_that_cannot_be_had_is_refused(capsys, asked, said):
    """Every axis in use needs two ranks, and one machine has only so many."""
    assert main(["prove", "tiny-gpt", *MESH, "--ranks", asked]) == 2
    assert said in capsys.readouterr().err
