"""All ranks of a Program in one process: who goes next, who meets whom, what came of it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from trainwright.engine.record import Recorder
from trainwright.ir.action import Action, Collective, Recv, Send, Wait, kind
from trainwright.ir.event import Event
from trainwright.ir.layout import Group
from trainwright.ir.program import Program
from trainwright.plan.lower import family_of
from trainwright.plan.plan import Plan
from trainwright.prove.numeric import MATHEMATICS
from trainwright.prove.numeric.call import Array, Feed
from trainwright.prove.numeric.exchange import Channel, Meeting, Transfer
from trainwright.prove.numeric.pieces import put_together
from trainwright.prove.numeric.rank import LOSS, SQUARES, Rank
from trainwright.units import Bytes

Watch: TypeAlias = Callable[[Rank, Action], None]
"""Called after each action with the rank that has done it."""


class DeadlockError(RuntimeError):
    """No rank can go on; the message names each waiting action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step gave: the loss over the global batch, the norm of its gradients before clipping, the rate."""

    loss: float
    gradient_norm: float
    lr: float
    num_valid: float


class Machine:
    """All ranks of a plan. `parameters` are logical: `b0.q.weight`, `embed.tokens`.

    Ranks take turns, each going as far as it can; one action is one tick of the clock. `events` holds the events of the last step.
    Raises ValueError for a plan in another format than float64, and KeyError for a parameter that is missing.
    """

    def __init__(self, plan: Plan, program: Program, *, feed: Feed, parameters: Mapping[str, Array], watch: Watch | None = None) -> None:
        formats = {buffer.format for buffer in program.buffers.values()} - {"fp64", ""}
        if formats:
            raise ValueError(f"the numpy interpreter computes in fp64; the plan asks for {', '.join(sorted(formats))}")
        self.plan, self.program, self.watch = plan, program, watch
        self.units = family_of(plan).units
        mathematics = MATHEMATICS.get(plan.model.family)
        self.ranks = [
            Rank(plan=plan, program=program, number=number, units=self.units, mathematics=mathematics, feed=feed)
            for number in range(plan.num_devices)
        ]
        for rank in self.ranks:
            rank.load(parameters)
        self.recorders = [Recorder(rank.number, rank.at["pipeline"]) for rank in self.ranks]
        self.clock_s = 0
        self.events: tuple[Event, ...] = ()
        self.peak_bytes = [rank.live_bytes for rank in self.ranks]
        self.meetings: dict[tuple[str, tuple[int, ...], int], Meeting] = {}
        self.num_joined: dict[tuple[int, str], int] = defaultdict(int)
        self.channels: dict[tuple[int, int, str], Channel] = defaultdict(Channel)

    # --- a step ----------------------------------------------------------------------------------------------------------------

    def step(self, step: int, num_steps: int) -> StepResult:
        """Perform one step on all ranks. Raises DeadlockError, and MismatchError where members of a group do different things."""
        before = [rank.live_bytes for rank in self.ranks]
        for rank in self.ranks:
            rank.begin(step, num_steps)
        while any(rank.next_action is not None for rank in self.ranks):
            moved = [self.advance(rank) for rank in self.ranks]
            if not any(moved):
                raise DeadlockError(self.deadlock())
        recorded = (recorder.take(step, live) for recorder, live in zip(self.recorders, before, strict=True))
        self.events = tuple(event for events in recorded for event in events)
        first = self.ranks[0]
        return StepResult(
            loss=float(first.scalars[LOSS]),
            gradient_norm=math.sqrt(first.scalars[SQUARES]),
            lr=self.plan.optimizer.lr_at(step, num_steps),
            num_valid=max(rank.num_valid for rank in self.ranks),
        )

    def advance(self, rank: Rank) -> bool:
        """Take a rank as far as it goes; whether it has moved."""
        moved = False
        while (action := rank.next_action) is not None and not rank.blocked_by:
            sent_bytes = rank.on_the_way[action.site, action.kind].sent_bytes if isinstance(action, Wait) else 0
            transfer = rank.perform(action)
            if transfer is not None:
                self.meet(rank, transfer)
            rank.place += 1
            self.note(rank, action, sent_bytes)
            moved = True
        return moved

    def note(self, rank: Rank, action: Action, sent_bytes: Bytes) -> None:
        """Record an action that has just been done."""
        live_bytes = rank.live_bytes
        self.peak_bytes[rank.number] = max(self.peak_bytes[rank.number], live_bytes)
        self.recorders[rank.number].saw(action, float(self.clock_s), float(self.clock_s + 1), sent_bytes, live_bytes)
        self.clock_s += 1
        if self.watch is not None:
            self.watch(rank, action)

    def deadlock(self) -> str:
        """Each waiting action, and what it waits for."""
        lines = [
            f"rank {rank.number}: {action.site} {kind(action)} ({rank.blocked_by})"
            for rank in self.ranks
            if (action := rank.next_action) is not None
        ]
        return "deadlock: " + "; ".join(lines)

    # --- who meets whom --------------------------------------------------------------------------------------------------------

    def meet(self, rank: Rank, transfer: Transfer) -> None:
        """Bring an exchange together with the other ranks' side of it."""
        action = transfer.action
        match action:
            case Collective():
                group, ranks = str(action.group), self.members(rank, action.group)
                number = self.num_joined[rank.number, group]
                self.num_joined[rank.number, group] += 1
                meeting = self.meetings.setdefault((group, ranks, number), Meeting(group=group, ranks=ranks))
                meeting.join(transfer)
                if len(meeting.joined) == len(ranks):
                    del self.meetings[group, ranks, number]
            case Send():
                peer = self.peer(rank, action.to)
                transfer.waits_for = f"rank {peer} has not come to its recv"
                self.channels[rank.number, peer, action.channel].post(transfer)
            case Recv():
                peer = self.peer(rank, action.source)
                transfer.waits_for = f"rank {peer} has not come to its send"
                self.channels[peer, rank.number, action.channel].post(transfer)

    def peer(self, rank: Rank, position: int) -> int:
        """The rank at another position that shares all other coordinates."""
        return self.plan.rank_of({**rank.at, "pipeline": position})

    def members(self, rank: Rank, group: Group) -> tuple[int, ...]:
        """The ranks that differ from this one in the group's axes only, in order."""
        choices = [group.coordinates(axis) or tuple(range(self.plan.size(axis))) for axis in group.axes]
        return tuple(sorted(self.plan.rank_of({**rank.at, **dict(zip(group.axes, one, strict=True))}) for one in product(*choices)))

    # --- what came of it -------------------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, Array]:
        """The logical parameters; of several copies the first rank's."""
        return {name: copies[0] for name, copies in self.copies("weights").items()}

    def gradients(self) -> dict[str, Array]:
        """The logical gradients of the last step, summed over all ranks and not yet clipped; of several copies the first rank's."""
        return {name: copies[0] for name, copies in self.copies("gradients").items()}

    def copies(self, what: str) -> dict[str, list[Array]]:
        """Every rank's copy of the logical "weights", or of the last step's "gradients"."""
        flats = {rank.number: rank.gradients if what == "gradients" else rank.flats(what) for rank in self.ranks}
        return put_together(self.plan, self.units, flats)
