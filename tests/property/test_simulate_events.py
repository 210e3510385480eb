"""The simulator against a second one, which plays every action of every role one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from small_plans import GPT, small_plan
from trainwright.ir.action import WAITED_KIND, Action, Collective, Recv, Send, Wait
from trainwright.ir.program import Program
from trainwright.plan.lower import lower
from trainwright.plan.plan import Plan
from trainwright.predict.memory import Memory
from trainwright.predict.price import Prices, price
from trainwright.predict.simulate import simulate
from trainwright.predict.slopes import crosses_roles


class Played:
    """A slow simulator: a list of actions for each role, advanced until none can go on."""

    def __init__(self, program: Program, prices: Prices) -> None:
        self.program, self.prices = program, prices
        self.todo = [list(self.priced(role.position)) for role in program.roles]
        self.next = [0] * len(self.todo)
        self.clock = [0.0] * len(self.todo)
        self.free: dict[object, float] = defaultdict(float)
        self.names: dict[tuple[int, object, str], object] = {}
        self.issued: dict[object, dict[object, float]] = defaultdict(dict)
        self.turns: dict[object, int] = defaultdict(int)
        self.begins: dict[object, float] = {}
        self.ends: dict[object, float] = {}
        self.times: list[list[object]] = [[] for _ in self.todo]
        while sum(self.advance(position) for position in range(len(self.todo))):
            pass
        assert all(index == len(actions) for index, actions in zip(self.next, self.todo, strict=True)), "stuck"

    def priced(self, position: int) -> Iterator[tuple[Action, float]]:
        """Every action of a role with its price."""
        seconds = [one for run in self.program.roles[position].runs for one in self.prices.durations[run.template]]
        return zip(self.program.actions(position), seconds, strict=True)

    def advance(self, me: int) -> bool:
        """Go on until something must be waited for."""
        moved = False
        while self.next[me] < len(self.todo[me]):
            action, seconds = self.todo[me][self.next[me]]
            if not self.step(me, action, seconds):
                break
            self.next[me] += 1
            moved = True
        return moved

    def members(self, action: Collective) -> tuple[int, ...]:
        """Positions that join a collective."""
        return action.group.coordinates("pipeline") or tuple(range(len(self.todo)))

    def step(self, me: int, action: Action, seconds: float) -> bool:
        """Perform one action; False if it must wait."""
        start = self.clock[me]
        match action:
            case Collective() if "pipeline" not in action.group.axes:
                lane = (me, action.group)
                start = max(start, self.free[lane])
                self.free[lane] = end = start + seconds
                self.ends[me, action.site, "collective"] = end
                self.names[me, action.site, "collective"] = (me, action.site, "collective")
                self.times[me].append((start, end))
                return True
            case Collective():
                exchange = (action.group, self.turn(me, action.group))
                self.issue(exchange, me, me, start, action, len(self.members(action)), action.group, seconds)
            case Send(to=to, channel=channel):
                exchange = (me, to, channel, self.turn(me, (me, to, channel, "send")))
                wire_s = self.prices.transfers[me, to, action.payload_bytes]
                self.issue(exchange, me, "send", start, action, 2, (me, to, channel), wire_s)
            case Recv(source=source, channel=channel):
                exchange = (source, me, channel, self.turn(me, (source, me, channel, "recv")))
                wire_s = self.prices.transfers[source, me, action.payload_bytes]
                self.issue(exchange, me, "recv", start, action, 2, (source, me, channel), wire_s)
            case Wait(site=site, kind=kind):
                exchange = self.names[me, site, kind]
                if exchange not in self.ends:
                    return False
                self.clock[me] = max(start, self.ends[exchange]) + seconds
            case _:
                self.clock[me] = start + seconds
        self.times[me].append((start, self.clock[me]))
        if crosses_roles(action):
            self.times[me][-1] = exchange
        return True

    def turn(self, me: int, what: object) -> int:
        """How many of a kind this role has started."""
        self.turns[me, what] += 1
        return self.turns[me, what]

    def issue(self, exchange, me, end, start, action, num_members, lane, seconds) -> None:
        """Hear of one end of an exchange; with the last it takes place."""
        self.names[me, action.site, WAITED_KIND[type(action)]] = exchange
        self.issued[exchange][end] = start
        if len(self.issued[exchange]) == num_members:
            begins = max(*self.issued[exchange].values(), self.free[lane])
            self.free[lane] = self.ends[exchange] = begins + seconds
            self.begins[exchange] = begins

    def all_times(self, position: int) -> list[tuple[float, float]]:
        """Start and end of every action of a role, exchanges with other roles where they take place."""
        return [(self.begins[one], self.ends[one]) if one in self.begins else one for one in self.times[position]]

    @property
    def step_s(self) -> float:
        """End of the last action."""
        return max([*self.clock, *self.ends.values()])


@st.composite
def plans(draw) -> Plan:
    """Small plans of every kind that lowers."""
    pipelines = [(1, "1f1b", 1), (2, "1f1b", 1), (4, "1f1b", 1), (2, "gpipe", 1), (4, "gpipe", 1), (2, "interleaved", 2)]
    num_positions, schedule, chunks = draw(st.sampled_from(pipelines))
    data, zero, tensor = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (1, 3, 2)]))
    return small_plan(
        mesh={"pipeline": num_positions, "data": data, "zero": zero, "tensor": tensor},
        schedule=schedule,
        chunks=chunks,
        zero={
            "stage": draw(st.sampled_from([1, 2, 3])),
            "prefetch": draw(st.sampled_from([0, 1, 2])),
            "reshard_after_forward": draw(st.booleans()),
            "free": draw(st.sampled_from(["before-reduce", "after-reduce"])),
            "gradients": draw(st.sampled_from(["sharded", "whole"])),
            "overlap": draw(st.booleans()),
        },
        sequence=draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        num_microbatches=draw(st.sampled_from([1, 2, 4, 5])) * num_positions,
        model={"tied": draw(st.booleans()), **(GPT if draw(st.booleans()) else {})},
        cluster=draw(st.sampled_from(["local", "h100-64"])),
    )


@settings(max_examples=60, deadline=None)
@given(plan=plans())
def test_both_simulators_agree_on_every_action(plan):
    """Two levels and a graph, or one action after another: the same times, to the last bit."""
    program = lower(plan)
    prices = price(program, plan)
    simulation, played = simulate(program, prices), Played(program, prices)

    assert played.step_s == simulation.step_s
    events = list(simulation.events())
    for position in range(len(program.roles)):
        assert played.all_times(position) == [(event.start_s, event.end_s) for event in events if event.position == position]


@settings(max_examples=40, deadline=None)
@given(plan=plans())
def test_a_lane_is_never_busier_than_the_step(plan):
    """The actions of one lane run one after another."""
    program = lower(plan)
    simulation = simulate(program, price(program, plan))

    for position in range(len(program.roles)):
        assert all(busy <= simulation.step_s for busy in simulation.lane_busy_s(position).values())
    for event, following in pairwise(sorted(simulation.events(), key=lambda one: (one.position, one.lane, one.start_s, one.end_s))):
        if (event.position, event.lane) == (following.position, following.lane):
            assert event.end_s <= following.start_s


@settings(max_examples=40, deadline=None)
@given(plan=plans())
def test_memory_is_the_running_sum_of_the_events(plan):
    """Folding templates gives what adding up every event gives."""
    program = lower(plan)
    timeline = simulate(program, price(program, plan)).timeline()
    memory = Memory(program, 2**40, 0, 1.0)

    for role in memory.roles:
        curve = [live for _, live in timeline.live_bytes(role.position)]
        mine = [event for event in timeline.events if event.position == role.position]
        assert role.persistent_bytes + max(curve) == role.boundary_peak_bytes
        assert role.persistent_bytes + max(live + event.temporary_bytes for live, event in zip(curve, mine, strict=True)) == role.peak_bytes
        assert curve[-1] == 0
        assert sum(role.parts.values()) == role.peak_bytes >= role.boundary_peak_bytes >= role.persistent_bytes
        assert list(memory.curve(role.position).sum(axis=1)) == [role.persistent_bytes + live for live in curve]


@settings(max_examples=20, deadline=None)
@given(plan=plans(), factor=st.sampled_from([0.0, 0.5, 3.0]))
def test_what_goes_over_the_wire_does_not_depend_on_how_long_it_takes(plan, factor):
    """The ledger is a property of the plan."""
    program = lower(plan)
    prices = price(program, plan)
    slower = Prices(
        durations={name: tuple(one * factor for one in seconds) for name, seconds in prices.durations.items()},
        transfers={key: seconds * factor for key, seconds in prices.transfers.items()},
    )
    ledgers = [
        [(str(one.site), one.kind, one.sent_bytes) for one in simulate(program, each).events() if one.sent_bytes]
        for each in (prices, slower)
    ]

    assert ledgers[0] == ledgers[1]


@pytest.mark.parametrize(("num_positions", "num_microbatches"), [(1, 3), (2, 4), (4, 8), (4, 4)])
def test_one_f_one_b_idles_for_p_minus_one_slots(num_positions, num_microbatches):
    """With free sends and equal stages the bubble is (P - 1)(F + B)."""
    plan = small_plan(mesh={"pipeline": num_positions}, num_microbatches=num_microbatches)
    program = lower(plan)
    prices = price(program, plan)
    slot = {"forward": 1.0, "backward": 2.0}
    durations = {
        name: tuple(slot.get(name.partition("[")[0], 0.0) if index == len(actions) // 2 else 0.0 for index in range(len(actions)))
        for name, actions in program.templates.items()
    }
    simulation = simulate(program, Prices(durations=durations, transfers=dict.fromkeys(prices.transfers, 0.0)))

    assert 3.0 * (num_microbatches + num_positions - 1) == simulation.step_s
