"""Page: what a lesson shows. Words in two languages; numbers once, each a Figure that says what it rests on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from trainwright.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainwright.ir.figure import Figure

Language: TypeAlias = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")


@dataclass(frozen=True, slots=True)
class Text:
    """The same words in English and Chinese."""

    en: str
    zh: str

    def read(self, language: Language) -> str:
        """Return the words in one language."""
        return self.zh if language == "zh" else self.en


Words: TypeAlias = Text | str
"""A plain str reads the same in both languages: a name, a formula, a number."""

Cell: TypeAlias = Words | int | float

RANK = Text("rank", "进程")
POSITION = Text("position", "位置")

_CHINESE: dict[str, str] = {
    "ticks": "拍",
    "slots": "个时隙",
    "microbatches": "个微批次",
    "all-gathers": "次聚合",
    "elements": "个元素",
    "chunks": "块",
    "bytes": "字节",
    "tick": "拍",
    "kept": "保留",
    "kept_bytes": "保留字节",
    "live": "存活",
    "peak": "峰值",
    "value": "值",
    "rank": "进程",
}
"""Units of figures and names of buffers, as a page shows them in Chinese. A document keeps the English ones: they are its keys."""


def in_words(name: str, language: Language) -> str:
    """Return a unit, or the name of a step's buffer, in one language; a number behind it stays: "rank 0". Other names stay as they are.

    >>> in_words("rank 0", "zh"), in_words("c2", "zh"), in_words("ticks", "en")
    ('进程 0', 'c2', 'ticks')
    """
    if language == "en":
        return name
    word, space, number = name.partition(" ")
    return f"{_CHINESE.get(word, word)}{space}{number}"


def read(words: Cell, language: Language) -> str | int | float:
    """Return a cell in one language; numbers and plain strings as they are."""
    return words.read(language) if isinstance(words, Text) else words


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A whole number that the reader may change."""

    name: str
    default: int
    meaning: Text
    least: int = 1
    most: int = 1_000_000

    def check(self, value: int) -> Iterator[Problem]:
        """Refuse a value out of range."""
        if not self.least <= value <= self.most:
            nearest = min(max(value, self.least), self.most)
            yield Problem(
                f"{self.name} is {'too small' if value < self.least else 'too large'}: {self.meaning.en}",
                path=self.name,
                given=value,
                allowed=f"whole numbers from {self.least} to {self.most}",
                attempt=f"{self.name}={nearest}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """A Figure with the words under which it is shown.

    wire     bytes in powers of 1000, as traffic is counted.
    tabled   a table of the page shows it already: only the document lists it once more.
    """

    label: Words
    figure: Figure
    wire: bool = False
    tabled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One event of a walk-through: what happened, on which rank (None: on all), and what the named buffers hold afterwards.

    `place` is what the rank is called: in a pipeline of single ranks it is a position.
    """

    event: Words
    rank: int | None = None
    place: Text = RANK
    buffers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under column heads."""

    title: Words
    columns: tuple[Words, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        """Every row fills every column."""
        assert all(len(row) == len(self.columns) for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A lesson with its numbers."""

    name: str
    title: Text
    text: tuple[Text, ...]
    inputs: Mapping[str, int]
    figures: Mapping[str, Labelled]
    steps: tuple[Step, ...] = ()
    tables: tuple[Table, ...] = ()
    not_counted: tuple[Text, ...] = ()
    sources: tuple[str, ...] = ()

    def to_json(self, language: Language) -> dict[str, Any]:
        """Return the document of `trainwright lesson NAME --json`."""
        return {
            "schema": "trainwright/lesson/1",
            "name": self.name,
            "language": language,
            "title": self.title.read(language),
            "text": [paragraph.read(language) for paragraph in self.text],
            "inputs": dict(self.inputs),
            "figures": {name: _figure(shown, language) for name, shown in self.figures.items()},
            "steps": [{"event": read(step.event, language), "rank": step.rank, "buffers": dict(step.buffers)} for step in self.steps],
            "tables": [
                {
                    "title": read(table.title, language),
                    "columns": [read(column, language) for column in table.columns],
                    "rows": [[read(cell, language) for cell in row] for row in table.rows],
                }
                for table in self.tables
            ],
            "not_counted": [text.read(language) for text in self.not_counted],
            "sources": list(self.sources),
        }


def _figure(shown: Labelled, language: Language) -> dict[str, Any]:
    return {"label": read(shown.label, language), "value": shown.figure.value, **shown.figure.provenance()}
