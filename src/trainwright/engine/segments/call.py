"""Call: all that a segment may look at beside its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch import Tensor

from trainwright.engine.random import Key, Piece, dropout_mask
from trainwright.engine.segments.tables import Tables
from trainwright.engine.segments.weights import Weights

if TYPE_CHECKING:
    from trainwright.engine.segments.gradients import Sink
    from trainwright.spec.model import Model

Tensors: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a segment, on one rank.

    weights           the unit that holds the segment's parameters: `embed`, `positions`, a block or `head`; `embed` for a tied `logits`;
                      none for a segment without
    gradients         where backward adds the unit's gradients; None in forward
    sequence          stream tensors hold the tensor_index-th slice of the tokens of each sequence
    tokens, targets   [b, s], int64; a target below 0 is ignored
    num_valid_tokens  targets of the whole step that are not ignored, over all microbatches and ranks; read where it is used
    seed, step        with the sequence ids, what dropout draws from
    sequence_ids      number of each sequence within the step, counted over all ranks and microbatches; [b]
    keep_saved        return what backward needs; False where it will be computed again
    only_saved        return nothing else: a forward that runs again may stop when backward has what it needs
    """

    model: Model
    weights: Weights = field(default_factory=Weights.none)
    gradients: Sink | None = None
    tensor_index: int = 0
    num_tensor: int = 1
    sequence: bool = False
    tokens: Tensor | None = None
    targets: Tensor | None = None
    num_valid_tokens: float | Tensor = 1.0
    block: int | None = None
    step: int = 0
    seed: int = 0
    sequence_ids: Sequence[int] = ()
    keep_saved: bool = True
    only_saved: bool = False
    tables: Tables = field(default_factory=Tables)

    @property
    def sink(self) -> Sink:
        """Where gradients go, in backward."""
        assert self.gradients is not None, "backward needs a gradient sink"
        return self.gradients

    def fused(self, names: tuple[str, ...]) -> Tensor:
        """Adjacent parameters as one matrix, [rows of all, columns]."""
        return self.weights.fused(names)

    def optional(self, names: tuple[str, ...]) -> Tensor | None:
        """Adjacent parameters as one, or None where the model has none (biases)."""
        return self.weights.fused(names) if names[0] in self.weights else None

    def first_token(self, num_tokens: int) -> int:
        """Place within its sequence of the first token of a stream tensor that holds `num_tokens`."""
        return self.tensor_index * num_tokens if self.sequence else 0

    def drop_(self, values: Tensor, site: str) -> Tensor:
        """Apply dropout to a stream tensor [b, u, h] in place. Backward does the same, and so does every mesh: see engine/random.py."""
        num_tokens, width = values.shape[1:]
        key = Key.of(self.seed, self.step, site if self.block is None else f"b{self.block}.{site}")
        num_all_tokens = num_tokens * self.num_tensor if self.sequence else num_tokens
        for row, sequence_id in zip(values, self.sequence_ids, strict=True):
            before = sequence_id * num_all_tokens + self.first_token(num_tokens)  # tokens of the step before this piece
            piece = Piece(global_shape=(before + num_tokens, width), offsets=(before, 0), shape=(num_tokens, width))
            row.mul_(dropout_mask(key, piece, self.model.dropout, values.dtype, values.device))
        return values

    def kept(self, outputs: dict[str, Tensor], saved: dict[str, Tensor]) -> dict[str, Tensor]:
        """Outputs, together with what backward needs unless that is not wanted."""
        return outputs | saved if self.keep_saved else outputs


class Segment(Protocol):
    """A file of this folder.

    Inputs and outputs go by their formal names ("x", "h1"); what backward needs beside them is prefixed "saved."; the gradient of
    "h1" is "dh1". No input is changed. Outputs are fresh tensors. Runs without autograd; the caller disables it.
    """

    NAME: str

    def forward(self, call: Call, inputs: Tensors) -> dict[str, Tensor]:
        """Outputs, and with call.keep_saved what backward needs beside kept inputs and outputs."""

    def backward(self, call: Call, inputs: Tensors) -> dict[str, Tensor]:
        """Gradients of the inputs. Those of the parameters go to call.gradients."""
