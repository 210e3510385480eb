"""Schema: what a plan file may hold, as pydantic models and as JSON Schema.

The tables of the file are the dataclasses of `spec/` and `strategies/`, field by field: a new option there is a new setting here.
Pydantic checks names and types (strictly: `true` is no number, `4.0` is no count), the dataclasses' own `check` the values.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, create_model
from pydantic.fields import FieldInfo

from trainwright.plan.published import published
from trainwright.spec.batch import Batch
from trainwright.spec.bounds import MAX_COUNT
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
from trainwright.units import parse_bytes, parse_count

MAX_SIZE: Final = 1_000_000  # devices along one axis, or in a cluster: ten times the largest cluster that was announced


class Table(BaseModel):
    """A table of a plan file: unknown keys are refused, no value is converted, no number is NaN or infinite."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)


def table(cls: type, *, refined: Mapping[str, Any] | None = None, extra: Mapping[str, Any] | None = None) -> type[Table]:
    """The table whose keys are the fields of a dataclass. `refined` narrows types, `extra` adds keys that the dataclass has not."""
    hints = typing.get_type_hints(cls)
    fields: dict[str, Any] = {}
    for one in dataclasses.fields(cls):
        default = ... if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING else None
        if one.default is not dataclasses.MISSING:
            default = one.default
        fields[one.name] = ((refined or {}).get(one.name, _column(one.name, hints[one.name])), default)
    return create_model(cls.__name__, __base__=Table, __doc__=cls.__doc__, **fields, **(extra or {}))


def _column(name: str, hint: Any) -> Any:  # noqa: ANN401 - a type is any object
    """The pydantic type of one field: counts start at 1, an optional dataclass is a table of its own."""
    if hint is int:
        return Annotated[int, Field(ge=1, le=MAX_SIZE if name == "size" else MAX_COUNT)]
    if hint == tuple[int, ...]:
        return tuple[Annotated[int, Field(ge=1, le=MAX_COUNT)], ...]
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else ()
    if parts and dataclasses.is_dataclass(parts[0]):
        return table(typing.cast("type", parts[0])) | None
    return hint


Index: TypeAlias = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Tokens: TypeAlias = Annotated[
    int, BeforeValidator(parse_count), WithJsonSchema({"type": ["integer", "string"], "examples": ["15T"]}), Field(ge=1, le=10**18)
]
Budget: TypeAlias = Annotated[int, BeforeValidator(parse_bytes), WithJsonSchema({"type": "string", "examples": ["60 GiB"]})]

DeviceEntry: TypeAlias = Annotated[Any, WithJsonSchema({"type": ["string", "object"]})]  # `spec.reading` says what is wrong with one
Quantity: TypeAlias = Annotated[Any, WithJsonSchema({"type": ["number", "string"]})]


class ModelTable(Table):
    """The model: one of a catalog name, a Hugging Face config.json, or a module of your own."""

    name: str | None = Field(None, description="name in the catalog", examples=["llama-3-8b"])
    config: str | None = Field(None, description="path of a Hugging Face config.json, relative to the plan file")
    module: str | None = Field(None, description='"package.module:factory" (not landed yet)')


class ClusterTable(Table):
    """The cluster: a catalog name, a cluster file, or a device with its counts; beside a name or a file, other keys replace its values."""

    name: str | None = Field(None, description="name in the catalog; with device, a label", examples=["h100-64"])
    file: str | None = Field(None, description="path of a cluster file, relative to the plan file")
    device: DeviceEntry = Field(None, description="name of a device in the catalog, or a table that describes one")
    nodes: int | None = Field(None, ge=1, le=MAX_SIZE, description="machines")
    devices_per_node: int | None = Field(None, ge=1, le=MAX_SIZE, description="devices of one machine")
    nic_bytes_per_s: Quantity = Field(None, description="one direction, per device, between nodes", examples=["400 Gb/s"])
    stack: str | None = Field(None, description="software era: which calibration applies", examples=["default"])
    usd_per_device_hour: float | None = Field(None, ge=0, le=1e6, description="without it no money is shown")
    watts_per_device: float | None = Field(None, ge=0, le=1e6, description="the board limit if absent")
    source: str | None = Field(None, description="where these figures come from")


class OffloadTable(Table):
    """What rests in the memory of the host."""

    optimizer: bool = False


@functools.cache
def plan_table() -> type[Table]:
    """The whole plan file."""
    parts = (Pipeline, Data, Zero, Context, Expert, Tensor)
    axes: dict[str, Any] = {part.__name__.lower(): (table(part, refined=_REFINED.get(part)), None) for part in parts}
    about = "The axes of the mesh; the order of the lines is the mesh order, outermost first."
    parallel = create_model("Parallel", __base__=Table, __doc__=about, **axes)
    tables: dict[str, Any] = {
        "model": (ModelTable, ...),
        "cluster": (ClusterTable, ...),
        "batch": (table(Batch), ...),
        "precision": (table(Precision), None),
        "parallel": (parallel, None),
        "recompute": (table(Recompute, extra={"budget": (Budget | None, None)}), None),
        "offload": (OffloadTable, None),
        "optimizer": (table(Optimizer, refined=_REFINED[Optimizer]), None),
        "run": (table(RunSettings, refined=_REFINED[RunSettings]), None),
    }
    return create_model("PlanFile", __base__=Table, __doc__="How one model is trained on one cluster.", **tables)


_REFINED: Final[Mapping[type, Mapping[str, Any]]] = {
    Zero: {"stage": Annotated[int, Field(ge=1, le=3)], "prefetch": Index},
    Optimizer: {"warmup_steps": Index},
    RunSettings: {"seed": Index, "tokens": Tokens | None},
}


def column(path: tuple[str | int, ...]) -> FieldInfo | None:
    """What the plan file allows at a path; None where there is no such setting. An element of an array answers as the array."""
    at: Any = plan_table()
    found: FieldInfo | None = None
    for name in path:
        if isinstance(name, int):
            return found
        if at is None or name not in at.model_fields:
            return None
        found = at.model_fields[name]
        at = table_in(found)
    return found


def table_in(field: FieldInfo) -> type[Table] | None:
    """The table that a key holds, if it holds one."""
    for hint in (field.annotation, *typing.get_args(field.annotation)):
        if isinstance(hint, type) and issubclass(hint, Table):
            return hint
    return None


def names(path: tuple[str | int, ...] = ()) -> tuple[str, ...]:
    """Names that the table at a path may hold; none if it is no table."""
    field = column(path) if path else None
    inner = table_in(field) if field is not None else None if path else plan_table()
    return () if inner is None else tuple(inner.model_fields)


def schemas() -> dict[str, Any]:
    """JSON Schema of the plan file, of cluster files, and of the fields a model has, by name."""
    tables = {"Plan file": plan_table(), "Cluster file": _cluster_file(), "Model": table(Model)}
    return {title.split()[0].lower(): published(wanted.model_json_schema(), title) for title, wanted in tables.items()}


def _cluster_file() -> type[Table]:
    """A cluster file holds what [cluster] may hold, but names no further file."""
    own = {name: (one.annotation, one) for name, one in ClusterTable.model_fields.items() if name != "file"}
    return create_model("ClusterFile", __base__=Table, __doc__=ClusterTable.__doc__, **typing.cast("Any", own))
