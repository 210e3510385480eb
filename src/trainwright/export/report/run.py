"""A run on a page: what was learned, and speed, wire and memory, predicted and measured beside each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from trainwright.export.report.page import MEASURED, SIMULATED, Section, badge, card, cards, details, figure, legend, paragraph, table
from trainwright.export.report.plan import TIME_WORDS, TIMES, mesh, time_bars
from trainwright.export.report.svg import bar, chart, line, rule, stretched, text, ticks
from trainwright.units import show_bytes, show_count, show_seconds, show_wire

HEIGHT: Final = 240

Document = Mapping[str, Any]


def section(run: Document) -> Section:
    """The section, from the document of schema trainwright/run/1."""
    plan = run["plan"]
    body = paragraph(
        f"{plan['model']}, {plan['num_parameters']:,} parameters, trained for {run['num_steps']:,} steps "
        f"of {plan['tokens_per_step']:,} tokens on {plan['num_devices']} ranks ({mesh(plan['mesh'])})."
    )
    body += _heads(run)
    body += "<h3>Loss</h3>" + _losses(run)
    body += "<h3>Predicted beside measured</h3>" + _table(run)
    rows = [("predicted step", run["predicted"]["time"]), ("measured step", run["measured"]["time"])]
    used = {TIMES[name]: TIME_WORDS[name] for name in TIME_WORDS if any(time.get(name, 0) > 0 for _, time in rows)}
    body += "<h3>Where the time of a step went</h3>" + figure(
        legend(used) + time_bars(rows),
        f"Above {badge(SIMULATED)}, below {badge(MEASURED, 'mean of the recorded steps of one rank')}: "
        f"the mean of the recorded steps of rank {run['measured']['rank']}. "
        "Measured waiting for the wire includes waiting for a rank that is late; other is the executor itself.",
    )
    body += details("What the prediction rests on, and what is not counted", _rests(run))
    return Section(anchor="run", title="Run", body=body)


def _heads(run: Document) -> str:
    validation, measured, predicted = run["validation"], run["measured"], run["predicted"]
    learned = []
    if validation["final"] is not None:
        below = validation["below_unigram"]
        learned.append(
            card(
                "Validation loss",
                f"{validation['final']:.3f} nat per byte",
                basis=MEASURED,
                note=f"{abs(below):.3f} {'below' if below >= 0 else 'above'} "
                f"the {validation['unigram_entropy']:.3f} of letter frequencies alone",
                source="text kept out of training",
                tone="good" if below > 0 else "warn",
            )
        )
    apart = predicted["step_s"] / measured["step_s"] - 1
    inside = predicted["interval_s"]["p10"] <= measured["step_s"] <= predicted["interval_s"]["p90"]
    sent = sum(one["sent_bytes_per_rank"] for one in predicted["wire"]), sum(one["sent_bytes_per_rank"] for one in measured["wire"])
    peaks = predicted["memory"]["peak_bytes"], measured["memory"]["peak_bytes"]
    return cards(
        *learned,
        card(
            "Tokens per second",
            show_count(measured["tokens_per_s"]),
            basis=MEASURED,
            note=f"{show_count(predicted['tokens_per_s'])} predicted",
            source="mean of the recorded steps",
        ),
        card(
            "Step time",
            show_seconds(measured["step_s"]),
            basis=MEASURED,
            source=f"mean of the recorded steps; the median of all is {show_seconds(measured['median_step_s'])}",
            note=f"{show_seconds(predicted['step_s'])} predicted ({apart:+.0%}); {'inside' if inside else 'outside'} the interval "
            f"{show_seconds(predicted['interval_s']['p10'])} to {show_seconds(predicted['interval_s']['p90'])}",
            tone="" if inside else "warn",
        ),
        card(
            "Wire bytes of a rank",
            "equal" if sent[0] == sent[1] else "NOT equal",
            basis=MEASURED,
            note=f"{show_wire(sent[1])} measured, {show_wire(sent[0])} predicted, a step",
            tone="good" if sent[0] == sent[1] else "bad",
        ),
        card(
            "Peak memory of a rank",
            "equal" if peaks[0] == peaks[1] else "NOT equal",
            basis=MEASURED,
            note=f"{show_bytes(peaks[1])} measured, {show_bytes(peaks[0])} predicted, at the ends of actions",
            tone="good" if peaks[0] == peaks[1] else "bad",
        ),
    )


# --- loss --------------------------------------------------------------------------------------------------------------------------------


def _losses(run: Document) -> str:
    """Training and validation loss in nat per byte, with the entropy of single letters."""
    each = [loss / run["bytes_per_token"] for loss in run["losses"]]
    looks = [(one["step"], one["loss"]) for one in run["validation"]["losses"]]
    entropy: float = run["validation"]["unigram_entropy"]
    first = run["first_step"]
    num_steps = max(len(each), 1)
    finite = [value for value in (*each, *(loss for _, loss in looks), entropy) if math.isfinite(value)]
    top: float = 1.04 * max(finite)

    def height(loss: float) -> float:
        return HEIGHT * (1 - min(loss, top) / top)

    train = [((number + 1) / num_steps, height(loss)) for number, loss in enumerate(each) if math.isfinite(loss)]
    seen = [((step - first) / num_steps, height(loss)) for step, loss in looks if math.isfinite(loss)]
    dots = "".join(
        bar(
            max(0.0, share - 0.004),
            min(1.0, share + 0.004),
            y=y - 4,
            height=8,
            kind="dot",
            title=f"validation after step {step}: {loss:.3f}",
        )
        for (share, y), (step, loss) in zip(seen, looks, strict=False)
    )
    marks = [
        text(
            mark / num_steps,
            HEIGHT + 15,
            f"{first + mark:g}",
            kind="mark",
            anchor="start" if mark == 0 else "end" if mark > 0.97 * num_steps else "middle",
        )
        for mark in ticks(num_steps)
    ]
    grid = [
        piece
        for mark in ticks(top)[1:]
        for piece in (rule(height(mark), kind="grid"), text(0, height(mark) - 3, f"{mark:g}", kind="mark halo", indent=3))
    ]
    picture = chart(
        HEIGHT + 22,
        *grid,
        rule(HEIGHT, kind="axis"),
        stretched(line(train, kind="one"), line(seen, kind="two dashed"), y=0, height=HEIGHT),
        dots,
        rule(height(entropy), kind="persistent"),
        *marks,
        label=f"loss over {num_steps} steps, from {each[0]:.2f} to {each[-1]:.2f} nat per byte" if each else "no losses",
    )
    names = {"one": "training", "two": "validation", "persistent": "entropy of single bytes"}
    caption = f"Nat per byte over steps, {badge(MEASURED)}. Below the dotted line the model knows more than how often each byte occurs."
    rows = [(f"{step:,}", f"{loss:.4f}") for step, loss in looks]
    return figure(legend(names) + picture, caption) + (
        details("Validation losses, as a table", table(("after step", "nat per byte"), rows, right=(0, 1))) if rows else ""
    )


# --- predicted and measured --------------------------------------------------------------------------------------------------------------


def _table(run: Document) -> str:
    head = ("", "predicted", "measured", "difference", "rests on")
    return table(head, list(_rows(run)), right=(1, 2, 3), caption="Of one step; wire and time of one rank.")


def _rows(run: Document) -> Iterator[tuple[str, ...]]:
    predicted, measured = run["predicted"], run["measured"]
    yield _row("step", predicted["step_s"], measured["step_s"], show_seconds, "simulated, mean of recorded steps")
    yield _row("tokens per second", predicted["tokens_per_s"], measured["tokens_per_s"], show_count, "simulated, mean of recorded steps")
    yield _row(
        "peak memory of a rank",
        predicted["memory"]["peak_bytes"],
        measured["memory"]["peak_bytes"],
        show_bytes,
        "Program's buffers, executor's storages",
    )
    sent = {(one["axis"], one["op"]): one["sent_bytes_per_rank"] for one in measured["wire"]}
    for one in predicted["wire"]:
        if one["payload_bytes"]:
            found = sent.pop((one["axis"], one["op"]), 0)
            yield _row(
                f"sent: {one['op']} over {one['axis']}", one["sent_bytes_per_rank"], found, show_wire, "Program's exchanges, engine's wire"
            )
    for (axis, op), num_bytes in sent.items():
        yield _row(f"sent: {op} over {axis}", 0, num_bytes, show_wire, "not in the Program")
    ahead, found = predicted["time"], measured["time"]
    for name in TIME_WORDS:
        if ahead.get(name) or found.get(name):
            yield _row(
                f"time: {TIME_WORDS[name]}", ahead.get(name, 0.0), found.get(name, 0.0), show_seconds, "simulated, mean of recorded steps"
            )


def _row(name: str, predicted: float, measured: float, show: Callable[[float], str], rests: str) -> tuple[str, ...]:
    apart = f"{predicted / measured - 1:+.0%}" if predicted and measured else ""
    apart = "equal" if predicted == measured else apart
    return name, show(predicted) if predicted else "–", show(measured) if measured else "–", apart, rests


def _rests(run: Document) -> str:
    device = run["predicted"].get("device", {})
    rows = [
        (name, f"{value:,.6g}", "measured on this machine before the run" if run["plan"]["cluster"] == "local" else "catalog")
        for name, value in device.items()
    ]
    left_out = "".join(paragraph(f"Not counted: {words}.") for words in run.get("not_counted", ()))
    return table(("figure", "value", "source"), rows, right=(1,)) + left_out
