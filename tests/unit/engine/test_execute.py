"""The executor's own arithmetic. What it does with a Program is proved in tests/proof."""

import pytest
import torch

from trainwright.engine.execute import SQUARED_ROW, sum_of_squares


@pytest.mark.parametrize("length", [0, 1, SQUARED_ROW - 1, SQUARED_ROW, 3 * SQUARED_ROW + 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-6), (torch.float64, 1e-14)])
def test_squares_are_summed_as_if_in_float64(length, dtype, tolerance):
    """Whatever the length: rows, a rest, or nothing."""
    flat = torch.linspace(-1.0, 1.5, length, dtype=torch.float64).to(dtype)

    assert sum_of_squares(flat).item() == pytest.approx(flat.double().square().sum().item(), rel=tolerance)
