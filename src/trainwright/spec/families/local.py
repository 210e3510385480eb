"""Local: a rank's view of the batch and of the tensor axis, from which a family describes itself."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.ir.layout import REPLICATED, Layout, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """What one rank sees of a microbatch: its sequences and tokens, the tensor axis, and the format it computes in."""

    num_sequences: int
    sequence_tokens: int
    num_tensor: int = 1
    sequence: bool = False
    compute: str = "bf16"

    @property
    def wide(self) -> str:
        """The format of statistics and of the loss."""
        return "fp64" if self.compute == "fp64" else "fp32"

    def on_tensor(self, placement: Placement) -> Layout:
        """A layout that differs from replicated on the tensor axis only; with one tensor rank it does not differ."""
        return REPLICATED.on("tensor", placement) if self.num_tensor > 1 else REPLICATED
