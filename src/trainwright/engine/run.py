"""A run that is over: what came of it beside what was predicted, as a document and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainwright.engine.outcome import Outcome
from trainwright.plan.plan import Plan
from trainwright.units import show_bytes, show_count, show_seconds, show_wire

SCHEMA = "trainwright/run/1"

NOT_COUNTED = (
    "reading the text, validation and checkpoints are in no step",
    "peak: buffers that are live between actions; the reserve of the allocator and what an operator holds inside are left out",
    "waiting for a rank that is late counts as exposed wire",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One call of `run`: its plan, what came of it, and a document of schema trainwright/predict/1 for the devices it ran on."""

    plan: Plan
    outcome: Outcome
    prediction: Mapping[str, Any]

    def __repr__(self) -> str:
        """One line: model, mesh, steps, loss, step time."""
        out = self.outcome
        step_s = show_seconds(out.measured(self.critical_position)["step_s"])
        loss = f"loss {out.losses[0]:.3f} to {out.losses[-1]:.3f}"
        return f"Run({self.plan.model.name} on {mesh(self.plan)}: {len(out.losses)} of {out.num_steps} steps, {loss}, {step_s} a step)"

    @property
    def critical_position(self) -> int:
        """The pipeline position whose rank the prediction speaks of."""
        role = next((one["value"] for one in self.prediction["assumptions"] if one["name"] == "critical role"), "pipeline[0]")
        return int(role.removeprefix("pipeline[").removesuffix("]"))

    def predicted(self) -> dict[str, Any]:
        """What was predicted, in the words of `Outcome.measured`."""
        told = self.prediction
        roles = told["memory"]["roles"]
        return {
            "step_s": told["step_s"],
            "interval_s": told["interval_s"],
            "tokens_per_s": told["tokens_per_s"],
            "memory": {
                "peak_bytes": max(role["boundary_peak_bytes"] for role in roles),
                "peak_with_temporary_bytes": told["memory"]["peak_bytes"],
            },
            "wire": told["wire"],
            "time": told["time"],
            "device": {one["name"]: one["value"] for one in told["assumptions"] if one["name"] in _FIGURES}
            | {"peak_flops_per_s": told["peak_flops_per_s_per_device"]},
        }

    def to_json(self) -> dict[str, Any]:
        """The document of schema trainwright/run/1."""
        out = self.outcome
        final = out.looks[-1].loss if out.looks else None
        measured = out.measured(self.critical_position)
        return {
            "schema": SCHEMA,
            "plan": dict(self.prediction["plan"]),
            "num_steps": len(out.losses),
            "first_step": out.first_step,
            "planned_steps": out.num_steps,
            "planned_steps_before": out.planned_before,
            "losses": list(out.losses),
            "bytes_per_token": out.bytes_per_token,
            "validation": {
                "unit": "nat/byte",
                "losses": [{"step": look.step, "loss": look.loss} for look in out.looks],
                "final": final,
                "unigram_entropy": out.unigram_entropy,
                "below_unigram": None if final is None else out.unigram_entropy - final,
            },
            "tokens_per_s": measured["tokens_per_s"],
            "predicted": self.predicted(),
            "measured": measured,
            "checkpoint": out.checkpoint,
            "folder": out.folder,
            "trace": out.trace,
            "not_counted": list(NOT_COUNTED),
        }

    def lines(self) -> Iterator[str]:
        """The page for a terminal."""
        out = self.outcome
        first = f"steps {out.first_step + 1} to {out.first_step + len(out.losses)} of {out.num_steps}"
        yield f"{self.plan.model.name} on {mesh(self.plan)}: {first}, {out.tokens_per_step:,} tokens each"
        if out.planned_before not in (None, out.num_steps):
            yield f"  resumed     planned {out.planned_before} steps before: the learning-rate schedule now ends at {out.num_steps}"
        yield f"  loss        {out.losses[0]:.3f} to {out.losses[-1]:.3f} nat/token in training"
        if out.looks:
            final = out.looks[-1].loss
            looks = ", ".join(f"{look.loss:.3f} after {look.step}" for look in out.looks[-4:])
            below = (
                f"{out.unigram_entropy - final:+.3f} below" if final <= out.unigram_entropy else f"{final - out.unigram_entropy:.3f} above"
            )
            yield f"  validation  {looks} nat/byte: {below.lstrip('+')} the {out.unigram_entropy:.3f} of letter frequencies alone"
        yield ""
        found = out.measured(self.critical_position)
        yield from _table(self.predicted(), found)
        yield ""
        number = found["num_recorded_steps"]
        steps = "the recorded step" if number == 1 else f"means over the {number} recorded steps"
        yield f"  measured    {steps} of rank {found['rank']}; the median of all steps is {show_seconds(found['median_step_s'])}"
        if out.checkpoint:
            yield f"  checkpoint  {out.checkpoint}{self._kept()}"
        yield f"  folder      {out.folder}" + (f", trace for ui.perfetto.dev: {out.trace}" if out.trace else "")
        yield "Not counted: " + "; ".join(NOT_COUNTED) + "."

    def _kept(self) -> str:
        """What became of older checkpoints."""
        settings = self.plan.run.checkpoint
        return f" (the newest {settings.keep} are kept, older ones removed: run.checkpoint.keep)" if settings is not None else ""


def mesh(plan: Plan) -> str:
    """The axes in use: `pipeline 2 x zero 4`."""
    return " x ".join(f"{axis} {size}" for axis, size in plan.parallel.sizes.items() if size > 1) or "one process"


_FIGURES = ("memory_bytes_per_s", "scale_up_bytes_per_s", "launch_s", "gemm_efficiency", "memory_efficiency", "host_fixed_s")


def _table(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> Iterator[str]:
    """Predicted beside measured, with the difference in per cent of the measured. The measured parts add up to the measured step."""
    yield f"  {'':<24}{'predicted':>14}{'measured':>14}{'':>9}"
    yield _row("tokens/s", predicted["tokens_per_s"], measured["tokens_per_s"], show_count)
    yield _row("step", predicted["step_s"], measured["step_s"], show_seconds)
    mine, theirs = predicted["time"], measured["time"]
    yield _row("  compute", mine["compute_s"], theirs["compute_s"], show_seconds)
    yield _row("  wire and bubble", mine["exposed_wire_s"] + mine["bubble_s"], theirs["exposed_wire_s"], show_seconds)
    yield _row("  update", mine["update_s"], theirs["update_s"], show_seconds)
    yield f"  {'  executor':<24}{'in compute':>14}{show_seconds(theirs['other_s']):>14}"
    yield _row("peak memory of a rank", predicted["memory"]["peak_bytes"], measured["memory"]["peak_bytes"], show_bytes)
    sent = {(one["axis"], one["op"]): one["sent_bytes_per_rank"] for one in measured["wire"]}
    for one in predicted["wire"]:
        if one["payload_bytes"]:
            found = sent.pop((one["axis"], one["op"]), 0)
            yield _row(f"sent, {one['op']} {one['axis']}", one["sent_bytes_per_rank"], found, show_wire)
    for (axis, op), num_bytes in sent.items():
        yield _row(f"sent, {op} {axis}", 0, num_bytes, show_wire)


def _row(name: str, predicted: float, measured: float, show: Any) -> str:  # noqa: ANN401 - one of `units`
    if predicted == measured:
        apart = "equal"
    elif not predicted or not measured:
        apart = ""
    else:
        apart = f"{predicted / measured - 1:+.0%}"
    return f"  {name:<24}{show(predicted) if predicted else '-':>14}{show(measured):>14}{apart:>9}"
