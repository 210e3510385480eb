"""Tables: cosines and sines of rotary positions, kept for the life of a rank."""

from __future__ import annotations

from math import pi
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainwright.units import Bytes

if TYPE_CHECKING:
    from trainwright.spec.model import Model, RopeScaling


class Tables:
    """The rope tables of one rank. Ranks may be threads of one process: each has its own."""

    def __init__(self) -> None:
        """Begin empty; a table is made when first asked for."""
        self._rope: dict[object, tuple[Tensor, Tensor]] = {}

    def rope(self, model: Model, num_tokens: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position and frequency, each [num_tokens, 1, d / 2], in the format and on the device of `like`."""
        key = (num_tokens, model.head_width, model.rope_theta, model.rope_scaling, like.dtype, like.device)
        tables = self._rope.get(key)
        if tables is None:
            angles = torch.outer(torch.arange(num_tokens, dtype=torch.float64), frequencies(model)).unsqueeze(1)
            tables = angles.cos().to(like.device, like.dtype), angles.sin().to(like.device, like.dtype)
            self._rope[key] = tables
        return tables

    def warm(self, model: Model, num_tokens: int, like: Tensor) -> None:
        """Make what a pass over so many tokens will ask for."""
        if model.positions == "rope":
            self.rope(model, num_tokens, like)

    def tensors(self) -> list[Tensor]:
        """The tables made so far."""
        return [table for pair in self._rope.values() for table in pair]

    @property
    def num_bytes(self) -> Bytes:
        """Bytes of the tables made so far."""
        return sum(table.nbytes for pair in self._rope.values() for table in pair)


def frequencies(model: Model) -> Tensor:
    """Radians a token, [d / 2], float64.

    Source: Su et al. 2021, RoFormer, equation 15 (theta ** (-2 i / d)).
    """
    exponents = torch.arange(0, model.head_width, 2, dtype=torch.float64) / model.head_width
    plain = model.rope_theta**-exponents
    return plain if model.rope_scaling is None else _stretched(plain, model.rope_scaling)


def _stretched(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Frequencies for a longer context; see RopeScaling. Between the two limits, a blend that is linear in turns per old context."""
    num_turns = scaling.original_max_positions * plain / (2 * pi)
    share = ((num_turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
    return plain * (share + (1.0 - share) / scaling.factor)
