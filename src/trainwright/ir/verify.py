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
from trainwright.ir.layout import Layout, Partial
from trainwright.ir.program import Program, Role, Run
from trainwright.ir.ref import Ref
from trainwright.ir.site import Site
from trainwright.problems import Problem

Live = dict[Ref, Layout]
Lent = dict[tuple[Site, str], tuple[Ref, Ref, Layout]]


@dataclass(slots=True)
class _State:
    """Buffers alive, and exchanges that are on their way: (site, kind) -> (source, target, layout after)."""

    live: Live = field(default_factory=dict)
    lent: Lent = field(default_factory=dict)

    def frozen(self) -> _Frozen:
        return _Frozen(frozenset(self.live.items()), frozenset(self.lent.items()))


@dataclass(frozen=True, slots=True)
class _Frozen:
    live: frozenset[tuple[Ref, Layout]] = frozenset()
    lent: frozenset[tuple[tuple[Site, str], tuple[Ref, Ref, Layout]]] = frozenset()

    def thawed(self) -> _State:
        return _State(dict(self.live), dict(self.lent))


class _Walk:
    """One template, walked from one state: the state it leaves, and the faults on the way."""

    def __init__(self, state: _State, owes: frozenset[str]) -> None:
        self.state, self.owes = state, owes
        self.faults: list[str] = []

    def fault(self, action: Action, text: str) -> None:
        self.faults.append(f"{action.site} {kind(action)}: {text}")

    def untouched(self, action: Action, ref: Ref, *, write: bool) -> None:
        for (site, what), (source, target, _) in self.state.lent.items():
            if ref == target or (write and ref == source):
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
        if action.after is not None:
            self.state.live[action.weights] = action.after


def _scoped(frozen: _Frozen, *, microbatched: bool) -> _Frozen:
    """The part of a state that belongs to a microbatch, or that does not."""
    return _Frozen(
        frozenset(pair for pair in frozen.live if (pair[0].microbatch is not None) is microbatched),
        frozenset(pair for pair in frozen.lent if (pair[1][1].microbatch is not None) is microbatched),
    )


class _RoleCheck:
    """Buffers of one role, through all its runs. State is kept by (stage, microbatch), in the templates' relative names."""

    def __init__(self, program: Program, role: Role, cache: dict[tuple[str, _Frozen], tuple[_Frozen, list[str]]]) -> None:
        self.program, self.role, self.cache = program, role, cache
        self.states: dict[tuple[int | None, int | None], _Frozen] = defaultdict(_Frozen)
        self.start: dict[tuple[int | None, int | None], _Frozen] = {}
        for (stage, ref), layout in role.persistent.items():
            held = self.states[stage, None]
            self.states[stage, None] = _Frozen(held.live | {(ref, layout)}, held.lent)
        self.start = dict(self.states)

    def problems(self) -> Iterator[str]:
        for run in self.role.runs:
            yield from self.run(run)
        for key, state in self.states.items():
            allowed = self.start.get(key, _Frozen())
            for ref, _ in sorted(state.live - allowed.live, key=lambda pair: str(pair[0])):
                if ref not in dict(allowed.live):
                    yield f"position {self.role.position}: {self.where(key)}{ref} is never freed"
            for (site, what), _ in state.lent:
                yield f"position {self.role.position}: {self.where(key)}nobody waits for the {what} of {site}"

    @staticmethod
    def where(key: tuple[int | None, int | None]) -> str:
        stage, microbatch = key
        return "" if stage is None else f"stage {stage}" + ("" if microbatch is None else f" microbatch {microbatch}") + ": "

    def run(self, run: Run) -> Iterator[str]:
        keys = dict.fromkeys([(run.stage, run.microbatch), (run.stage, None), (None, None)])
        entered = _Frozen(
            frozenset().union(*(self.states[key].live for key in keys)),
            frozenset().union(*(self.states[key].lent for key in keys)),
        )
        left, faults = self.walked(run.template, entered)
        place = self.where((run.stage, run.microbatch))
        yield from (f"position {self.role.position}: {place}{fault}" for fault in faults)
        position_wide = self.states[None, None]
        rest = _Frozen(
            frozenset(pair for pair in left.live if pair[0] not in dict(position_wide.live)) if run.stage is not None else left.live,
            left.lent,
        )
        if run.stage is None:
            self.states[None, None] = rest
            return
        self.states[run.stage, None] = _scoped(rest, microbatched=False)
        if run.microbatch is not None:
            self.states[run.stage, run.microbatch] = _scoped(rest, microbatched=True)

    def walked(self, template: str, entered: _Frozen) -> tuple[_Frozen, list[str]]:
        key = (template, entered)
        if key not in self.cache:
            walk = _Walk(entered.thawed(), self.program.owes)
            for action in self.program.templates[template]:
                walk.step(action)
            self.cache[key] = (walk.state.frozen(), walk.faults)
        return self.cache[key]


@dataclass(slots=True)
class _Lane:
    """How far one role has come through the actions that others may wait for."""

    position: int
    events: deque[tuple[Action, str]]
    blocked_at: str = ""


def _talk(program: Program, role: Role) -> deque[tuple[Action, str]]:
    """Sends, receives, collectives across roles, and Waits of these, in order, bound."""
    across: dict[str, list[Action]] = {}
    for name, actions in program.templates.items():
        crossing = [
            one for one in actions if isinstance(one, Send | Recv) or (isinstance(one, Collective) and "pipeline" in one.group.axes)
        ]
        sites = {(one.site, WAITED_KIND[type(one)]) for one in crossing}
        kept = [
            one
            for one in actions
            if one in crossing or (isinstance(one, Wait) and ((one.site, one.kind) in sites or one.kind != "collective"))
        ]
        across[name] = kept
    events: deque[tuple[Action, str]] = deque()
    for run in role.runs:
        place = program.place(role, run)
        for action in across[run.template]:
            bound = bind(action, place)
            events.append((bound, f"position {role.position}: {bound.site} {kind(bound)}"))
    return events


class _Rendezvous:
    """Play the exchanges between roles with no buffering at all, until all are done or nobody can go on."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lanes = [_Lane(role.position, _talk(program, role)) for role in program.roles]
        self.sent: dict[tuple[int, int, str], list[Site]] = defaultdict(list)
        self.posted: dict[tuple[int, int, str], list[Site]] = defaultdict(list)
        self.number: dict[tuple[int, Site, str], tuple[tuple[int, int, str], int]] = {}
        self.joined: dict[str, dict[int, list[tuple[Site, str]]]] = defaultdict(lambda: defaultdict(list))
        self.turn: dict[tuple[int, Site], tuple[str, int]] = {}

    def problems(self) -> Iterator[str]:
        moved = True
        while moved:
            moved = False
            for lane in self.lanes:
                moved |= self.advance(lane)
        waiting = [lane for lane in self.lanes if lane.events]
        if waiting:
            yield "deadlock: " + "; ".join(f"{lane.events[0][1]} ({lane.blocked_at})" for lane in waiting)
        for channel in self.sent.keys() | self.posted.keys():
            num_sent, num_posted = len(self.sent[channel]), len(self.posted[channel])
            if num_sent != num_posted and not waiting:
                yield f"channel {channel[0]} -> {channel[1]} {channel[2]}: {num_sent} sends meet {num_posted} receives"
        yield from self.orders()

    def orders(self) -> Iterator[str]:
        for group, sequences in self.joined.items():
            first, *others = sequences.items()
            for position, sequence in others:
                if sequence != first[1]:
                    differing = next((pair for pair in zip(first[1], sequence, strict=False) if pair[0] != pair[1]), None)
                    where = f": {differing[0][0]} there, {differing[1][0]} here" if differing else ""
                    yield f"group {group}: position {position} starts its collectives in another order than position {first[0]}{where}"

    def advance(self, lane: _Lane) -> bool:
        moved = False
        while lane.events and self.ready(lane, lane.events[0][0]):
            lane.events.popleft()
            moved = True
        return moved

    def ready(self, lane: _Lane, action: Action) -> bool:
        me = lane.position
        match action:
            case Send(site=site, to=to, channel=name):
                channel = (me, to, name)
                self.number[me, site, "send"] = (channel, len(self.sent[channel]))
                self.sent[channel].append(site)
            case Recv(site=site, source=source, channel=name):
                channel = (source, me, name)
                self.number[me, site, "recv"] = (channel, len(self.posted[channel]))
                self.posted[channel].append(site)
            case Collective(site=site, group=group, op=op):
                self.turn[me, site] = (str(group), len(self.joined[str(group)][me]))
                self.joined[str(group)][me].append((Site(step=None, segment=site.segment, phase=site.phase, tag=site.tag), op))
            case Wait(site=site, kind="collective"):
                return self.all_joined(lane, site)
            case Wait(site=site, kind=what):
                return self.met(lane, site, what)
        return True

    def met(self, lane: _Lane, site: Site, what: str) -> bool:
        found = self.number.get((lane.position, site, what))
        if found is None:
            lane.blocked_at = f"waits for a {what} that was never started"
            return False
        channel, number = found
        other = self.posted if what == "send" else self.sent
        lane.blocked_at = f"waits for the {'receive' if what == 'send' else 'send'} of position {channel[1 if what == 'send' else 0]}"
        return len(other[channel]) > number

    def all_joined(self, lane: _Lane, site: Site) -> bool:
        found = self.turn.get((lane.position, site))
        if found is None:
            lane.blocked_at = "waits for a collective that was never started"
            return False
        group, number = found
        members = self.members(group)
        missing = [position for position in members if len(self.joined[group][position]) <= number]
        lane.blocked_at = f"waits for position {', '.join(map(str, missing))} to join {group}"
        return not missing

    def members(self, group: str) -> list[int]:
        for actions in self.program.templates.values():
            for action in actions:
                if isinstance(action, Collective) and str(action.group) == group:
                    listed = action.group.coordinates("pipeline")
                    return list(listed) if listed is not None else [role.position for role in self.program.roles]
        return []


def faults(program: Program) -> Iterator[str]:
    """Every fault of a Program, in words."""
    cache: dict[tuple[str, _Frozen], tuple[_Frozen, list[str]]] = {}
    for role in program.roles:
        yield from dict.fromkeys(_RoleCheck(program, role, cache).problems())
    if "pipeline" not in program.owes:
        yield from _Rendezvous(program).problems()


def verify(program: Program) -> list[Problem]:
    """The faults of a Program as Problems; empty if it is sound."""
    return [Problem(message=text) for text in faults(program)]
