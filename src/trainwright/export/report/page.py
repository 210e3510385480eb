"""The page around the sections: one HTML file that asks for nothing else, light or dark as the reader's system is, narrow or wide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

MEASURED, SIMULATED, PREDICTED, ASSUMED = "measured", "simulated", "predicted", "assumed"

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
    return '<div class="legend">' + "".join(f'<span><i class="{kind}"></i>{escape(words)}</span>' for kind, words in kinds.items()) + "</div>"


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
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{STYLE}</style></head>\n'
        f"<body><header><h1>{escape(title)}</h1>{paragraph(lead)}<nav>{links}</nav></header>\n<main>{bodies}</main>\n"
        f'<footer><ul class="bases">{bases}</ul><p>Written by Trainwright {escape(version)}. Memory in GiB (2<sup>30</sup> bytes), '
        "wire in GB (10<sup>9</sup> bytes). Point at a bar to read its name and times.</p></footer></body></html>\n"
    )


# Okabe and Ito 2008, "Color Universal Design": eight colours that people with any colour vision tell apart; the yellow and black are replaced, for
# they vanish on one of the two backgrounds.
STYLE: Final = """
:root { --page:#fbfbfa; --card:#fff; --ink:#1b1f24; --soft:#5b6570; --line:#dfe3e7; --link:#0a58a6;
 --blue:#0072b2; --sky:#56b4e9; --green:#009e73; --orange:#e69f00; --red:#d55e00; --pink:#cc79a7; --olive:#9a8a00; --grey:#8a929b; --idle:#eceff2;
 --good:#0b7a4b; --warn:#9a6200; --bad:#b3261e; }
@media (prefers-color-scheme: dark) { :root { --page:#14171a; --card:#1c2024; --ink:#e8eaed; --soft:#a3adb8; --line:#343a41; --link:#79b8ff;
 --blue:#3f95d0; --sky:#8fd0f5; --green:#27b88b; --orange:#f0b132; --red:#ee7a2b; --pink:#dc97bd; --olive:#cabb36; --grey:#7d8791; --idle:#262b30;
 --good:#5cc795; --warn:#efb65a; --bad:#ff8a80; } }
* { box-sizing:border-box } html { -webkit-text-size-adjust:100% }
p.source { font-size:13px }
body { margin:0; background:var(--page); color:var(--ink); font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif }
header,main,footer { max-width:1080px; margin:0 auto; padding:0 20px }
header { padding-top:28px } h1 { font-size:26px; line-height:1.2; margin:0 0 6px } header p { margin:0 0 12px; color:var(--soft) }
nav { display:flex; flex-wrap:wrap; gap:6px 16px; padding-bottom:12px; border-bottom:1px solid var(--line) } a { color:var(--link); text-decoration:none }
a:hover { text-decoration:underline }
section { padding:10px 0 6px } h2 { font-size:20px; margin:22px 0 10px } h3 { font-size:15px; margin:24px 0 6px } p { margin:6px 0 10px; max-width:76ch }
.cards { display:grid; grid-template-columns:repeat(auto-fill,minmax(200px,1fr)); gap:12px; margin:10px 0 16px }
.card { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:10px 14px }
.card.good { border-left:4px solid var(--good) } .card.warn { border-left:4px solid var(--warn) } .card.bad { border-left:4px solid var(--bad) }
.label { color:var(--soft); font-size:13px } .value { font-size:22px; font-weight:600; line-height:1.3; overflow-wrap:anywhere }
.note { font-size:13px } .source { font-size:12px; color:var(--soft); margin-top:2px; overflow-wrap:anywhere }
.badge { display:inline-block; font-size:11px; line-height:16px; padding:0 7px; border-radius:9px; border:1px solid var(--line); color:var(--soft); white-space:nowrap }
.badge.measured { border-color:var(--green); color:var(--good) } .badge.simulated { border-color:var(--blue); color:var(--link) }
.badge.predicted { border-color:var(--orange); color:var(--warn) }
figure { margin:10px 0 18px; background:var(--card); border:1px solid var(--line); border-radius:8px; padding:12px 14px }
figcaption { color:var(--soft); font-size:13px; margin-top:8px; max-width:90ch }
svg.chart { display:block; overflow:visible } svg text { font-size:12px; fill:var(--ink); font-family:inherit }
svg text.inside { fill:#fff; font-size:11.5px; paint-order:stroke; stroke:rgba(0,0,0,.55); stroke-width:2.5px } svg text.mark { fill:var(--soft); font-size:11px } svg text.halo { paint-order:stroke; stroke:var(--card); stroke-width:4px; stroke-linejoin:round }
.legend { display:flex; flex-wrap:wrap; gap:2px 14px; font-size:12.5px; color:var(--soft); margin-bottom:8px }
.legend span { display:inline-flex; align-items:center; gap:6px } .legend i { width:12px; height:12px; border-radius:2px; display:inline-block }
.scroll { overflow-x:auto; margin:8px 0 14px } table { border-collapse:collapse; font-size:13.5px; min-width:60% }
th,td { padding:4px 12px 4px 0; text-align:left; vertical-align:top; border-bottom:1px solid var(--line) }
th { font-weight:600; font-size:12.5px; color:var(--soft); white-space:nowrap } .number { text-align:right; font-variant-numeric:tabular-nums; white-space:nowrap }
details { margin:8px 0 } summary { cursor:pointer; color:var(--link) } code { font-size:12.5px; overflow-wrap:anywhere }
footer { color:var(--soft); font-size:13px; border-top:1px solid var(--line); margin-top:24px; padding-top:10px; padding-bottom:30px }
.bases { list-style:none; padding:0; margin:0; display:grid; gap:3px }
.axis { stroke:var(--soft); stroke-width:1 } .tick { stroke:var(--soft) } .grid { stroke:var(--line); stroke-width:1 } .lane { fill:var(--idle) }
i.lane { background:var(--idle) } .capacity { stroke:var(--bad); stroke-width:1.5; stroke-dasharray:6 4 } .persistent { stroke:var(--ink); stroke-width:1.5; stroke-dasharray:2 4 }
i.capacity { background:var(--bad); height:2px } i.persistent { background:var(--ink); height:2px }
.forward,.weights,.compute { fill:var(--blue) } i.forward,i.weights,i.compute { background:var(--blue) }
.backward,.activations,.wire { fill:var(--orange) } i.backward,i.activations,i.wire { background:var(--orange) }
.recompute,.temporary { fill:var(--pink) } i.recompute,i.temporary { background:var(--pink) }
.update,.master,.wire-data { fill:var(--green) } i.update,i.master,i.wire-data { background:var(--green) }
.gathered,.wire-zero { fill:var(--sky) } i.gathered,i.wire-zero { background:var(--sky) }
.gradients,.wire-tensor { fill:var(--red) } i.gradients,i.wire-tensor { background:var(--red) }
.optimizer,.wire-pipeline { fill:var(--olive) } i.optimizer,i.wire-pipeline { background:var(--olive) }
.wire_buffers,.other,.wire-other { fill:var(--grey) } i.wire_buffers,i.other,i.wire-other { background:var(--grey) }
.bubble { fill:var(--idle); stroke:var(--grey); stroke-width:.5 } i.bubble { background:var(--idle); border:1px solid var(--grey) }
.free { fill:var(--idle) } i.free { background:var(--idle) }
polyline { stroke-width:1.8; stroke-linejoin:round } .one { stroke:var(--blue) } .two { stroke:var(--orange) } .three { stroke:var(--green) } .thick { stroke-width:5; opacity:.45 }
i.one { background:var(--blue) } i.two { background:var(--orange) } i.three { background:var(--green) }
.dashed { stroke-dasharray:6 4 } rect.dot { fill:var(--orange) }
@media print { body { background:#fff } details { display:block } figure,.card { break-inside:avoid } }
@media (max-width:520px) { header,main,footer { padding-left:14px; padding-right:14px } .cards { grid-template-columns:repeat(auto-fill,minmax(150px,1fr)); gap:8px } .value { font-size:18px } }
""".strip()
