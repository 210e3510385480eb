"""Load: a plan file, or a bare model name, to a Plan; every Problem at once.

A text goes through five steps: TOML to tables, overrides from the command line laid over them, names and types (`schema`), the
dataclasses of `spec/` and `strategies/`, and the laws of `check`. What one step finds wrong is set aside, so that the later steps can
still look at the rest.
"""

from __future__ import annotations

import copy
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import ValidationError

from trainwright.plan import refuse, schema
from trainwright.plan.check import check
from trainwright.plan.plan import AXES, Parallel, Plan, mesh_order
from trainwright.plan.source import Duplicate, Source, duplicates, locate
from trainwright.problems import PlanError, Problem, nearest
from trainwright.schedules import SCHEDULES
from trainwright.spec import catalog, reading
from trainwright.spec.batch import Batch
from trainwright.spec.cluster import Cluster
from trainwright.spec.hugging_face import read_hf_config
from trainwright.spec.model import Model
from trainwright.spec.optimizer import Optimizer
from trainwright.spec.precision import Precision
from trainwright.spec.run_settings import Checkpoint, RunSettings
from trainwright.strategies.recompute import Recompute

Command = Literal["predict", "prove", "run"]
Tables = dict[str, Any]
Part = TypeVar("Part")

MAX_FILE_BYTES: Final = 1_000_000  # a plan file is a page; what is larger was given by mistake
_BOMS: Final = {b"\xef\xbb\xbf": "UTF-8", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_PLACE: Final = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def load(plan: str | Path, overrides: Mapping[str, Any] | None = None, command: Command = "predict") -> Plan:
    """Read a plan file, or make the default plan of a model in the catalog.

    overrides  values by dotted path, as on the command line (`{"parallel.tensor.size": "4"}`): text is read as TOML where it is a value.
    command    which default plan a bare model name means: 8 x h100-sxm for predict, one local device for run and prove.

    Raises PlanError with every Problem that was found.
    """
    if _is_name(plan):
        return read(_default_text(str(plan), overrides or {}, command), overrides=overrides)
    file = Path(plan)
    return read(_text(file), file=file, overrides=overrides)


def read(text: str, *, file: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Plan:
    """A Plan from TOML text; `file` says where it came from, and paths in it are relative to its folder. Raises PlanError."""
    tables = _tables(text, file)
    written = tuple(tables["parallel"]) if isinstance(tables.get("parallel"), dict) else ()
    draft = Draft(source=Source(file=file, text=text, lines=locate(text)), tables=tables)
    draft.override(overrides or {})
    draft.validate()
    plan = draft.plan(mesh_order(written))
    draft.found += check(plan, frozenset(draft.wrong))
    if draft.found:
        raise PlanError(_in_order(_placed(draft.found, plan.source)))
    return plan


@dataclass(slots=True, kw_only=True)
class Draft:
    """A plan half read: what was written, what was found wrong, and at which paths, so that nothing is said twice."""

    source: Source
    tables: Tables
    found: list[Problem] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)
    checked: Any = None

    def refuse(self, path: str, problems: Iterator[Problem] | tuple[Problem, ...]) -> None:
        """Note Problems, and that the setting they speak of cannot be used."""
        self.found += problems
        self.wrong.add(path)

    def override(self, overrides: Mapping[str, Any]) -> None:
        """Lay the values of the command line over those of the file."""
        names = {path.lstrip("-").replace("-", "_"): value for path, value in overrides.items()}
        self.source = replace(self.source, overridden=frozenset(names))
        for path, value in names.items():
            *around, name = path.split(".")
            table = self.tables
            for step in around:
                inner = table.setdefault(step, {})
                if not isinstance(inner, dict):
                    inner = table[step] = {}
                table = inner
            for rival in _rivals(path, value, names):
                table.pop(rival, None)
            table[name] = _value(value) if isinstance(value, str) else value

    def validate(self) -> None:
        """Check names and types; what is wrong is noted, and taken out or filled in until the rest can be read."""
        wanted = schema.plan_table()
        first = True
        while self.checked is None:
            try:
                self.checked = wanted.model_validate(_arrays_as_tuples(self.tables))
            except ValidationError as error:
                self.found += refuse.problems(error) if first else ()
                first = False
                for path in refuse.paths(error):
                    self.wrong.add(refuse.dotted(refuse.meant(path)))
                    _take_out(self.tables, path)

    def plan(self, order: tuple[str, ...]) -> Plan:
        """The Plan as far as it can be read; where model or cluster cannot, another stands in, and no check speaks of it."""
        checked = self.checked
        source = replace(self.source, model=dict(self.tables["model"]), cluster=dict(self.tables["cluster"]))
        if checked.offload is not None and checked.offload.optimizer:
            self.refuse("offload.optimizer", (_OFFLOAD,))
        return Plan(
            model=self._model(),
            cluster=self._cluster(),
            batch=_built(checked.batch, Batch),
            precision=_built(checked.precision, Precision),
            parallel=_parallel(checked.parallel, order),
            recompute=self._recompute(),
            optimizer=_built(checked.optimizer, Optimizer),
            run=_built(checked.run, RunSettings),
            source=source,
        )

    def _model(self) -> Model:
        table = self.checked.model
        if "model" not in self.wrong:
            kind = self._one_of("model", ("name", "config", "module"), 'name = "llama-3-8b"')
            try:
                match kind:
                    case "name":
                        return catalog.model(table.name)
                    case "config":
                        return _config(self.source.folder / table.config)
                    case "module":
                        self.refuse("model", (_MODULE,))
            except PlanError as error:
                self.refuse("model", _under(error, f"model.{kind}", getattr(table, str(kind))))
        return catalog.model(_STAND_IN_MODEL)

    def _recompute(self) -> Recompute:
        table = self.checked.recompute
        if table is None:
            return Recompute()
        if table.budget is not None:
            self.refuse("recompute", (_BUDGET,))
        policy = "blocks" if "blocks" in table.model_fields_set and "policy" not in table.model_fields_set else table.policy
        return Recompute(policy=policy, blocks=table.blocks)

    def _one_of(self, name: str, kinds: tuple[str, ...], example: str) -> str | None:
        """The one key of several that the table holds; a Problem and None if it holds none or more."""
        table = getattr(self.checked, name)
        given = [kind for kind in kinds if getattr(table, kind) is not None]
        if len(given) == 1:
            return given[0]
        if any(path.startswith(f"{name}.") for path in self.wrong):  # the missing one was written, wrongly
            self.wrong.add(name)
            return None
        message = f"[{name}] has {' and '.join(given)}, but one of them is enough" if given else f"[{name}] does not say which {name}"
        attempt = f"keep {name}.{given[0]} only" if given else f"[{name}] with {example}"
        path = f"{name}.{given[1]}" if given else name
        self.refuse(
            name,
            (
                Problem(
                    message,
                    path=path,
                    given=getattr(table, given[1]) if given else None,
                    allowed=f"one of {', '.join(kinds)}",
                    attempt=attempt,
                ),
            ),
        )
        return None

    def _cluster(self) -> Cluster:
        """The cluster; a local one that does not say how many devices it has takes as many processes as the sizes need."""
        table = dict(self.tables["cluster"].items())
        if not any(name in table for name in ("name", "file", "device")):
            self._one_of("cluster", ("name", "file", "device"), 'device = "h100-sxm", nodes = 8, devices_per_node = 8')
        if "cluster" not in self.wrong:
            try:
                cluster = _cluster_file(table, self.source) if "file" in table else reading.cluster_from_dict(table)
            except PlanError as error:
                found = tuple(problem for problem in error.problems if problem.path not in self.wrong)
                self.refuse("cluster", found)
            else:
                return (
                    cluster.with_devices(_num_ranks(self.checked.parallel))
                    if cluster.is_local and "devices_per_node" not in table
                    else cluster
                )
        return catalog.cluster(_STAND_IN_CLUSTER)


_RIVALS: Final[Mapping[str, tuple[str, ...]]] = {
    "model.name": ("config", "module"),
    "model.config": ("name", "module"),
    "model.module": ("name", "config"),
    "cluster.name": ("file", "device", "nodes", "devices_per_node", "stack", "usd_per_device_hour"),
    "cluster.file": ("name", "device"),
    "cluster.device": ("name", "file"),
}
"""What an override takes the place of."""


def _rivals(path: str, value: object, overrides: Mapping[str, object]) -> tuple[str, ...]:
    """What an override takes the place of. A recompute policy takes that of the file's `blocks`, unless it is the one that counts them."""
    if path == "recompute.policy" and value != "blocks" and "recompute.blocks" not in overrides:
        return ("blocks",)
    return _RIVALS.get(path, ())


_STAND_IN_MODEL: Final = "gpt2"
_STAND_IN_CLUSTER: Final = "local"
_STAND_INS: Final[Mapping[str, Any]] = {
    "model": {"name": _STAND_IN_MODEL},
    "cluster": {"name": _STAND_IN_CLUSTER},
    "batch": {"sequence_tokens": 1, "global_sequences": 1},
    "batch.sequence_tokens": 1,
    "batch.global_sequences": 1,
    "run.checkpoint.every": 1,
}
"""What fills the place of a required setting that is missing or wrong, so that the rest can be read; no check speaks of it."""

_MODULE: Final = Problem(
    "a model of your own module cannot be planned yet: this lands with generic modules",
    path="model.module",
    allowed="name, a model of the catalog, or config, a Hugging Face config.json of the GPT-2 or Llama kind",
    attempt='model.name = "llama-3-8b"',
)
_OFFLOAD: Final = Problem(
    "offloading the optimizer has not landed yet",
    path="offload.optimizer",
    given=True,
    allowed="false",
    attempt="offload.optimizer = false, with a larger parallel.zero.size",
)
_BUDGET: Final = Problem(
    "recomputing to a memory budget has not landed yet",
    path="recompute.budget",
    allowed='policy = "none", "selective" or "full", or blocks = N',
    attempt='recompute.policy = "selective"',
)


def _built(checked: Any, part: type[Part]) -> Part:  # noqa: ANN401 - a table made by `schema`
    """The dataclass that a checked table stands for; its defaults where the file has no such table."""
    if checked is None:
        return part()
    values = {name: getattr(checked, name) for name in checked.model_fields_set}
    if part is RunSettings and values.get("checkpoint") is not None:
        values["checkpoint"] = _built(values["checkpoint"], Checkpoint)
    return part(**values)


def _parallel(checked: Any, order: tuple[str, ...]) -> Parallel:  # noqa: ANN401 - a table made by `schema`
    if checked is None:
        return Parallel(order=order)
    kinds = {name: type(getattr(Parallel(), name)) for name in checked.model_fields_set}
    parts: dict[str, Any] = {name: _built(getattr(checked, name), kind) for name, kind in kinds.items()}
    pipeline = parts.get("pipeline")
    if pipeline is not None and "chunks" not in checked.pipeline.model_fields_set and pipeline.schedule in SCHEDULES:
        parts["pipeline"] = replace(pipeline, chunks=SCHEDULES.get(pipeline.schedule).DEFAULT_CHUNKS)
    return Parallel(order=order, **parts)


def _config(file: Path) -> Model:
    """The model of a Hugging Face config.json.

    Problems inside the file name it and the line; one of the file as a whole stands where the plan names it.
    """
    allowed = "the path of a Hugging Face config.json, relative to the plan file"
    reason = _why_no_file(file)
    if reason is not None:
        raise PlanError(Problem(f"the model's config {file} {reason}", path="model.config", allowed=allowed))
    try:
        return read_hf_config(file)
    except PlanError as error:
        raise PlanError(
            replace(problem, file=None, allowed=allowed) if problem.path == "model.config" else problem for problem in error.problems
        ) from None


def _why_no_file(file: Path) -> str | None:
    """Why there is no ordinary file of that name, as the end of a sentence; None if there is one."""
    try:
        if file.is_file():
            return None
        return "is no ordinary file" if file.exists() else "does not exist"
    except (OSError, ValueError) as error:
        return f"cannot be looked at: {error}"


def _num_ranks(checked: Any) -> int:  # noqa: ANN401 - a table made by `schema`
    parts = [getattr(checked, axis) for axis in AXES] if checked is not None else []
    return math.prod(getattr(part, "size", 1) for part in parts)


def _cluster_file(table: Tables, source: Source) -> Cluster:
    """The cluster of a file; the other keys of the plan's table replace the file's. Problems name the file and line they speak of."""
    file = source.folder / table["file"]
    try:
        text = _text(file)
        written = _tables(text, file)
    except PlanError as error:
        raise PlanError(replace(problem, path=problem.path or "cluster.file") for problem in error.problems) from None
    ours = {name: value for name, value in table.items() if name != "file"}
    try:
        return reading.cluster_from_dict({**written, **ours})
    except PlanError as error:
        lines = locate(text)
        inside = [(problem, (problem.path or "").removeprefix("cluster.")) for problem in error.problems]
        raise PlanError(
            problem if name.split(".")[0] in ours else replace(problem, path=name).at(str(file), lines.get(name))
            for problem, name in inside
        ) from None


def _under(error: PlanError, path: str, given: object) -> tuple[Problem, ...]:
    """The Problems of a catalog or a file, put at the setting that named it, unless they have a place of their own."""
    return tuple(
        problem if problem.file else replace(problem, path=path, given=given if problem.given is None else problem.given)
        for problem in error.problems
    )


def _take_out(tables: Tables, path: tuple[str | int, ...]) -> None:
    """Remove a setting, or put its stand-in there where it is required; an array goes as a whole."""
    names = [str(name) for name in path[: next((place for place, name in enumerate(path) if isinstance(name, int)), len(path))]]
    *around, last = names
    table: Any = tables
    for name in around:
        table = table[name]
    if last in table:
        del table[last]
    elif ".".join(names) in _STAND_INS:
        table[last] = copy.deepcopy(_STAND_INS[".".join(names)])


def _arrays_as_tuples(value: Any) -> Any:  # noqa: ANN401 - any TOML value
    match value:
        case dict():
            return {name: _arrays_as_tuples(inner) for name, inner in value.items()}
        case list():
            return tuple(_arrays_as_tuples(inner) for inner in value)
        case _:
            return value


def _value(text: str) -> Any:  # noqa: ANN401 - any TOML value
    """A value of the command line: what TOML makes of it, else the text itself."""
    try:
        tables = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return tables["value"] if set(tables) == {"value"} else text


def _placed(problems: list[Problem], source: Source) -> Iterator[Problem]:
    """Each Problem with the file and line of its setting; one that has a file already keeps it."""
    for problem in problems:
        path = (problem.path or "").replace("[", ".").replace("]", "")
        yield problem if problem.file else problem.at(*source.place(path))


def _in_order(problems: Iterator[Problem]) -> list[Problem]:
    """By line, as one reads a file; what has no line comes last."""
    return sorted(problems, key=lambda problem: (problem.line is None, problem.line or 0))


# --- text -------------------------------------------------------------------------------------------------------------------------


def _tables(text: str, file: Path | None) -> Tables:
    """What TOML makes of a text. Raises PlanError with line and column where it is none, and with both lines of a key written twice."""
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise PlanError(
            Problem("the text is nested too deeply to be a plan", file=_name(file), allowed="tables within tables, three deep")
        ) from None
    except ValueError as error:
        raise PlanError(_syntax_problems(str(error), text, file)) from None
    if not tables:
        raise PlanError(
            Problem(
                "the plan is empty",
                file=_name(file),
                allowed="TOML with at least the tables [model], [cluster] and [batch]",
                attempt="begin with a file of the folder plans/, or give the name of a model: trainwright predict llama-3-8b",
            )
        )
    return tables


def _syntax_problems(message: str, text: str, file: Path | None) -> list[Problem]:
    twice = [_duplicate(one, file) for one in duplicates(text)]
    if twice and message.startswith(("Cannot overwrite", "Cannot declare", "Cannot mutate", "Duplicate")):
        return twice
    place = _PLACE.search(message)
    lines = text.splitlines() or [""]
    line = int(place[1]) if place is not None and place[1] else len(lines)
    column = f", column {place[2]}" if place is not None and place[2] else ""
    reason = _PLACE.sub("", message)
    return [
        Problem(
            f"this is not TOML: {reason[:1].lower()}{reason[1:]} (line {line}{column})",
            file=_name(file),
            line=line,
            given=lines[min(line, len(lines)) - 1].strip() or "an empty line",
            allowed='TOML: [table] headers, and key = value with text in quotes (policy = "full")',
            attempt=_syntax_attempt(file),
        ),
        *twice,
    ]


def _syntax_attempt(file: Path | None) -> str:
    if file is not None and file.suffix == ".json":
        return f'a plan file with [model] and config = "{file.name}"'
    return "put text in quotes, and close every quote and bracket"


def _duplicate(one: Duplicate, file: Path | None) -> Problem:
    name = one.path.rpartition(".")[2]
    return Problem(
        f'"{name}" is written twice; the first time on line {one.first_line}',
        file=_name(file),
        line=one.line,
        path=one.path,
        allowed="each key once",
        attempt=f"remove line {one.first_line} or line {one.line}",
    )


def _name(file: Path | None) -> str | None:
    return None if file is None else str(file)


def _text(file: Path) -> str:
    """The text of a plan file. Raises PlanError where it cannot be read as UTF-8 without a byte order mark."""
    content = _content(file)
    for mark, encoding in _BOMS.items():
        if content.startswith(mark):
            message = f"the file begins with a byte order mark ({encoding}), which TOML does not allow"
            raise PlanError(
                Problem(
                    message,
                    file=str(file),
                    line=1,
                    given=f"bytes {mark.hex(' ')}",
                    allowed="UTF-8 without a mark",
                    attempt='save it as "UTF-8", without BOM',
                )
            )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        given = f"byte {content[error.start]:#04x} at position {error.start}"
        message = "the file is not UTF-8 text"
        raise PlanError(Problem(message, file=str(file), line=line, given=given, allowed="UTF-8", attempt="save it as UTF-8")) from None


def _content(file: Path) -> bytes:
    try:
        if file.is_dir():
            raise PlanError(
                Problem("this is a folder, not a plan file", file=str(file), allowed="a TOML file", attempt=_file_attempt(file))
            )
        if not file.exists():
            raise PlanError(_no_such_plan(file))
        if not file.is_file() or file.stat().st_size > MAX_FILE_BYTES:
            message = f"this is not an ordinary file of at most {MAX_FILE_BYTES} bytes"
            raise PlanError(Problem(message, file=str(file), allowed="a TOML file", attempt=_file_attempt(file.parent)))
        return file.read_bytes()
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise PlanError(Problem(f"the plan cannot be read: {reason}", file=str(file), allowed="a file that this user may read")) from None


def _no_such_plan(file: Path) -> Problem:
    """Neither a file nor, where it could be one, a model of the catalog."""
    if file.suffix or len(file.parts) > 1:
        close = nearest(file.name, [one.name for one in file.parent.glob("*.toml")])
        return Problem(
            f"there is no file {file}",
            given=str(file),
            allowed="a plan file (TOML), or a model of the catalog",
            attempt=str(file.parent / close) if close else _file_attempt(file.parent),
        )
    names = catalog.model_names()
    close = nearest(file.name, names)
    return Problem(
        f'"{file}" is neither a file nor a model of the catalog',
        given=str(file),
        allowed=f"a plan file (TOML), or one of {', '.join(names)}",
        attempt=close or "llama-3-8b",
    )


def _file_attempt(folder: Path) -> str:
    found = sorted(folder.glob("*.toml")) if folder.is_dir() else []
    return str(found[0]) if found else "the name of a model, such as llama-3-8b"


# --- a bare model name ------------------------------------------------------------------------------------------------------------


def _is_name(plan: str | Path) -> bool:
    """A model of the catalog is meant, unless there is a file of that name."""
    return isinstance(plan, str) and plan in catalog.model_names()


def _default_text(name: str, overrides: Mapping[str, Any], command: Command) -> str:
    """The plan that a bare model name means, as a plan file: ZeRO-3 over 8 x h100-sxm for predict, one local process for run and prove.

    The ZeRO size follows from the devices and the other sizes where the command line gives those, a cluster by name or file among them;
    the batch is 8 sequences a replica.
    """
    most_tokens = catalog.model(name).max_positions
    asked = {path.lstrip("-").replace("-", "_"): value for path, value in overrides.items()}
    far = command == "predict"
    nodes, each = _named_cluster(asked) or (1, 8 if far else 1)
    devices = _asked(asked, "cluster.nodes", nodes) * _asked(asked, "cluster.devices_per_node", each)
    others = math.prod(_asked(asked, f"parallel.{axis}.size", 1) for axis in AXES if axis != "zero")
    zero = _asked(asked, "parallel.zero.size", devices // others if devices % others == 0 else devices)
    replicas = zero * _asked(asked, "parallel.data.size", 1)
    cluster = 'device = "h100-sxm"\nnodes = 1\ndevices_per_node = 8' if far else 'name = "local"'
    return _DEFAULT.format(
        name=name,
        cluster=cluster,
        sequence_tokens=min(most_tokens, 8192 if far else 256),
        global_sequences=8 * replicas,
        compute="bf16" if far else "fp32",
        zero=zero,
        policy="selective" if far else "none",
    )


def _named_cluster(asked: Mapping[str, Any]) -> tuple[int, int] | None:
    """Nodes, and devices of each, of the cluster that the command line names; None if it names none. A wrong one is refused later."""
    try:
        if "cluster.name" in asked and "cluster.device" not in asked:
            found = catalog.cluster(str(asked["cluster.name"]))
        elif "cluster.file" in asked:
            found = _cluster_file({"file": str(asked["cluster.file"])}, Source())
        else:
            return None
    except PlanError:
        return None
    return (1, 1) if found.is_local else (found.num_nodes, found.devices_per_node)


def _asked(asked: Mapping[str, Any], path: str, default: int) -> int:
    """A count of the command line where it is one; what is none is refused later, with all else."""
    value = asked.get(path, default)
    value = _value(value) if isinstance(value, str) else value
    return value if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= schema.MAX_SIZE else default


_DEFAULT: Final = """\
[model]
name = "{name}"
[cluster]
{cluster}
[batch]
sequence_tokens = {sequence_tokens}
global_sequences = {global_sequences}
[precision]
compute = "{compute}"
[parallel]
zero = {{ size = {zero}, stage = 3 }}
[recompute]
policy = "{policy}"
"""
