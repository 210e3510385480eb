"""`trainwright prove PLAN`: the plan, small, on local ranks, against the unsharded reference."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from typing import TYPE_CHECKING

from trainwright.plan.load import load
from trainwright.units import show_bytes, show_wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainwright.prove.prove import Proof

HELP = "prove a plan on local ranks in float64 against the unsharded reference; wire and memory reconciled"

PROOF_FAILED = 4

WIDTH = 110
"""Letters of a line; only what was shrunk needs more than one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("plan", metavar="PLAN", help="plan file, or the name of a model")
    parser.add_argument("--ranks", type=int, default=None, metavar="N", help="use the largest sizes whose product is at most N")
    parser.add_argument("--processes", action="store_true", help="ranks are processes, so that the operating system counts bytes too")
    parser.add_argument("--float32", action="store_true", help="prove in float32 (gradients to 2e-5) instead of float64")
    parser.add_argument("--report", metavar="FILE", default=None, help="write a page of HTML, predicted and measured beside each other")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Prove, and say what was found: 0 proved, 4 not."""
    from trainwright.prove.prove import prove  # torch is loaded here, for the verbs that need it alone
    from trainwright.prove.shrink import demand_ranks

    plan = load(args.plan, args.overrides, command="prove")
    demand_ranks(plan, args.ranks, "--ranks")
    if args.report is not None:
        from trainwright.export.html import demand_writable

        demand_writable(args.report)
    proof = prove(plan, max_ranks=args.ranks, processes=args.processes, dtype="fp32" if args.float32 else "fp64")
    if args.report is not None:
        from trainwright.export.html import report, write

        write(args.report, report(proof=proof))
    if args.json:
        json.dump(proof.to_json(), sys.stdout)
        print()
    else:
        print(text(proof))
    return 0 if proof.equal else PROOF_FAILED


def text(proof: Proof) -> str:
    """The proof as a person reads it."""
    rows = [*_shrunk(proof), *_rows(proof)]
    sizes = " x ".join(f"{axis} {size}" for axis, size in proof.plan.parallel.sizes.items() if size > 1) or "one rank"
    ranks = "process" if proof.processes else "thread"
    many = "es" if proof.processes else "s"
    where = f"{proof.plan.num_devices} {ranks}{many if proof.plan.num_devices > 1 else ''}{' over gloo' if proof.processes else ''}"
    head = f"{'proved' if proof.equal else 'NOT proved'}: {sizes} on {where}, {proof.dtype}"
    return "\n".join([head, *(f"  {name:<10}  {said}" for name, said in rows)])


def _shrunk(proof: Proof) -> Iterator[tuple[str, str]]:
    """What was changed for the proof; a change stays on one line."""
    changes = ", ".join(str(change).replace(" ", "\N{NO-BREAK SPACE}") for change in proof.changes) or "nothing"
    for number, line in enumerate(textwrap.wrap(changes, WIDTH, break_long_words=False, break_on_hyphens=False)):
        yield "" if number else "shrunk", line.replace("\N{NO-BREAK SPACE}", " ")


def _rows(proof: Proof) -> Iterator[tuple[str, str]]:
    wire, memory, allowed = proof.wire, proof.memory, proof.tolerance
    num_tensors = proof.gradients.num_tensors_compared
    worst = f"worst relative error {proof.worst_relative_error:.2g}, allowed {allowed.gradients:g}"
    yield "values", f"loss, gradient norm and {num_tensors} gradients: {worst}"
    error = proof.parameters.worst_relative_error
    yield "parameters", f"after 3 steps with clipping: worst relative error {error:.2g}, allowed {allowed.parameters:g}"
    differing = proof.differing_replicas
    more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
    yield "replicas", f"differ: {', '.join(differing[:4])}{more}" if differing else "bit-identical"
    agrees = "equal at every one" if wire.equal else f"{len(wire.wrong)} wrong, {len(wire.missing)} missing, {len(wire.extra)} extra"
    sites = f"{wire.num_sites} {'site' if wire.num_sites == 1 else 'sites'}"
    amounts = f"predicted {show_wire(wire.predicted_bytes)}, measured {show_wire(wire.measured_bytes)} at {sites}: {agrees}"
    yield "wire", amounts if wire.num_sites or not wire.equal else "no exchange"
    peaks = f"peak predicted {show_bytes(memory.predicted_peak_bytes)}, measured {show_bytes(memory.measured_peak_bytes)}"
    yield "memory", f"{peaks}; {'equal after every one' if memory.equal else 'wrong after some'} of {memory.num_boundaries} actions"
    inside = show_bytes(memory.predicted_temporary_bytes), show_bytes(memory.measured_temporary_bytes)
    close = "within a tenth" if memory.temporary_close else "more than a tenth apart"
    yield "temporary", f"inside a segment: predicted {inside[0]}, measured {inside[1]}: {close}"
    yield from _system(proof)
    if (first := proof.first_difference) is not None:
        yield "first", f"{first.site}: {first.tensor} on rank {first.rank}: expected {first.expected!r}, found {first.found!r}"
    yield from (("cause", f"{cause.name}: {cause.text}") for cause in proof.causes)
    for rank, site, what, expected, found in (*wire.wrong[:3], *memory.wrong[:3]):
        yield "differs", f"rank {rank} {site} {what}: predicted {expected}, measured {found}"


def _system(proof: Proof) -> Iterator[tuple[str, str]]:
    """What the operating system counted, where ranks are processes."""
    wire = proof.wire
    if wire.os_bytes is not None and wire.os_error is not None:
        counted = f"{show_wire(round(wire.os_bytes))} written, without {wire.header_bytes:.0f} B a message"
        yield "system", f"the operating system counted {counted}: {100 * wire.os_error:.3f}% off"
    elif proof.processes and not wire.measured_bytes:
        yield "system", "no message was sent, nothing to count"
    elif proof.processes:
        yield "system", "the operating system's counter is not readable here"
