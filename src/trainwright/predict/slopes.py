"""A template as a map: when everything in one run of it happens, given when what it waits for has happened.

All actions of a role are maxima and sums of times, so a run of a template is linear in the algebra of (max, +): every moment in it is the
maximum, over a few inputs, of the input's time plus a constant. Those constants are worked out once a template.

Glossary
    input    what a run depends on: the clock (its role has finished the run before), a wire lane that is free again, an exchange that is
             done
    row      the constants of one moment, one an input; minus infinity where the moment does not depend on it
    moment   a row and an offset added to all of it: a Compute moves the offset only
    port     what a run gives to others: a send issued, a receive posted, a collective joined, an exchange left for a later run to wait for
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar

from trainwright.ir.action import WAITED_KIND, Action, Collective, Compute, Recv, Send, Wait
from trainwright.ir.site import Site
from trainwright.units import Seconds

NEVER: Final = -math.inf

CLOCK: Final = "clock"

Row: TypeAlias = tuple[float, ...]
Moment: TypeAlias = tuple[Row, Seconds]
Exchange: TypeAlias = tuple[Site, str]
"""Site and waited kind ("collective", "send", "recv") of an exchange: how a Wait names it."""


M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Port(Generic[M]):
    """A moment of a run that others hear of.

    `kind` is "send", "recv", "join" (a collective of several roles) or "done" (an exchange to be waited for by a later run).
    """

    kind: str
    action: Collective | Send | Recv
    moment: M

    @property
    def exchange(self) -> Exchange:
        """What a Wait for it names."""
        return (self.action.site, WAITED_KIND[type(self.action)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Slopes:
    """A solved template.

    `lanes` are the lanes of its inputs, the clock first; after them come `awaited`, the exchanges that it waits for and that need another
    role or an earlier run. `leaves` has the moment at which each of `lanes` is free at the end. `starts` and `ends` have one moment an
    action; those of Sends, Recvs and collectives of several roles are the moments of issue, for when they take place lies beyond the
    template.
    """

    lanes: tuple[str, ...]
    awaited: tuple[Exchange, ...]
    leaves: tuple[Moment, ...]
    ports: tuple[Port[Moment], ...]
    starts: tuple[Moment, ...]
    ends: tuple[Moment, ...]

    @property
    def outputs(self) -> tuple[Moment, ...]:
        """Moments that make nodes of the step's graph: the lanes' ends, then the ports."""
        return (*self.leaves, *(port.moment for port in self.ports))


def lane_of(action: Action) -> str:
    """The lane on which an action takes place."""
    match action:
        case Collective(group=group):
            return f"wire:{group}"
        case Send(channel=channel):
            return f"wire:pipeline.{channel}.out"
        case Recv(channel=channel):
            return f"wire:pipeline.{channel}.in"
        case _:
            return "compute"


def crosses_roles(action: Action) -> bool:
    """Whether an exchange has members in other roles."""
    return isinstance(action, Send | Recv) or (isinstance(action, Collective) and "pipeline" in action.group.axes)


def awaited_exchanges(actions: Sequence[Action]) -> Iterator[Exchange]:
    """What a template waits for that does not end within it."""
    inside: set[Exchange] = set()
    for action in actions:
        if isinstance(action, Collective) and not crosses_roles(action):
            inside.add((action.site, "collective"))
        elif isinstance(action, Wait):
            exchange = (action.site, action.kind)
            if exchange in inside:
                inside.discard(exchange)
            else:
                yield exchange


class Walk(ABC, Generic[M]):
    """A template played from its first action to its last, in any algebra that knows `after` and `latest`.

    `unit(place, number)` is the moment of input `place` of `number`. Afterwards `starts`, `ends`, `leaves` and `ports` have the moments.
    """

    def __init__(self, actions: Sequence[Action], unit: Callable[[int, int], M]) -> None:
        self.actions = actions
        used = dict.fromkeys(lane_of(one) for one in actions if isinstance(one, Collective) and not crosses_roles(one))
        self.lanes = (CLOCK, *used)
        self.awaited = tuple(dict.fromkeys(awaited_exchanges(actions)))
        number = len(self.lanes) + len(self.awaited)
        inputs = [unit(place, number) for place in range(number)]
        self.clock = inputs[0]
        self.free = dict(zip(self.lanes, inputs, strict=False))
        self.done = dict(zip(self.awaited, inputs[len(self.lanes) :], strict=True))
        self.own: dict[Exchange, tuple[Collective, M]] = {}
        self.ports: list[Port[M]] = []
        self.starts: list[M] = []
        self.ends: list[M] = []

    @abstractmethod
    def after(self, moment: M, duration_s: Seconds, action: Action) -> M:
        """The moment at which an action that begins at `moment` is over."""

    @abstractmethod
    def latest(self, one: M, other: M) -> M:
        """The later of two moments."""

    def play(self, durations: Sequence[Seconds]) -> None:
        """Perform every action."""
        for action, duration_s in zip(self.actions, durations, strict=True):
            start, end = self.step(action, duration_s)
            self.starts.append(start)
            self.ends.append(end)
        self.ports += [Port("done", action, moment) for action, moment in self.own.values()]

    @property
    def leaves(self) -> tuple[M, ...]:
        """When each of `lanes` is free."""
        return (self.clock, *(self.free[lane] for lane in self.lanes[1:]))

    def step(self, action: Action, duration_s: Seconds) -> tuple[M, M]:
        """Start and end of an action; the clock and the lanes move on."""
        start = self.clock
        match action:
            case Send() | Recv():
                self.ports.append(Port(WAITED_KIND[type(action)], action, start))
            case Collective() if crosses_roles(action):
                self.ports.append(Port("join", action, start))
            case Collective():
                lane = lane_of(action)
                start = self.latest(start, self.free[lane])
                end = self.after(start, duration_s, action)
                self.free[lane] = end
                self.own[action.site, "collective"] = (action, end)
                return start, end
            case Wait(site=site, kind=kind):
                own = self.own.pop((site, kind), None)
                self.clock = self.after(self.latest(start, own[1] if own else self.done[site, kind]), duration_s, action)
            case _:
                self.clock = self.after(start, duration_s, action)
        return start, self.clock


class _Solver(Walk[Moment]):
    """The algebra of rows and offsets."""

    def after(self, moment: Moment, duration_s: Seconds, action: Action) -> Moment:
        del action
        return (moment[0], moment[1] + duration_s)

    def latest(self, one: Moment, other: Moment) -> Moment:
        (row, offset), (other_row, other_offset) = one, other
        if row is other_row:
            return one if offset >= other_offset else other
        return (tuple([max(a + offset, b + other_offset) for a, b in zip(row, other_row, strict=True)]), 0.0)


def solve(actions: Sequence[Action], durations: Sequence[Seconds]) -> Slopes:
    """Work out a template's constants."""
    walk = _Solver(actions, lambda place, number: (tuple(0.0 if other == place else NEVER for other in range(number)), 0.0))
    walk.play(durations)
    return Slopes(
        lanes=walk.lanes,
        awaited=walk.awaited,
        leaves=walk.leaves,
        ports=tuple(walk.ports),
        starts=tuple(walk.starts),
        ends=tuple(walk.ends),
    )


def row_of(moment: Moment) -> Row:
    """The constants of a moment, offset included."""
    row, offset = moment
    return tuple([constant + offset for constant in row]) if offset else row


WORDS: Final = {"fwd": "forward", "re": "recompute", "bwd": "backward", "upd": "update"}


def label(action: Action) -> str:
    """The class of an action in reports: what is done in which segment, or which exchange over which axes.

    A Wait's own time is "contention": what traffic beside compute costs.
    """
    match action:
        case Compute(site=site, function=function):
            phase = WORDS.get(site.phase or "", site.phase or "")
            return " ".join(filter(None, (phase, function if function not in {"forward", "backward"} else "", site.segment)))
        case Collective(op=op, group=group):
            return f"{op} {group}"
        case Send() | Recv():
            return "send pipeline"
        case Wait():
            return "contention"
        case _:
            return type(action).__name__.lower()
