"""The examples of docs/*.md run and show what they say, and the page on the plan file lists what the schema lists.

In a page, ```console holds commands behind `$ ` and what they print (nothing shown: anything goes); `…` stands for any text, alone on a
line for any lines; `# exit 3` behind a command is its exit code. ```toml and ```python that begin with the name of a file are that file;
other ```python runs, all of a page as one program. Every page has a folder of its own.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined

from trainwright.plan import schema
from trainwright.spec import catalog, reading
from trainwright.spec.stack import Stack

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
SLOW = {"prove.md", "run.md", "python.md", "extending.md"}
"""Pages whose examples load torch."""

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\S+\.(?:toml|py))\b")
EXIT = re.compile(r"# exit (\d+)")

DRIVER = """
import doctest, json, sys
names = {"__name__": "__main__"}
for code in json.load(sys.stdin):
    if ">>> " not in code:
        exec(compile(code, "page", "exec"), names)
        continue
    test = doctest.DocTestParser().get_doctest(code.replace("…", "..."), names, "page", None, 0)
    if doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, clear_globs=False).failed:
        sys.exit(1)
    names = test.globs
"""


@dataclass(frozen=True, slots=True)
class Workshop:
    """The folder in which a page is tried out. Where a page adds a file to the source, `trainwright` and `./tw` run a copy that has it."""

    folder: Path

    @classmethod
    def of(cls, folder: Path, page: str) -> Workshop:
        """Make it ready for a page."""
        if "# src/" in page:
            shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.pyc.*"))
            shutil.copytree(ROOT / "tests" / "conformance", folder / "tests" / "conformance")
            shutil.copy(ROOT / "tests" / "conftest.py", folder / "tests")
            shutil.copy(ROOT / "pyproject.toml", folder)
        shim = folder / "bin" / "trainwright"
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trainwright "$@"\n')
        tests = f'shift; exec "{sys.executable}" -m pytest -q -p no:cacheprovider "$@"'
        (folder / "tw").write_text(f'#!/bin/sh\n[ "$1" != test ] || {{ {tests}; }}\nexec {shim} "$@"\n')
        shim.chmod(0o755)
        (folder / "tw").chmod(0o755)
        return cls(folder)

    def run(self, arguments: list[str], given: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command in the folder, `given` on its standard input."""
        source = self.folder / "src" if (self.folder / "src").exists() else ROOT / "src"
        own = {"PYTHONPATH": str(source), "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "80"}
        return subprocess.run(
            arguments, input=given, cwd=self.folder, env={**os.environ, **own}, capture_output=True, text=True, check=False, timeout=300
        )


def commands(fence: str) -> list[tuple[str, str]]:
    """The commands of a console, each with what is shown below it."""
    parts = re.split(r"^\$ ", fence, flags=re.MULTILINE)[1:]
    return [(command, shown.strip("\n")) for command, _, shown in (part.partition("\n") for part in parts)]


def shows(shown: str, printed: str) -> bool:
    """What a page shows is what was printed, `…` standing for what it leaves out; blanks at the ends of lines do not count."""
    patterns = []
    for line in shown.splitlines():
        any_text = r".*?".join(map(re.escape, line.rstrip().split("…")))
        patterns.append(r"(?:.*\n)*?" if line.strip() == "…" else rf"{any_text} *\n")
    return re.fullmatch("".join(patterns), printed.strip("\n") + "\n") is not None


@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.slow] * (page.name in SLOW), id=page.stem) for page in PAGES])
def test_the_examples_of_a_page_run_and_print_what_it_shows(page, tmp_path):
    """In the order of the page; its Python comes last, as one program."""
    text = page.read_text(encoding="utf-8")
    workshop = Workshop.of(tmp_path, text)
    programs = []
    for kind, body in FENCE.findall(text):
        named = FILE.match(body)
        if kind in {"toml", "python"} and named:
            (tmp_path / named[1]).write_text(body, encoding="utf-8")
        elif kind == "python":
            programs.append(body)
        for command, shown in commands(body) if kind == "console" else ():
            done = workshop.run(["sh", "-c", command])
            wanted = int(code[1]) if (code := EXIT.search(command)) else 0
            printed = done.stdout + done.stderr
            assert done.returncode == wanted, f"{page.name}: {command}\n{printed}"
            assert not shown or shows(shown, printed), f"{page.name}: {command} printed\n{printed}"
    if programs:
        done = workshop.run([sys.executable, "-c", DRIVER], json.dumps(programs))
        assert done.returncode == 0, f"{page.name}:\n{done.stdout}{done.stderr}"


def test_what_is_shown_is_held_against_what_is_printed():
    """A line that differs is found; `…` stands for text within a line, or for lines."""
    assert shows("a … c\n…\nz", "a b c\nany\nlines\nz\n")
    assert shows("a\n…\nz", "a\nz\n")
    assert not shows("a\nz", "a\nb\nz\n")
    assert not shows("a …", "b c\n")


def test_every_page_has_an_example_that_runs():
    """The index alone may do without."""
    silent = [page.name for page in PAGES if not re.search(r"^```(console|python)$", page.read_text(encoding="utf-8"), re.MULTILINE)]

    assert silent in ([], ["README.md"])


def test_the_index_names_every_page():
    """And every page it names exists: the links of all pages are checked in test_readme.py."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")

    assert [] == [page.name for page in PAGES if page.name != "README.md" and f"({page.name})" not in index]


# The page on the plan file


def written(path: tuple[str, ...]) -> list[tuple[str, object]]:
    """Key and default of each row of the page's table for `[path]`."""
    page = (ROOT / "docs" / "plan-file.md").read_text(encoding="utf-8")
    heading = re.escape(".".join(path))
    section = re.search(rf"^#+ \[{heading}\].*?\n(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL)
    assert section is not None, f"no heading for [{'.'.join(path)}]"
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", section[1], re.MULTILINE)
    return [(key, default.strip("`")) for key, default in rows]


def literal(value: object) -> str:
    """A default as the page writes it: as TOML, `required` or a dash."""
    if value is PydanticUndefined:
        return "required"
    if value is None or value == ():
        return "–"
    return str(value).lower() if isinstance(value, bool) else json.dumps(value)


TABLES = [(name,) for name in schema.names() if name != "parallel"]
AXES = [("parallel", name) for name in schema.names(("parallel",))]


@pytest.mark.parametrize("path", [*TABLES, *AXES, ("run", "checkpoint")], ids=".".join)
def test_the_page_on_the_plan_file_has_every_key_with_its_default(path):
    """A key that is added to the schema must be added to the page."""
    expected = [(name, literal(schema.column((*path, name)).default)) for name in schema.names(path)]
    found = [(key, default if default in {"required", "–"} else comparable(default)) for key, default in written(path)]

    assert [(key, default if default in {"required", "–"} else comparable(default)) for key, default in expected] == found


def comparable(default: str) -> object:
    """The value of a default: 3e-4 is 0.0003."""
    return ast.literal_eval({"true": "True", "false": "False"}.get(default, default))


def test_the_page_on_the_plan_file_has_every_figure_of_a_device():
    """A device of one's own is a table with these keys."""
    assert {key for key, _ in written(("cluster", "device"))} == {*reading._DEVICE_READERS, "base"}


@pytest.mark.parametrize("shelf", ["model", "device", "cluster", "stack"])
def test_the_page_on_the_plan_file_names_the_whole_catalog(shelf):
    """In one line a shelf."""
    page = (ROOT / "docs" / "plan-file.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^- {shelf}s: (.*)$", page, re.MULTILINE)

    assert list(getattr(catalog, f"{shelf}_names")()) == re.findall(r"`([^`]+)`", line)


def test_the_page_on_predictions_has_every_constant_of_a_stack_with_its_default():
    """What is no constant says what the stack is, or what it was fitted on."""
    page = (ROOT / "docs" / "predict.md").read_text(encoding="utf-8").partition("### Constants")[2]
    about = {"name", "title", "source", "num_points", "fitted_devices", "on_devices"}
    constants = [(one.name, "–" if one.default is None else one.default) for one in dataclasses.fields(Stack) if one.name not in about]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE)

    assert constants == [(name, default if default == "–" else json.loads(default.strip("`"))) for name, default in rows]


def test_the_page_on_proofs_names_every_cause():
    """And no cause that no recognizer gives."""
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "src" / "trainwright" / "prove").glob("*.py")]
    sources = [text for text in files if "Cause(name=" in text]
    given = {name for source in sources for name in re.findall(r'"((?:[a-z]+-)+[a-z]+)"', source)}
    given |= {name for source in sources for name in re.findall(r'Cause\(name="([a-z-]+)"', source)}
    page = (ROOT / "docs" / "prove.md").read_text(encoding="utf-8").partition("## Causes")[2]

    assert given == {name for row in re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE) for name in re.findall(r"`([a-z-]+)`", row)}
