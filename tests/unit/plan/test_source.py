"""Where a setting was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwright.plan.source import Source, duplicates, locate

TEXT = """\
# a comment, [not.a.table]
[model] # behind it
name = "a # b = 1"
notes = \"\"\"
[not]
key = 1
\"\"\"

[parallel]
pipeline = { size = 2, layers = [1, # one
  31] , schedule = '1f1b' }
zero.size = 4
"tensor" . size = 2
[optimizer]
betas = [
  0.9,
  0.95,
]
[run.checkpoint]
every = 5
[[links]]
rate = 1
[[links]]
rate = 2
[links.more]
x = 1979-05-27T07:32:00Z
"""


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("model", 2),
        ("model.name", 3),
        ("model.notes", 4),
        ("parallel", 9),
        ("parallel.pipeline.size", 10),
        ("parallel.pipeline.layers.0", 10),
        ("parallel.pipeline.layers.1", 11),
        ("parallel.pipeline.schedule", 11),
        ("parallel.zero", 12),
        ("parallel.zero.size", 12),
        ("parallel.tensor.size", 13),
        ("optimizer.betas.1", 17),
        ("run", 19),
        ("run.checkpoint.every", 20),
        ("links.0.rate", 22),
        ("links.1.rate", 24),
        ("links.1.more.x", 26),
    ],
)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_every_key_has_the_line_it_stands_on(path, line, ending):
    """Headers, dotted keys, inline tables, arrays over several lines, strings that look like tables."""
    assert locate(TEXT.replace("\n", ending))[path] == line


def test_what_a_string_holds_is_no_key():
    """Text in quotes is skipped."""
    assert not {"not", "not.key", "key"} & locate(TEXT).keys()


def test_a_setting_without_a_line_has_that_of_its_table():
    """The nearest table around it."""
    source = Source(file=Path("plan.toml"), lines=locate(TEXT))

    assert source.line("parallel.pipeline.chunks") == 10
    assert source.line("recompute.policy") is None


def test_what_the_command_line_set_has_no_line():
    """It is not in the file, whatever the file says."""
    source = Source(file=Path("plan.toml"), lines=locate(TEXT), overridden=frozenset({"parallel.zero.size"}))

    assert source.place("parallel.zero.size") == ("command line", None)
    assert source.place("parallel.zero") == ("plan.toml", 12)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a = 1\nb = 2\na = 3\n", [("a", 1, 3)]),
        ("a = { b = 1, b = 2 }", [("a.b", 1, 1)]),
        ("[a]\nb.c = 1\nb.d = 1\nb.c = 2\n", [("a.b.c", 2, 4)]),
        ("[a]\nx = 1\n[b]\n[a]\nx = 2\n", [("a", 1, 4)]),
        ("[a.b]\n[a]\n", []),
        ("[[a]]\nx = 1\n[[a]]\nx = 1\n", []),
        ("a = 1\na = 2\n= no toml", [("a", 1, 2)]),
    ],
)
def test_a_key_written_twice_is_found_with_both_lines(text, found):
    """In texts that tomllib refuses; a table that is passed through is not written twice."""
    assert [(one.path, one.first_line, one.line) for one in duplicates(text)] == found
