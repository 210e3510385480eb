"""The command line: verbs, settings as options, and what every mistake ends in."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from trainwright.cli import main as command_line
from trainwright.cli.main import Parser, main, verbs
from trainwright.problems import PlanError, Problem


@pytest.fixture
def verb(monkeypatch):
    """Put a verb of the test's own in the place of `schema`."""

    def put(run, *, plan=True):
        def add_arguments(parser):
            if plan:
                parser.add_argument("plan")
            parser.add_argument("--json", action="store_true")
            parser.add_argument("--depth", type=int, default=0)

        fake = SimpleNamespace(HELP="a verb of the test", add_arguments=add_arguments, run=run)
        monkeypatch.setattr(command_line, "import_module", lambda _: fake)

    return put


def problems_of(capsys) -> list[dict[str, object]]:
    """The problems document on stdout, which holds nothing else."""
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "trainwright/problems/1"
    return document["problems"]


def test_every_verb_of_the_folder_is_listed(capsys):
    """With what it does; asking for help is no mistake."""
    assert main(["--help"]) == 0
    text = capsys.readouterr().out

    assert {"predict", "prove", "run", "schedule", "lesson", "schema"} <= set(verbs())
    assert [] == [name for name, says in verbs().items() if f"  {name}" not in text or says not in text]


@pytest.mark.parametrize("name", sorted(verbs()))
def test_every_verb_explains_itself(name, capsys):
    """And takes --json."""
    assert main([name, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_settings_of_the_plan_are_options(verb):
    """In both forms, dashes as underscores, negative numbers too; they may stand anywhere."""
    seen = {}
    verb(lambda args: seen.update(vars(args)) or 0)

    assert (
        main(
            ["schema", "--parallel.tensor.size", "4", "plan.toml", "--run.data=text:a=b", "--optimizer.weight-decay", "-1", "--depth", "3"]
        )
        == 0
    )
    assert {"parallel.tensor.size": "4", "run.data": "text:a=b", "optimizer.weight_decay": "-1"} == seen["overrides"]
    assert ("plan.toml", 3) == (seen["plan"], seen["depth"])


def test_a_verb_without_a_plan_takes_no_settings(verb, capsys):
    """The option is unknown there."""
    verb(lambda _: 0, plan=False)

    assert main(["schema", "--run.steps", "3", "--json"]) == 2
    assert "no option --run.steps" in problems_of(capsys)[0]["message"]


@pytest.mark.parametrize(
    ("words", "message", "attempt"),
    [
        (["predcit", "gpt2"], 'there is no command "predcit"', "trainwright predict"),
        (["run", "gpt2", "--profil"], "run has no option --profil", "--profile"),
        (["run", "gpt2", "--steps", "5"], "run has no option --steps", "--run.steps"),
        (["run", "gpt2", "--run.steps"], "--run.steps has no value", None),
        (["run", "gpt2", "--stop-after", "x"], "--stop-after takes a number", "trainwright run --help"),
        (["run"], "the following arguments are required: PLAN", "trainwright run --help"),
        (["schedule", "1f1b", "2"], '"2" is one argument too many', None),
        (["--jsn"], 'there is no option "--jsn"', None),
        ([], "no command was given", "trainwright predict llama-3-8b --json"),
        (["predict", "no-such-model"], '"no-such-model" is neither a file nor a model of the catalog', None),
    ],
)
def test_a_mistake_is_a_problem(words, message, attempt, capsys):
    """Exit code 2; with --json the document, without it the words; never a traceback."""
    assert main([*words, "--json"]) == 2
    problems = problems_of(capsys)
    assert message == problems[0]["message"]
    assert attempt is None or problems[0]["try"] == attempt

    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err
    assert "Traceback" not in err


def test_every_unknown_option_is_named(capsys):
    """Not only the first."""
    assert main(["predict", "gpt2", "--wy", "--jsno", "--json"]) == 2
    assert ["--why", "--json"] == [problem["try"] for problem in problems_of(capsys)]


def test_problems_of_a_verb_are_printed(verb, capsys):
    """All of them, also where a rank raised them and something else carries them."""

    def run(_):
        raise RuntimeError("rank 1 failed") from PlanError([Problem("one"), Problem("two")])

    verb(run)

    assert main(["schema", "x", "--json"]) == 2
    assert ["one", "two"] == [problem["message"] for problem in problems_of(capsys)]


def test_our_own_mistake_is_one_line(verb, capsys, monkeypatch):
    """It names the error and how to see more; then the traceback is there."""

    def run(_):
        raise ZeroDivisionError("by nothing")

    verb(run)
    monkeypatch.delenv("TRAINWRIGHT_TRACEBACK", raising=False)
    assert main(["schema", "x"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "ZeroDivisionError: by nothing" in err
    assert "TRAINWRIGHT_TRACEBACK=1" in err

    monkeypatch.setenv("TRAINWRIGHT_TRACEBACK", "1")
    assert main(["schema", "x"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_ends_quietly(verb, capsys):
    """With the code that shells give it."""

    def run(_):
        raise KeyboardInterrupt

    verb(run)

    assert main(["schema", "x"]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_a_reader_that_leaves_is_no_mistake(root):
    """`trainwright schema | head -1` says nothing on stderr."""
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m trainwright schema | head -1"], capture_output=True, text=True, check=False, env=environment
    )

    assert ("{\n", "") == (done.stdout, done.stderr)


def test_the_exit_code_of_a_verb_is_that_of_the_program(verb):
    """3, 4 and 5 mean something to scripts."""
    verb(lambda _: 4)

    assert main(["schema", "x"]) == 4


def test_the_version_is_that_of_the_package(capsys):
    """As the package's metadata has it."""
    import trainwright

    assert main(["--version"]) == 0
    assert f"trainwright {trainwright.__version__}\n" == capsys.readouterr().out


def test_abbreviations_are_not_guessed():
    """`--js` for `--json` would change its meaning when an option is added."""
    parser = Parser(prog="x", allow_abbrev=False)
    parser.add_argument("--json", action="store_true")

    assert (argparse.Namespace(json=False), ["--js"]) == parser.parse_known_args(["--js"])


@pytest.mark.parametrize(("name", "key"), [("plan", "parallel"), ("cluster", "device"), ("model", "num_layers")])
def test_schemas_are_json_schema(name, key, capsys):
    """With the settings that files may hold."""
    assert main(["schema", name]) == 0
    document = json.loads(capsys.readouterr().out)

    assert document["$schema"].startswith("https://json-schema.org/")
    assert key in document["properties"]
