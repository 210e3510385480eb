"""What the README shows, works."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import trainwright


@pytest.fixture(scope="module")
def readme(root) -> str:
    return (root / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def plan_file(readme, tmp_path):
    """The plan of the README, as a file."""
    (text,) = re.findall(r"```toml\n(.*?)```", readme, re.DOTALL)
    path = tmp_path / "plan.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_plan_of_the_readme_can_be_predicted(plan_file, monkeypatch):
    """The Python example runs on the TOML example."""
    monkeypatch.chdir(plan_file.parent)
    plan = trainwright.load("plan.toml")

    assert plan.num_devices == 64
    assert trainwright.predict(plan) is not None


def test_the_override_of_the_readme_is_accepted(plan_file, root):
    """The second console line ends with 0, or with 3 where the plan does not fit."""
    arguments = ["predict", str(plan_file), "--parallel.tensor.size", "8", "--parallel.zero.size", "2", "--json"]
    done = subprocess.run([sys.executable, "-m", "trainwright", *arguments], capture_output=True, text=True, check=False, cwd=root / "src")

    assert done.returncode in {0, 3}, done.stderr


def test_every_command_of_the_table_exists(readme, root):
    """And every command there is stands in the table."""
    table = re.findall(r"^\| `([a-z]+)(?: [A-Z]+)?` \|", readme, re.MULTILINE)
    helped = subprocess.run(
        [sys.executable, "-m", "trainwright", "--help"], capture_output=True, text=True, check=True, cwd=root / "src"
    ).stdout

    assert "predict" in table
    assert [] == [verb for verb in table if not re.search(rf"\b{verb}\b", helped)]


def test_the_links_of_the_pages_lead_somewhere(root):
    """README, CONTRIBUTING and the decisions link only to what exists."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    broken = [
        (page.name, target)
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]

    assert broken == []
