"""Batch, precision, optimizer and run settings: defaults, and values that make no sense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.spec import catalog
from trainwright.spec.batch import Batch
from trainwright.spec.formats import FORMATS, bytes_of
from trainwright.spec.optimizer import Optimizer
from trainwright.spec.precision import Precision
from trainwright.spec.run_settings import Checkpoint, RunSettings


def paths(thing):
    return [problem.path for problem in thing.check()]


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_sign_exponent_and_mantissa(name):
    """tf32 is kept in four bytes; the others fill theirs."""
    fmt = FORMATS[name]

    assert (1 + fmt.exponent_bits + fmt.mantissa_bits == 8 * fmt.num_bytes) != (name == "tf32")


def test_a_copy_that_does_not_exist_takes_no_bytes():
    """A master copy, under fp32."""
    assert bytes_of("none") == 0


@pytest.mark.parametrize(("compute", "num_bytes"), [("bf16", 18), ("fp32", 16), ("fp64", 32)])
def test_adamw_keeps_so_many_bytes_for_a_parameter(compute, num_bytes):
    """bf16: 2 + 4 + 4 + 2 * 4; fp32: 4 * 4; fp64: 4 * 8."""
    assert num_bytes == Precision(compute=compute).resolved().state_bytes_per_parameter(num_moments=2)


def test_what_is_said_is_kept_and_gradients_travel_as_they_are_kept():
    """The format on the wire follows the buffer unless it is said."""
    assert Precision(gradients="bf16").resolved().reduce == "bf16"
    assert Precision(reduce="bf16").resolved().gradients == "fp32"


def test_a_stack_may_declare_another_gradient_format():
    """Only under mixed precision, and only where the plan says nothing."""
    stack = catalog.stack("megatron-2021")

    assert Precision().resolved(stack).gradients == "bf16"
    assert Precision(gradients="fp32").resolved(stack).gradients == "fp32"
    assert Precision(compute="fp64").resolved(stack).gradients == "fp64"


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (Precision(compute="fp16"), 'precision.compute = "bf16"'),
        (Precision(compute="float64"), 'precision.compute = "fp64"'),
        (Precision(weights="none"), None),
        (Precision(optimizer="fp23"), None),
    ],
)
def test_a_format_that_cannot_be_used_is_named(precision, expected):
    """With one that can."""
    (problem,) = precision.check()

    assert expected in {None, problem.attempt}


def test_no_master_copy_is_allowed():
    """The optimizer then updates the weights themselves."""
    assert not paths(Precision(master="none"))


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (Batch(sequence_tokens=8, global_sequences=4), []),
        (Batch(sequence_tokens=0, global_sequences=4), ["batch.sequence_tokens"]),
        (Batch(sequence_tokens=8, global_sequences=4, microbatch_sequences=5), ["batch.microbatch_sequences"]),
        (Batch(sequence_tokens=8.0, global_sequences=True), ["batch.sequence_tokens", "batch.global_sequences"]),
    ],
)
def test_a_batch_is_made_of_counts(batch, expected):
    """And a microbatch is a part of it."""
    assert expected == paths(batch)


@given(warmup=st.integers(0, 20), num_steps=st.integers(1, 60), fraction=st.floats(0, 1))
def test_the_learning_rate_rises_then_falls_to_its_least(warmup, num_steps, fraction):
    """Never above the peak, never below the least after warm-up, and never rising again."""
    optimizer = Optimizer(lr=1.0, warmup_steps=warmup, min_lr_fraction=fraction)
    rates = [optimizer.lr_at(step, num_steps) for step in range(num_steps)]
    rising, falling = rates[:warmup], rates[warmup:]

    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert all(0 < rate <= 1 for rate in rising)
    assert all(fraction - 1e-12 <= rate <= 1 for rate in falling)
    if num_steps > warmup + 1:
        assert fraction == pytest.approx(rates[-1])


def test_sgd_without_momentum_keeps_no_moment():
    """And with it, one."""
    assert (2, 1, 0) == (Optimizer().num_moments, Optimizer(name="sgd").num_moments, Optimizer(name="sgd", momentum=0.0).num_moments)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (Optimizer(), []),
        (Optimizer(name="adam"), ["optimizer.name"]),
        (Optimizer(lr=0.0), ["optimizer.lr"]),
        (Optimizer(lr=float("nan"), clip_norm=-1.0), ["optimizer.lr", "optimizer.clip_norm"]),
        (Optimizer(betas=(0.9, 1.0)), ["optimizer.betas[1]"]),
        (Optimizer(warmup_steps=-1, decay="linear"), ["optimizer.decay", "optimizer.warmup_steps"]),
    ],
)
def test_constants_of_an_optimizer_lie_in_their_ranges(optimizer, expected):
    """Every one that does not is named."""
    assert expected == paths(optimizer)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (RunSettings(), []),
        (RunSettings(steps=0), ["run.steps"]),
        (RunSettings(seed=-1), ["run.seed"]),
        (RunSettings(tokens=15 * 10**12), []),
        (RunSettings(tokens=0), ["run.tokens"]),
        (RunSettings(validation_fraction=1.0), ["run.validation_fraction"]),
        (RunSettings(data="corpus"), ["run.data"]),
        (RunSettings(checkpoint=Checkpoint(every=0)), ["run.checkpoint.every"]),
        (RunSettings(checkpoint=Checkpoint(every=1, keep=0)), ["run.checkpoint.keep"]),
    ],
)
def test_settings_of_a_run_make_sense(settings, expected):
    """Every one that does not is named."""
    assert expected == paths(settings)


def test_tokens_set_the_number_of_steps():
    """Rounded up: the last step is whole."""
    assert RunSettings(tokens=1001).num_steps(tokens_per_step=100) == 11
    assert RunSettings(steps=7).num_steps(tokens_per_step=100) == 7
