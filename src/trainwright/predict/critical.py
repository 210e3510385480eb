"""Where the time of a step goes on its longest path: seconds by class of action.

The path through the step's graph leads from moment to moment; between two moments of a run it leads through the run's template, action by
action. Every second of the step belongs to one action or one exchange.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from trainwright.ir.action import Action
from trainwright.predict.simulate import Simulation
from trainwright.predict.slopes import NEVER, Walk, label, row_of
from trainwright.units import Seconds

Step: TypeAlias = tuple[Seconds, "Step | None", str, Seconds]
"""A moment on a path: when it comes, the moment before it, and the class and duration of the action between."""


def seconds_by_class(simulation: Simulation) -> dict[str, Seconds]:
    """Seconds of the longest path by class of action; they sum to the step."""
    return _Path(simulation).seconds()


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of a run: which template, and which output of which run it is."""

    template: str
    inputs: Sequence[int]
    output: int


class _Path:
    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.traced: dict[tuple[str, int, int], Counter[str]] = {}
        owners = sorted(
            (first, name, inputs)
            for name, batch in simulation.graph.batches.items()
            for first, inputs in zip(batch.first_nodes, batch.inputs, strict=True)
        )
        self.firsts = [first for first, _, _ in owners]
        self.owners = [(name, inputs) for _, name, inputs in owners]
        self.names = {
            exchange: label(port.action)
            for batch in simulation.graph.batches.values()
            for first in batch.first_nodes
            for number, port in enumerate(batch.slopes.ports, first + len(batch.slopes.lanes))
            if (exchange := simulation.exchange_after.get(number)) is not None
        }

    def seconds(self) -> dict[str, Seconds]:
        graph = self.simulation.graph
        sums: Counter[str] = Counter()
        nodes = self.simulation.critical_nodes()
        for before, node in zip([None, *nodes[:-1]], nodes, strict=True):
            if node in graph.exchanges:
                sums[self.names[node]] += graph.durations[node]
            elif before is not None:
                sums.update(self.between(before, self.node(node)))
        return {name: float(seconds) for name, seconds in sorted(sums.items()) if seconds}

    def node(self, node: int) -> _Node:
        place = int(np.searchsorted(self.firsts, node, side="right")) - 1
        name, inputs = self.owners[place]
        return _Node(name, inputs, node - self.firsts[place])

    def between(self, before: int, node: _Node) -> Counter[str]:
        """The classes on the way from a run's input to one of its moments; where one node serves several inputs, the latest of them."""
        row = row_of(self.simulation.slopes[node.template].outputs[node.output])
        which = max((place for place, source in enumerate(node.inputs) if source == before), key=row.__getitem__)
        key = (node.template, which, node.output)
        if key not in self.traced:
            simulation = self.simulation
            actions = simulation.program.templates[node.template]
            self.traced[key] = Trace(actions, which).classes(simulation.prices.durations[node.template], node.output)
        return self.traced[key]


class Trace(Walk[Step]):
    """A template walked from one input alone, each moment remembering how it came about."""

    def __init__(self, actions: Sequence[Action], which: int) -> None:
        super().__init__(actions, lambda place, _: (0.0 if place == which else NEVER, None, "", 0.0))

    def after(self, moment: Step, duration_s: Seconds, action: Action) -> Step:
        """The moment so much later, and through what."""
        return (moment[0] + duration_s, moment, label(action), duration_s)

    def latest(self, one: Step, other: Step) -> Step:
        """The later of two moments."""
        return one if one[0] >= other[0] else other

    def classes(self, durations: Sequence[Seconds], output: int) -> Counter[str]:
        """Seconds by class on the way to an output."""
        self.play(durations)
        step: Step | None = (*self.leaves, *(port.moment for port in self.ports))[output]
        sums: Counter[str] = Counter()
        while step is not None:
            _, step, name, seconds = step
            if seconds:
                sums[name] += seconds  # type: ignore[assignment]  # a Counter of seconds
        return sums
