"""A prediction on a terminal: verdict, time, memory, wire, what limits, and on what it rests.

One layout, as lines of styled pieces: with colour where the terminal shows it, the same letters without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from trainwright.units import show_bytes, show_bytes_per_s, show_count, show_flops_per_s, show_seconds, show_usd, show_wire

Piece: TypeAlias = tuple[str, str]
Line: TypeAlias = list[Piece]
Document: TypeAlias = Mapping[str, Any]

BAR: Final = 44
MOST_ROLES: Final = 16
LEFT: Final = 11
DAY_S: Final = 86400.0

PARTS: Final = {
    "weights": ("W", "blue"),
    "gathered": ("w", "bright_blue"),
    "gradients": ("G", "magenta"),
    "master": ("M", "cyan"),
    "optimizer": ("O", "bright_cyan"),
    "activations": ("A", "green"),
    "temporary": ("T", "yellow"),
    "wire_buffers": ("N", "bright_black"),
}
"""Letter and colour of each part of memory."""

TIMES: Final = {
    "compute_s": ("compute", "█", "green"),
    "exposed_wire_s": ("exposed wire", "▓", "yellow"),
    "bubble_s": ("bubble", "░", "red"),
    "update_s": ("update", "▒", "cyan"),
    "offload_s": ("offload", "▒", "magenta"),
}

VERDICTS: Final = {"fits": "bold green", "risky": "bold yellow", "does not fit": "bold red"}


def lines(document: Document, advice: Sequence[str] = ()) -> Iterator[Line]:
    """The report, line by line; `advice` is what `remedy` says of a plan that does not fit."""
    yield from _head(document)
    yield from ([(line, "")] for line in advice)
    yield []
    yield from _time(document)
    yield []
    yield from _memory(document)
    yield []
    yield from _wire(document)
    yield []
    yield _row("limited by", (document["bottleneck"], "bold"))
    yield []
    yield from _assumptions(document)


def plain(report: Iterator[Line]) -> str:
    """The report without colour."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in report)


def show(report: Iterator[Line]) -> None:
    """Print the report in colour."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in report:
        console.print(Text.assemble(*((text, style) for text, style in line)), soft_wrap=True)


def _row(name: str, *pieces: Piece) -> Line:
    return [(f"{name:<{LEFT}}", "dim"), *pieces]


def _head(document: Document) -> Iterator[Line]:
    plan, memory = document["plan"], document["memory"]
    yield [(f"{plan['model']}", "bold"), (f" on {plan['num_devices']:,} × {plan['device']}", "")]
    axes = " × ".join(f"{axis} {size}" for axis, size in plan["mesh"].items() if size > 1) or "one rank"
    count = f"{plan['num_microbatches']:,} microbatch{'' if plan['num_microbatches'] == 1 else 'es'}"
    batch = f"{count} of {plan['microbatch_sequences']} × {plan['sequence_tokens']:,} tokens"
    yield [(f"{axes}, {batch}", "dim")]
    yield []
    verdict = memory["verdict"]
    share = memory["reserved_bytes"] / memory["capacity_bytes"]
    yield [
        (f" {verdict.upper()} ", f"{VERDICTS[verdict]} reverse"),
        (f"  {show_bytes(memory['reserved_bytes'])} of {show_bytes(memory['capacity_bytes'])} reserved ({share:.0%})", ""),
    ]


def _time(document: Document) -> Iterator[Line]:
    step_s, interval = document["step_s"], document["interval_s"]
    yield _row(
        "step",
        (show_seconds(step_s), "bold"),
        (f"   80% interval {show_seconds(interval['p10'])} to {show_seconds(interval['p90'])}", ""),
    )
    rate, each = show_count(document["tokens_per_s"]), show_count(document["tokens_per_s_per_device"])
    yield _row("tokens/s", (rate, "bold"), (f"   {each} a device", ""))
    conventions = document["conventions"]
    yield _row(
        "MFU",
        (f"{document['mfu']:.1%}", "bold"),
        (f"   executed {document['hfu']:.1%}, mask ignored {conventions['full']:.1%}", ""),
        (f", of {show_flops_per_s(document['peak_flops_per_s_per_device'])}", ""),
    )
    cost = document["cost"]
    whole = f"{_days(cost['days'])}, " if cost["days"] is not None else ""
    money = f", {show_usd(cost['usd'])}" if cost["usd"] is not None else ""
    energy = f", {show_count(cost['kwh'])} kWh" if cost["kwh"] is not None and cost["covers"] == "run" else ""
    if cost["covers"] == "run" or money:
        yield _row(f"a {cost['covers']}", (f"{whole}{show_count(cost['device_hours'])} device hours{money}{energy}", ""))
    yield _row("time", *_time_bar(document))
    for key, (name, mark, style) in TIMES.items():
        seconds = document["time"][key]
        if seconds:
            yield _row("", (f"{mark} ", style), (f"{name:<13}{seconds / step_s:>6.1%}  {show_seconds(seconds):>9}", ""))


def _days(days: float) -> str:
    """The length of a run: days, or what a person would say below one."""
    return f"{days:.1f} days" if days >= 1 else show_seconds(days * DAY_S)


def _time_bar(document: Document) -> Iterator[Piece]:
    shares = [document["time"][key] / document["step_s"] for key in TIMES]
    for (_, mark, style), length in zip(TIMES.values(), _lengths(shares, BAR), strict=True):
        yield mark * length, style


def _memory(document: Document) -> Iterator[Line]:
    memory = document["memory"]
    capacity = memory["capacity_bytes"]
    roles = memory["roles"]
    fullest = max(range(len(roles)), key=lambda number: roles[number]["peak_bytes"])
    shown = range(len(roles)) if len(roles) <= MOST_ROLES else sorted({0, 1, fullest, len(roles) // 2, len(roles) - 1})
    yield _row("memory", (f"peak of each pipeline position, of {show_bytes(capacity)}", ""))
    for number in shown:
        role = roles[number]
        style = "bold" if number == fullest else ""
        yield [
            (f"  {role['role']:<14}{show_bytes(role['peak_bytes']):>9}  ", style),
            *_memory_bar(role["parts"], capacity),
            (f"  ×{role['num_ranks']:,} ranks" if number == shown[0] else "", "dim"),
        ]
    if len(shown) < len(roles):
        yield [(f"  and {len(roles) - len(shown)} more, none fuller", "dim")]
    parts = roles[fullest]["parts"]
    legend: Line = [("  ", "")]
    for part, (letter, style) in PARTS.items():
        if parts[part]:
            legend += [(f"{letter} ", style), (f"{part.replace('_', ' ')} {show_bytes(parts[part])}  ", "")]
    yield legend


def _memory_bar(parts: Mapping[str, int], capacity: int) -> Iterator[Piece]:
    lengths = _lengths([parts[part] / capacity for part in PARTS], BAR)
    for (letter, style), length in zip(PARTS.values(), lengths, strict=True):
        yield letter * length, style
    used = sum(lengths)
    yield ("·" * (BAR - used), "dim") if used < BAR else ("!", "bold red")


def _lengths(shares: Sequence[float], width: int) -> list[int]:
    """Whole lengths for shares of a width: rounded down, what is left going to the largest remainders. Never more than `width` in all.

    >>> _lengths([0.5, 0.3, 0.04, 0.0], 10)
    [5, 3, 0, 0]
    """
    scale = width / max(1.0, sum(shares))
    exact = [share * scale for share in shares]
    found = [int(length) for length in exact]
    left = min(width, round(sum(exact))) - sum(found)
    for place in sorted(range(len(exact)), key=lambda place: found[place] - exact[place])[:left]:
        found[place] += 1
    return found


def _wire(document: Document) -> Iterator[Line]:
    if not document["wire"]:
        yield _row("wire", ("nothing is sent", ""))
        return
    width = max(4, *(len(row["axis"]) for row in document["wire"]))
    yield _row("wire", ("one rank of the critical position, a step", ""))
    yield [(f"  {'axis':<{width}}  {'exchange':<14} {'count':>7} {'payload':>10} {'sent':>10} {'exposed':>10}", "dim")]
    for row in sorted(document["wire"], key=lambda one: -one["sent_bytes_per_rank"]):
        sizes = f"{show_wire(row['payload_bytes']):>10} {show_wire(row['sent_bytes_per_rank']):>10}"
        exposed = show_seconds(row["exposed_s"]) if row["exposed_s"] else "-"
        yield [(f"  {row['axis']:<{width}}  {row['op']:<14} {row['count']:>7,} {sizes} {exposed:>10}", "")]


def _assumptions(document: Document) -> Iterator[Line]:
    known = {entry["name"]: entry for entry in document["assumptions"]}
    stack = known["stack"]
    yield _row("rests on", (f"stack {stack['value']}: {stack['source']}", ""))
    attention = known.get("attention_forward_efficiency")
    kernel = f"attention {attention['value']:.0%} of peak forward" if attention else "attention that is not fused"
    rates = f"matrix products at {known['gemm_efficiency']['value']:.0%} of peak, {kernel}"
    links = (
        f"scale-up {show_bytes_per_s(known['scale_up_bytes_per_s']['value'])}, NIC {show_bytes_per_s(known['nic_bytes_per_s']['value'])}"
    )
    yield _row("", (f"{rates}; {links}", ""))
    states = ", ".join(f"{name} {known[f'precision.{name}']['value']}" for name in ("weights", "gradients", "master", "optimizer"))
    yield _row("", (f"{states}; recompute {known['recompute']['value']}", ""))
    yield _row("left out", ("; ".join(entry["value"] for entry in document["assumptions"] if entry["name"] == "left out"), "dim"))
