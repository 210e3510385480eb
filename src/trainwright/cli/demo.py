"""`trainwright demo`: the main job end to end.

Predicts a large plan, proves it small, trains a small model, and writes a report of all three.

This process never loads torch: the proof and the run happen in children of it, so that each forks its ranks from a process that has run no
kernel yet.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainwright.problems import PlanError, Problem
from trainwright.units import Seconds

if TYPE_CHECKING:
    import argparse
    from multiprocessing.connection import Connection

    from trainwright.export.report.page import Section

HELP = "the main job end to end: predict, prove, run, and a report of all three"

HOLDS, DOES_NOT_FIT, DOES_NOT_HOLD = 0, 3, 4

PLANS: Final = Path(__file__).parent.parent / "plans"
LARGE: Final = PLANS / "llama-3-8b-64-h100.toml"
SMALL: Final = PLANS / "tiny-llama-text.toml"

NUM_RANKS: Final = 8
LEARNED_NAT_PER_BYTE: Final = 0.5
"""How far the validation loss must fall below the entropy of single bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one of the three steps found: its document, its page for the terminal, its sections of the report, and what was checked."""

    document: dict[str, Any]
    text: str
    sections: tuple[Section, ...]
    checks: dict[str, bool]

    @property
    def holds(self) -> bool:
        """Everything that was checked."""
        return all(self.checks.values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb."""
    parser.add_argument("--report", metavar="FILE", default="report.html", help="where the report goes (report.html in the current folder)")
    parser.add_argument("--steps", metavar="N", type=int, default=None, help="train for so many steps instead of the plan's")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Do the three steps: 0 if all of them hold, 3 if the large plan does not fit, 4 if a proof or the run falls short."""
    start_s = time.perf_counter()
    target = Path(args.report)
    _demand(target, args.steps)
    steps: tuple[tuple[str, str, Callable[[], Part]], ...] = (
        ("predict", "Llama 3 8B, from its Hugging Face config.json, on 64 H100; torch is not loaded", predict),
        ("prove", f"the same plan, shrunk, on {NUM_RANKS} processes of this machine in float64", lambda: _in_a_child(prove)),
        ("run", "a small Llama on Python's own source files, 2 processes of this machine", lambda: _in_a_child(train, args.steps)),
    )
    parts: dict[str, Part] = {}
    for number, (name, what, step) in enumerate(steps, 1):
        began_s = time.perf_counter()
        if not args.json:
            print(f"{number}/{len(steps)} {name}: {what}\n", flush=True)
        parts[name] = step()
        if not args.json:
            print(f"{parts[name].text}\n\n    {verdict(parts[name])}, {time.perf_counter() - began_s:.0f} s\n", flush=True)
    _write(target, parts)
    elapsed_s = time.perf_counter() - start_s
    holds = all(part.holds for part in parts.values())
    if args.json:
        print(json.dumps(document(parts, target, elapsed_s), separators=(",", ":")))
    else:
        print(f"{'all three hold' if holds else 'NOT all of it holds'}, {elapsed_s:.0f} s. The report: {target.resolve()}")
    if not parts["predict"].checks["the plan fits"]:
        return DOES_NOT_FIT
    return HOLDS if holds else DOES_NOT_HOLD


def document(parts: dict[str, Part], target: Path, elapsed_s: Seconds) -> dict[str, Any]:
    """The document of schema trainwright/demo/1: those of the three verbs, and what was checked."""
    return {
        "schema": "trainwright/demo/1",
        "holds": all(part.holds for part in parts.values()),
        "checks": {name: part.checks for name, part in parts.items()},
        "elapsed_s": elapsed_s,
        "report": str(target.resolve()),
        **{name: part.document for name, part in parts.items()},
    }


def verdict(part: Part) -> str:
    """What was checked, in a line."""
    return "; ".join(f"{'yes' if holds else 'NO'}: {what}" for what, holds in part.checks.items())


# --- the three steps ---------------------------------------------------------------------------------------------------------------------


def predict() -> Part:
    """Predict the large plan."""
    from trainwright.export.html import prediction_sections
    from trainwright.plan.load import load
    from trainwright.predict.predict import predict as predicted
    from trainwright.predict.report import lines, plain

    prediction = predicted(load(LARGE))
    found = prediction.to_json()
    return Part(
        document=found,
        text=plain(lines(found)),
        sections=tuple(prediction_sections(prediction)),
        checks={"the plan fits": prediction.fits, "no torch was loaded": "torch" not in sys.modules},
    )


def prove() -> Part:
    """Prove the large plan, shrunk."""
    from trainwright.cli.prove import text
    from trainwright.export.html import proof_sections
    from trainwright.plan.load import load
    from trainwright.prove.prove import prove as proved

    proof = proved(load(LARGE, command="prove"), max_ranks=NUM_RANKS, processes=True)
    return Part(
        document=proof.to_json(),
        text=text(proof),
        sections=tuple(proof_sections(proof)),
        checks={
            "equal to the unsharded reference": proof.values_equal and not proof.differing_replicas,
            "wire bytes as predicted at every site": proof.wire.equal,
            "live bytes as predicted after every action": proof.memory.equal,
            "nothing else amiss": proof.equal,
        },
    )


def train(num_steps: int | None = None) -> Part:
    """Train the small model."""
    from trainwright import api
    from trainwright.export.html import run_sections

    overrides = {} if num_steps is None else {"run.steps": num_steps}
    with tempfile.TemporaryDirectory(prefix="trainwright-demo-") as folder:
        done = api.run(api.load(SMALL, "run", **overrides), folder=folder, progress=True)
    found = {**done.to_json(), "folder": None}
    lines = [line for line in done.lines() if not line.startswith("  folder")]
    return Part(document=found, text="\n".join(lines), sections=tuple(run_sections(found)), checks=run_checks(found))


def run_checks(found: dict[str, Any]) -> dict[str, bool]:
    """What a run must show: something learned, and wire and memory as predicted."""
    below = found["validation"]["below_unigram"]
    sent = [
        {(one["axis"], one["op"]): one["sent_bytes_per_rank"] for one in found[side]["wire"] if one["payload_bytes"]}
        for side in ("predicted", "measured")
    ]
    peaks = [found[side]["memory"]["peak_bytes"] for side in ("predicted", "measured")]
    return {
        f"learned {LEARNED_NAT_PER_BYTE} nat per byte beyond letter frequencies": (below or 0.0) >= LEARNED_NAT_PER_BYTE,
        "wire bytes as predicted": sent[0] == sent[1],
        "peak of live bytes as predicted": peaks[0] == peaks[1],
    }


# --- around them -------------------------------------------------------------------------------------------------------------------------


def _demand(target: Path, num_steps: int | None) -> None:
    """Raise PlanError, before minutes are spent, where the report could not be written; ModuleNotFoundError where torch is missing."""
    from trainwright.export.html import demand_writable

    demand_writable(target)
    if num_steps is not None and num_steps < 1:
        raise PlanError(Problem("a run does at least one step", path="--steps", given=num_steps, allowed="whole numbers from 1"))
    if find_spec("torch") is None:
        raise ModuleNotFoundError("proving and running need torch", name="torch")


def _write(target: Path, parts: dict[str, Part]) -> None:
    from trainwright.export.html import assemble, write

    sections = [section for part in parts.values() for section in part.sections]
    lead = "Llama 3 8B on 64 H100, predicted; the same plan shrunk, executed and compared; and a small Llama, trained on this machine."
    write(target, assemble("Trainwright: one plan predicted, proved and run", sections, lead))


def _in_a_child(step: Callable[..., Part], *arguments: object) -> Part:
    """Do a step in a forked process and bring its Part home; what it raises is raised here."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_tell, args=(there, step, arguments))
    child.start()
    there.close()
    try:
        said = here.recv()
    except EOFError:
        child.join()
        raise RuntimeError(f"the process of {step.__name__} ended without a word (exit code {child.exitcode})") from None
    except KeyboardInterrupt:
        child.terminate()
        raise
    finally:
        here.close()
        child.join()
    if isinstance(said, BaseException):
        raise said
    assert isinstance(said, Part), "a child tells a Part or what it raised"
    return said


def _tell(there: Connection, step: Callable[..., Part], arguments: tuple[object, ...]) -> None:
    """In the child: do the step and send what came of it."""
    said: Part | BaseException
    try:
        said = step(*arguments)
    except KeyboardInterrupt:
        said = KeyboardInterrupt()
    except Exception as error:  # noqa: BLE001 - told to the parent, which raises it
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, PlanError | KeyboardInterrupt):
            cause = cause.__cause__
        said = cause or RuntimeError(f"{type(error).__name__}: {error}")
    with suppress(BrokenPipeError):
        there.send(said)
