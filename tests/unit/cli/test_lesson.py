"""`trainwright lesson`: pages in two languages, inputs, problems."""

from __future__ import annotations

import argparse
import json
import re

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


def test_a_chinese_page_has_chinese_units_and_names(capsys):
    """A document keeps the English ones: they are keys."""
    run("pipeline", "--language", "zh")
    out = capsys.readouterr().out

    assert "22 拍" in out
    assert "位置 0  拍 0, 保留 1" in out
    assert not {"ticks", "slots", "microbatches", "rank", "kept"} & set(out.partition("数值")[2].split())


@pytest.mark.parametrize("name", ["activations", "collectives", "pipeline", "zero-ledger"])
def test_chinese_text_is_broken_by_its_width(name, capsys):
    """A line of the text is at most 100 wide, breaks within no word, and begins with no closing mark."""
    run(name, "--language", "zh")
    lines = capsys.readouterr().out.partition("输入")[0].splitlines()

    assert 100 >= max(map(lesson._width, lines))
    assert all(line[:1] not in {"，", "。", "；", "：", "、", "）"} for line in lines)
    words = " ".join(paragraph.zh for paragraph in lesson.LESSONS.get(name).page(**lesson._inputs(lesson.LESSONS.get(name), ())).text)
    assert {piece for line in lines[2:] for piece in re.findall(r"[A-Za-z]{2,}", line)} <= set(re.findall(r"[A-Za-z]{2,}", words))


def test_bytes_of_a_table_are_grouped_and_whole_numbers_are_whole(capsys):
    """As in the figures."""
    run("activations")
    assert "67,108,864  64.00 MiB" in capsys.readouterr().out
    run("pipeline", "--json")
    rows = json.loads(capsys.readouterr().out)["tables"][0]["rows"]

    assert "19" == json.dumps(rows[2][1])
    assert "12" == json.dumps(rows[2][2])
