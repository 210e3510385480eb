"""How a tensor is spread over the axes of the mesh.

Every parallel strategy is a combination of three moves, and a Layout has a word for each: *partition* (Shard), *replicate*
(Replicate, Partial) and *load or unload by liveness* (Residency).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank of the axis holds an equal piece along tensor dimension `dim`."""

    dim: int

    def __str__(self) -> str:
        return f"shard({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Each rank of the axis holds the same, whole tensor."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True, slots=True)
class Partial:
    """Each rank of the axis holds a whole tensor; the true value is their `op` ("sum" or "max")."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"partial({self.op})"


Placement = Shard | Replicate | Partial


class Residency(Enum):
    """What a rank keeps of a tensor in device memory, beyond what the placements say.

    GATHERED: the whole tensor (of this rank's other axes). SHARDED: its piece alone. OFFLOADED: nothing on the device, the
    piece in host memory. FREED: nothing.
    """

    GATHERED = "gathered"
    SHARDED = "sharded"
    OFFLOADED = "offloaded"
    FREED = "freed"


@dataclass(frozen=True, slots=True)
class Layout:
    """Placement by axis, axes not named being Replicate, and one Residency.

    >>> print(Layout((("tensor", Shard(1)), ("zero", Partial()))))
    tensor=shard(1) zero=partial(sum)
    """

    axes: tuple[tuple[str, Placement], ...] = ()
    residency: Residency = Residency.GATHERED

    def __getitem__(self, axis: str) -> Placement:
        """The placement on one axis."""
        return dict(self.axes).get(axis, Replicate())

    def on(self, axis: str, placement: Placement, residency: Residency | None = None) -> Layout:
        """The same layout with the placement on `axis` replaced."""
        others = tuple(pair for pair in self.axes if pair[0] != axis)
        mine = () if isinstance(placement, Replicate) else ((axis, placement),)
        return Layout(tuple(sorted(others + mine, key=lambda pair: pair[0])), residency or self.residency)

    def partial_axes(self) -> tuple[str, ...]:
        """The axes over which the tensor is still to be summed."""
        return tuple(axis for axis, placement in self.axes if isinstance(placement, Partial))

    def __str__(self) -> str:
        shown = " ".join(f"{axis}={placement}" for axis, placement in self.axes) or "replicate"
        return shown if self.residency is Residency.GATHERED else f"{shown} {self.residency.value}"


REPLICATED = Layout()


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that take part in a collective: they differ in these axes only.

    `only` restricts an axis to listed coordinates, for instance the two ends of a pipeline that share an embedding.

    >>> str(Group(("tensor",))), str(Group(("pipeline",), (("pipeline", (0, 3)),)))
    ('tensor', 'pipeline[0,3]')
    """

    axes: tuple[str, ...]
    only: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def coordinates(self, axis: str) -> tuple[int, ...] | None:
        """The listed coordinates on `axis`, None if all take part."""
        return dict(self.only).get(axis)

    def size(self, sizes: dict[str, int]) -> int:
        """Number of ranks in one group, given the size of each mesh axis."""
        total = 1
        for axis in self.axes:
            listed = self.coordinates(axis)
            total *= sizes[axis] if listed is None else len(listed)
        return total

    def __str__(self) -> str:
        listed = {axis: f"[{','.join(map(str, places))}]" for axis, places in self.only}
        return "+".join(axis + listed.get(axis, "") for axis in self.axes)
