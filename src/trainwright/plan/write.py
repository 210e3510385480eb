"""Write: a Plan as the text of a plan file, and changes to a text that keep its comments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from trainwright.plan.plan import Plan
from trainwright.problems import PlanError, Problem
from trainwright.spec import catalog, reading

if TYPE_CHECKING:
    from trainwright.spec.cluster import Cluster
    from trainwright.spec.model import Model


def dump(plan: Plan) -> str:
    """The text of a plan file that reads back as an equal Plan.

    Paths stay as they were written: they are relative to the file that the plan came from, so the text belongs beside it.
    Raises PlanError for a model or cluster that was made in Python and is in no file.
    """
    parallel = {axis: _table(getattr(plan.parallel, axis)) for axis in (*plan.parallel.order, "expert")}
    tables: dict[str, Mapping[str, Any]] = {
        "model": _model(plan),
        "cluster": _cluster(plan),
        "batch": _table(plan.batch),
        "precision": _table(plan.precision),
        "parallel": parallel,
        "recompute": _recompute(plan),
        "optimizer": _table(plan.optimizer),
        "run": _table(plan.run),
    }
    return "\n".join(_lines(tables))


def edit(text: str, settings: Mapping[str, Any]) -> str:
    r"""The same text with other values at dotted paths; comments, order and spacing stay. None takes a setting out.

    >>> print(edit("[run]\nsteps = 5  # short\n", {"run.steps": 7, "run.seed": 1}))
    [run]
    steps = 7  # short
    seed = 1
    <BLANKLINE>

    Raises PlanError where a path leads through something that is no table, and tomlkit's ParseError for a text that is no TOML.
    """
    import tomlkit

    document = tomlkit.parse(text)
    for path, value in settings.items():
        *around, name = path.split(".")
        table: Any = document
        for depth, step in enumerate(around):
            if step not in table:
                table[step] = tomlkit.table() if depth == 0 else tomlkit.inline_table()
            table = table[step]
            if not isinstance(table, dict):
                raise PlanError(Problem(f"{step} is no table", path=path, given=value))
        if value is None:
            table.pop(name, None)
        else:
            table[name] = _item(value, inline=bool(around))
    return tomlkit.dumps(document)


def _item(value: object, *, inline: bool) -> Any:  # noqa: ANN401 - any TOML value
    """A value as tomlkit takes it: arrays as lists, and a table inside a table in one line."""
    import tomlkit

    match value:
        case Mapping():
            table = tomlkit.inline_table() if inline else tomlkit.table()
            table.update({name: _item(one, inline=True) for name, one in value.items()})
            return table
        case list() | tuple():
            return [_item(one, inline=True) for one in value]
        case _:
            return value


def _model(plan: Plan) -> Mapping[str, Any]:
    """How the plan file named its model, or the model's name in the catalog."""
    written = plan.source.model
    if "config" in written or written.get("name") == plan.model.name:
        return written
    if plan.model.name in catalog.model_names() and catalog.model(plan.model.name) == plan.model:
        return {"name": plan.model.name}
    raise PlanError(_in_no_file("model", plan.model))


def _cluster(plan: Plan) -> Mapping[str, Any]:
    """The shortest table that reads as the plan's cluster."""
    cluster = plan.cluster
    counts = {"nodes": cluster.num_nodes, "devices_per_node": cluster.devices_per_node}
    money = {} if cluster.usd_per_device_hour is None else {"usd_per_device_hour": cluster.usd_per_device_hour}
    ways: tuple[dict[str, Any], ...] = (
        {**plan.source.cluster},
        {**plan.source.cluster, **counts},
        {"name": cluster.name, **counts},
        {"device": cluster.device.name, **counts, "stack": cluster.stack.name, **money},
        {"name": cluster.name, "device": cluster.device.name, **counts, "stack": cluster.stack.name, **money},
    )
    for table in ways:
        if "file" in table or _reads_as(table, cluster):
            return table
    raise PlanError(_in_no_file("cluster", cluster))


def _reads_as(table: Mapping[str, Any], cluster: Cluster) -> bool:
    try:
        found = reading.cluster_from_dict(table)
    except PlanError:
        return False
    if found.is_local and "devices_per_node" not in table:  # takes as many processes as the plan needs
        found = found.with_devices(cluster.num_devices)
    return found == cluster


def _in_no_file(noun: str, thing: Model | Cluster) -> Problem:
    return Problem(
        f'the {noun} "{thing.name}" was made in Python and is in no file, so a plan file cannot name it',
        path=noun,
        given=thing.name,
        allowed=f"a {noun} of the catalog, or one read from a file",
    )


def _recompute(plan: Plan) -> Mapping[str, Any]:
    table = _table(plan.recompute)
    return table if plan.recompute.policy == "blocks" else {name: value for name, value in table.items() if name != "blocks"}


def _table(part: Any) -> dict[str, Any]:  # noqa: ANN401 - any dataclass of Plan
    """Fields by name. Left out: what is None, and an empty array that is the default."""
    found = {one.name: (getattr(part, one.name), one.default) for one in fields(part)}
    return {name: value for name, (value, default) in found.items() if value is not None and (value != () or default in {MISSING, None})}


def _lines(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, table in tables.items():
        if table:
            yield f"[{name}]"
            yield from (f"{key} = {_value(value)}" for key, value in table.items())
            yield ""


def _value(value: object) -> str:
    """A value in TOML; a dataclass or mapping is an inline table."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(_value(one) for one in value)}]"
        case Mapping():
            return f"{{ {', '.join(f'{name} = {_value(one)}' for name, one in value.items())} }}"
        case _:
            return _value(_table(value))
