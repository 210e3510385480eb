"""When everything in a step happens: a Program and its prices, solved exactly.

Two levels. Each template is solved once as a (max, +) map (`slopes`). The step is a graph of the templates' runs: a node for each moment
that one run gives to another, for each transfer between positions, and for each collective of several positions; an edge for each
constant. The longest paths through it are the times of the step. All ranks of a position are one role.

    Compute, Update     begin when the role is free and end after their duration
    Collective          begins when it is issued and its lane is free; of several roles, when all have issued it and their last one is over
    Send, Recv          the transfer begins when both are issued and the channel's last transfer is over (nothing is buffered)
    Wait                the role goes on when the exchange it names is over, and what is felt of it has passed

Left out: jitter, and ranks of one position that differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.longest_path import critical_path, longest_path
from trainwright.cost.wire import sent_bytes_per_rank
from trainwright.ir.action import Action, Collective, Compute, Recv, Send, Update, Wait, bind, kind
from trainwright.ir.event import Event
from trainwright.ir.layout import Group
from trainwright.ir.program import Program, Run
from trainwright.ir.site import Site
from trainwright.ir.timeline import Timeline
from trainwright.predict.memory import live_deltas, temporary_of
from trainwright.predict.price import Prices
from trainwright.predict.slopes import CLOCK, Moment, Slopes, crosses_roles, lane_of, row_of, solve
from trainwright.units import Bytes, Seconds

Times: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]

ORIGIN: Final = 0
"""Node at which the step begins."""

CHUNK: Final = 8192
"""Runs whose Waits are looked at together."""

Pending: TypeAlias = tuple[int | None, int | None, Site, str]
"""An exchange on its way in one role: stage and microbatch of the run that started it, and its name in the template."""


@dataclass(slots=True)
class _Batch:
    """All runs of one template: their nodes and those they depend on."""

    slopes: Slopes
    first_nodes: list[int] = field(default_factory=list)
    inputs: list[list[int]] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    run_numbers: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A node that is a transfer or a collective of several roles: how long it takes, and the nodes that must come first."""

    duration_s: Seconds
    after: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """What one role waited for.

    An axis (a group as it prints), the operation, and for how long; `idle_s` is the part that no wire of its own explains.
    """

    axis: str
    op: str
    exposed_s: Seconds
    idle_s: Seconds


class Graph:
    """The step as nodes and edges."""

    def __init__(self, program: Program, prices: Prices, slopes: Mapping[str, Slopes]) -> None:
        self.program, self.prices, self.slopes = program, prices, slopes
        self.num_nodes = 1
        self.batches = {name: _Batch(one) for name, one in slopes.items()}
        self.exchanges: dict[int, Exchanged] = {}
        self.channels: dict[tuple[int, int, str], list[int]] = defaultdict(list)
        self.ends_seen: dict[tuple[int, int, str, str], int] = defaultdict(int)
        self.joined: dict[tuple[Group, int], int] = defaultdict(int)
        self.crossings: dict[Group, list[int]] = defaultdict(list)
        for role in program.roles:
            self.add_role(role.position, role.runs)

    def add_role(self, position: int, runs: tuple[Run, ...]) -> None:
        """Nodes of one role's runs, and what each depends on."""
        lanes: dict[str, int] = {CLOCK: ORIGIN}
        pending: dict[Pending, int] = {}
        for number, run in enumerate(runs):
            batch = self.batches[run.template]
            slopes = batch.slopes
            first = self.num_nodes
            self.num_nodes += len(slopes.lanes) + len(slopes.ports)
            batch.first_nodes.append(first)
            batch.positions.append(position)
            batch.run_numbers.append(number)
            inputs = [lanes.get(lane, ORIGIN) for lane in slopes.lanes]
            for node, port in enumerate(slopes.ports, first + len(slopes.lanes)):
                site, what = port.exchange
                pending[run.stage, run.microbatch, site, what] = node if port.kind == "done" else self.meet(position, port.action, node)
            inputs += [pending.pop((run.stage, run.microbatch, site, what)) for site, what in slopes.awaited]
            batch.inputs.append(inputs)
            lanes |= {lane: node for node, lane in enumerate(slopes.lanes, first)}

    def meet(self, position: int, action: Collective | Send | Recv, node: int) -> int:
        """The node of the exchange that an action starts; what it needs is noted."""
        num_positions = len(self.program.roles)
        match action:
            case Collective(group=group):
                turn = self.joined[group, position]
                self.joined[group, position] = turn + 1
                exchange = self.nth(self.crossings[group], turn, self.collective_s(action))
            case Send(to=to, channel=channel):
                target = (position + to) % num_positions
                exchange = self.transfer((position, target, channel), "send", action.payload_bytes)
            case Recv(source=offset, channel=channel):
                source = (position + offset) % num_positions
                exchange = self.transfer((source, position, channel), "recv", action.payload_bytes)
        self.exchanges[exchange].after.append(node)
        return exchange

    def transfer(self, channel: tuple[int, int, str], end: str, payload_bytes: Bytes) -> int:
        """The node of the next transfer of a channel, seen from one of its ends."""
        turn = self.ends_seen[(*channel, end)]
        self.ends_seen[(*channel, end)] = turn + 1
        return self.nth(self.channels[channel], turn, self.prices.transfers[channel[0], channel[1], payload_bytes])

    def nth(self, known: list[int], turn: int, duration_s: Seconds) -> int:
        """The turn-th node of a list, made if it is not there yet; each follows the one before."""
        if turn == len(known):
            known.append(self.num_nodes)
            self.exchanges[self.num_nodes] = Exchanged(duration_s, [known[-2]] if turn else [])
            self.num_nodes += 1
        return known[turn]

    def collective_s(self, action: Collective) -> Seconds:
        """Seconds of a collective of several roles."""
        return self.crossing_s[action.op, action.group, action.payload_bytes]

    @cached_property
    def crossing_s(self) -> dict[tuple[str, Group, int], Seconds]:
        """Seconds of the collectives of several roles."""
        return {
            (one.op, one.group, one.payload_bytes): duration_s
            for name, actions in self.program.templates.items()
            for one, duration_s in zip(actions, self.prices.durations[name], strict=True)
            if isinstance(one, Collective) and crosses_roles(one)
        }

    @cached_property
    def rows(self) -> tuple[Indices, Indices, Times]:
        """The edges in compressed rows: offsets, predecessors, lags."""
        targets, sources, lags = [], [], []
        for batch in self.batches.values():
            if batch.first_nodes:
                matrix = np.array([row_of(moment) for moment in batch.slopes.outputs])
                outputs, inputs = np.nonzero(np.isfinite(matrix))
                targets.append((np.array(batch.first_nodes)[:, None] + outputs).ravel())
                sources.append(np.array(batch.inputs)[:, inputs].ravel())
                lags.append(np.tile(matrix[outputs, inputs], len(batch.first_nodes)))
        pairs = np.array([(node, before) for node, one in self.exchanges.items() for before in one.after], dtype=np.int64).reshape(-1, 2)
        target = np.concatenate([*targets, pairs[:, 0]])
        order = np.argsort(target, kind="stable")
        offsets = np.concatenate(([0], np.cumsum(np.bincount(target, minlength=self.num_nodes))))
        source = np.concatenate([*sources, pairs[:, 1]])[order]
        return offsets, source, np.concatenate([*lags, np.zeros(len(pairs))])[order]

    @cached_property
    def durations(self) -> Times:
        """Seconds that each node lasts: those of exchanges, else 0."""
        durations = np.zeros(self.num_nodes)
        durations[list(self.exchanges)] = [one.duration_s for one in self.exchanges.values()]
        return durations


@dataclass(frozen=True)
class Simulation:
    """The times of one step."""

    program: Program
    prices: Prices
    slopes: Mapping[str, Slopes]
    graph: Graph
    starts: Times  # of every node

    @cached_property
    def ends(self) -> Times:
        """End of every node of the graph."""
        return self.starts + self.graph.durations

    @cached_property
    def step_s(self) -> Seconds:
        """From the start of the step to the end of its last action or exchange."""
        return float(self.ends.max())

    @cached_property
    def waits(self) -> tuple[tuple[Waited, ...], ...]:
        """Of every role: what it waited for, summed over the step."""
        exposed: list[dict[tuple[str, str], float]] = [defaultdict(float) for _ in self.program.roles]
        idle: list[dict[tuple[str, str], float]] = [defaultdict(float) for _ in self.program.roles]
        for name, batch in self.graph.batches.items():
            waits = self.template_waits(name, batch.slopes)
            for first in range(0, len(batch.first_nodes) if waits else 0, CHUNK):
                self.add_waits(batch, waits, slice(first, first + CHUNK), exposed, idle)
        return tuple(
            tuple(Waited(axis=key[0], op=key[1], exposed_s=exposed[place][key], idle_s=idle[place][key]) for key in exposed[place])
            for place in range(len(exposed))
        )

    def add_waits(self, batch: _Batch, waits: list[_Wait], part: slice, exposed: list[Any], idle: list[Any]) -> None:
        """Add what some runs of a template waited for. What a role waits beyond an exchange's own time, it waits for others."""
        slopes = batch.slopes
        inputs = np.array(batch.inputs[part])
        times = self.ends[inputs]
        positions = np.array(batch.positions[part])
        for wait in waits:
            blocked = _at(slopes.ends[wait.index], times) - _at(slopes.starts[wait.index], times)
            if not blocked.any():
                continue
            own = blocked
            if wait.of_others:
                own = np.minimum(blocked, self.graph.durations[inputs[:, wait.awaited]])
            for sums, values in ((exposed, own), (idle, blocked - own)):
                for position, value in enumerate(np.bincount(positions, values, minlength=len(sums))):
                    if value:
                        sums[position][wait.axis, wait.op] += float(value)
                        exposed[position][wait.axis, wait.op] += 0.0

    def template_waits(self, name: str, slopes: Slopes) -> list[_Wait]:
        """The Waits of a template."""
        found = []
        for index, action in enumerate(self.program.templates[name]):
            if isinstance(action, Wait):
                exchange = (action.site, action.kind)
                started = self.collectives[action.site] if action.kind == "collective" else None
                awaited = len(slopes.lanes) + slopes.awaited.index(exchange) if exchange in slopes.awaited else 0
                found.append(
                    _Wait(
                        index=index,
                        axis=str(started.group) if started else "pipeline",
                        op=started.op if started else "send",
                        awaited=awaited,
                        of_others=started is None or crosses_roles(started),
                    )
                )
        return found

    @cached_property
    def collectives(self) -> dict[Site, Collective]:
        """Every template's collectives, by their relative site; those of one site have one group and operation."""
        return {one.site: one for actions in self.program.templates.values() for one in actions if isinstance(one, Collective)}

    @cached_property
    def busy_s(self) -> tuple[dict[str, Seconds], ...]:
        """Of every role: the sum of its actions' durations by class, "compute", "update" or "offload"."""
        by_template = {name: _busy(self.program.templates[name], seconds) for name, seconds in self.prices.durations.items()}
        found = []
        for role in self.program.roles:
            sums: dict[str, Seconds] = dict.fromkeys(("compute", "update", "offload"), 0.0)
            for run in role.runs:
                for name, seconds in by_template[run.template].items():
                    sums[name] += seconds
            found.append(sums)
        return tuple(found)

    def exposed_s(self, position: int) -> Seconds:
        """Time that a role waited for wires of its own."""
        return sum(one.exposed_s for one in self.waits[position])

    @cached_property
    def critical(self) -> int:
        """The role that holds the others up: the one that idles least, the first of them if several do."""
        used = [sum(self.busy_s[place].values()) + self.exposed_s(place) for place in range(len(self.program.roles))]
        return used.index(max(used))

    def lane_busy_s(self, position: int) -> dict[str, Seconds]:
        """Sum of durations on each lane of a role."""
        by_template = {name: _lane_sums(actions, self.prices.durations[name]) for name, actions in self.program.templates.items()}
        sums: dict[str, Seconds] = defaultdict(float)
        num_positions = len(self.program.roles)
        for run in self.program.roles[position].runs:
            for lane, seconds in by_template[run.template].items():
                sums[lane] += seconds
            for action in self.program.templates[run.template]:
                if isinstance(action, Send):
                    sums[lane_of(action)] += self.prices.transfers[position, (position + action.to) % num_positions, action.payload_bytes]
                elif isinstance(action, Recv):
                    sums[lane_of(action)] += self.prices.transfers[
                        (position + action.source) % num_positions, position, action.payload_bytes
                    ]
        return dict(sums)

    # --- the critical path ---------------------------------------------------------------------------------------------------------

    def critical_nodes(self) -> list[int]:
        """Nodes of one longest path through the step."""
        offsets, sources, lags = self.graph.rows
        return critical_path(offsets, sources, lags, self.graph.durations, self.starts)

    # --- events --------------------------------------------------------------------------------------------------------------------

    def timeline(self) -> Timeline:
        """Every action of every role as an Event: for programs of a size that a person would look at."""
        return Timeline("predicted", tuple(self.events()))

    def events(self) -> Iterator[Event]:
        """Events of every role, in the order of its actions; an exchange stands where it is issued."""
        deltas = {name: live_deltas(self.program, actions) for name, actions in self.program.templates.items()}
        located = {
            (position, number): (batch, place)
            for batch in self.graph.batches.values()
            for place, (position, number) in enumerate(zip(batch.positions, batch.run_numbers, strict=True))
        }
        for role in self.program.roles:
            for number, run in enumerate(role.runs):
                batch, place = located[role.position, number]
                yield from self.run_events(role.position, run, batch, place, deltas[run.template])

    def run_events(self, position: int, run: Run, batch: _Batch, place: int, deltas: list[int]) -> Iterator[Event]:
        """Events of one run."""
        slopes = batch.slopes
        times = self.ends[batch.inputs[place]]
        where = self.program.place(self.program.roles[position], run)
        nodes = self.exchange_nodes(batch, place)
        for index, action in enumerate(self.program.templates[run.template]):
            start_s, end_s = float(_at(slopes.starts[index], times)), float(_at(slopes.ends[index], times))
            if (node := nodes.get(id(action))) is not None:
                start_s, end_s = float(self.starts[node]), float(self.ends[node])
            bound = bind(action, where)
            op, group, payload = kind(bound), "", 0
            sent = 0
            if isinstance(bound, Collective):
                group, payload = str(bound.group), bound.payload_bytes
                sent = sent_bytes_per_rank(op, payload, bound.group.size(dict(self.program.sizes)))
            elif isinstance(bound, Send):
                group, payload, sent = "pipeline", bound.payload_bytes, bound.payload_bytes
            elif isinstance(bound, Recv):
                group, payload = "pipeline", bound.payload_bytes
            yield Event(
                position=position,
                lane=lane_of(bound),
                site=bound.site,
                kind=op,
                start_s=start_s,
                end_s=end_s,
                flops=bound.work.flops if isinstance(bound, Compute | Update) else 0,
                payload_bytes=payload,
                sent_bytes=sent,
                group=group,
                live_delta_bytes=deltas[index],
                temporary_bytes=temporary_of(action),
            )

    def exchange_nodes(self, batch: _Batch, place: int) -> dict[int, int]:
        """By identity of a port's action: the node of the exchange that it starts in one run."""
        first = batch.first_nodes[place] + len(batch.slopes.lanes)
        wanted = {first + number: id(port.action) for number, port in enumerate(batch.slopes.ports) if port.kind != "done"}
        return {wanted[node]: self.exchange_after[node] for node in wanted}

    @cached_property
    def exchange_after(self) -> dict[int, int]:
        """The exchange that a port's node leads to."""
        return {node: exchange for exchange, one in self.graph.exchanges.items() for node in one.after if node not in self.graph.exchanges}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    """A Wait of a template: its index, what it waits for, whether other roles take part, and the input that then brings the news."""

    index: int
    axis: str
    op: str
    awaited: int
    of_others: bool


def simulate(program: Program, prices: Prices) -> Simulation:
    """Solve a step."""
    used = {run.template for role in program.roles for run in role.runs}
    slopes = {name: solve(actions, prices.durations[name]) for name, actions in program.templates.items() if name in used}
    graph = Graph(program, prices, slopes)
    starts = longest_path(graph.num_nodes, *graph.rows, graph.durations)
    return Simulation(program, prices, slopes, graph, starts)


def _at(moment: Moment, times: Times) -> Any:  # noqa: ANN401 - an array, or a number for one run
    """When a moment comes, given the times of the inputs (last dimension)."""
    row, offset = moment
    return (times + np.array(row)).max(axis=-1) + offset


def _busy(actions: tuple[Action, ...], durations: tuple[Seconds, ...]) -> dict[str, Seconds]:
    sums: dict[str, Seconds] = defaultdict(float)
    for action, duration_s in zip(actions, durations, strict=True):
        match action:
            case Compute():
                sums["compute"] += duration_s
            case Update():
                sums["update"] += duration_s
            case Collective() | Send() | Recv() | Wait():
                pass
            case _:
                sums["offload"] += duration_s
    return dict(sums)


def _lane_sums(actions: tuple[Action, ...], durations: tuple[Seconds, ...]) -> dict[str, Seconds]:
    sums: dict[str, Seconds] = defaultdict(float)
    for action, duration_s in zip(actions, durations, strict=True):
        if not isinstance(action, Send | Recv | Wait):
            sums[lane_of(action)] += duration_s
    return dict(sums)
