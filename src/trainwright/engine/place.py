"""Where a rank stands in the mesh, and who else is in its groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

from trainwright.ir.layout import Group
from trainwright.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's coordinates."""

    plan: Plan
    rank: int
    coordinates: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Look up the coordinates once: they are asked for at every action."""
        object.__setattr__(self, "coordinates", self.plan.coordinates(self.rank))

    def coordinate(self, axis: str) -> int:
        """This rank's place along an axis."""
        return self.coordinates[axis]

    @property
    def replica(self) -> int:
        """Which part of the batch this rank sees."""
        return self.coordinate("data") * self.plan.size("zero") + self.coordinate("zero")

    def peer(self, position: int) -> int:
        """The rank at another pipeline position that shares all other coordinates."""
        return self.plan.rank_of({**self.coordinates, "pipeline": position})

    def members(self, group: Group) -> tuple[int, ...]:
        """The ranks of this rank's group, in the order of their coordinates."""
        choices = [group.coordinates(axis) or range(self.plan.size(axis)) for axis in group.axes]
        ranks = (self.plan.rank_of({**self.coordinates, **dict(zip(group.axes, places, strict=True))}) for places in product(*choices))
        return tuple(sorted(ranks))
