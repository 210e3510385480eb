"""Tells whether two sets of tensors are equal, and if not, where they part first.

The reference comes as a mapping from name to array in model order; what was found is held against it name by name. Errors are relative:

- gradients: per tensor max|a - b| / max(max|b|, 0.01 g), where b is the reference and g the largest |entry| over all its gradients. The
  floor is there because some gradients are exactly 0 (the bias of an attention key: softmax does not see it) and their largest entry is
  rounding noise.
- parameters: max|a - b| over all / max|b| over all.

Something that is missing, has another shape, or is not a number where the reference is one has error infinity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Mapping

Array: TypeAlias = NDArray[np.floating[Any]]

GRADIENT_TOLERANCE: Final = 1e-12
"""In float64: correct engines were measured at 1e-16 to 1e-14."""

PARAMETER_TOLERANCE: Final = 1e-9
"""In float64, after AdamW, whose g / sqrt(v) enlarges rounding where the gradient is small."""

FLOOR: Final = 0.01
"""A tensor's own maximum counts as its scale if it is at least this part of the largest gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first entry that differs: in model order of tensors, then row by row. A tensor that is missing or ill-shaped has index ()."""

    tensor: str
    index: tuple[int, ...]
    expected: float
    found: float
    reason: str = "value"

    def __str__(self) -> str:
        """One line, as a failed proof prints it."""
        place = f"{self.tensor}[{', '.join(map(str, self.index))}]" if self.index else self.tensor
        return f"{place}: expected {self.expected!r}, found {self.found!r}" if self.reason == "value" else f"{place}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What comparing found out. `errors` holds the relative error of every tensor of the reference, in model order."""

    errors: Mapping[str, float]
    worst_relative_error: float
    worst_tensor: str | None
    first_difference: Difference | None
    unexpected: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Every tensor is there and within the tolerance, and none came that the reference does not know."""
        return self.first_difference is None and not self.unexpected

    @property
    def num_tensors_compared(self) -> int:
        """Tensors of the reference."""
        return len(self.errors)

    @property
    def wrong(self) -> tuple[str, ...]:
        """Tensors with an error, the largest first."""
        return tuple(sorted((name for name, error in self.errors.items() if error > 0), key=lambda name: -self.errors[name]))


def compare(reference: Mapping[str, Array], found: Mapping[str, Array | None], *, tolerance: float = GRADIENT_TOLERANCE) -> Comparison:
    """Compare gradients, each on its own scale.

    >>> b = {"q": np.array([1.0, 2.0]), "k": np.array([1e-20])}
    >>> compare(b, {"q": np.array([1.0, 2.5]), "k": np.array([0.0])}).first_difference
    Difference(tensor='q', index=(1,), expected=2.0, found=2.5, reason='value')
    """
    floor = FLOOR * max((largest(value) for value in reference.values()), default=0.0)
    return _compared(reference, found, {name: max(largest(value), floor) for name, value in reference.items()}, tolerance)


def compare_parameters(
    reference: Mapping[str, Array], found: Mapping[str, Array | None], *, tolerance: float = PARAMETER_TOLERANCE
) -> Comparison:
    """Compare parameters, all on one scale."""
    scale = max((largest(value) for value in reference.values()), default=0.0)
    return _compared(reference, found, dict.fromkeys(reference, scale), tolerance)


def relative_error(expected: float, found: float) -> float:
    """Relative error of a loss or a norm: |found - expected| / |expected|; infinity where only one of them is a number.

    >>> relative_error(2.0, 2.5), relative_error(0.0, 0.0), relative_error(1.0, math.nan)
    (0.25, 0.0, inf)
    """
    if expected == found or (math.isnan(expected) and math.isnan(found)):
        return 0.0
    error = abs(found - expected) / abs(expected) if expected else math.inf
    return math.inf if math.isnan(error) else error


def largest(value: Array) -> float:
    """The largest |entry| of an array; 0 of an empty one."""
    return float(np.abs(value).max()) if value.size else 0.0


def _compared(
    reference: Mapping[str, Array], found: Mapping[str, Array | None], scales: Mapping[str, float], tolerance: float
) -> Comparison:
    errors: dict[str, float] = {}
    first: Difference | None = None
    for name, expected in reference.items():
        value = found.get(name)
        errors[name] = _error(expected, value, scales[name])
        if first is None and errors[name] > tolerance:
            first = _difference(name, expected, value, tolerance * scales[name])
    worst = max(errors, key=lambda name: errors[name], default=None)
    return Comparison(
        errors=errors,
        worst_relative_error=0.0 if worst is None else errors[worst],
        worst_tensor=worst,
        first_difference=first,
        unexpected=tuple(name for name in found if name not in reference),
    )


def _error(expected: Array, found: Array | None, scale: float) -> float:
    if found is None or found.shape != expected.shape:
        return math.inf
    apart = _apart(expected, found)
    if apart == 0:
        return 0.0
    return apart / scale if scale > 0 else math.inf


def _apart(expected: Array, found: Array) -> float:
    """max|a - b|; entries that are the same infinity or both no number agree, those where only one is a number are infinitely apart."""
    return largest(_distances(expected, found))


def _distances(expected: Array, found: Array) -> Array:
    same = (expected == found) | (np.isnan(expected) & np.isnan(found))
    with np.errstate(invalid="ignore"):
        distances = np.where(same, 0.0, np.abs(found.astype(np.float64) - expected.astype(np.float64)))
    return np.where(np.isnan(distances), math.inf, distances)


def _difference(name: str, expected: Array, found: Array | None, allowed: float) -> Difference:
    if found is None:
        return Difference(tensor=name, index=(), expected=largest(expected), found=math.nan, reason="missing")
    if found.shape != expected.shape:
        reason = f"expected shape {expected.shape}, found {found.shape}"
        return Difference(tensor=name, index=(), expected=largest(expected), found=math.nan, reason=reason)
    flat = int(np.argmax(_distances(expected, found).reshape(-1) > allowed))
    index = tuple(int(i) for i in np.unravel_index(flat, expected.shape))
    return Difference(tensor=name, index=index, expected=float(expected[index]), found=float(found[index]))
