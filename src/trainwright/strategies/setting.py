"""What a strategy's pass is told about the template that it rewrites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from trainwright.ir.action import Action, Collective, Compute, Free, Operand, Recv, Send, Update, Wait
from trainwright.ir.buffer import Buffer
from trainwright.ir.layout import Layout
from trainwright.ir.ref import Ref
from trainwright.spec.families.segment import Family, Unit
from trainwright.spec.formats import bytes_of
from trainwright.spec.precision import ResolvedPrecision
from trainwright.units import Bytes

WireBuffer = Callable[[str, Bytes, int, int], Bytes]
"""(op, payload bytes, ranks, bytes of an element) -> bytes that the wire holds between start and Wait."""


@dataclass(frozen=True, slots=True)
class StageShape:
    """What makes stages alike: whether one begins with the embedding, how many blocks it has, whether it ends with the head."""

    has_embed: bool
    num_blocks: int
    has_head: bool

    def __str__(self) -> str:
        ends = ("embed+" if self.has_embed else "") + f"{self.num_blocks}" + ("+head" if self.has_head else "")
        return f"[{ends}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One template: its kind, the stage it is for, and what all passes share.

    `kind` is "forward", "backward", "reduce" (sum and measure a stage's gradients), "apply" (update), or of the position as a whole:
    "begin", "norm", "end".
    `first` and `last` tell whether it is for the first or last run of its kind at this stage in a step. `buffers` collects what
    kinds of buffers the passes introduce. `sequence` tells whether the residual stream is cut over the tensor axis,
    `num_gradient_shards` into how many pieces ZeRO cuts the summed gradients, `stream_tensors` names
    the buffers that are then cut along the sequence.
    """

    kind: str
    shape: StageShape
    first: bool = True
    last: bool = True
    sizes: Mapping[str, int]
    family: Family
    precision: ResolvedPrecision
    wire_buffer: WireBuffer
    sequence: bool = False
    num_gradient_shards: int = 1
    stream_tensors: frozenset[str] = frozenset()
    buffers: dict[str, Buffer] = field(default_factory=dict)

    def size(self, axis: str) -> int:
        """Ranks along a mesh axis."""
        return self.sizes[axis]

    def unit(self, ref: Ref) -> Unit:
        """The unit that a flat buffer belongs to: `embed.weights` to embed, `weights` of a block to block."""
        name, dot, _ = ref.tensor.partition(".")
        return self.family.units[name if dot else "block"]

    @property
    def tied(self) -> bool:
        """The head uses the embedding's table."""
        return self.family.tied

    def num_gradient_elements(self, unit: Unit) -> int:
        """Elements of a unit's gradient buffer on one rank, padding included."""
        return unit.padded(self.sizes["zero"]) // self.num_gradient_shards

    def beside(self, ref: Ref, kind: str) -> Ref:
        """Another flat buffer of the same unit: `b3.weights` -> `b3.gathered`."""
        name, dot, _ = ref.tensor.rpartition(".")
        return Ref(f"{name}{dot}{kind}", ref.block, ref.microbatch)

    def full_buffer(self, tensor: str) -> Buffer:
        """The buffer of an activation as it is outside the residual stream: with the whole sequence."""
        name = tensor.removesuffix(".full").removesuffix(".partial")
        buffer = self.buffers[name]
        if not self.sequence or name not in self.stream_tensors:
            return buffer
        batch, pieces, *rest = buffer.shape
        size = self.sizes["tensor"]
        return replace(buffer, shape=(batch, pieces * size, *rest), num_bytes=buffer.num_bytes * size, layout=Layout())

    def wire_bytes(self, op: str, payload_bytes: Bytes, group_axes: tuple[str, ...], fmt: str) -> Bytes:
        """Bytes that the wire holds while the collective is on its way."""
        ranks = 1
        for axis in group_axes:
            ranks *= self.sizes[axis]
        return self.wire_buffer(op, payload_bytes, ranks, bytes_of(fmt))


def touched(action: Action) -> tuple[Ref, ...]:
    """The buffers that an action reads, writes or lends (not those that it frees)."""
    match action:
        case Compute(reads=reads, writes=writes, weights=weights, accumulates=accumulates):
            return tuple(one.ref for one in (*reads, *writes, *filter(None, (weights, accumulates))))
        case Collective(source=source, target=target):
            return (source,) if source == target else (source, target)
        case Send(buffer=buffer) | Recv(buffer=buffer):
            return (buffer,)
        case Update(weights=weights, gradients=gradients, states=states, master=master):
            return (weights, gradients, *states, *((master,) if master else ()))
        case Wait() | Free():
            return ()
        case _:
            return ()


def gradients_of(action: Action) -> Operand | None:
    """The gradients that an action adds to, if it does."""
    grad = action.accumulates if isinstance(action, Compute) else None
    return grad if grad is not None and grad.name == "gradients" else None
