"""Reading: turns tables, as TOML gives them, into the models, devices, stacks and clusters they declare.

Every function finds all problems of its table before it raises one PlanError. `where` is the dotted place of the table in its file
("cluster", or "" for a file that holds nothing else) and begins the path of each Problem.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, cast

from trainwright import units
from trainwright.problems import PlanError, Problem, nearest
from trainwright.spec import shelf
from trainwright.spec.bounds import choice_problems, count_problems, range_problems
from trainwright.spec.cluster import Cluster
from trainwright.spec.device import Device, Source
from trainwright.spec.formats import FORMATS
from trainwright.spec.model import SIZES, Model, RopeScaling
from trainwright.spec.stack import Stack

Table: TypeAlias = Mapping[str, Any]
Reader: TypeAlias = "Callable[[str, Any, list[Problem]], Any]"


def model_from_dict(table: Table, where: str = "model") -> Model:
    """Return the model that a table of a model's fields declares."""
    problems: list[Problem] = []
    values = _read(table, where, _MODEL_READERS, ("name", *SIZES), problems)
    _raise(problems)
    model = Model(**values)
    _raise(list(model.check()))
    return model


def device_from_dict(table: Table, where: str = "device") -> Device:
    """Return the device that a table declares; with `base`, a device of the catalog in which the other keys are replaced."""
    problems: list[Problem] = []
    path = _join(where, "base")
    base = table.get("base")
    if base is not None:
        problems += choice_problems(path, str(base), shelf.names("device"))
        _raise(problems)
        table = {**shelf.table("device", str(base), path), "name": f"{base}, changed", **{k: v for k, v in table.items() if k != "base"}}
    values = _read(table, where, _DEVICE_READERS, _DEVICE_REQUIRED, problems)
    _raise(problems)
    return Device(**values)


def stack_from_dict(table: Table) -> Stack:
    """Return the stack of a catalog file, which the tests keep right: nothing is checked here."""
    values = {**table, "fitted_devices": tuple(table.get("fitted_devices", ()))}
    return Stack(**values)


def cluster_from_dict(table: Table, where: str = "cluster") -> Cluster:
    """Return the cluster that a `[cluster]` table or a cluster file declares.

    Without `device`, `name` is an entry of the catalog, and the other keys replace its values. With `device`, `name` is only a label.
    `device` is a name of the catalog, or a table that `device_from_dict` reads.
    """
    problems: list[Problem] = []
    table = _with_catalog(table, where, problems)
    values = _read(table, where, _CLUSTER_READERS, ("device", "nodes", "devices_per_node"), problems)
    _raise(problems)
    device: Device = values["device"]
    return Cluster(
        name=values.get("name") or f"{values['nodes']} x {values['devices_per_node']} {device.name}",
        device=device,
        num_nodes=values["nodes"],
        devices_per_node=values["devices_per_node"],
        nic_bytes_per_s=values.get("nic_bytes_per_s", device.nic_bytes_per_s),
        stack=values["stack"].on(device.name) if "stack" in values else _usual_stack(device),
        usd_per_device_hour=values.get("usd_per_device_hour"),
        watts_per_device=values.get("watts_per_device"),
        source=values.get("source", ""),
    )


def _usual_stack(device: Device) -> Stack:
    name = "local" if device.name == "local" else "default"
    return stack_from_dict({"name": name, **shelf.table("stack", name, "stack")}).on(device.name)


def _with_catalog(table: Table, where: str, problems: list[Problem]) -> Table:
    name = table.get("name")
    if "device" in table or name is None:
        return table
    path = _join(where, "name")
    if not isinstance(name, str) or name not in shelf.names("cluster"):
        problems.append(shelf.unknown("cluster", str(name), path))
        raise PlanError(problems)
    return {**shelf.table("cluster", name, path), **table}


def _read(table: Table, where: str, readers: Mapping[str, Reader], required: tuple[str, ...], problems: list[Problem]) -> dict[str, Any]:
    """Read each key with its reader; note keys that have none and required keys that are absent."""
    values: dict[str, Any] = {}
    for key, given in table.items():
        path = _join(where, key)
        if key in readers:
            values[key] = readers[key](path, given, problems)
        else:
            meant = nearest(key, readers)
            allowed = tuple(readers)
            attempt = _join(where, meant) if meant else None
            problems.append(Problem(f"unknown key {path}", path=path, given=given, allowed=allowed, attempt=attempt))
    for key in required:
        if key not in table:
            path = _join(where, key)
            problems.append(Problem(f"{path} is missing", path=path, attempt=f"{path} = {_EXAMPLES.get(key, '...')}"))
    return values


_EXAMPLES: Final = {
    "device": '"h100-sxm"',
    "nodes": "1",
    "devices_per_node": "8",
    "memory_bytes": '"80 GiB"',
    "memory_bytes_per_s": '"3350 GB/s"',
    "peak_flops_per_s": '{ bf16 = "989 TFLOP/s" }',
    "scale_up_bytes_per_s": '"450 GB/s"',
    "nic_bytes_per_s": '"400 Gb/s"',
}


def _text(path: str, given: object, problems: list[Problem]) -> str:
    if isinstance(given, str) and given:
        return given
    problems.append(Problem(f"{path} must be a text", path=path, given=given, allowed="a text in quotes"))
    return ""


def _switch(path: str, given: object, problems: list[Problem]) -> bool:
    if not isinstance(given, bool):
        problems.append(Problem(f"{path} must be true or false", path=path, given=given, allowed=("true", "false")))
    return given is True


def _count(path: str, given: object, problems: list[Problem]) -> int:
    found = list(count_problems(path, given))
    problems += found
    return 1 if found else cast("int", given)


def _number(path: str, given: object, problems: list[Problem]) -> float:
    found = list(range_problems(path, given, least=0.0, suggestion=1.0))
    problems += found
    return 0.0 if found else float(cast("float", given))


def _quantity(parse: Callable[[Any], float], *, positive: bool = True) -> Reader:
    def read(path: str, given: object, problems: list[Problem]) -> float:
        try:
            value = parse(given)
        except units.QuantityError as error:
            problems.append(Problem(f"{path}: {error}", path=path, given=error.given, allowed=error.allowed, attempt=error.attempt))
            return 1
        if positive and value <= 0:
            problems.append(Problem(f"{path} must be above 0", path=path, given=given, allowed="above 0"))
        return value

    return read


def _rates(path: str, given: object, problems: list[Problem]) -> dict[str, float]:
    if not isinstance(given, Mapping) or not given:
        problems.append(
            Problem(f"{path} must give a rate for each format", path=path, given=given, attempt=f'{path} = {{ bf16 = "989 TFLOP/s" }}')
        )
        return {}
    readers = {name: _quantity(units.parse_flops_per_s) for name in FORMATS}
    return _read(given, path, readers, (), problems)


def _sources(path: str, given: object, problems: list[Problem]) -> dict[str, Source]:
    found: dict[str, Source] = {}
    for field, entry in given.items() if isinstance(given, Mapping) else ():
        if isinstance(entry, str):
            found[field] = Source(entry, "unverified")
        elif isinstance(entry, Mapping) and isinstance(entry.get("text"), str) and entry.get("standing") in {"verified", "unverified"}:
            found[field] = Source(entry["text"], entry["standing"])
        else:
            allowed = 'a text, or { text = "...", standing = "verified" | "unverified" }'
            problems.append(Problem(f"{path}.{field} names no source", path=f"{path}.{field}", given=entry, allowed=allowed))
    return found


def _device(path: str, given: object, problems: list[Problem]) -> Device | None:
    try:
        if isinstance(given, Mapping):
            return device_from_dict({"name": "own device", **given}, path)
        name = _text(path, given, problems)
        return device_from_dict({"name": name, **shelf.table("device", name, path)}, path) if name else None
    except PlanError as error:
        problems += error.problems
        return None


def _stack(path: str, given: object, problems: list[Problem]) -> Stack | None:
    try:
        name = _text(path, given, problems)
        return stack_from_dict({"name": name, **shelf.table("stack", name, path)}) if name else None
    except PlanError as error:
        problems += error.problems
        return None


def _rope_scaling(path: str, given: object, problems: list[Problem]) -> RopeScaling | None:
    if not isinstance(given, Mapping):
        problems.append(Problem(f"{path} must be a table", path=path, given=given))
        return None
    names = tuple(field.name for field in dataclasses.fields(RopeScaling))
    readers: dict[str, Reader] = {name: _count if name == "original_max_positions" else _number for name in names}
    values = _read(given, path, readers, names, problems)
    return RopeScaling(**values) if set(values) >= set(names) and not problems else None


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _raise(problems: list[Problem]) -> None:
    if problems:
        raise PlanError(problems)


_RATE: Final = _quantity(units.parse_bytes_per_s)
_RATE_OR_NONE: Final = _quantity(units.parse_bytes_per_s, positive=False)

_MODEL_READERS: Final[Mapping[str, Reader]] = {
    **dict.fromkeys(("name", "source", "family", "norm", "positions", "activation"), _text),
    **dict.fromkeys(SIZES, _count),
    **dict.fromkeys(("norm_eps", "rope_theta", "dropout"), _number),
    **dict.fromkeys(("bias", "tied"), _switch),
    "rope_scaling": _rope_scaling,
}

_DEVICE_READERS: Final[Mapping[str, Reader]] = {
    **dict.fromkeys(("name", "title", "vendor"), _text),
    "memory_bytes": _quantity(units.parse_bytes),
    "memory_bytes_per_s": _RATE,
    "peak_flops_per_s": _rates,
    "scale_up_bytes_per_s": _RATE,
    "scale_up_domain": _count,
    "spans_nodes": _switch,
    "nic_bytes_per_s": _RATE_OR_NONE,
    "host_bytes_per_s": _RATE,
    "launch_s": _quantity(units.parse_seconds, positive=False),
    "watts": _number,
    "num_processors": _count,
    "sources": _sources,
}
_DEVICE_REQUIRED: Final = (
    "name",
    "memory_bytes",
    "memory_bytes_per_s",
    "peak_flops_per_s",
    "scale_up_bytes_per_s",
)

_CLUSTER_READERS: Final[Mapping[str, Reader]] = {
    "name": _text,
    "source": _text,
    "device": _device,
    "nodes": _count,
    "devices_per_node": _count,
    "nic_bytes_per_s": _RATE_OR_NONE,
    "stack": _stack,
    "usd_per_device_hour": _number,
    "watts_per_device": _number,
}
