"""`trainwright lesson NAME`: one page, computed by the code that plans."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import TYPE_CHECKING

from trainwright.cli.numbers import Setting
from trainwright.lessons import LESSONS
from trainwright.lessons.page import LANGUAGES, in_words, read
from trainwright.problems import PlanError, Problem, nearest
from trainwright.units import show_bytes, show_wire

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    from trainwright.lessons.page import Input, Labelled, Language, Page, Table

HELP = "one page on how training systems work, computed by the code that plans"

MOST_STEPS = 40
_HEADINGS = {
    "inputs": ("Inputs", "输入"),
    "figures": ("Figures", "数值"),
    "steps": ("Step by step", "逐步"),
    "not_counted": ("Not counted", "未计入"),
    "sources": ("Sources", "来源"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb."""
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help=f"one of {', '.join(LESSONS.names())}; none lists them")
    parser.add_argument("inputs", metavar="INPUT=VALUE", nargs="*", help="change a number of the page, such as stages=8")
    parser.add_argument("--language", metavar="LANGUAGE", default="en", help="en or zh (en)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Print the page. Raises PlanError with every Problem of the arguments."""
    language = _language(args.language)
    if not args.name:
        _list_lessons(language, as_json=args.json)
        return 0
    lesson = LESSONS.get(args.name)
    page: Page = lesson.page(**_inputs(lesson, args.inputs))
    if args.json:
        print(json.dumps(page.to_json(language), ensure_ascii=False))
    else:
        print("\n".join(_lines(page, lesson.INPUTS, language)))
    return 0


def _language(given: str) -> Language:
    for language in LANGUAGES:
        if given == language:
            return language
    raise PlanError(Problem("no such language", path="--language", given=given, allowed=LANGUAGES, attempt="--language en"))


def _list_lessons(language: Language, *, as_json: bool) -> None:
    titles = {name: lesson.TITLE.read(language) for name, lesson in LESSONS.parts()}
    if as_json:
        print(json.dumps({"schema": "trainwright/lessons/1", "lessons": titles}, ensure_ascii=False))
    else:
        print("\n".join(f"{name:<14} {title}" for name, title in titles.items()))


def _inputs(lesson: ModuleType, given: Sequence[str]) -> dict[str, int]:
    """Read `name=value` pairs over the defaults. Raises PlanError with every Problem."""
    inputs: tuple[Input, ...] = lesson.INPUTS
    by_name = {each.name: each for each in inputs}
    values = {each.name: each.default for each in inputs}
    problems: list[Problem] = []
    for pair in given:
        name, _, text = pair.partition("=")
        name = name.replace("-", "_")
        if name not in by_name:
            close = nearest(name, by_name)
            attempt = f"{close}={text or by_name[close].default}" if close else None
            problems.append(
                Problem(f'the lesson "{lesson.NAME}" has no input "{name}"', given=pair, allowed=tuple(by_name), attempt=attempt)
            )
            continue
        value = Setting(name=name, least=by_name[name].least, most=by_name[name].most).whole(text)
        if isinstance(value, Problem):
            problems.append(value)
        else:
            values[name] = value
    if problems:
        raise PlanError(problems)
    return values


def _lines(page: Page, inputs: Sequence[Input], language: Language) -> Iterator[str]:
    title = page.title.read(language)
    yield from (title, "=" * _width(title), "")
    for paragraph in page.text:
        yield from (*_wrapped(paragraph.read(language)), "")
    meanings = {each.name: each.meaning.read(language) for each in inputs}
    yield from _block("inputs", language, [(f"{name} = {value}", meanings.get(name, "")) for name, value in page.inputs.items()])
    yield from _block(
        "figures",
        language,
        [(str(read(each.label, language)), _value(each, language)) for each in page.figures.values() if not each.tabled],
    )
    for table in page.tables:
        yield from (*_table(table, language), "")
    if page.steps:
        yield from _block("steps", language, _steps(page, language))
    yield from _block("not_counted", language, [(text.read(language),) for text in page.not_counted])
    yield from _block("sources", language, [(source,) for source in page.sources])


def _steps(page: Page, language: Language) -> list[tuple[str, ...]]:
    shown: list[tuple[str, ...]] = [
        (
            str(read(step.event, language)),
            "" if step.rank is None else f"{step.place.read(language)} {step.rank}",
            ", ".join(f"{in_words(name, language)} {_plain(value)}" for name, value in step.buffers.items()),
        )
        for step in page.steps[:MOST_STEPS]
    ]
    hidden = len(page.steps) - len(shown)
    return [*shown, (f"… {hidden} more: --json" if language == "en" else f"……另有 {hidden} 步：--json", "", "")] if hidden else shown


def _block(name: str, language: Language, rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    english, chinese = _HEADINGS[name]
    yield chinese if language == "zh" else english
    yield from (f"  {line}" for line in _aligned(rows, ["left"] * max((len(row) for row in rows), default=0)))
    yield ""


def _table(table: Table, language: Language) -> Iterator[str]:
    columns = tuple(str(read(column, language)) for column in table.columns)
    cells = [tuple(read(cell, language) for cell in row) for row in table.rows]
    sides = [
        "right" if all(isinstance(row[place], (int, float)) or row[place] == "" for row in cells) else "left"
        for place in range(len(columns))
    ]
    yield str(read(table.title, language))
    yield from (f"  {line}" for line in _aligned([columns, *(tuple(map(_plain, row)) for row in cells)], sides))


def _aligned(rows: Sequence[tuple[str, ...]], sides: Sequence[str]) -> Iterator[str]:
    """Pad every column to its widest cell; Chinese characters take two places."""
    widths = [max(_width(row[place]) for row in rows) for place in range(len(sides))]
    for row in rows:
        padded = (
            f"{' ' * (width - _width(cell))}{cell}" if side == "right" else f"{cell}{' ' * (width - _width(cell))}"
            for cell, width, side in zip(row, widths, sides, strict=True)
        )
        yield "  ".join(padded).rstrip()


def _wrapped(text: str, columns: int = 100) -> Iterator[str]:
    """Break at spaces and between Chinese characters, never within a word, nor before a closing mark or behind an opening one."""
    line = ""
    for piece in _PIECES.findall(text):
        if line and _width(line) + _width(piece) > columns:
            yield line
            line = piece.lstrip()
        else:
            line += piece
    yield line


_WIDE = r"\u2e80-\u9fff\uff00-\uffef"  # Chinese characters and their punctuation
_PIECES = re.compile(rf" *[（“《]*(?:[^ {_WIDE}]+|[{_WIDE}])[，。；：、！？）”》]*")


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def _value(shown: Labelled, language: Language) -> str:
    value, unit = shown.figure.value, shown.figure.unit
    words = in_words(unit, language)
    if unit == "bytes":
        return f"{show_wire(value) if shown.wire else show_bytes(value)}  ({_plain(value)} {words})"
    return f"{_plain(value)} {words}" if unit != "1" else _plain(value)


def _plain(value: object) -> str:
    match value:
        case float():
            return f"{value:.6g}"
        case int():
            return f"{value:,}"
        case _:
            return str(value)
