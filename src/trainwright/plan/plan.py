"""Plan: how one model is trained on one cluster, and which rank sits where in the mesh.

Nothing here reads files or validates: `load` reads, `check` finds what is wrong, `write` writes back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from trainwright.plan.source import Source
from trainwright.problems import PlanError, Problem, nearest
from trainwright.spec.batch import Batch
from trainwright.spec.cluster import Cluster
from trainwright.spec.model import Model
from trainwright.spec.optimizer import Optimizer
from trainwright.spec.precision import Precision
from trainwright.spec.run_settings import RunSettings
from trainwright.strategies.context import Context
from trainwright.strategies.data import Data
from trainwright.strategies.expert import Expert
from trainwright.strategies.pipeline import Pipeline
from trainwright.strategies.recompute import Recompute
from trainwright.strategies.tensor import Tensor
from trainwright.strategies.zero import Zero

AXES: Final = ("pipeline", "data", "zero", "context", "tensor")

_NAMES_IN_THE_FILE: Final = MappingProxyType({"cluster.nodes": "cluster.num_nodes"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """The `[parallel]` table: the axes of the mesh.

    order   the five axes, outermost first, as the lines of the file had them; it numbers the ranks and nothing else.
    expert  is no axis of its own: it is laid over the ranks of data, zero and context.
    """

    order: tuple[str, ...] = AXES
    pipeline: Pipeline = field(default_factory=Pipeline)
    data: Data = field(default_factory=Data)
    zero: Zero = field(default_factory=Zero)
    context: Context = field(default_factory=Context)
    expert: Expert = field(default_factory=Expert)
    tensor: Tensor = field(default_factory=Tensor)

    def size(self, axis: str) -> int:
        """Number of ranks along one axis.

        >>> Parallel(tensor=Tensor(size=4)).size("tensor")
        4
        """
        return int(getattr(self, axis).size)

    @property
    def strategies(self) -> tuple[Any, ...]:
        """The options of every strategy, axes and expert."""
        return tuple(getattr(self, one.name) for one in fields(self) if one.name != "order")

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis, in mesh order."""
        return {axis: self.size(axis) for axis in self.order}


def mesh_order(lines: tuple[str, ...]) -> tuple[str, ...]:
    """All five axes in the order of the given lines; an absent one follows the axis that it follows by default.

    >>> mesh_order(("tensor", "zero"))
    ('pipeline', 'data', 'tensor', 'zero', 'context')
    """
    order = [axis for axis in lines if axis in AXES]
    for place, axis in enumerate(AXES):
        if axis not in order:
            order.insert(order.index(AXES[place - 1]) + 1 if place else 0, axis)
    return tuple(order)


def cut_layers(num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """Blocks of each virtual stage when the plan does not say; None if there is no such cut.

    Even if it divides. Else, if two more would divide, the first and the last stage get one block fewer: embedding and head count
    as a block (Llama 3 405B was cut so: Grattafiori et al. 2024, "The Llama 3 Herd of Models", 3.3.2).

    >>> cut_layers(32, 4), cut_layers(126, 4), cut_layers(5, 2)
    ((8, 8, 8, 8), (31, 32, 32, 31), None)
    """
    if num_layers >= num_stages and num_layers % num_stages == 0:
        return (num_layers // num_stages,) * num_stages
    blocks, left = divmod(num_layers + 2, num_stages)
    if left or blocks < 2 or num_stages < 2:
        return None
    return (blocks - 1, *(blocks,) * (num_stages - 2), blocks - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a model is trained on a cluster. `source` says where it was written and plays no part in equality."""

    model: Model
    cluster: Cluster
    batch: Batch
    precision: Precision = field(default_factory=Precision)
    parallel: Parallel = field(default_factory=Parallel)
    recompute: Recompute = field(default_factory=Recompute)
    optimizer: Optimizer = field(default_factory=Optimizer)
    run: RunSettings = field(default_factory=RunSettings)
    source: Source = field(default_factory=Source, compare=False, repr=False)

    def size(self, axis: str) -> int:
        """Number of ranks along one axis."""
        return self.parallel.size(axis)

    @property
    def num_devices(self) -> int:
        """Ranks of the mesh: the product of its sizes. `check` compares it with the devices of the cluster."""
        return math.prod(self.parallel.sizes.values())

    @property
    def num_replicas(self) -> int:
        """Model replicas that see different data: data times zero."""
        return self.size("data") * self.size("zero")

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.run.num_steps(self.batch.global_sequences * self.batch.sequence_tokens)

    @property
    def num_microbatches(self) -> int:
        """Microbatches that one replica sees in a step (M)."""
        return self.batch.global_sequences // (self.num_replicas * self.batch.microbatch_sequences)

    @property
    def num_stages(self) -> int:
        """Virtual stages: positions times chunks."""
        return self.parallel.pipeline.size * self.parallel.pipeline.chunks

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Blocks of each virtual stage, in model order. Raises PlanError where the plan gives none and no automatic cut exists."""
        if self.parallel.pipeline.layers:
            return self.parallel.pipeline.layers
        cut = cut_layers(self.model.num_layers, self.num_stages)
        if cut is None:
            message = f"{self.model.num_layers} layers cannot be cut into {self.num_stages} stages"
            raise PlanError(Problem(message, path="parallel.pipeline.size", given=self.parallel.pipeline.size))
        return cut

    def coordinates(self, rank: int) -> dict[str, int]:
        """Place of a global rank on each axis, in mesh order; the last axis varies fastest.

        Raises ValueError for a rank outside the mesh.
        """
        if not 0 <= rank < self.num_devices:
            message = f"rank {rank} is not one of 0 to {self.num_devices - 1}"
            raise ValueError(message)
        places: dict[str, int] = {}
        for axis in reversed(self.parallel.order):
            rank, places[axis] = divmod(rank, self.size(axis))
        return {axis: places[axis] for axis in self.parallel.order}

    def rank_of(self, coordinates: Mapping[str, int]) -> int:
        """Global rank at a place; an axis that is not named counts as 0."""
        rank = 0
        for axis, size in self.parallel.sizes.items():
            rank = rank * size + coordinates.get(axis, 0)
        return rank

    def ranks_of(self, coordinates: Mapping[str, int]) -> tuple[int, ...]:
        """Every rank whose place agrees with the named coordinates, in order; `{"pipeline": 0}` is all of position 0."""
        ranks = [0]
        for axis, size in self.parallel.sizes.items():
            places = (coordinates[axis],) if axis in coordinates else range(size)
            ranks = [rank * size + place for rank in ranks for place in places]
        return tuple(ranks)

    def path(self, written: str) -> Path:
        """A path as the plan wrote it, taken relative to the plan file's folder."""
        return self.source.folder / Path(written).expanduser()

    def replace_settings(self, settings: Mapping[str, Any]) -> Plan:
        """The plan with other values at dotted paths, as in the file. Values are taken as they are: run `check` after.

        Only Plan's own tables can be set so; another model or cluster is put in with `dataclasses.replace`.
        Raises PlanError naming the nearest setting for a path that is none.
        """
        plan = self
        for path, value in settings.items():
            plan = _replaced(plan, path, tuple(_NAMES_IN_THE_FILE.get(path, path).split(".")), value)
        return plan


def _replaced(part: Any, path: str, names: tuple[str, ...], value: object) -> Any:  # noqa: ANN401 - any dataclass of Plan
    """A copy of a nested dataclass with one field changed; the types inside are those of Plan, which mypy cannot follow through a path."""
    first, *rest = names
    known = [one.name for one in fields(part)] if is_dataclass(part) else []
    if first not in known:
        raise PlanError(_no_such_setting(path, first, known, given=value))
    inner = _replaced(getattr(part, first), path, tuple(rest), value) if rest else value
    return replace(part, **{first: inner})


def _no_such_setting(path: str, name: str, known: list[str], *, given: object) -> Problem:
    known = [one for one in known if one != "source"]  # where the plan was written is no setting of it
    guess = nearest(name, known)
    return Problem(
        f"{path} is not a setting of a plan",
        path=path,
        given=given,
        allowed=", ".join(known) or "nothing below this",
        attempt=f"{path.replace(name, guess)}" if guess else "`trainwright schema` lists every setting",
    )
