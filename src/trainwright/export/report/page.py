"""The page around the sections: one HTML file that asks for nothing else, light or dark as the reader's system is, narrow or wide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

STYLE: Final = Path(__file__).with_name("style.css")

MEASURED, SIMULATED, PREDICTED, ASSUMED = "measured", "simulated", "predicted", "assumed"

BASES: Final = (MEASURED, SIMULATED, PREDICTED, ASSUMED)

MEANING: Final = {
    MEASURED: "taken from events of ranks that really ran",
    SIMULATED: "from the priced Program, played through by the simulator",
    PREDICTED: "counted from the plan's Program, or a formula of such counts; nothing was run",
    ASSUMED: "given by the plan, the catalog or a default",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a report: what its heading says, where links point to, and its HTML."""

    anchor: str
    title: str
    body: str


def badge(basis: str, source: str = "") -> str:
    """What a number rests on."""
    title = MEANING[basis] + (f". {source}" if source else "")
    return f'<span class="badge {basis}" title="{escape(title)}">{basis}</span>'


def card(label: str, value: str, *, basis: str, note: str = "", source: str = "", tone: str = "") -> str:
    """A figure that matters, with what it rests on."""
    below = f'<div class="note">{escape(note)}</div>' if note else ""
    said = f'<div class="source">{escape(source)}</div>' if source else ""
    return (
        f'<div class="card {tone}"><div class="label">{escape(label)}</div><div class="value">{escape(value)}</div>'
        f"{below}<div>{badge(basis, source)}</div>{said}</div>"
    )


def cards(*each: str) -> str:
    """Figures side by side."""
    return f'<div class="cards">{"".join(each)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "", right: Iterable[int] = ()) -> str:
    """A table; cells that begin with `<` are HTML already, the rest is text. Columns named in `right` hold numbers."""
    numeric = set(right)

    def cell(tag: str, place: int, words: str) -> str:
        kind = ' class="number"' if place in numeric else ""
        return f"<{tag}{kind}>{words if words.startswith('<') else escape(words)}</{tag}>"

    top = "".join(cell("th", place, words) for place, words in enumerate(head))
    body = "".join(f"<tr>{''.join(cell('td', place, words) for place, words in enumerate(row))}</tr>" for row in rows)
    said = f'<p class="source">{escape(caption)}</p>' if caption else ""
    return f'{said}<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def legend(kinds: Mapping[str, str]) -> str:
    """Class of the style sheet to words."""
    return (
        '<div class="legend">' + "".join(f'<span><i class="{kind}"></i>{escape(words)}</span>' for kind, words in kinds.items()) + "</div>"
    )


def figure(picture: str, caption: str) -> str:
    """A picture and what it shows. The caption may hold HTML."""
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


def details(summary: str, body: str) -> str:
    """What only some readers want to see."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def paragraph(words: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{escape(words)}</p>"


def page(title: str, lead: str, sections: Sequence[Section], version: str) -> str:
    """The whole file."""
    links = "".join(f'<a href="#{one.anchor}">{escape(one.title)}</a>' for one in sections)
    bodies = "".join(f'<section id="{one.anchor}"><h2>{escape(one.title)}</h2>{one.body}</section>' for one in sections)
    bases = "".join(f"<li>{badge(basis)} {escape(words)}</li>" for basis, words in MEANING.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>'
        f"<style>{STYLE.read_text(encoding='utf-8')}</style></head>\n"
        f"<body><header><h1>{escape(title)}</h1>{paragraph(lead)}<nav>{links}</nav></header>\n<main>{bodies}</main>\n"
        f'<footer><ul class="bases">{bases}</ul><p>Written by Trainwright {escape(version)}. Memory in GiB (2<sup>30</sup> bytes), '
        "wire in GB (10<sup>9</sup> bytes). Point at a bar to read its name and times.</p></footer></body></html>\n"
    )
