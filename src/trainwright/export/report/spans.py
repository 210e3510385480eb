"""When everything in one position's step happens, as arrays: the simulation's answer for all runs of a template at once.

A plan for many devices has 10^5 actions; as one object each they would take seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainwright.ir.action import Action, Compute, Recv, Send, Update, Wait
from trainwright.ir.program import Run
from trainwright.ir.site import Site
from trainwright.predict.simulate import Simulation
from trainwright.predict.slopes import WORDS, Moment, crosses_roles, lane_of
from trainwright.units import Seconds

Times = NDArray[np.float64]
Numbers = NDArray[np.int64]

COMPUTE: Final = ("forward", "recompute", "backward", "update")
"""Classes of work on the compute lane, in the order of a legend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The actions of one position, in order: start and end, the run and its action by number, and a class by index into `kinds`.

    A class is a word of COMPUTE, "wire:" and a group, or "" for what takes no time of its own (frees, waits).
    """

    position: int
    runs: tuple[Run, ...]
    templates: Sequence[tuple[Action, ...]]
    first_blocks: Sequence[int]
    kinds: tuple[str, ...]
    starts: Times
    ends: Times
    kind: Numbers
    run: Numbers
    action: Numbers

    @property
    def wires(self) -> tuple[str, ...]:
        """The classes of exchanges."""
        return tuple(name for name in self.kinds if name.startswith("wire:"))

    def of(self, *names: str) -> Numbers:
        """Places of the actions of some classes, in the order of their starts; those of no duration are left out."""
        wanted = [self.kinds.index(name) for name in names if name in self.kinds]
        places = np.flatnonzero(np.isin(self.kind, wanted) & (self.ends > self.starts))
        found: Numbers = places[np.argsort(self.starts[places], kind="stable")]
        return found

    def site(self, place: int) -> Site:
        """Where an action stands, in full."""
        number = int(self.run[place])
        run = self.runs[number]
        site = self.templates[number][int(self.action[place])].site
        return site.at(stage=run.stage, microbatch=run.microbatch, first_block=self.first_blocks[number])


def kind_of(action: Action) -> str:
    """The class of an action."""
    match action:
        case Compute() | Update():
            return WORDS.get(action.site.phase or "", "")
        case Send() | Recv():
            return "wire:pipeline"
        case _:
            lane = lane_of(action)
            return lane if lane != "compute" else ""


def spans(simulation: Simulation, position: int) -> Spans:
    """The spans of one position."""
    program = simulation.program
    runs = program.roles[position].runs
    parts = dict(_parts(simulation, position))
    empty = np.zeros(0)
    times = [parts.get(number, (empty, empty)) for number in range(len(runs))]
    lengths = [len(start) for start, _ in times]
    by_template = {name: [kind_of(action) for action in program.templates[name]] for name in {run.template for run in runs}}
    kinds = tuple(dict.fromkeys(("", *COMPUTE, *sorted({one for names in by_template.values() for one in names}))))
    index = {name: place for place, name in enumerate(kinds)}
    coded = {name: np.array([index[one] for one in names], dtype=np.int64) for name, names in by_template.items()}
    return Spans(
        position=position,
        runs=runs,
        templates=[program.templates[run.template] for run in runs],
        first_blocks=[0 if run.stage is None else program.first_block[run.stage] for run in runs],
        kinds=kinds,
        starts=np.concatenate([start for start, _ in times]),
        ends=np.concatenate([end for _, end in times]),
        kind=np.concatenate([coded[run.template] for run in runs]),
        run=np.repeat(np.arange(len(runs)), lengths),
        action=np.concatenate([np.arange(length) for length in lengths]),
    )


def _parts(simulation: Simulation, position: int) -> Iterator[tuple[int, tuple[Times, Times]]]:
    """Of each run of a position: its number, and starts and ends of its actions."""
    for name, batch in simulation.graph.batches.items():
        mine = [place for place, one in enumerate(batch.positions) if one == position]
        actions = simulation.program.templates[name]
        if not mine or not actions:
            continue
        inputs = simulation.ends[np.array([batch.inputs[place] for place in mine])]
        starts = np.stack([_at(moment, inputs) for moment in batch.slopes.starts], axis=1)
        ends = np.stack([_at(moment, inputs) for moment in batch.slopes.ends], axis=1)
        ports = {id(port.action): number for number, port in enumerate(batch.slopes.ports, len(batch.slopes.lanes)) if port.kind != "done"}
        crossing = [
            (index, ports[id(action)]) for index, action in enumerate(actions) if crosses_roles(action) and not isinstance(action, Wait)
        ]
        for row, place in enumerate(mine):
            for index, port in crossing:  # these take place when all members are there, which no single run knows
                node = simulation.exchange_after[batch.first_nodes[place] + port]
                starts[row, index], ends[row, index] = simulation.starts[node], simulation.ends[node]
            yield batch.run_numbers[place], (starts[row], ends[row])


def _at(moment: Moment, inputs: Times) -> Times:
    row, offset = moment
    found: Times = (inputs + np.array(row)).max(axis=1) + offset
    return found


# --- pieces to draw --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A bar: work of one class in one run, without a gap that could be seen."""

    kind: str
    run: Run
    start_s: Seconds
    end_s: Seconds


def pieces(of: Spans, gap_s: Seconds) -> list[Piece]:
    """The compute lane as bars: actions of one class and one run that follow each other within `gap_s` are one bar."""
    places = of.of(*COMPUTE)
    if not len(places):
        return []
    starts, ends = of.starts[places], of.ends[places]
    kind, run = of.kind[places], of.run[places]
    breaks = np.flatnonzero((kind[1:] != kind[:-1]) | (run[1:] != run[:-1]) | (starts[1:] - ends[:-1] > gap_s)) + 1
    firsts, lasts = np.concatenate(([0], breaks)), np.concatenate((breaks, [len(places)])) - 1
    return [
        Piece(kind=of.kinds[kind[first]], run=of.runs[run[first]], start_s=float(starts[first]), end_s=float(ends[last]))
        for first, last in zip(firsts, lasts, strict=True)
    ]


def busy_shares(of: Spans, names: Sequence[str], step_s: Seconds, num_columns: int) -> Times:
    """How busy some classes are in each of `num_columns` equal slices of the step, [names, columns], each from 0 to 1."""
    edges = np.linspace(0.0, step_s, num_columns + 1)
    return np.stack([np.diff(_busy_until(of, name, edges)) for name in names]) * (num_columns / step_s)


def _busy_until(of: Spans, name: str, moments: Times) -> Times:
    """Seconds that a class was busy before each moment. Overlapping actions of one class count once."""
    places = of.of(name)
    if not len(places):
        return np.zeros(len(moments))
    ends = np.maximum.accumulate(of.ends[places])
    starts = np.maximum(of.starts[places], np.concatenate(([0.0], ends[:-1])))
    ends = np.maximum(starts, ends)
    sums = np.concatenate(([0.0], np.cumsum(ends - starts)))
    corners = np.stack([starts, ends], axis=1).ravel()
    values = np.stack([sums[:-1], sums[1:]], axis=1).ravel()
    found: Times = np.interp(moments, corners, values, left=0.0)
    return found


def columns(of: Spans, step_s: Seconds, num_columns: int) -> list[Piece]:
    """The compute lane in equal slices, each shown as what fills most of it: for steps with more work than a screen has points."""
    shares = busy_shares(of, COMPUTE, step_s, num_columns)
    idle = 1.0 - shares.sum(axis=0)
    most = np.where(idle > shares.max(axis=0), -1, shares.argmax(axis=0))
    middles = (np.arange(num_columns) + 0.5) * step_s / num_columns
    places = of.of(*COMPUTE)
    run = of.run[places][np.clip(np.searchsorted(of.starts[places], middles, side="right") - 1, 0, None)]
    breaks = np.flatnonzero((most[1:] != most[:-1]) | (run[1:] != run[:-1])) + 1
    firsts, lasts = np.concatenate(([0], breaks)), np.concatenate((breaks, [num_columns]))
    return [
        Piece(
            kind=COMPUTE[most[first]],
            run=of.runs[run[first]],
            start_s=float(first) * step_s / num_columns,
            end_s=float(last) * step_s / num_columns,
        )
        for first, last in zip(firsts, lasts, strict=True)
        if most[first] >= 0
    ]
