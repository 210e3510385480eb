"""One self-contained page that tells what a plan was predicted to do, what was proved of it, and what a run measured."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trainwright
from trainwright.export.report import memory, pipeline, plan
from trainwright.export.report.page import Section, page
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
    return assemble(_title(prediction, proof, run), sections)


def _title(prediction: Prediction | None, proof: Proof | None, run: Mapping[str, Any] | None) -> str:
    """What a page is about."""
    if prediction is not None:
        of = prediction.plan
        return f"{of.model.name} on {of.num_devices:,} × {of.cluster.device.title or of.cluster.device.name}"
    if proof is not None:
        return f"{proof.plan.model.name}: proof on {proof.plan.num_devices} ranks"
    return f"{run['plan']['model']}: run on {run['plan']['num_devices']} ranks" if run is not None else "Trainwright"


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
    return page(title, lead or "What was predicted, what was measured, and what each number rests on.", sections, trainwright.__version__)


def demand_writable(file: str | Path) -> None:
    """Raise PlanError, before any work is done, where a report could not be written."""
    target = Path(file)
    if target.is_dir() or not os.access(target.parent, os.W_OK) or (target.exists() and not os.access(target, os.W_OK)):
        raise PlanError(_unwritable(target, "no file can be written there"))


def write(file: str | Path, text: str) -> None:
    """Write a report; PlanError if the file cannot be written."""
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(_unwritable(file, error.strerror or str(error))) from error


def _unwritable(file: str | Path, reason: str) -> Problem:
    return Problem(f"the report cannot be written: {reason}", path="--report", given=str(file), attempt="--report /tmp/report.html")
