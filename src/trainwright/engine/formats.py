"""The torch dtype of each number format."""

from __future__ import annotations

from typing import Final

import torch

DTYPES: Final = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
