"""What an action costs a machine, in counts that do not depend on the machine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trainwright.units import Bytes, Flops


class OpKind(Enum):
    """The classes of operators that are priced differently.

    GEMM: a matrix product (m, n, k). ATTENTION_FORWARD and ATTENTION_BACKWARD: the fused attention core; flops count the causal half.
    ELEMENTWISE: anything whose
    time is the bytes it reads and writes.
    """

    GEMM = "gemm"
    GEMM_WEIGHT = "gemm_weight"
    ATTENTION_FORWARD = "attention_forward"
    ATTENTION_BACKWARD = "attention_backward"
    ELEMENTWISE = "elementwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator of an action: FLOPs (multiply and add count as two), bytes read and written, and the shape of a product.

    `format` is the number format that a matrix product runs in. `k` is the length summed over (GEMM only). `score_elements` counts the
    elements of the score matrices of an
    attention (its full square), which an attention that is not fused reads and writes.
    """

    name: str
    kind: OpKind
    flops: Flops = 0
    num_bytes: Bytes = 0
    k: int = 0
    format: str = "bf16"
    score_elements: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """The operators of one action, in order."""

    ops: tuple[Op, ...] = ()

    @property
    def flops(self) -> Flops:
        """FLOPs of all operators."""
        return sum(op.flops for op in self.ops)

    @property
    def num_bytes(self) -> Bytes:
        """Bytes that the operators read and write."""
        return sum(op.num_bytes for op in self.ops)


NO_WORK = Work()
