"""`trainwright schedule NAME`: a pipeline schedule on a clock, with its idle slots, its peaks and the least possible time."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from trainwright.cli.numbers import Setting
from trainwright.problems import PlanError, Problem
from trainwright.schedules import SCHEDULES

if TYPE_CHECKING:
    import argparse

    from trainwright.schedules.timeline import Prices, Timeline

HELP = "draw a pipeline schedule: makespan, idle slots, peaks, lower bound"

MOST_SLOTS = 4_000_000
"""Slots that a few seconds and a few hundred MB can hold."""

_SIZES = (Setting(name="--stages", most=65_536), Setting(name="--microbatches", most=1_000_000), Setting(name="--chunks", most=4_096))
_PRICES = (
    Setting(name="--forward", least=0, most=1e9),
    Setting(name="--backward", least=0, most=1e9),
    Setting(name="--weight", least=0, most=1e9),
    Setting(name="--send", least=0, most=1e9),
)
_KINDS = ("forward", "backward", "backward_input", "backward_weight")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb."""
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help=f"one of {', '.join(SCHEDULES.names())}")
    parser.add_argument("--stages", metavar="P", default="4", help="positions on the pipeline axis (4)")
    parser.add_argument("--microbatches", metavar="M", default="8", help="microbatches of one step (8)")
    parser.add_argument("--chunks", metavar="V", default=None, help="virtual stages on each position, where the schedule uses them")
    parser.add_argument("--forward", metavar="F", default="1", help="time units of a forward of one virtual stage (1)")
    parser.add_argument("--backward", metavar="B", default="1", help="time units of its backward (1)")
    parser.add_argument("--weight", metavar="W", default="0", help="time units of the weight gradients, on top of the backward (0)")
    parser.add_argument("--send", metavar="C", default="0", help="time units from one position to the next (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Draw the schedule. Raises PlanError with every Problem of the arguments."""
    from trainwright.schedules.timeline import draw

    if args.name not in SCHEDULES:
        raise PlanError(SCHEDULES.unknown(args.name) if args.name else _nameless())
    schedule = SCHEDULES.get(args.name)
    chunks_text = str(schedule.DEFAULT_CHUNKS) if args.chunks is None else args.chunks
    sizes = [setting.whole(text) for setting, text in zip(_SIZES, (args.stages, args.microbatches, chunks_text), strict=True)]
    prices = [setting.number(text) for setting, text in zip(_PRICES, (args.forward, args.backward, args.weight, args.send), strict=True)]
    problems = [value for value in (*sizes, *prices) if isinstance(value, Problem)]
    num_positions, num_microbatches, chunks = (0 if isinstance(size, Problem) else size for size in sizes)
    if not problems:
        problems = [*schedule.check(num_positions, num_microbatches, chunks), *_too_many(num_positions * num_microbatches * chunks)]
    if problems:
        raise PlanError(problems)
    timeline = draw(schedule, num_positions, num_microbatches, chunks, _prices(prices))
    if args.json:
        print(json.dumps(document(args.name, timeline, num_microbatches), separators=(",", ":")))
    else:
        print("\n".join(report(args.name, timeline, num_microbatches)))
    return 0


def document(name: str, timeline: Timeline, num_microbatches: int) -> dict[str, Any]:
    """Return the JSON document of a drawn schedule."""
    num_positions, prices = timeline.num_positions, timeline.prices
    rows = zip(
        timeline.positions.tolist(), timeline.starts.tolist(), timeline.ends.tolist(), timeline.kinds.tolist(), timeline.slots, strict=True
    )
    return {
        "schema": "trainwright/schedule/1",
        "name": name,
        "inputs": {
            "stages": num_positions,
            "microbatches": num_microbatches,
            "chunks": len(timeline.stage_positions) // num_positions,
            "forward": prices.forward,
            "backward": prices.backward,
            "weight": prices.weight,
            "send": prices.send,
        },
        "makespan": timeline.makespan,
        "elapsed_max": timeline.elapsed_max,
        "idle_slots": timeline.idle_slots,
        "idle_fraction": timeline.idle_fraction,
        "lower_bound": timeline.lower_bound,
        "gap": timeline.gap,
        "stages": [
            {
                "stage": visits.position,
                "num_forwards": visits.num_forwards,
                "num_backwards": visits.num_backwards,
                "peak_kept": visits.peak_kept,
            }
            for visits in timeline.visits
        ],
        "actions": [
            {"rank": rank, "start": start, "end": end, "kind": _KINDS[kind], "stage": slot.stage, "microbatch": slot.microbatch}
            for rank, start, end, kind, slot in rows
        ],
        "not_counted": [
            "all stages cost the same",
            "sends overlap with compute and with each other",
            "recompute, gradient reduction and the optimizer",
        ],
    }


def report(name: str, timeline: Timeline, num_microbatches: int) -> list[str]:
    """Return the lines for a terminal."""
    from trainwright.cli.gantt import COLOURS, RESET, gantt

    prices, num_positions = timeline.prices, timeline.num_positions
    chunks = len(timeline.stage_positions) // num_positions
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = shutil.get_terminal_size((120, 24)).columns
    bound = "none known" if timeline.lower_bound is None else f"{timeline.lower_bound:g} (gap {timeline.gap:.1%})"
    table = [
        f"{visits.position:>8} {visits.num_forwards:>9} {visits.num_backwards:>10} {visits.peak_kept:>10}" for visits in timeline.visits
    ]
    legend = [("F", "forward"), ("B", "backward")]
    key = "  ".join(f"{COLOURS[letter]} {letter} {RESET} {word}" if colour else f"{letter} {word}" for letter, word in legend)
    return [
        f"{name}: {num_positions} positions × {num_microbatches} microbatches" + (f" × {chunks} chunks" if chunks > 1 else ""),
        f"forward {prices.forward:g}, backward {prices.backward:g}, weight {prices.weight:g}, send {prices.send:g}",
        "",
        f"makespan     {timeline.makespan:g}",
        f"lower bound  {bound}",
        f"elapsed max  {timeline.elapsed_max:g}",
        f"idle         {timeline.idle_slots:g} of {num_positions * timeline.makespan:g} ({timeline.idle_fraction:.1%})",
        "",
        "position  forwards  backwards  peak kept",
        *table,
        "",
        *gantt(timeline, width, colour=colour),
        "",
        f"{key}  . idle",
        "Not counted: unequal stages, shared wires, recompute, gradient reduction, optimizer.",
    ]


def _prices(values: list[Any]) -> Prices:
    from trainwright.schedules.timeline import Prices

    forward, backward, weight, send = values
    if not forward + backward + weight:
        raise PlanError(Problem("a schedule of no work has no length", given="forward, backward and weight 0", attempt="--forward 1"))
    return Prices(forward=forward, backward=backward, weight=weight, send=send)


def _too_many(num_visits: int) -> list[Problem]:
    if 2 * num_visits <= MOST_SLOTS:
        return []
    return [
        Problem(
            f"{2 * num_visits:,} slots are too many to draw",
            given="--stages × --microbatches × --chunks × 2",
            allowed=f"at most {MOST_SLOTS:,}",
            attempt="fewer microbatches: a longer step repeats the same pattern",
        )
    ]


def _nameless() -> Problem:
    return Problem("which schedule?", allowed=SCHEDULES.names(), attempt="trainwright schedule 1f1b --stages 4 --microbatches 8")
