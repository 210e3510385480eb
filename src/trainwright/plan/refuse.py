"""Refuse: what pydantic found wrong in a plan file, said as Problems.

Pydantic knows what is wrong ("int_type"); here it is put as what was given, what is allowed and what to try.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from trainwright.plan import schema
from trainwright.problems import Problem, nearest
from trainwright.spec.bounds import MAX_COUNT
from trainwright.units import QuantityError

if typing.TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

Path = tuple[str | int, ...]

_KINDS: Final[Mapping[str, str]] = {
    "int_type": "a whole number",
    "greater_than_equal": "a number within bounds",
    "less_than_equal": "a number within bounds",
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "string_type": "text in quotes",
    "bool_type": "true or false",
    "tuple_type": "an array in square brackets",
    "model_type": "a table",
}
_EXAMPLES: Final[Mapping[str, str]] = {
    "model": '[model] with name = "llama-3-8b"',
    "cluster": '[cluster] with device = "h100-sxm", nodes = 8, devices_per_node = 8',
    "batch": "[batch] with sequence_tokens = 8192, global_sequences = 512",
    "batch.sequence_tokens": "batch.sequence_tokens = 8192",
    "batch.global_sequences": "batch.global_sequences = 512",
    "run.checkpoint.every": "run.checkpoint.every = 50",
}

_FAR: Final = 1e300  # a number beyond was not meant; also, a larger int is no float


def problems(error: ValidationError) -> Iterator[Problem]:
    """One Problem for each thing that pydantic found."""
    details = error.errors(include_url=False)
    misspelt = {meant(detail["loc"]) for detail in details if detail["type"] == "extra_forbidden"}
    for detail in details:
        if detail["type"] != "missing" or detail["loc"] not in misspelt:
            yield _problem(detail)


def paths(error: ValidationError) -> list[Path]:
    """Paths of the settings that were found wrong."""
    return [detail["loc"] for detail in error.errors(include_url=False, include_context=False)]


def meant(path: Path) -> Path:
    """The setting that a path was probably meant to be: itself if it exists, else its nearest neighbour."""
    if schema.column(path) is not None:
        return path
    guess = nearest(str(path[-1]), schema.names(path[:-1]))
    return path if guess is None else (*path[:-1], guess)


def dotted(path: Path) -> str:
    """A path as it is written in messages and on the command line.

    >>> dotted(("optimizer", "betas", 1))
    'optimizer.betas.1'
    """
    return ".".join(str(name) for name in path)


def _problem(detail: ErrorDetails) -> Problem:
    path, given = detail["loc"], detail["input"]
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_key(path, given)
        case "missing":
            return _missing(path)
        case "value_error":
            return _bad_quantity(path, given, detail["ctx"]["error"])
        case "too_long" | "too_short":
            return _wrong_length(path, given)
        case kind:
            return _wrong_value(path, given, kind)


def _unknown_key(path: Path, given: object) -> Problem:
    *around, name = path
    known = schema.names(tuple(around))
    guess = nearest(str(name), known)
    place = f"in [{dotted(tuple(around))}]" if around else "at the top of a plan"
    better = dotted((*around, guess)) if guess else _other_place(str(name))
    return Problem(
        f'there is no "{name}" {place}',
        path=dotted(path),
        given=given,
        allowed=known,
        attempt=f"{better} in place of {dotted(path)}" if better else "leave it out",
    )


def _other_place(name: str) -> str | None:
    """Where a key of this name does exist, if in one place only."""
    tables = [(top,) for top in schema.names()] + [("parallel", axis) for axis in schema.names(("parallel",))]
    homes = [dotted((*one, name)) for one in tables if name in schema.names(one)]
    homes += [name] if name in schema.names() else []
    return homes[0] if len(homes) == 1 else None


def _missing(path: Path) -> Problem:
    if isinstance(path[-1], int):
        return _wrong_length(path[:-1], None)
    name = dotted(path)
    example = _EXAMPLES.get(name, f"add {path[-1]}")
    if len(path) == 1:
        return Problem(f"the table [{name}] is missing", path=name, allowed="[model], [cluster] and [batch] are required", attempt=example)
    return Problem(f'"{path[-1]}" is missing in [{dotted(path[:-1])}]', path=name, allowed=_allowed(schema.column(path)), attempt=example)


def _bad_quantity(path: Path, given: object, error: object) -> Problem:
    if not isinstance(error, QuantityError):
        return Problem(str(error), path=dotted(path), given=given)
    return Problem(
        str(error), path=dotted(path), given=given, allowed=error.allowed, attempt=error.attempt or "write the number out in full"
    )


def _wrong_length(path: Path, given: object) -> Problem:
    field = schema.column(path)
    num_items = len(typing.get_args(field.annotation)) if field is not None else 0
    return Problem(
        f"{dotted(path)} needs {num_items} values",
        path=dotted(path),
        given=given,
        allowed=f"an array of {num_items} numbers",
        attempt=f"{dotted(path)} = {_default(field)}",
    )


def _wrong_value(path: Path, given: object, kind: str) -> Problem:
    field = schema.column(path)
    wanted = _KINDS.get(kind, "another value")
    allowed = _allowed(field) if kind != "model_type" else f"a table with {', '.join(schema.names(path))}"
    if isinstance(path[-1], int) or allowed is None:
        allowed = wanted
    return Problem(
        f"{dotted(path)} must be {_wanted(wanted, given, field)}",
        path=dotted(path),
        given=given,
        allowed=allowed,
        attempt=_attempt(path, given, kind, field),
    )


def _wanted(wanted: str, given: object, field: FieldInfo | None) -> str:
    """The end of the sentence: what it must be, and what it is not."""
    if wanted == "a number within bounds":
        return f"{_allowed(field)}"
    match given:
        case bool():
            return f"{wanted}, not true or false"
        case str():
            return f"{wanted}, not text"
        case float() if math.isfinite(given):
            return f"{wanted}, not a fraction"
        case float():
            return f"{wanted}, and {given} is none"
        case dict():
            return f"{wanted}, not a table"
        case list() | tuple():
            return f"{wanted}, not an array"
        case _:
            return wanted


def _bounds(field: FieldInfo | None) -> tuple[int, int] | None:
    """Least and greatest value of a count, if it has any."""
    marks = field.metadata if field is not None else []
    least = [mark.ge for mark in marks if hasattr(mark, "ge")]
    most = [mark.le for mark in marks if hasattr(mark, "le")]
    return (least[0], most[0]) if least and most else None


def _allowed(field: FieldInfo | None) -> str | None:
    """What a setting may hold, in words."""
    if field is None:
        return None
    hints = {field.annotation, *typing.get_args(field.annotation)}
    bounds = _bounds(field)
    if int in hints:
        return "a whole number" if bounds is None else f"a whole number from {bounds[0]} to {bounds[1]}"
    if float in hints:
        return "a finite number" if bounds is None else f"a finite number from {bounds[0]:g} to {bounds[1]:g}"
    if bool in hints:
        return "true or false"
    return "text in quotes" if str in hints else None


def _default(field: FieldInfo | None) -> Any:  # noqa: ANN401 - the default of any setting
    value = None if field is None or field.is_required() else field.default
    return list(value) if isinstance(value, tuple) else value


def _attempt(path: Path, given: object, kind: str, field: FieldInfo | None) -> str:
    """A value that would be taken, as near to the given one as can be guessed."""
    name = dotted(path)
    if kind == "model_type":
        return _table_attempt(path, given)
    if kind in {"string_type", "tuple_type", "bool_type"}:
        return f"{name} = {_text_attempt(given, kind, field)}"
    number = _number(given)
    bounds = _bounds(field)
    if kind in {"float_type", "finite_number"}:
        default = _default(field)
        return f"{name} = {number if number is not None else default if isinstance(default, int | float) else 1.0:g}"
    least, most = bounds or (1, MAX_COUNT)
    if number is None or number > most:
        default = _default(field)
        return _EXAMPLES.get(name, f"{name} = {default if isinstance(default, int) and default >= least else least}")
    return f"{name} = {max(least, round(number))}"


def _number(given: object) -> float | None:
    """The finite number that was probably meant."""
    if isinstance(given, str):
        try:
            given = float(given)
        except ValueError:
            return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not abs(given) < _FAR:
        return None
    return given


def _text_attempt(given: object, kind: str, field: FieldInfo | None) -> str:
    match kind:
        case "string_type":
            default = _default(field)
            return f'"{default}"' if isinstance(default, str) else f'"{given}"'
        case "tuple_type":
            return f"[{given}]" if isinstance(given, int) else str(_default(field))
        case _:
            text = str(given).lower()
            return text if text in {"true", "false"} else str(_default(field) is True).lower()


def _table_attempt(path: Path, given: object) -> str:
    names: Sequence[str] = schema.names(path)
    name = dotted(path)
    if isinstance(given, str) and "name" in names:
        return f'{name}.name = "{given}"'
    value = given if isinstance(given, int) and not isinstance(given, bool) else 1
    return f"{name} = {{ size = {value} }}" if "size" in names else f"write [{name}] with its keys below"
