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
    def position(self) -> int:
        """This rank's place in the pipeline."""
        return self.coordinates["pipeline"]

    @property
    def column(self) -> int:
        """Which piece of the cut matrices this rank holds."""
        return self.coordinates["tensor"]

    @property
    def num_columns(self) -> int:
        """Pieces that matrices are cut into."""
        return self.plan.size("tensor")

    @property
    def cuts_sequence(self) -> bool:
        """The residual stream is cut along the sequence."""
        return self.plan.parallel.tensor.sequence and self.num_columns > 1

    def slice_of(self, num_elements: int) -> tuple[int, int]:
        """This rank's part of a flat buffer that is updated in pieces of `num_elements`."""
        begin = self.coordinates["zero"] * num_elements
        return begin, begin + num_elements

    def owned(self, num_elements: int, num_replicated: int) -> tuple[int, int]:
        """The range of a gradient buffer of `num_elements` that this rank counts in the norm: every logical element has one owner.

        Later data replicas own nothing; later tensor ranks nothing of the first `num_replicated` elements, which all of them hold.
        """
        if self.coordinates["data"]:
            return 0, 0
        if not self.column:
            return 0, num_elements
        begin, _ = self.slice_of(num_elements)
        return min(max(num_replicated - begin, 0), num_elements), num_elements

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
