"""What a command loads: predicting needs no torch, asking for help needs next to nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from architecture.source import PACKAGE


def loaded_by(code: str) -> set[str]:
    """The top-level modules that are loaded after `code` has run in a fresh interpreter."""
    report = "import json, sys; sys.stdout.flush(); sys.stderr.write('\\n' + json.dumps(sorted({n.split('.')[0] for n in sys.modules})))"
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


def running(*arguments: str) -> str:
    """Code that runs one command line in this process."""
    return f"from trainwright.cli.main import main\ntry: main({list(arguments)!r})\nexcept SystemExit: pass"


def test_the_package_itself_is_light():
    """`import trainwright` only prepares names."""
    heavy = {"numpy", "pydantic", "rich", "tomlkit", "torch"}

    assert set() == loaded_by("import trainwright") & heavy


@pytest.mark.parametrize("module", ["trainwright.cli.main", "trainwright.predict", "trainwright.plan", "trainwright.api"])
def test_no_torch_at_import(module):
    """The command line, the plan, the prediction and the public names load no torch."""
    assert "torch" not in loaded_by(f"import {module}")


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("predict", "--help"), ("predict", "gpt2", "--json"), ("schedule", "1f1b", "--json"), ("run", "gpt2", "--print-launch")],
)
def test_no_torch_when_run(arguments):
    """Neither do these commands while they run; what they print for a program needs no rich either."""
    loaded = loaded_by(running(*arguments))

    assert set() == loaded & {"torch", "rich"}


def test_the_public_functions_win_over_the_folders_of_the_same_name():
    """Whatever was imported before, trainwright.predict and trainwright.prove can be called."""
    code = "import trainwright.predict, trainwright.prove, trainwright as t; assert callable(t.predict); assert callable(t.prove)"

    assert "trainwright" in loaded_by(code)
