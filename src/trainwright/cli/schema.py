"""`trainwright schema`: the JSON Schema of the files that a user writes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from trainwright.problems import PlanError, Problem, nearest

if TYPE_CHECKING:
    import argparse

HELP = "JSON Schema of plan files, cluster files and models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb."""
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help="plan, cluster or model; none prints all three")
    parser.add_argument("--json", action="store_true", help="the same: a schema is JSON already")


def run(args: argparse.Namespace) -> int:
    """Print one schema, or all of them by name. Raises PlanError for a name that is none."""
    from trainwright.plan.schema import schemas

    known = schemas()
    if args.name and args.name not in known:
        close = nearest(args.name, known)
        raise PlanError(Problem(f'there is no schema "{args.name}"', given=args.name, allowed=tuple(known), attempt=close))
    document = known[args.name] if args.name else {"schema": "trainwright/schema/1", **known}
    print(json.dumps(document, indent=None if args.json else 2, ensure_ascii=False))
    return 0
