"""`trainwright prove PLAN`: the plan, small, on local ranks, against the unsharded reference."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from trainwright.plan.load import load
from trainwright.units import show_bytes, show_wire

if TYPE_CHECKING:
    from trainwright.prove.prove import Proof

HELP = "prove a plan on local ranks in float64 against the unsharded reference; wire and memory reconciled"

PROOF_FAILED = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("plan", metavar="PLAN", help="plan file, or the name of a model")
    parser.add_argument("--ranks", type=int, default=None, metavar="N", help="use the largest sizes whose product is at most N")
    parser.add_argument("--processes", action="store_true", help="ranks are processes, so that the operating system counts bytes too")
    parser.add_argument("--float32", action="store_true", help="prove in float32 (gradients to 2e-5) instead of float64")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Prove, and say what was found: 0 proved, 4 not."""
    from trainwright.prove.prove import prove  # torch is loaded here, for the verbs that need it alone

    plan = load(args.plan, args.overrides, command="prove")
    proof = prove(plan, max_ranks=args.ranks, processes=args.processes, dtype="fp32" if args.float32 else "fp64")
    if args.json:
        json.dump(proof.to_json(), sys.stdout)
        print()
    else:
        print(text(proof))
    return 0 if proof.equal else PROOF_FAILED


def text(proof: Proof) -> str:
    """The proof as a person reads it."""
    wire, memory = proof.wire, proof.memory
    sizes = " x ".join(f"{axis} {size}" for axis, size in proof.plan.parallel.sizes.items() if size > 1) or "1 rank"
    where = "processes over gloo" if proof.processes else "threads"
    lines = [
        f"{'proved' if proof.equal else 'NOT proved'}: {sizes} on {proof.plan.num_devices} {where}, {proof.dtype}",
        f"  shrunk      {', '.join(map(str, proof.changes)) or 'nothing'}",
        f"  values      worst relative error {proof.worst_relative_error:.2g} over loss, gradient norm and {proof.gradients.num_tensors_compared} gradients "
        f"(allowed {proof.tolerance.gradients:g}); {proof.parameters.worst_relative_error:.2g} over parameters after 3 steps "
        f"(allowed {proof.tolerance.parameters:g})",
        f"  replicas    {'bit-identical' if not proof.differing_replicas else 'differ: ' + ', '.join(proof.differing_replicas[:4])}",
        f"  wire        predicted {show_wire(wire.predicted_bytes)}, measured {show_wire(wire.measured_bytes)} over {wire.num_sites} sites: "
        f"{'equal at every site' if wire.equal else f'{len(wire.wrong)} wrong, {len(wire.missing)} missing, {len(wire.extra)} extra'}",
        f"  memory      peak predicted {show_bytes(memory.predicted_peak_bytes)}, measured {show_bytes(memory.measured_peak_bytes)}; "
        f"{'equal after every one of' if memory.equal else 'wrong on some of'} {memory.num_boundaries} actions",
        f"  temporary   inside a segment: predicted {show_bytes(memory.predicted_temporary_bytes)}, measured {show_bytes(memory.measured_temporary_bytes)}",
    ]
    if wire.os_error is not None:
        lines.append(
            f"  system      the operating system counted {show_wire(round(wire.os_bytes or 0))} (without {wire.header_bytes:.0f} B a message): "
            f"{100 * wire.os_error:.3f} % off"
        )
    elif proof.processes:
        lines.append("  system      the operating system's counter is not readable here")
    if proof.first_difference:
        one = proof.first_difference
        lines.append(f"  first       {one.site}: {one.tensor} on rank {one.rank}: expected {one.expected!r}, found {one.found!r}")
    lines += [f"  cause       {cause.name}: {cause.text}" for cause in proof.causes]
    for row in (*wire.wrong[:3], *memory.wrong[:3]):
        lines.append(f"  differs     rank {row[0]} {row[1]} {row[2]}: predicted {row[3]}, measured {row[4]}")
    return "\n".join(lines)
