"""`trainwright schedule`: the document, the picture, the problems."""

from __future__ import annotations

import argparse
import json

import pytest

from trainwright.cli import schedule
from trainwright.cli.gantt import gantt
from trainwright.problems import PlanError
from trainwright.schedules import SCHEDULES
from trainwright.schedules.timeline import Prices, draw


def run(*arguments):
    parser = argparse.ArgumentParser()
    schedule.add_arguments(parser)
    return schedule.run(parser.parse_args(arguments))


def test_the_document_holds_what_scripts_rely_on(capsys):
    """One JSON document and nothing else; whole numbers stay whole."""
    assert 0 == run("1f1b", "--stages", "2", "--microbatches", "2", "--json")

    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "trainwright/schedule/1"
    assert [document[name] for name in ("makespan", "elapsed_max", "idle_slots", "idle_fraction", "lower_bound", "gap")] == [
        6,
        6,
        4,
        4 / 12,
        6,
        0.0,
    ]
    assert document["stages"][0] == {"stage": 0, "num_forwards": 2, "num_backwards": 2, "peak_kept": 2}
    assert document["actions"][0] == {"rank": 0, "start": 0, "end": 1, "kind": "forward", "stage": 0, "microbatch": 0}
    assert len(document["actions"]) == 8


def test_rank_is_the_position_and_stage_the_virtual_stage(capsys):
    """With two chunks position 0 runs stages 0 and 2; peaks count chunks; there is an entry a position."""
    run("interleaved", "--stages", "2", "--microbatches", "2", "--json")

    document = json.loads(capsys.readouterr().out)
    assert {(action["rank"], action["stage"]) for action in document["actions"]} == {(0, 0), (0, 2), (1, 1), (1, 3)}
    assert [stage["peak_kept"] for stage in document["stages"]] == [4, 3]


def test_the_text_shows_figures_and_picture_without_colour(capsys, monkeypatch):
    """Not a terminal: no escape codes."""
    monkeypatch.setenv("COLUMNS", "120")
    run("1f1b", "--stages", "3", "--microbatches", "4")

    out = capsys.readouterr().out
    assert "makespan     12" in out
    assert "0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3" in out
    assert "\x1b" not in out


def test_all_problems_come_at_once():
    """Five bad numbers, five problems, each with what is allowed."""
    with pytest.raises(PlanError) as caught:
        run("1f1b", "--stages", "2.5", "--microbatches", "1" + "0" * 18, "--forward", "nan", "--send=-1", "--weight", "soon")

    problems = caught.value.problems
    assert [problem.path for problem in problems] == ["--stages", "--microbatches", "--forward", "--weight", "--send"]
    assert all(problem.allowed for problem in problems)


@pytest.mark.parametrize("bad", ["0", "-3", "1.5", "true", "", "1e3", "١", "--4"])
def test_sizes_are_whole_numbers_from_one(bad):
    """Zero, negative, fractional, boolean, empty, other scripts."""
    with pytest.raises(PlanError):
        run("gpipe", f"--stages={bad}")


def test_an_unknown_name_is_answered_with_the_nearest():
    """And no name at all with all of them."""
    with pytest.raises(PlanError, match="1f1b"):
        run("1f1")
    with pytest.raises(PlanError, match="gpipe, interleaved"):
        run()


@pytest.mark.parametrize(
    "arguments",
    [
        ("interleaved", "--microbatches", "9"),
        ("1f1b", "--chunks", "2"),
        ("1f1b", "--stages", "65536", "--microbatches", "1000000"),
        ("1f1b", "--forward", "0", "--backward", "0"),
    ],
)
def test_what_a_schedule_cannot_do_is_a_problem(arguments):
    """Never a traceback, never a wrong picture."""
    with pytest.raises(PlanError):
        run(*arguments)


def picture(text):
    """The rows of a docstring's diagram, with every microbatch's letter as the command prints it."""
    return [line.split(maxsplit=2)[2].rstrip() for line in text.splitlines() if line.strip().startswith("position ") and ".." in line]


@pytest.mark.parametrize(("name", "num_positions", "num_microbatches"), [("gpipe", 3, 3), ("1f1b", 3, 4)])
def test_the_diagram_of_a_docstring_is_what_the_schedule_does(name, num_positions, num_microbatches):
    """A picture that cannot drift from its code."""
    part = SCHEDULES.get(name)
    rows = gantt(draw(part, num_positions, num_microbatches, 1, Prices()), 120)

    assert picture(part.__doc__) == [row.split("  ", maxsplit=1)[1] for row in rows]


def test_the_diagram_of_the_interleaved_schedule_too():
    """There a small letter is chunk 1; the command writes a and b."""
    part = SCHEDULES.get("interleaved")
    rows = [row.split("  ", maxsplit=1)[1].split() for row in gantt(draw(part, 2, 2, 2, Prices()), 120)]
    short = [[cell[:2].lower() if cell.endswith("b") else ".." if cell == "..." else cell[:2] for cell in row] for row in rows]

    assert [row.split() for row in picture(part.__doc__)] == short


def test_a_long_schedule_is_drawn_in_slices():
    """One column a slice, F and B and idle, no wider than asked."""
    rows = gantt(draw(SCHEDULES.get("1f1b"), 4, 64, 1, Prices()), 60)

    assert max(map(len, rows)) <= 60
    assert {"F", "B", "."} >= set(rows[0].split("  ", maxsplit=1)[1])
    assert rows[3].split("  ", maxsplit=1)[1].startswith(".F")


def test_colour_does_not_change_the_letters():
    """Escape codes only."""
    timeline = draw(SCHEDULES.get("1f1b"), 2, 3, 1, Prices(weight=1))
    plain, painted = gantt(timeline, 120), gantt(timeline, 120, colour=True)
    for code in ("\x1b[30;46m", "\x1b[30;42m", "\x1b[30;43m", "\x1b[0m"):
        painted = [row.replace(code, "") for row in painted]

    assert plain == [row.rstrip() for row in painted]
