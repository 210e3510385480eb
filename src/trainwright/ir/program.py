"""A Program: what every rank does in one step, stored so that its size does not depend on the number of microbatches.

A **template** is the list of actions of one slot, with relative names (see `ref`), shared by all microbatches and by all stages
that are alike. A **role** is one position on the pipeline axis: all its ranks do the same. Its **runs** say which template it goes
through, for which stage and microbatch, in which order. `actions` expands them; simulator and executor use the same object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from trainwright.ir.action import Action, Place, bind
from trainwright.ir.buffer import Buffer
from trainwright.ir.layout import Layout
from trainwright.ir.ref import Ref
from trainwright.ir.verify import verify
from trainwright.problems import Problem
from trainwright.units import Bytes


@dataclass(frozen=True, slots=True)
class Run:
    """One pass through a template: of which stage (None: of the position as a whole), for which microbatch (None: for the step)."""

    template: str
    stage: int | None = None
    microbatch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """All ranks of one pipeline position: `multiplicity` ranks with one program.

    `persistent` buffers live before, during and after the step; the key is the stage that owns them and the stage's relative name.
    """

    position: int
    multiplicity: int
    runs: tuple[Run, ...]
    persistent: Mapping[tuple[int, Ref], Layout] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One optimizer step of every rank.

    `sizes` maps each mesh axis to its size, in mesh order (rank = row-major). `first_block` gives the number of a stage's first
    block. `buffers` says what each kind of buffer is, by `Ref.tensor`. `owes` names the strategies whose pass is still to come: their
    boundaries and sums may be missing, nothing else.
    """

    sizes: Mapping[str, int]
    templates: Mapping[str, tuple[Action, ...]]
    roles: tuple[Role, ...]
    first_block: Mapping[int, int]
    buffers: Mapping[str, Buffer]
    owes: frozenset[str] = frozenset()

    @property
    def num_ranks(self) -> int:
        """Ranks of all roles."""
        return sum(role.multiplicity for role in self.roles)

    def place(self, role: Role, run: Run) -> Place:
        """Where a run takes place."""
        return Place(
            position=role.position,
            num_positions=len(self.roles),
            stage=run.stage,
            microbatch=run.microbatch,
            first_block=0 if run.stage is None else self.first_block[run.stage],
        )

    def actions(self, position: int) -> Iterator[Action]:
        """The actions of one role in order, with absolute names."""
        role = self.roles[position]
        for run in role.runs:
            place = self.place(role, run)
            for action in self.templates[run.template]:
                yield bind(action, place)

    def persistent(self, position: int) -> Iterator[Ref]:
        """The absolute names of a role's persistent buffers."""
        for stage, ref in self.roles[position].persistent:
            yield ref.at(None, self.first_block[stage])

    def verify(self) -> list[Problem]:
        """What is unsound about this Program; empty if nothing is. See `verify` in the file of that name."""
        return verify(self)

    def num_bytes(self, ref: Ref) -> Bytes:
        """Size of a buffer on one rank."""
        return self.buffers[ref.tensor].num_bytes
