"""The command line: finds the verb, reads its arguments, and turns whatever goes wrong into a message and an exit code.

A verb is a file of this folder with HELP, `add_arguments(parser)` and `run(args) -> int`; it is imported when it is called. Verbs
that take a PLAN also take every setting of it as an option (`--parallel.tensor.size 4`): these become `args.overrides`, by dotted path.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainwright.problems import PlanError, Problem, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import ModuleType

OK, OUR_FAULT, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

_ORDER = ("predict", "prove", "run", "schedule", "lesson", "demo", "schema")
_DECLARED = re.compile(r'^HELP = "([^"\n]+)"', re.MULTILINE)
_WRONG_VALUE = re.compile(r"argument (--[\w-]+): invalid (int|float) value: '(.*)'", re.DOTALL)
_SETTING = re.compile(r"--([A-Za-z_][\w-]*(?:\.[\w-]+)+)(?:=(.*))?", re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # looking for plugins of pydantic takes longer than most predictions
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a letter shows another
    try:
        code = _called(words)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return OK
    except Exception as error:  # noqa: BLE001 - the last place where anything can be said
        return _failed(error, as_json="--json" in words)
    return code


def verbs() -> Mapping[str, str]:
    """The verbs, each with what it does, in the order of the help. Reads their files and imports none."""
    found: dict[str, str] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        declared = _DECLARED.search(path.read_text(encoding="utf-8"))
        if declared is not None:
            found[path.stem] = declared[1]
    order = [*(verb for verb in _ORDER if verb in found), *(verb for verb in found if verb not in _ORDER)]
    return {verb: found[verb] for verb in order}


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line as a Problem."""

    def error(self, message: str) -> NoReturn:
        """Raise PlanError; argparse itself would print and exit."""
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        wrong = _WRONG_VALUE.fullmatch(message)
        if wrong is not None:
            name, kind, given = wrong.groups()
            allowed = "whole numbers" if kind == "int" else "numbers"
            raise PlanError(Problem(f"{name} takes a number", path=name, given=given, allowed=allowed, attempt=f"{self.prog} --help"))
        text = message[:1].lower() + message[1:]
        raise PlanError(Problem(text, allowed=usage, attempt=f"{self.prog} --help"))

    @property
    def options(self) -> tuple[str, ...]:
        """Every option that was declared."""
        return tuple(name for action in self._actions for name in action.option_strings)

    def takes(self, name: str) -> bool:
        """Tell whether an argument of that name was declared."""
        return any(action.dest == name for action in self._actions)


def _called(words: list[str]) -> int:
    known = verbs()
    verb = next((word for word in words if not word.startswith("-")), None)
    if verb is None:
        return _without_verb(words, known)
    if verb not in known:
        close = nearest(verb, known)
        raise PlanError(
            Problem(f'there is no command "{verb}"', given=verb, allowed=tuple(known), attempt=f"trainwright {close or '--help'}")
        )
    words.remove(verb)
    module = import_module(f"trainwright.cli.{verb}")
    parser = Parser(prog=f"trainwright {verb}", description=f"{module.HELP}.", allow_abbrev=False)
    module.add_arguments(parser)
    try:
        args = _parsed(parser, words)
    except SystemExit as done:  # --help
        return int(done.code or 0)
    return _run(module, args)


def _run(module: ModuleType, args: argparse.Namespace) -> int:
    code: int = module.run(args)
    return code


def _without_verb(words: list[str], known: Mapping[str, str]) -> int:
    """What is asked of the program as a whole."""
    if "--version" in words:
        import trainwright

        print(f"trainwright {trainwright.__version__}")
        return OK
    strange = [word for word in words if word not in {"-h", "--help", "--json"}]
    if strange:
        raise PlanError(Problem(f'there is no option "{strange[0]}"', given=strange[0], allowed="--help, --version, or a command"))
    width = max(map(len, known))
    lines = [
        "usage: trainwright COMMAND ...",
        "",
        "Decide how to train a model on a cluster, prove the plan right, and run it.",
        "",
        *(f"  {verb:<{width}}  {text}" for verb, text in known.items()),
        "",
        "trainwright COMMAND --help tells what a command takes. A PLAN is a plan file or the name of a model; every setting of it",
        "can be given as an option: --parallel.tensor.size 4.",
    ]
    if "-h" in words or "--help" in words:
        print("\n".join(lines))
        return OK
    if "--json" in words:
        raise PlanError(Problem("no command was given", allowed=tuple(known), attempt="trainwright predict llama-3-8b --json"))
    print("\n".join(lines), file=sys.stderr)
    return BAD_INPUT


def _parsed(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a verb, settings of its plan among them. Raises PlanError with all options that are not known."""
    rest, overrides, problems = _settings(words) if parser.takes("plan") else (list(words), {}, [])
    args, unknown = parser.parse_known_args(rest)
    problems += [_unknown(parser, word) for word in unknown if word.startswith("-") or not any(one.startswith("-") for one in unknown)]
    if problems:
        raise PlanError(problems)
    args.overrides = overrides
    return args


def _settings(words: Iterable[str]) -> tuple[list[str], dict[str, str], list[Problem]]:
    """The words that are no settings; the settings by path; settings without a value."""
    rest: list[str] = []
    found: dict[str, str] = {}
    problems: list[Problem] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        match = _SETTING.fullmatch(word)
        if match is None:
            rest.append(word)
            continue
        path, value = match[1].replace("-", "_"), match[2]
        if value is None and queue and not queue[0].startswith("--"):
            value = queue.pop(0)
        if value is None:
            problems.append(Problem(f"{word} has no value", given=word, allowed=f"{word} VALUE, or {word}=VALUE"))
        else:
            found[path] = value
    return rest, found, problems


def _unknown(parser: Parser, word: str) -> Problem:
    """An option, or one word too many, that the verb does not know."""
    name = word.partition("=")[0]
    if not name.startswith("-"):
        return Problem(
            f'"{word}" is one argument too many', given=word, allowed=" ".join(parser.format_usage().removeprefix("usage: ").split())
        )
    setting = _full_name(name.lstrip("-").replace("-", "_")) if parser.takes("plan") else None
    close = setting or nearest(name, parser.options)
    settings = ", and every setting of the plan (--run.steps 100)" if parser.takes("plan") else ""
    return Problem(
        f"{parser.prog.rpartition(' ')[2]} has no option {name}",
        given=word,
        allowed=", ".join(option for option in parser.options if option.startswith("--")) + settings,
        attempt=close or f"{parser.prog} --help",
    )


def _full_name(name: str) -> str | None:
    """The option of the setting that was meant by its last part alone: `--run.steps` for "steps"."""
    from trainwright.plan.schema import names

    for table in names():
        for inner in names((table,)):
            if inner == name:
                return f"--{table}.{name}"
            if name in names((table, inner)):
                return f"--{table}.{inner}.{name}"
    return None


def _failed(error: BaseException, *, as_json: bool) -> int:
    """Say what went wrong: every Problem of bad input; one line of a fault of ours."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, PlanError | KeyboardInterrupt):
        cause = cause.__cause__  # a rank that failed carries the reason with it
    if isinstance(cause, KeyboardInterrupt):
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    if isinstance(cause, PlanError):
        print(cause, file=sys.stderr)
        if as_json:
            print(json.dumps(cause.to_json(), ensure_ascii=False))
        return BAD_INPUT
    if os.environ.get("TRAINWRIGHT_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
        print(getattr(error, "text", ""), file=sys.stderr)
    what = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    missing = isinstance(error, ModuleNotFoundError) and error.name in {"torch", "safetensors"}
    hint = 'pip install "trainwright[run]"' if missing else "TRAINWRIGHT_TRACEBACK=1 shows where; a report is welcome"
    print(f"trainwright failed: {what} ({hint})", file=sys.stderr)
    return OUR_FAULT
