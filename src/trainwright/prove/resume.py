"""Tells whether a run that was stopped and resumed is the run that was never stopped, and if not, what was not restored.

Both runs are told as histories. After the resume they must agree to the last bit: the samples read, the random numbers drawn, the
optimizer's state, and the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from trainwright.prove.diagnose import Cause

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainwright.prove.compare import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a run did from first_step on.

    samples   the ids that each step read, over all ranks, in order
    draws     a fingerprint of each step's random numbers
    state     parameters, moments and whatever else is kept from step to step, as it is at the end
    """

    first_step: int = 0
    samples: tuple[tuple[int, ...], ...] = ()
    draws: tuple[int, ...] = ()
    state: Mapping[str, Array] = field(default_factory=dict)


def diagnose_resume(straight: History, resumed: History) -> list[Cause]:
    """Causes why the resumed run is not the straight one; empty if it is.

    straight: the run that was never stopped, from its first step to the same end. resumed: from the step at which it was resumed.
    """
    causes = [*_cursor(straight, resumed), *_randomness(straight, resumed)]
    return causes or [*_state(straight, resumed)]


def _cursor(straight: History, resumed: History) -> Iterator[Cause]:
    skip = resumed.first_step - straight.first_step
    expected, found = _flat(straight.samples[skip:]), _flat(resumed.samples)
    place = _first_difference(expected, found)
    if place is None:
        return
    before = _flat(straight.samples[:skip])
    right, wrong = (ids[place] if place < len(ids) else "nothing" for ids in (expected, found))
    text = f"the data cursor was not restored: the sample after {len(before) + place} others must be {right}, and is {wrong}"
    again, left_out = len(set(found) & set(before)), len(set(expected) - set(found))
    if wrong in before:
        text += f", as if only {before.index(wrong)} had been read"
    text += f"; {again} are read again, {left_out} are left out. Save one global sample index, counted from the start of the run"
    yield Cause(name="data-cursor", text=text)


def _randomness(straight: History, resumed: History) -> Iterator[Cause]:
    skip = resumed.first_step - straight.first_step
    place = _first_difference(straight.draws[skip:], resumed.draws)
    if place is None:
        return
    text = f"the random state was not restored: step {resumed.first_step + place} draws other numbers than in the run that was not stopped"
    if skip and resumed.draws == straight.draws[: len(resumed.draws)]:
        text += f"; they are those of step {straight.first_step + place}, as if the run had begun anew"
    yield Cause(name="random-state", text=text + ". Key random numbers by seed and step, or save the generator's state")


def _state(straight: History, resumed: History) -> Iterator[Cause]:
    unequal = tuple(name for name, value in straight.state.items() if not _same(value, resumed.state.get(name)))
    if unequal:
        text = (
            f"{len(unequal)} of {len(straight.state)} tensors of the state differ, the first is {unequal[0]}, although samples and random "
            "numbers agree: something was not saved, not restored, or restored in another format"
        )
        yield Cause(name="state-not-restored", text=text, tensors=unequal)


def _flat(steps: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(sample for step in steps for sample in step)


def _first_difference(expected: tuple[int, ...], found: tuple[int, ...]) -> int | None:
    for place, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return place
    return None if len(expected) == len(found) else min(len(expected), len(found))


def _same(one: Array, other: Array | None) -> bool:
    return other is not None and one.dtype == other.dtype and np.array_equal(one, other, equal_nan=True)
