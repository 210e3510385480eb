"""One self-contained page that tells what a plan was predicted to do, what was proved of it, and what a run measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright import __version__
from trainwright.export.report import memory, pipeline, plan
from trainwright.export.report.page import Section, page
from trainwright.export.report.plan import mesh
from trainwright.problems import PlanError, Problem

if TYPE_CHECKING:
    from trainwright.predict.predict import Prediction
    from trainwright.prove.prove import Proof


def report(prediction: Prediction | None = None, proof: Proof | None = None, run: Mapping[str, Any] | None = None) -> str:
    """The page: sections for what is given. `run` is the document of schema trainwright/run/1."""
    sections: list[Section] = []
    if prediction is not None:
        sections += prediction_sections(prediction)
    if proof is not None:
        sections += proof_sections(proof)
    if run is not None:
        sections += run_sections(run)
    names = [prediction.plan.model.name] if prediction else [proof.plan.model.name] if proof else []
    return assemble(" ".join([*names, "report"]), sections)


def prediction_sections(prediction: Prediction) -> list[Section]:
    """The plan and its verdict, the pipeline picture, memory over time."""
    return [plan.section(prediction), pipeline.section(prediction), memory.section(prediction)]


def proof_sections(proof: Proof) -> list[Section]:
    """Predicted and measured beside each other, for a plan that was executed small."""
    from trainwright.export.report import proof as proof_

    return [proof_.section(proof)]


def run_sections(run: Mapping[str, Any]) -> list[Section]:
    """What a run learned, and how its speed, wire and memory compare with the prediction."""
    from trainwright.export.report import run as run_

    return [run_.section(run)]


def assemble(title: str, sections: list[Section], lead: str = "") -> str:
    """The file's text."""
    return page(title, lead or "What was predicted, what was measured, and what each number rests on.", sections, __version__)


def subject(prediction: Prediction) -> str:
    """What a prediction is about, in a line."""
    of = prediction.plan
    device = of.cluster.device.title or of.cluster.device.name
    return f"{of.model.name} on {of.num_devices} × {device}: {mesh(of.parallel.sizes)}"


def write(path: Path, text: str) -> None:
    """Write a report; PlanError if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"the report cannot be written: {error.strerror or error}"
        raise PlanError(Problem(message, path="--report", given=str(path), attempt="--report /tmp/report.html")) from error
