"""Precision: the number format of each copy of the model's state."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

from trainwright.problems import Problem, nearest
from trainwright.spec.formats import FORMATS, LANDED, bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainwright.spec.stack import Stack
    from trainwright.units import Bytes

_OTHER_NAMES: Final = {
    "float64": "fp64",
    "double": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "bfp16": "bf16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Formats; None means the default that `resolved()` fills in.

    compute       operands of matrix products.
    weights       the copy that forward and backward read.
    gradients     the buffer in which microbatches are summed.
    master        the copy that the optimizer updates; "none" if it updates the weights themselves.
    optimizer     each moment.
    reduce        gradients on the wire.
    activations   tensors kept for backward, and those sent between stages.
    """

    compute: str = "bf16"
    weights: str | None = None
    gradients: str | None = None
    master: str | None = None
    optimizer: str | None = None
    reduce: str | None = None
    activations: str | None = None

    def resolved(self, stack: Stack | None = None) -> ResolvedPrecision:
        """Every format named. A stack may declare another gradient format than the default.

        bf16 compute: weights and activations bf16, gradients, master and moments fp32.
        fp32 and fp64 compute: everything in that format, and no master copy.

        >>> Precision().resolved().state_bytes_per_parameter(num_moments=2)
        18
        >>> Precision(compute="fp32").resolved().state_bytes_per_parameter(num_moments=2)
        16
        """
        mixed = bytes_of(self.compute) < bytes_of("fp32")
        weights = self.weights or self.compute
        exact = "fp32" if mixed else self.compute
        gradients = self.gradients or (stack.gradients if stack is not None and stack.gradients and mixed else exact)
        return ResolvedPrecision(
            compute=self.compute,
            weights=weights,
            gradients=gradients,
            master=self.master or (exact if mixed else "none"),
            optimizer=self.optimizer or exact,
            reduce=self.reduce or gradients,
            activations=self.activations or self.compute,
        )

    def check(self) -> Iterator[Problem]:
        """Names that are no format, and formats that the engine cannot compute in yet."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or value in LANDED or (value == "none" and field.name == "master"):
                continue
            yield _format_problem(field.name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPrecision:
    """A Precision in which nothing is left open; see there for what each means."""

    compute: str
    weights: str
    gradients: str
    master: str
    optimizer: str
    reduce: str
    activations: str

    @property
    def has_master(self) -> bool:
        """The optimizer updates a copy of its own, and the weights are cast from it."""
        return self.master != "none"

    def state_bytes_per_parameter(self, num_moments: int) -> Bytes:
        """Bytes that stay from step to step for one unsharded parameter: weight, gradient, master and moments."""
        return bytes_of(self.weights) + bytes_of(self.gradients) + bytes_of(self.master) + num_moments * bytes_of(self.optimizer)


def _format_problem(field: str, value: str) -> Problem:
    allowed = (*LANDED, "none") if field == "master" else LANDED
    known = value in FORMATS
    meant = _OTHER_NAMES.get(value) or ("bf16" if known else nearest(value, allowed) or "bf16")
    return Problem(
        f'format "{value}" has not landed: the engine does not compute in it yet' if known else f'"{value}" is not a number format',
        path=f"precision.{field}",
        given=value,
        allowed=allowed,
        attempt=f'precision.{field} = "{meant}"',
    )
