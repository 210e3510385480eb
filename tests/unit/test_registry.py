from __future__ import annotations

import sys

import pytest

from trainwright.problems import PlanError
from trainwright.registry import Registry, file_stem


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A package with two parts, one broken part, and one file that is none."""
    folder = tmp_path / "toolbox_of_a_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "hand_saw.py").write_text('NAME = "hand-saw"\nTEETH = 20\n')
    (folder / "two_by_four.py").write_text('NAME: str = "2-by-4"\n')
    (folder / "drill.py").write_text('NAME = "drill"\nimport a_module_that_does_not_exist\n')
    (folder / "shelf.py").write_text("raise AssertionError('never loaded')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield Registry("toolbox_of_a_test", "tool")
    for name in [name for name in sys.modules if name.startswith("toolbox_of_a_test")]:
        del sys.modules[name]


def test_names_are_listed_without_loading_anything(tools):
    """A broken part and a file without a NAME do not disturb the list."""
    assert tools.names() == ("2-by-4", "drill", "hand-saw")
    assert not any(name.startswith("toolbox_of_a_test.") for name in sys.modules)


def test_getting_a_part_loads_its_file_alone(tools):
    """The others stay on disk."""
    assert tools.get("hand-saw").TEETH == 20
    assert [name for name in sys.modules if name.startswith("toolbox_of_a_test.")] == ["toolbox_of_a_test.hand_saw"]


def test_an_unknown_name_is_a_problem_with_the_nearest_one(tools):
    """The message lists what there is and says what was probably meant."""
    with pytest.raises(PlanError) as refused:
        tools.get("handsaw", path="work.tool")

    (problem,) = refused.value.problems
    assert str(problem) == (
        'there is no tool named "handsaw"\n'
        '  given    work.tool = "handsaw"\n'
        "  allowed  2-by-4, drill, hand-saw\n"
        '  try      work.tool = "hand-saw"'
    )


def test_a_broken_part_names_its_file(tools):
    """The author of a part finds the line; the user learns that it is not the plan."""
    with pytest.raises(ImportError, match=r"drill\.py.*a_module_that_does_not_exist"):
        tools.get("drill")


def test_membership_and_all_parts(tools):
    """`in` asks for a name; parts() loads them in the order of their names."""
    assert "drill" in tools
    assert "shelf" not in tools
    with pytest.raises(ImportError):
        list(tools.parts())


@pytest.mark.parametrize(
    ("expected", "name"),
    [("ring", "ring"), ("halving_doubling", "halving-doubling"), ("one_f_one_b", "1f1b"), ("two_by_four", "2-by-4"), ("zb_h1", "zb-h1")],
)
def test_a_file_is_called_after_its_part(expected, name):
    """- becomes _; a name that begins with a digit is spelled out."""
    assert expected == file_stem(name)
