"""A resumed run that went astray says what was not restored."""

from __future__ import annotations

import numpy as np

from trainwright.prove.resume import History, diagnose_resume

STATE = {"w": np.arange(3.0), "w.m": np.ones(3)}
STRAIGHT = History(samples=tuple((10 * step, 10 * step + 5) for step in range(6)), draws=(11, 22, 33, 44, 55, 66), state=STATE)
RESUMED = History(
    first_step=4, samples=STRAIGHT.samples[4:], draws=STRAIGHT.draws[4:], state={name: value.copy() for name, value in STATE.items()}
)


def changed(**changes):
    fields = {"first_step": 4, "samples": RESUMED.samples, "draws": RESUMED.draws, "state": RESUMED.state}
    return History(**fields | changes)


def test_a_run_that_was_restored_has_no_cause():
    """Every id, every draw and every bit agrees."""
    assert diagnose_resume(STRAIGHT, RESUMED) == []


def test_a_cursor_that_counts_from_the_last_resume():
    """After a second resume at sample 40 the loader begins at 10, as if two samples had been read."""
    (cause,) = diagnose_resume(STRAIGHT, changed(samples=STRAIGHT.samples[1:3]))

    assert cause.name == "data-cursor"
    assert "must be 40, and is 10, as if only 2 had been read; 4 are read again, 4 are left out" in cause.text


def test_samples_that_are_skipped():
    """The cursor ran ahead of the updates."""
    (cause,) = diagnose_resume(STRAIGHT, changed(samples=((50, 55), (60, 65))))

    assert cause.name == "data-cursor"
    assert "0 are read again, 2 are left out" in cause.text


def test_random_numbers_that_began_anew():
    """The draws are those of the first steps."""
    (cause,) = diagnose_resume(STRAIGHT, changed(draws=(11, 22)))

    assert cause.name == "random-state"
    assert "those of step 0" in cause.text


def test_a_global_generator_that_was_moved():
    """Something drew from it after it was restored."""
    (cause,) = diagnose_resume(STRAIGHT, changed(draws=(55, 67)))

    assert cause.name == "random-state"
    assert "step 5" in cause.text
    assert "anew" not in cause.text


def test_moments_that_were_not_restored():
    """Samples and draws agree, one tensor of the state does not."""
    (cause,) = diagnose_resume(STRAIGHT, changed(state={"w": STATE["w"], "w.m": np.zeros(3)}))

    assert cause.name == "state-not-restored"
    assert cause.tensors == ("w.m",)


def test_a_format_that_changed_is_a_difference():
    """Equal values in another format round differently in the next step."""
    (cause,) = diagnose_resume(STRAIGHT, changed(state={"w": STATE["w"].astype(np.float32), "w.m": STATE["w.m"]}))

    assert cause.tensors == ("w",)


def test_cursor_and_randomness_are_both_named():
    """The state then differs as a consequence, and is not a third cause."""
    causes = diagnose_resume(STRAIGHT, changed(samples=STRAIGHT.samples[:2], draws=STRAIGHT.draws[:2], state={}))

    assert [cause.name for cause in causes] == ["data-cursor", "random-state"]
