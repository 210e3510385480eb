"""A proof on a page: values, bytes on the wire and live bytes, predicted and measured beside each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from trainwright.export.report.memory import HEIGHT, byte_marks, level
from trainwright.export.report.page import MEASURED, PREDICTED, Section, badge, card, cards, details, figure, legend, paragraph, table
from trainwright.export.report.plan import mesh
from trainwright.export.report.svg import chart, line, staircase, stretched, text, ticks
from trainwright.predict.memory import live_deltas
from trainwright.units import Bytes, show_bytes, show_wire

if TYPE_CHECKING:
    from trainwright.prove.launch import RankReport
    from trainwright.prove.prove import Proof

MOST_SITES: Final = 20


def section(proof: Proof) -> Section:
    """The section."""
    where = "processes over gloo" if proof.processes else "threads of one process"
    tensors = proof.gradients.num_tensors_compared
    body = paragraph(
        f"The same plan, shrunk to {proof.plan.num_devices} local ranks ({mesh(proof.plan.parallel.sizes)}; {where}), "
        f"was executed in {proof.dtype} and held against an unsharded reference that shares no code with the engine."
    )
    body += _heads(proof)
    body += details("What was made smaller", table(("setting", "in the plan", "in the proof"), _changes(proof)))
    if proof.causes:
        body += "".join(paragraph(f"Likely cause: {cause.name}: {cause.text}") for cause in proof.causes)
    body += f"<h3>Values: worst relative error over {tensors} gradients, the loss, the norm and the parameters</h3>" + _values(proof)
    body += "<h3>Bytes on the wire, by axis and operation</h3>" + _wire(proof)
    body += "<h3>Live bytes after every action</h3>" + _live(proof)
    return Section(anchor="proof", title="Proof", body=body)


def _heads(proof: Proof) -> str:
    wire, memory = proof.wire, proof.memory
    unknown = "nothing to count" if proof.processes and not wire.measured_bytes else "not readable here"
    system = unknown if wire.os_error is None else f"{show_wire(round(wire.os_bytes or 0))}"
    return cards(
        card(
            "Values",
            "equal" if proof.values_equal else "NOT equal",
            basis=MEASURED,
            note=f"worst relative error {proof.worst_relative_error:.1e}, allowed {proof.tolerance.gradients:.0e}",
            source="against the unsharded reference in float64",
            tone="good" if proof.values_equal else "bad",
        ),
        card(
            "Wire bytes",
            "equal" if wire.equal else "NOT equal",
            basis=MEASURED,
            note=f"{show_wire(wire.measured_bytes)} measured at {wire.num_sites:,} sites, predicted at each"
            if wire.num_sites
            else "no exchange: no message was sent",
            source="counted where the engine hands bytes to others",
            tone="good" if wire.equal else "bad",
        ),
        card(
            "Operating system's count",
            system,
            basis=MEASURED,
            note=""
            if wire.os_error is None
            else f"{wire.os_error:.4%} off the ledger, message headers of {wire.header_bytes:.0f} B taken off",
            source="wchar of /proc/self/io, every rank" if proof.processes else "ranks were threads: it cannot tell them apart",
        ),
        card(
            "Live bytes",
            "equal" if memory.equal else "NOT equal",
            basis=MEASURED,
            note=f"after each of {memory.num_boundaries:,} actions; peak {show_bytes(memory.measured_peak_bytes)}",
            source="storages that the executor holds",
            tone="good" if memory.equal else "bad",
        ),
    )


def _changes(proof: Proof) -> Iterator[tuple[str, str, str]]:
    for change in proof.changes:
        path, _, values = str(change).partition(" ")
        before, _, after = values.partition(" -> ")
        yield path, before, after


def _values(proof: Proof) -> str:
    replicas = "bit-identical" if not proof.differing_replicas else f"{len(proof.differing_replicas)} tensors differ"
    rows = [
        ("loss of the first step", _error(proof.loss_error), _error(proof.tolerance.gradients)),
        ("gradient norm of the first step", _error(proof.norm_error), _error(proof.tolerance.gradients)),
        (
            f"gradients (worst: {proof.gradients.worst_tensor})",
            _error(proof.gradients.worst_relative_error),
            _error(proof.tolerance.gradients),
        ),
        ("losses of later steps", _error(proof.later_loss_error), _error(proof.tolerance.parameters)),
        (
            f"parameters after {len(proof.reports[0].results) if proof.reports else 3} optimizer steps",
            _error(proof.parameters.worst_relative_error),
            _error(proof.tolerance.parameters),
        ),
        ("replicas", replicas, "bit-identical"),
    ]
    return table(("", "measured", "allowed"), rows, right=(1, 2))


def _error(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


# --- wire --------------------------------------------------------------------------------------------------------------------------------


def _wire(proof: Proof) -> str:
    from trainwright.prove.reconcile import measured_wire, predicted_wire

    assert proof.program is not None, "a finished proof has its Program"
    predicted, measured = predicted_wire(proof.plan, proof.program), measured_wire(proof.reports)
    groups = {(event.rank, str(event.site.at(step=None)), event.kind): event.group for report in proof.reports for event in report.events}
    by_axis: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    by_site: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for key in predicted.keys() | measured.keys():
        _, site, kind = key
        for totals in (by_axis[groups.get(key, "?"), kind], by_site[site, kind]):
            totals[0] += 1
            totals[1] += predicted.get(key, 0)
            totals[2] += measured.get(key, 0)
    axes = [(axis, kind, *_beside(totals)) for (axis, kind), totals in sorted(by_axis.items(), key=lambda one: -one[1][2])]
    sites = sorted(by_site.items(), key=lambda one: (-one[1][2], one[0]))
    rows = [(site, kind, *_beside(totals)) for (site, kind), totals in sites[:MOST_SITES]]
    head = ("exchanges", "predicted bytes", "measured bytes", "")
    caption = "Bytes handed to others in the first step, summed over ranks; an exchange is a site of one rank."
    body = table(("axis", "operation", *head), axes, caption=caption, right=(2, 3, 4))
    worst = [(f"rank {rank} {site}", kind, "1", f"{one:,}", f"{two:,}", "wrong") for rank, site, kind, one, two in proof.wire.wrong]
    summary = f"The {min(MOST_SITES, len(sites))} sites with most bytes, of {len(sites)}"
    return (
        body
        + (table(("site", "operation", *head), worst, right=(2, 3, 4)) if worst else "")
        + details(summary, table(("site", "operation", *head), rows, right=(2, 3, 4)))
    )


def _beside(totals: Sequence[int]) -> tuple[str, str, str, str]:
    number, predicted, measured = totals
    return f"{number:,}", f"{predicted:,}", f"{measured:,}", "equal" if predicted == measured else f"{measured - predicted:+,}"


# --- live bytes --------------------------------------------------------------------------------------------------------------------------


def _live(proof: Proof) -> str:
    """Predicted and measured live bytes of the fullest rank, as overlaid step curves over its actions."""
    fullest = max(proof.reports, key=lambda report: (report.peak_bytes, -report.rank))
    predicted, measured = curves(proof, fullest)
    top_bytes = round(1.06 * max(*predicted, *measured, 1))
    num_actions = len(predicted) - 1
    drawn = [line(_corners(curve, top_bytes), kind=kind) for curve, kind in ((predicted, "one thick"), (measured, "two"))]
    marks = [
        text(mark / num_actions, HEIGHT + 15, f"{mark:g}", kind="mark", anchor="start" if mark == 0 else "middle")
        for mark in ticks(num_actions * 0.97)
    ]
    picture = chart(
        HEIGHT + 22,
        *byte_marks(top_bytes),
        stretched(*drawn, y=0, height=HEIGHT),
        *marks,
        label=f"predicted and measured live bytes of rank {fullest.rank} over {num_actions} actions",
    )
    same = "The curves coincide after every action." if predicted == measured else "The curves differ."
    memory = proof.memory
    caption = (
        f"Rank {fullest.rank}, the fullest: live bytes after each of its {num_actions:,} actions of the first step, "
        f"{badge(PREDICTED)} and {badge(MEASURED)}. "
        f"{same} Inside an action the largest temporary is {show_bytes(memory.predicted_temporary_bytes)} predicted, "
        f"{show_bytes(memory.measured_temporary_bytes)} measured."
    )
    body = figure(legend({"one": "predicted", "two": "measured"}) + picture, caption)
    return body + details(
        "Peaks of all ranks, as a table", table(("rank", "predicted peak", "measured peak", ""), _peaks(proof), right=(1, 2))
    )


def curves(proof: Proof, report: RankReport) -> tuple[list[Bytes], list[Bytes]]:
    """Live bytes before the first action and after each, predicted and measured."""
    assert proof.program is not None, "a finished proof has its Program"
    program = proof.program
    position = report.events[0].position
    persistent = sum(program.num_bytes(ref) for ref in program.persistent(position))
    predicted = list(accumulate(live_deltas(program, tuple(program.actions(position))), initial=persistent))
    measured = list(accumulate((event.live_delta_bytes for event in report.events), initial=report.persistent_bytes))
    return predicted, measured


def _corners(curve: Sequence[Bytes], top_bytes: Bytes) -> list[tuple[float, float]]:
    most = max(len(curve) - 1, 1)
    return staircase([(place / most, level(live, top_bytes)) for place, live in enumerate(curve)])


def _peaks(proof: Proof) -> Iterator[tuple[str, str, str, str]]:
    for report in proof.reports:
        predicted, measured = (max(curve) for curve in curves(proof, report))
        yield f"{report.rank}", f"{predicted:,}", f"{measured:,}", "equal" if predicted == measured else f"{measured - predicted:+,}"
