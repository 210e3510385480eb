"""Operators on one device: work, time, and what holds them back."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cost.roofline import (
    attainable_flops_per_s,
    attention,
    elementwise,
    gemm,
    gemm_intensity,
    head_alignment,
    ridge,
    unfused_attention,
)

GOLDEN = tomllib.loads((Path(__file__).parents[2] / "golden" / "roofline.toml").read_text(encoding="utf-8"))
H100 = {"peak_flops_per_s": 989e12, "memory_bytes_per_s": 3.35e12}
sizes = st.integers(1, 20_000)


@pytest.mark.parametrize("row", GOLDEN["ridge"], ids=lambda row: row["device"])
def test_ridges_are_those_of_the_data_sheets(row):
    """Peak over bandwidth."""
    assert row["ridge"] == round(ridge(peak_flops_per_s=row["peak_flops_per_s"], memory_bytes_per_s=row["memory_bytes_per_s"]))


@pytest.mark.parametrize("row", GOLDEN["gemm"], ids=lambda row: f"{row['m']}x{row['n']}x{row['k']}")
def test_intensities_of_products(row):
    """FLOP per byte, each tensor once over the bus."""
    assert row["intensity"] == pytest.approx(
        gemm_intensity(m=row["m"], n=row["n"], k=row["k"], element_bytes=row["element_bytes"]), rel=1e-12
    )


@pytest.mark.parametrize("row", GOLDEN["attention"])
def test_work_of_attention(row):
    """Forward as published, backward 2.5 times."""
    shape = {"num_sequences": 1, "num_kv_heads": 8, **{name: row[name] for name in ("num_heads", "sequence_tokens", "head_width")}}

    assert row["flops"] == attention(**shape, **H100).flops
    assert 2.5 * row["flops"] == attention(**shape, **H100, backward=True).flops
    assert 2 * row["flops"] == attention(**shape, **H100, causal=False).flops


@given(m=sizes, n=sizes, k=sizes, k0=st.integers(0, 500), efficiency=st.floats(0.1, 1.0))
def test_a_product_is_never_faster_than_either_roof(m, n, k, k0, efficiency):
    """Not than its arithmetic at full rate, nor than its traffic, nor than a launch."""
    product = gemm(m=m, n=n, k=k, k0=k0, efficiency=efficiency, launch_s=5e-6, **H100)

    assert product.flops == 2 * m * n * k
    assert product.duration_s >= product.flops / H100["peak_flops_per_s"]
    assert product.duration_s >= product.traffic_bytes / H100["memory_bytes_per_s"]
    assert product.duration_s >= 5e-6


@pytest.mark.parametrize(("shape", "bound_by"), [((8192, 8192, 8192), "compute"), ((1, 8192, 8192), "memory"), ((64, 64, 64), "launch")])
def test_what_holds_a_product_back(shape, bound_by):
    """Large: arithmetic. One row: the weights' traffic. Tiny: the launch."""
    m, n, k = shape

    assert bound_by == gemm(m=m, n=n, k=k, **H100).bound_by


def test_a_short_inner_dimension_halves_the_rate_at_k0():
    """A product with k = k0 takes twice as long as its FLOPs at the sustained rate."""
    assert 2.0 == pytest.approx(
        gemm(m=8192, n=8192, k=512, k0=512, launch_s=0.0, **H100).duration_s / gemm(m=8192, n=8192, k=512, launch_s=0.0, **H100).duration_s
    )


def test_scores_that_are_written_cost_their_traffic_on_top():
    """Unfused attention is slower than fused at the same efficiency, and its products do not profit from the mask."""
    shape = {"num_sequences": 1, "num_heads": 32, "sequence_tokens": 4096, "head_width": 128}
    fused, unfused = attention(**shape, num_kv_heads=32, **H100), unfused_attention(**shape, **H100)

    assert unfused.flops == 2 * fused.flops
    assert unfused.duration_s > fused.duration_s
    assert unfused.traffic_bytes == 13 * 32 * 4096**2
    assert 17 * 32 * 4096**2 == unfused_attention(**shape, **H100, backward=True).traffic_bytes


@given(width=st.integers(1, 512))
def test_better_aligned_heads_are_never_slower(width):
    """Twice a width divides by at least as much."""
    assert head_alignment(width) <= head_alignment(2 * width) <= 1.0


def test_the_roof_is_flat_behind_the_ridge():
    """Half the ridge gives half the peak; twice the ridge no more than the peak."""
    at_ridge = ridge(**H100)

    assert 0.5 * H100["peak_flops_per_s"] == pytest.approx(attainable_flops_per_s(at_ridge / 2, **H100))
    assert H100["peak_flops_per_s"] == attainable_flops_per_s(2 * at_ridge, **H100)


def test_a_small_elementwise_operator_waits_for_its_launch():
    """Traffic and launch follow each other."""
    small = elementwise(traffic_bytes=100, memory_bytes_per_s=1e12, launch_s=5e-6)

    assert small.bound_by == "launch"
    assert 5e-6 < small.duration_s < 5.1e-6
    assert "memory" == elementwise(traffic_bytes=10**9, memory_bytes_per_s=1e12, launch_s=5e-6).bound_by
