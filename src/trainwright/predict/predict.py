"""Predict a plan: lower it, price it, simulate it, and add up what it holds, sends and costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trainwright.ir.program import Program
from trainwright.ir.timeline import Timeline
from trainwright.plan.lower import lower
from trainwright.plan.plan import Plan
from trainwright.predict.document import describe
from trainwright.predict.memory import ALLOCATOR_FACTOR, CONTEXT_BYTES, LOCAL_CONTEXT_BYTES, Memory
from trainwright.predict.page import Number, Page
from trainwright.predict.price import price
from trainwright.predict.simulate import Simulation, simulate
from trainwright.units import Bytes, Seconds, show_seconds

DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True)
class Prediction:
    """What a plan costs. `to_json` has everything; the rest are its main figures and what they were made from."""

    plan: Plan
    program: Program
    simulation: Simulation
    memory: Memory

    def __repr__(self) -> str:
        """One line: model, mesh, step time, verdict."""
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.plan.parallel.sizes.items() if size > 1) or "one rank"
        return f"Prediction({self.plan.model.name} on {mesh}: {show_seconds(self.step_s)} a step, {self.verdict})"

    @cached_property
    def page(self) -> Page:
        """The document and the reasons for its numbers."""
        return describe(self.plan, self.simulation, self.memory)

    def to_json(self, *, why: bool = False) -> dict[str, Any]:
        """The document of schema trainwright/predict/1; with `why`, `provenance` says of every number how it comes about."""
        document = dict(self.page.document)
        return {**document, "provenance": self.page.provenance()} if why else document

    @property
    def step_s(self) -> Seconds:
        """Seconds of one step."""
        return self.simulation.step_s

    @property
    def tokens_per_s(self) -> Number:
        """Tokens of a step over its seconds."""
        value: Number = self.page.document["tokens_per_s"]
        return value

    @property
    def mfu(self) -> float:
        """Share of the peak that the model's own arithmetic reaches, a causal mask counted as half."""
        return float(self.page.document["mfu"])

    @property
    def peak_bytes(self) -> Bytes:
        """Most that a rank of the fullest role holds."""
        return self.memory.peak_bytes

    @property
    def verdict(self) -> str:
        """fits, risky, or does not fit."""
        return self.memory.verdict

    @property
    def fits(self) -> bool:
        """Whether it may run at all."""
        return self.verdict != DOES_NOT_FIT

    @cached_property
    def timeline(self) -> Timeline:
        """Every action of every role as an Event; for programs of a size that a person would look at."""
        return self.simulation.timeline()


def predict(plan: Plan, program: Program | None = None) -> Prediction:
    """Predict a plan, or a Program that was lowered from it. Raises PlanError where the plan cannot be lowered."""
    program = lower(plan) if program is None else program
    simulation = simulate(program, price(program, plan))
    context_bytes = LOCAL_CONTEXT_BYTES if plan.cluster.is_local else CONTEXT_BYTES
    memory = Memory(program, plan.cluster.device.memory_bytes, context_bytes, ALLOCATOR_FACTOR)
    return Prediction(plan, program, simulation, memory)
