"""What every role holds in device memory through a step, exactly, by part.

A template changes what is live by the same amounts in each of its runs, so its running sums are taken once; a role's course is those sums
on top of what it held when the run began. Two peaks: at action boundaries (what a record of live buffers shows), and inside actions,
where a Compute's temporary memory counts too.

Glossary
    part         what a buffer is counted as: weights, gathered, gradients, master, optimizer, activations, temporary, wire_buffers
    persistent   live before, during and after the step
    boundary     the moment after an action
    reserved     what the process takes from the device: the allocator's blocks and the driver's own memory
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainwright.ir.action import Action, Alloc, Collective, Compute, Free, Move, Recv, Wait
from trainwright.ir.buffer import PARTS
from trainwright.ir.program import Program
from trainwright.ir.site import Site
from trainwright.units import GIB, MIB, Bytes

TEMPORARY: Final = PARTS.index("temporary")
WIRE: Final = PARTS.index("wire_buffers")

ALLOCATOR_FACTOR: Final = 1.04
"""Reserved over allocated memory: median of 27 published readings of PyTorch's allocator, which range from 1.03 to 1.09.

Source: SimuMax (MooreThreads), benchmark tables of its README and docs, dense models on B200.
"""

CONTEXT_BYTES: Final = 1 * GIB
"""Driver context, libraries and collective buffers of a GPU process.

An assumption (about 0.5 GiB of context, the rest NCCL); large jobs report more.
"""

LOCAL_CONTEXT_BYTES: Final = 256 * MIB
"""Resident memory of a Python process that has imported torch, before it holds a tensor: an assumption."""

FITS_BELOW: Final = 0.88
FAILS_ABOVE: Final = 1.05
"""Shares of the capacity; between them a plan is risky.

A choice, after the BLOOM engineering logs (bigscience-workshop/bigscience): of six runs there that died of memory five were foretold
above 1.05 of the capacity by such a ledger and one at 0.82, and two that ran were foretold at 1.03.
"""

Bytewise = NDArray[np.int64]


def changes(action: Action) -> Iterator[tuple[str, int]]:
    """What an action brings to life (+1) and ends (-1), by the kind of buffer. The wire's own are not among them."""
    match action:
        case Compute(writes=writes, accumulates=accumulates, fresh=fresh):
            yield from ((one.ref.tensor, 1) for one in writes)
            if accumulates is not None and fresh:
                yield accumulates.ref.tensor, 1
        case Collective(source=source, target=target):
            if target != source:
                yield target.tensor, 1
        case Recv(buffer=buffer) | Alloc(buffer=buffer):
            yield buffer.tensor, 1
        case Move(target=target):
            yield target.tensor, 1
        case Free(buffers=buffers):
            yield from ((ref.tensor, -1) for ref in buffers)
        case _:
            pass


def held_on_the_wire(actions: Sequence[Action]) -> list[Bytes]:
    """Change of the wire's own buffers at each action: a Collective takes them, its Wait gives them back."""
    taken: dict[Site, Bytes] = {}
    found = []
    for action in actions:
        change = 0
        if isinstance(action, Collective) and action.wire_buffer_bytes:
            taken[action.site] = change = action.wire_buffer_bytes
        elif isinstance(action, Wait) and action.kind == "collective":
            change = -taken.pop(action.site, 0)
        found.append(change)
    assert not taken, "an exchange with wire buffers must end in the template that starts it"
    return found


def temporary_of(action: Action) -> int:
    """What an action holds inside, beyond what it reads and writes."""
    return action.temporary_bytes if isinstance(action, Compute) else 0


def live_deltas(program: Program, actions: Sequence[Action]) -> list[Bytes]:
    """Change of live bytes at each action's end."""
    on_the_wire = held_on_the_wire(actions)
    sizes = program.buffers
    return [
        held + sum(sign * sizes[tensor].num_bytes for tensor, sign in changes(action))
        for action, held in zip(actions, on_the_wire, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Course:
    """What a template does to memory.

    Running sums by part after each action, [num_actions, num_parts], and what is held inside each, [num_actions].
    """

    after: Bytewise
    temporary: Bytewise

    @classmethod
    def of(cls, program: Program, actions: Sequence[Action]) -> Course:
        """The course of one run."""
        delta = np.zeros((len(actions), len(PARTS)), dtype=np.int64)
        part_of = {name: (PARTS.index(buffer.part), buffer.num_bytes) for name, buffer in program.buffers.items()}
        for index, (action, held) in enumerate(zip(actions, held_on_the_wire(actions), strict=True)):
            delta[index, WIRE] = held
            for tensor, sign in changes(action):
                part, num_bytes = part_of[tensor]
                delta[index, part] += sign * num_bytes
        return cls(np.cumsum(delta, axis=0), np.array([temporary_of(action) for action in actions], dtype=np.int64))

    @property
    def change(self) -> Bytewise:
        """What a whole run leaves behind, by part."""
        return self.after[-1] if len(self.after) else np.zeros(len(PARTS), dtype=np.int64)

    @property
    def highest(self) -> tuple[int, int]:
        """Action inside which most is held, and at whose end most is live: indices."""
        total = self.after.sum(axis=1)
        return int(np.argmax(total + self.temporary)), int(np.argmax(total))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """Memory of one role. `parts` are those at the instant of the peak, and sum to it; `peak_run` and `peak_action` tell where that is."""

    position: int
    num_ranks: int
    peak_bytes: Bytes
    parts: Mapping[str, Bytes]
    boundary_peak_bytes: Bytes
    boundary_parts: Mapping[str, Bytes]
    persistent: Mapping[str, Bytes]
    peak_run: int
    peak_action: int

    @property
    def persistent_bytes(self) -> Bytes:
        """What lives across steps."""
        return sum(self.persistent.values())


@dataclass(frozen=True)
class Memory:
    """Memory of a Program: each role's, and the verdict against a capacity."""

    program: Program
    capacity_bytes: Bytes
    context_bytes: Bytes
    allocator_factor: float

    @cached_property
    def courses(self) -> dict[str, Course]:
        """The course of every template."""
        return {name: Course.of(self.program, actions) for name, actions in self.program.templates.items()}

    @cached_property
    def roles(self) -> tuple[RoleMemory, ...]:
        """Every role's memory."""
        return tuple(self.role(position) for position in range(len(self.program.roles)))

    def persistent(self, position: int) -> Bytewise:
        """What a role holds before the step, by part."""
        held = np.zeros(len(PARTS), dtype=np.int64)
        for _, ref in self.program.roles[position].persistent:
            buffer = self.program.buffers[ref.tensor]
            held[PARTS.index(buffer.part)] += buffer.num_bytes
        return held

    def entered(self, position: int) -> Bytewise:
        """What is live when each run of a role begins, [num_runs, num_parts]."""
        change = [self.courses[run.template].change for run in self.program.roles[position].runs]
        before = np.cumsum([self.persistent(position), *change], axis=0)
        return before[:-1]

    def role(self, position: int) -> RoleMemory:
        """Peaks of one role, and what they are made of."""
        role = self.program.roles[position]
        entered = self.entered(position)
        names = [run.template for run in role.runs]
        tops = {name: self.tops(name) for name in set(names)}
        level = entered.sum(axis=1)
        inside, boundary = level + [tops[name][0] for name in names], level + [tops[name][1] for name in names]
        peak_run, boundary_run = int(np.argmax(inside)), int(np.argmax(boundary))
        course = self.courses[names[peak_run]]
        action = course.highest[0]
        parts = entered[peak_run] + course.after[action]
        parts[TEMPORARY] += course.temporary[action]
        other = self.courses[names[boundary_run]]
        boundary_parts = entered[boundary_run] + other.after[other.highest[1]]
        return RoleMemory(
            position=position,
            num_ranks=role.multiplicity,
            peak_bytes=int(inside[peak_run]),
            parts=_named(parts),
            boundary_peak_bytes=int(boundary[boundary_run]),
            boundary_parts=_named(boundary_parts),
            persistent=_named(self.persistent(position)),
            peak_run=peak_run,
            peak_action=action,
        )

    def tops(self, name: str) -> tuple[int, int]:
        """Most that a run adds to what was live at its beginning: inside an action, and at an action's end."""
        course = self.courses[name]
        if not len(course.after):
            return 0, 0
        total = course.after.sum(axis=1)
        return int((total + course.temporary).max()), int(total.max())

    def curve(self, position: int) -> Bytewise:
        """Live bytes by part after every action of a role, [num_actions, num_parts]: for reports."""
        entered = self.entered(position)
        runs = self.program.roles[position].runs
        return np.concatenate([entered[number] + self.courses[run.template].after for number, run in enumerate(runs)])

    def at_peak(self, position: int) -> Counter[str]:
        """How many buffers of each kind are live at a role's peak. What is no buffer (inside an action, on the wire) is left out."""
        mine = self.roles[position]
        runs = self.program.roles[position].runs
        counts: Counter[str] = Counter(ref.tensor for _, ref in self.program.roles[position].persistent)
        for name, times in Counter(run.template for run in runs[: mine.peak_run]).items():
            for tensor, change in self.counted[name].items():
                counts[tensor] += change * times
        for action in self.program.templates[runs[mine.peak_run].template][: mine.peak_action + 1]:
            for tensor, sign in changes(action):
                counts[tensor] += sign
        return counts

    @cached_property
    def counted(self) -> dict[str, Counter[str]]:
        """By how many a run of each template changes the number of live buffers of each kind."""
        found: dict[str, Counter[str]] = {}
        for name, actions in self.program.templates.items():
            found[name] = Counter()
            for action in actions:
                for tensor, sign in changes(action):
                    found[name][tensor] += sign
        return found

    # --- against the device --------------------------------------------------------------------------------------------------------

    @property
    def fullest(self) -> RoleMemory:
        """The role with the highest peak, the first of them."""
        return max(self.roles, key=lambda role: role.peak_bytes)

    @property
    def peak_bytes(self) -> Bytes:
        """The highest peak of any role."""
        return self.fullest.peak_bytes

    @property
    def reserved_bytes(self) -> Bytes:
        """What the fullest process takes from its device."""
        return math.ceil(self.peak_bytes * self.allocator_factor) + self.context_bytes

    @property
    def verdict(self) -> str:
        """fits, risky, or does not fit."""
        share = self.reserved_bytes / self.capacity_bytes
        if share < FITS_BELOW:
            return "fits"
        return "risky" if share <= FAILS_ABOVE else "does not fit"


def _named(parts: Bytewise) -> dict[str, Bytes]:
    return dict(zip(PARTS, map(int, parts), strict=True))
