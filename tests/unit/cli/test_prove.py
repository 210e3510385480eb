"""`trainwright prove`: what it refuses, and what it says where nothing is sent."""

from __future__ import annotations

import pytest

from trainwright.cli.main import main

MESH = ("--parallel.pipeline.size", "2", "--parallel.data.size", "2", "--parallel.zero.size", "1")


@pytest.mark.parametrize(("asked", "said"), [("0", "whole numbers from 4 to 64"), ("3", "--ranks 4"), ("65", "--ranks 64")])
def test_a_number_of_ranks_that_cannot_be_had_is_refused(capsys, asked, said):
    """Every axis in use needs two ranks, and one machine has only so many."""
    assert main(["prove", "tiny-gpt", *MESH, "--ranks", asked]) == 2
    assert said in capsys.readouterr().err


def test_where_nothing_is_sent_nothing_is_counted(capsys):
    """One process has nobody to send to; that is no fault of the system's counter."""
    assert main(["prove", "tiny-gpt", "--processes"]) == 0
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()}

    assert ("no exchange", "no message was sent, nothing to count") == (lines["wire"], lines["system"])


def test_a_number_that_is_none_is_refused_in_plain_words(capsys):
    """Not in those of the parser."""
    assert main(["prove", "tiny-gpt", "--ranks", "x"]) == 2
    assert "--ranks takes a number" in capsys.readouterr().err
