"""`trainwright run PLAN`: trains for real, and puts what was measured beside what was predicted."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainwright.engine.trial import Verdict
    from trainwright.plan.plan import Plan
    from trainwright.predict.predict import Prediction

HELP = "train for real, record what happened, and compare it with the prediction"

OK, DOES_NOT_FIT, CHECK_FAILED = 0, 3, 4


class DoesNotFit(Exception):  # noqa: N818 - named for what was found
    """The plan needs more memory than the machine has."""

    def __init__(self, prediction: Prediction) -> None:
        """Keep the prediction that says so."""
        super().__init__("the plan does not fit")
        self.prediction = prediction


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb."""
    parser.add_argument("plan", metavar="PLAN", help="a plan file, or the name of a model (then on one process of this machine)")
    parser.add_argument(
        "--check", action="store_true", help="only try it: one batch's loss falls, save and restore agree, all parameters learn"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of the plan's folder")
    parser.add_argument("--stop-after", metavar="STEPS", type=int, default=None, help="stop when so many steps of the run are done")
    parser.add_argument("--profile", action="store_true", help="write a trace of some steps for ui.perfetto.dev")
    parser.add_argument("--out", metavar="FOLDER", default=None, help="where metrics and traces go (runs/NAME/TIME)")
    parser.add_argument("--report", metavar="FILE", default=None, help="write a page of HTML: loss, and measured beside predicted")
    parser.add_argument("--print-launch", action="store_true", help="print the torchrun command of every node, and do nothing else")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Train: 0 done, 3 does not fit, 4 a check failed. Raises PlanError with every Problem."""
    from trainwright.plan.load import load

    plan = load(args.plan, args.overrides, command="run")
    _demand_steps(args)
    if args.print_launch:
        return print_launch(plan, args)
    if args.check:
        return check(plan, as_json=args.json)
    from trainwright import api
    from trainwright.engine.launch import speaks

    if args.report is not None:
        from trainwright.export.html import demand_writable

        demand_writable(args.report)
    try:
        done = api.run(
            plan,
            folder=args.out,
            resume=args.resume,
            stop_after=args.stop_after,
            profile=args.profile,
            progress=True,
            told=demand_room,
        )
    except DoesNotFit as found:
        if speaks():
            print(does_not_fit(found.prediction), file=sys.stderr)
            if args.json:
                print(json.dumps(found.prediction.to_json(), separators=(",", ":")))
        return DOES_NOT_FIT
    if args.report is not None and speaks():
        from trainwright.export.html import report, write

        write(args.report, report(run=done.to_json()))
    if speaks():
        print(json.dumps(done.to_json(), separators=(",", ":")) if args.json else "\n".join(done.lines()))
    return OK


def _demand_steps(args: argparse.Namespace) -> None:
    from trainwright.problems import PlanError, Problem

    if args.stop_after is not None and args.stop_after < 1:
        raise PlanError(Problem("a run does at least one step", path="--stop-after", given=args.stop_after, allowed="whole numbers from 1"))


def demand_room(prediction: Prediction) -> None:
    """Say what is expected, where somebody looks on. Raises DoesNotFit if the machine has not the memory."""
    if not prediction.fits:
        raise DoesNotFit(prediction)
    if sys.stderr.isatty():
        from trainwright.engine.launch import speaks

        if speaks():
            print(f"predicted: {prediction.step_s:.3g} s a step, {prediction.tokens_per_s:,.0f} tokens/s", file=sys.stderr)


def does_not_fit(prediction: Prediction) -> str:
    """The lines that say so: what is needed, what of it is largest, what to try."""
    from trainwright.predict.remedy import remedy
    from trainwright.units import show_bytes

    memory = prediction.to_json()["memory"]
    needs, has = show_bytes(memory["reserved_bytes"]), show_bytes(memory["capacity_bytes"])
    return "\n".join([f"the plan does not fit: a rank needs {needs}, and has {has}", *(f"  {line}" for line in remedy(prediction))])


def check(plan: Plan, *, as_json: bool) -> int:
    """Try a plan, and say of each item whether it held."""
    from trainwright import api
    from trainwright.engine.launch import speaks

    verdicts = api.check(plan)
    passed = all(one.holds for one in verdicts)
    if speaks():
        print(json.dumps(check_document(verdicts, passed=passed)) if as_json else "\n".join(check_lines(verdicts, passed=passed)))
    return OK if passed else CHECK_FAILED


def check_document(verdicts: Sequence[Verdict], *, passed: bool) -> dict[str, Any]:
    """The JSON document of a trial."""
    return {
        "schema": "trainwright/check/1",
        "passed": passed,
        "checks": [{"name": one.name, "holds": one.holds, "seen": one.seen} for one in verdicts],
    }


def check_lines(verdicts: Sequence[Verdict], *, passed: bool) -> list[str]:
    """One line an item, and one for all."""
    lines = [f"  {'yes' if one.holds else 'NO ':<4}{one.name}: {one.seen}" for one in verdicts]
    return ["the plan can train" if passed else "the plan can NOT train", *lines]


def print_launch(plan: Plan, args: argparse.Namespace) -> int:
    """The torchrun commands for the plan's cluster."""
    from trainwright.engine.torchrun import launch_commands

    commands = launch_commands(plan, arguments(args))
    if args.json:
        print(json.dumps({"schema": "trainwright/launch/1", "num_processes": plan.num_devices, "commands": commands}))
        return OK
    if len(commands) > 1:
        print(f"# one line a node; MASTER_ADDR names the first of {len(commands)} nodes")
    print("\n".join(commands))
    return OK


def arguments(args: argparse.Namespace) -> list[str]:
    """The command line again, without --print-launch."""
    plan = str(Path(args.plan).resolve()) if Path(args.plan).is_file() else args.plan
    flags = [f"--{name}" for name in ("check", "resume", "profile", "json") if getattr(args, name)]
    stop = ["--stop-after", str(args.stop_after)] if args.stop_after is not None else []
    out = ["--out", args.out] if args.out is not None else []
    return [plan, *(f"--{path}={value}" for path, value in args.overrides.items()), *flags, *stop, *out]
