"""`trainwright lesson`: pages in two languages, inputs, problems."""

from __future__ import annotations

import argparse
import json

import pytest

from trainwright.cli import lesson
from trainwright.problems import PlanError


def run(*arguments):
    parser = argparse.ArgumentParser()
    lesson.add_arguments(parser)
    return lesson.run(parser.parse_args(arguments))


def test_numbers_do_not_depend_on_the_language(capsys):
    """Words do."""
    documents = []
    for language in ("en", "zh"):
        run("pipeline", "stages=3", "microbatches=5", "--language", language, "--json")
        documents.append(json.loads(capsys.readouterr().out))
    english, chinese = documents

    assert [figure["value"] for figure in english["figures"].values()] == [figure["value"] for figure in chinese["figures"].values()]
    assert english["title"] != chinese["title"]
    assert english["inputs"] == {"stages": 3, "microbatches": 5}
    assert {"name", "inputs", "figures", "steps", "tables", "not_counted", "sources"} <= english.keys()


def test_a_page_is_shown_as_text(capsys):
    """Figures in the units of memory, and how many steps are left out."""
    run("activations")
    assert "4.00 GiB" in capsys.readouterr().out
    run("collectives", "ranks=8", "--language", "zh")
    out = capsys.readouterr().out
    assert "1.75" in out
    assert "未计入" in out
    assert "--json" in out


def test_no_name_lists_the_lessons(capsys):
    """With their titles."""
    assert 0 == run()
    assert "pipeline" in capsys.readouterr().out
    run("--json")
    assert "activations" in json.loads(capsys.readouterr().out)["lessons"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pipelin",), 'try      "pipeline"'),
        (("pipeline", "stage=3"), "try      stages=3"),
        (("pipeline", "stages=0"), "try      stages=1"),
        (("pipeline", "stages"), "whole number"),
        (("activations", "kv_heads=5"), "model.num_kv_heads = 4"),
        (("activations", "element_bytes=3"), "2, 4, 8"),
        (("pipeline", "--language", "fr"), "en, zh"),
    ],
)
def test_bad_input_is_answered_with_what_to_try(arguments, message):
    """Unknown lesson, unknown input, out of range, no number, impossible shape, unknown language."""
    with pytest.raises(PlanError) as caught:
        run(*arguments)

    assert message in str(caught.value)
