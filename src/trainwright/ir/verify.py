"""Proofs about a Program that need no execution.

Every buffer is produced before use, freed once and not leaked; its layout is the one its reader needs; what is lent to an
exchange is not touched before the Wait; sends and receives pair; every rank starts the collectives of a group in one order; and nothing
waits for ever when nothing is buffered (rendezvous: a Send completes only when its Recv is posted). Templates are walked once for each
state in which they are entered, not once a microbatch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainwright.ir.action import (
    WAITED_KIND,
    Action,
    Alloc,
    Collective,
    Compute,
    Free,
    Move,
    Operand,
    Recv,
    Save,
    Send,
    Update,
    Wait,
    bind,
    kind,
)
from trainwright.ir.layout import Group, Layout, Partial
from trainwright.ir.ref import Ref
from trainwright.ir.site import Site
from trainwright.problems import Problem

if TYPE_CHECKING:
    from trainwright.ir.program import Program, Role, Run

Live = dict[Ref, Layout]
Lent = dict[tuple[Site, str], tuple[Ref, Ref, Layout]]


@dataclass(frozen=True, slots=True)
class _Frozen:
    """The state of one microbatch, of one stage, or of the position, between runs."""

    live: frozenset[tuple[Ref, Layout]] = frozenset()
    lent: frozenset[tuple[tuple[Site, str], tuple[Ref, Ref, Layout]]] = frozenset()


@dataclass(slots=True)
class _State:
    """Buffers alive, and exchanges that are on their way: (site, kind) -> (source, target, layout after)."""

    live: Live = field(default_factory=dict)
    lent: Lent = field(default_factory=dict)

    @classmethod
    def union(cls, parts: tuple[_Frozen, ...]) -> _State:
        state = cls()
        for part in parts:
            state.live.update(part.live)
            state.lent.update(part.lent)
        return state

    def parted(self, entered: tuple[_Frozen, ...]) -> tuple[_Frozen, ...]:
        """Who owns what: the microbatch (first) its own, the position (last) what it had, the stage (if any, between) the rest."""
        *inner, position = entered
        wide = {ref for ref, _ in position.live} if inner else set(self.live)
        owners: list[tuple[Live, Lent]] = [({}, {}) for _ in entered]

        def owner(ref: Ref) -> int:
            if ref in wide:
                return len(entered) - 1
            return 0 if ref.microbatch is not None else max(len(inner) - 1, 0)

        for ref, layout in self.live.items():
            owners[owner(ref)][0][ref] = layout
        for name, lent in self.lent.items():
            owners[owner(lent[1])][1][name] = lent
        return tuple(_Frozen(frozenset(live.items()), frozenset(lent.items())) for live, lent in owners)


class _Walk:
    """One template, walked from one state: the state it leaves, and the faults on the way."""

    def __init__(self, state: _State, owes: frozenset[str]) -> None:
        self.state, self.owes = state, owes
        self.faults: list[str] = []

    def fault(self, action: Action, text: str) -> None:
        self.faults.append(f"{action.site} {kind(action)}: {text}")

    def untouched(self, action: Action, ref: Ref, *, write: bool) -> None:
        for (site, what), (source, target, _) in self.state.lent.items():
            if (ref == target and what != "send") or (write and ref == source):  # what is sent may still be read
                self.fault(action, f"{ref} is lent to the {what} of {site}, which nobody has waited for")

    def reads(self, action: Action, operand: Operand) -> None:
        self.untouched(action, operand.ref, write=False)
        layout = self.state.live.get(operand.ref)
        if layout is None:
            self.fault(action, f"uses {operand.ref} before it is produced")
        elif any(layout[axis] != operand.layout[axis] for axis in self.differing(layout, operand.layout)):
            self.fault(action, f"needs {operand.ref} as {operand.layout}, but it is {layout}")

    def differing(self, one: Layout, other: Layout) -> Iterator[str]:
        axes = {axis for axis, _ in one.axes} | {axis for axis, _ in other.axes}
        return (axis for axis in axes if axis not in self.owes)

    def produces(self, action: Action, ref: Ref, layout: Layout) -> None:
        if ref in self.state.live:
            self.fault(action, f"produces {ref}, which is already live")
        self.state.live[ref] = layout

    def step(self, action: Action) -> None:
        match action:
            case Compute():
                self.compute(action)
            case Collective():
                self.collective(action)
            case Send(buffer=buffer):
                self.untouched(action, buffer, write=False)
                if buffer not in self.state.live:
                    self.fault(action, f"uses {buffer} before it is produced")
                else:
                    self.lend(action, buffer, buffer, self.state.live[buffer])
            case Recv(buffer=buffer, layout=layout):
                self.produces(action, buffer, layout)
                self.lend(action, buffer, buffer, layout)
            case Wait(site=site, kind=what):
                self.wait(action, site, what)
            case Alloc(buffer=buffer):
                self.produces(action, buffer, Layout())
            case Free(buffers=buffers):
                for buffer in buffers:
                    self.untouched(action, buffer, write=True)
                    if self.state.live.pop(buffer, None) is None:
                        self.fault(action, f"frees {buffer}, which is not live")
            case Move(source=source, target=target):
                self.reads(action, Operand("source", source, self.state.live.get(source, Layout())))
                self.produces(action, target, self.state.live.get(source, Layout()))
            case Update():
                self.update(action)
            case Save():
                pass

    def compute(self, action: Compute) -> None:
        for operand in (*action.reads, *([action.weights] if action.weights else [])):
            self.reads(action, operand)
        for operand in action.writes:
            self.produces(action, operand.ref, operand.layout)
        if (grad := action.accumulates) is None:
            return
        self.untouched(action, grad.ref, write=True)
        if action.fresh:
            self.produces(action, grad.ref, grad.layout)
        elif grad.ref not in self.state.live:
            self.fault(action, f"adds to {grad.ref} before it is produced")
        else:
            self.state.live[grad.ref] = grad.layout

    def collective(self, action: Collective) -> None:
        self.untouched(action, action.source, write=True)
        layout = self.state.live.get(action.source)
        if layout is None:
            self.fault(action, f"uses {action.source} before it is produced")
            return
        for axis in action.group.axes:
            if layout[axis] != action.before[axis]:
                self.fault(action, f"takes {action.source} as {axis}={action.before[axis]}, but it is {axis}={layout[axis]}")
        after = Layout(layout.axes, action.after.residency)
        for axis in action.group.axes:
            after = after.on(axis, action.after[axis])
        if action.target != action.source:
            self.produces(action, action.target, after)
        self.lend(action, action.source, action.target, after)

    def lend(self, action: Collective | Send | Recv, source: Ref, target: Ref, after: Layout) -> None:
        name = (action.site, WAITED_KIND[type(action)])
        if name in self.state.lent:
            self.fault(action, "is started twice without a Wait between")
        self.state.lent[name] = (source, target, after)

    def wait(self, action: Action, site: Site, what: str) -> None:
        lent = self.state.lent.pop((site, what), None)
        if lent is None:
            self.fault(action, f"waits for the {what} of {site}, which was never started")
            return
        _, target, after = lent
        if target in self.state.live:
            self.state.live[target] = after

    def update(self, action: Update) -> None:
        for ref in (action.weights, action.gradients, *action.states, *filter(None, (action.master, action.scalars))):
            self.untouched(action, ref, write=True)
            if ref not in self.state.live:
                self.fault(action, f"uses {ref} before it is produced")
        layout = self.state.live.get(action.gradients, Layout())
        for axis, placement in layout.axes:
            if isinstance(placement, Partial) and axis not in self.owes:
                self.fault(action, f"updates from {action.gradients}, which is not yet summed over {axis}")
        if action.scalars is not None and (axes := self.state.live.get(action.scalars, Layout()).partial_axes()):
            self.fault(action, f"reads {action.scalars}, which is not yet summed over {', '.join(axes)}")
        if action.after is not None:
            self.state.live[action.weights] = action.after


_Key = tuple[int | None, int | None]
_Outcome = tuple[tuple[_Frozen, ...], list[str]]


class _Cache:
    """Templates walked before, by the states they were entered in. Equal states are one object: looking one up compares nothing."""

    def __init__(self) -> None:
        self.outcomes: dict[tuple[str, tuple[int, ...]], _Outcome] = {}
        self.known: dict[_Frozen, _Frozen] = {}
        self.nothing = self.one(_Frozen())

    def one(self, state: _Frozen) -> _Frozen:
        """The one object that stands for this state."""
        return self.known.setdefault(state, state)


class _RoleCheck:
    """Buffers of one role, through all its runs. State is kept by (stage, microbatch), in the templates' relative names."""

    def __init__(self, program: Program, role: Role, cache: _Cache) -> None:
        self.program, self.role, self.cache = program, role, cache
        self.states: dict[_Key, _Frozen] = defaultdict(lambda: cache.nothing)
        owned: dict[_Key, Live] = defaultdict(dict)
        for (stage, ref), layout in role.persistent.items():
            owned[stage, None][ref] = layout
        for key, live in owned.items():
            self.states[key] = cache.one(_Frozen(frozenset(live.items())))
        self.start = dict(self.states)

    def problems(self) -> Iterator[str]:
        for run in self.role.runs:
            yield from self.run(run)
        for key, state in self.states.items():
            allowed = dict(self.start.get(key, _Frozen()).live)
            for ref in sorted((ref for ref, _ in state.live if ref not in allowed), key=str):
                yield f"position {self.role.position}: {self.where(key)}{ref} is never freed"
            for (site, what), _ in state.lent:
                yield f"position {self.role.position}: {self.where(key)}nobody waits for the {what} of {site}"

    @staticmethod
    def where(key: _Key) -> str:
        stage, microbatch = key
        return "" if stage is None else f"stage {stage}" + ("" if microbatch is None else f" microbatch {microbatch}") + ": "

    def run(self, run: Run) -> Iterator[str]:
        """Walk one run from the states of its microbatch, its stage and the position."""
        keys = tuple(dict.fromkeys([(run.stage, run.microbatch), (run.stage, None), (None, None)]))
        left, faults = self.walked(run.template, tuple(self.states[key] for key in keys))
        if faults:
            place = self.where(keys[0])
            yield from (f"position {self.role.position}: {place}{fault}" for fault in faults)
        self.states.update(zip(keys, left, strict=True))

    def walked(self, template: str, entered: tuple[_Frozen, ...]) -> _Outcome:
        """The states after a template, and its faults; walked once for each state it is entered in."""
        key = (template, tuple(map(id, entered)))
        if key not in self.cache.outcomes:
            walk = _Walk(_State.union(entered), self.program.owes)
            for action in self.program.templates[template]:
                walk.step(action)
            self.cache.outcomes[key] = (tuple(map(self.cache.one, walk.state.parted(entered))), walk.faults)
        return self.cache.outcomes[key]


@dataclass(frozen=True, slots=True)
class _Step:
    """An exchange between roles, or its Wait, in one run."""

    action: Action
    run: Run

    @property
    def name(self) -> tuple[Site, int | None, int | None]:
        """What ties a Wait to what it waits for, within one role."""
        return (self.action.site, self.run.stage, self.run.microbatch)


@dataclass(slots=True)
class _Lane:
    """How far one role has come through its exchanges."""

    position: int
    steps: deque[_Step]
    blocked_by: str = ""


def _crossing(program: Program) -> dict[str, list[Action]]:
    """Of each template: sends, receives, collectives across roles, and the Waits of these."""
    found: dict[str, list[Action]] = {}
    for name, actions in program.templates.items():
        started = {one.site for one in actions if isinstance(one, Collective) and "pipeline" in one.group.axes}
        found[name] = [
            one
            for one in actions
            if isinstance(one, Send | Recv)
            or (isinstance(one, Collective) and one.site in started)
            or (isinstance(one, Wait) and (one.kind != "collective" or one.site in started))
        ]
    return found


_Channel = tuple[int, int, str]


class _Rendezvous:
    """Play the exchanges between roles with no buffering at all, until all are done or nobody can go on."""

    def __init__(self, program: Program) -> None:
        self.program = program
        crossing = _crossing(program)
        self.lanes = [
            _Lane(role.position, deque(_Step(one, run) for run in role.runs for one in crossing[run.template])) for role in program.roles
        ]
        self.sent: dict[_Channel, int] = defaultdict(int)
        self.posted: dict[_Channel, int] = defaultdict(int)
        self.number: list[dict[tuple[object, ...], tuple[_Channel, int]]] = [{} for _ in self.lanes]
        self.joined: dict[Group, dict[int, list[tuple[Site, str]]]] = defaultdict(lambda: defaultdict(list))
        self.turn: list[dict[tuple[object, ...], tuple[Group, int]]] = [{} for _ in self.lanes]

    def problems(self) -> Iterator[str]:
        """Deadlock, unpaired exchanges, and collectives in different orders."""
        while sum(self.advance(lane) for lane in self.lanes):
            pass
        waiting = [lane for lane in self.lanes if lane.steps]
        if waiting:
            yield "deadlock: " + "; ".join(f"{self.label(lane)} {lane.blocked_by}" for lane in waiting)
        else:
            for channel in sorted(self.sent.keys() | self.posted.keys()):
                if self.sent[channel] != self.posted[channel]:
                    numbers = f"{self.sent[channel]} sends meet {self.posted[channel]} receives"
                    yield f"channel {channel[0]} -> {channel[1]} {channel[2]}: {numbers}"
        yield from self.orders()

    def label(self, lane: _Lane) -> str:
        """The action at which a role stands."""
        step = lane.steps[0]
        bound = bind(step.action, self.program.place(self.program.roles[lane.position], step.run))
        return f"position {lane.position}: {bound.site} {kind(bound)}"

    def orders(self) -> Iterator[str]:
        """Groups whose members do not start their collectives in one order."""
        for group, sequences in self.joined.items():
            (first, expected), *others = sequences.items()
            for position, sequence in others:
                pair = next((pair for pair in zip(expected, sequence, strict=False) if pair[0] != pair[1]), None)
                if pair:
                    here, there = (f"{site} {op}" for site, op in pair)
                    yield f"group {group}: position {first} starts {here} where position {position} starts {there}"

    def advance(self, lane: _Lane) -> bool:
        """Take a role as far as it goes; whether it moved."""
        moved = False
        while lane.steps and self.takes(lane, lane.steps[0]):
            lane.steps.popleft()
            moved = True
        return moved

    def takes(self, lane: _Lane, step: _Step) -> bool:
        """Whether a role can take its next step."""
        me, action, num_positions = lane.position, step.action, len(self.lanes)
        match action:
            case Send():
                channel = (me, (me + action.to) % num_positions, action.channel)
                self.number[me]["send", *step.name] = (channel, self.sent[channel])
                self.sent[channel] += 1
            case Recv():
                channel = ((me + action.source) % num_positions, me, action.channel)
                self.number[me]["recv", *step.name] = (channel, self.posted[channel])
                self.posted[channel] += 1
            case Collective():
                sequence = self.joined[action.group][me]
                self.turn[me][step.name] = (action.group, len(sequence))
                sequence.append((action.site, action.op))
            case Wait(kind="collective"):
                return self.all_joined(lane, step)
            case Wait(kind=what):
                return self.met(lane, step, what)
        return True

    def met(self, lane: _Lane, step: _Step, what: str) -> bool:
        """Whether the other side of a send or receive has been posted."""
        found = self.number[lane.position].get((what, *step.name))
        if found is None:
            lane.blocked_by = f"(no {what} was started here)"
            return False
        channel, number = found
        other, peer = (self.posted, channel[1]) if what == "send" else (self.sent, channel[0])
        if other[channel] > number:
            return True
        lane.blocked_by = f"(position {peer} has not come to its {'recv' if what == 'send' else 'send'})"
        return False

    def all_joined(self, lane: _Lane, step: _Step) -> bool:
        """Whether every member of the group has started the collective."""
        found = self.turn[lane.position].get(step.name)
        if found is None:
            lane.blocked_by = "(no collective was started here)"
            return False
        group, number = found
        listed = group.coordinates("pipeline")
        members = range(len(self.lanes)) if listed is None else listed
        missing = [position for position in members if len(self.joined[group][position]) <= number]
        lane.blocked_by = f"(position {', '.join(map(str, missing))} has not joined {group})"
        return not missing


def faults(program: Program) -> Iterator[str]:
    """Every fault of a Program, in words."""
    cache = _Cache()
    for role in program.roles:
        yield from dict.fromkeys(_RoleCheck(program, role, cache).problems())
    if "pipeline" not in program.owes:
        yield from _Rendezvous(program).problems()


def verify(program: Program) -> list[Problem]:
    """The faults of a Program as Problems; empty if it is sound."""
    return [Problem(message=text) for text in faults(program)]
