"""`trainwright predict PLAN`: what a plan costs before it runs."""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

HELP = "memory, wire, time, MFU, bottleneck and verdict of a plan"

FITS, DOES_NOT_FIT = 0, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb."""
    parser.add_argument("plan", metavar="PLAN", help="a plan file, or the name of a model (then on 8 x h100-sxm)")
    parser.add_argument("--report", metavar="FILE", default=None, help="write a page of HTML: verdict, pipeline, memory over time")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--why", action="store_true", help="say of every number how it comes about")


def run(args: argparse.Namespace) -> int:
    """Predict a plan and print it; 3 if it does not fit. Raises PlanError with every Problem of the plan."""
    from trainwright.plan.load import load
    from trainwright.predict.predict import predict
    from trainwright.predict.remedy import remedy

    gc.disable()  # a prediction makes many small objects, all of which last: looking for garbage among them takes a tenth of its time
    try:
        prediction = predict(load(args.plan, getattr(args, "overrides", None) or {}))
        document = prediction.to_json(why=args.why)
    finally:
        gc.enable()
    if args.report is not None:
        from trainwright.export.html import report, write

        write(args.report, report(prediction))
    if args.json:
        print(json.dumps(document, separators=(",", ":")))
    else:
        _print(document, remedy(prediction))
    return FITS if prediction.fits else DOES_NOT_FIT


def _print(document: dict[str, Any], advice: Sequence[str]) -> None:
    from trainwright.predict.report import lines, plain, show

    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        show(lines(document, advice))
    else:
        print(plain(lines(document, advice)))
    if "provenance" in document:
        print(reasons(document))


def reasons(document: dict[str, Any]) -> str:
    """Every number with its formula, the inputs filled in, for a terminal."""
    from trainwright.ir.figure import lookup

    found = []
    for pointer, entry in document["provenance"].items():
        given = ", ".join(f"{name} = {value}" for name, value in entry["inputs"].items())
        found.append(f"{pointer} = {lookup(document, pointer)} {entry['unit']}".rstrip())
        found.append(f"    = {entry['formula']}   where {given}" if entry["formula"] != "value" else "    given")
        found += [f"    {word}: {entry[key]}" for key, word in (("source", "source"), ("not_counted", "not counted")) if entry[key]]
    return "\n" + "\n".join(found)
