"""The pieces that a model is lowered into.

A **segment** is as much of a model as runs without an exchange between ranks. A **unit** is a set of parameters kept in one flat buffer
and gathered
together. Everything here is local: shapes are those of one rank, after tensor and sequence sharding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainwright.ir.buffer import Buffer
from trainwright.ir.layout import REPLICATED, Layout
from trainwright.ir.work import NO_WORK, Work
from trainwright.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter: its logical (unsharded) shape, the dimension that tensor parallelism cuts (None: replicated), how it begins.

    `local_shape` is one rank's piece; where the dimension does not divide, the piece is rounded up and the rest is padding. `initial` is
    "normal" (with `std`), "zeros" or "ones".
    `decays` tells whether weight decay applies.
    """

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    tensor_dim: int | None = None
    initial: str = "normal"
    std: float = 0.02

    @property
    def decays(self) -> bool:
        """Matrices decay; norms and biases do not."""
        return len(self.shape) > 1

    @property
    def num_elements(self) -> int:
        """Elements of the local piece."""
        total = 1
        for size in self.local_shape:
            total *= size
        return total


@dataclass(frozen=True, slots=True)
class Span:
    """Where a parameter lies in its unit's flat buffer, in elements."""

    parameter: Parameter
    start: int

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.parameter.num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters in one flat buffer: those replicated over tensor first, then those that tensor parallelism cuts.

    `num_elements` leaves out the padding that sharding adds (see `padded`).
    """

    name: str
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, name: str, parameters: tuple[Parameter, ...]) -> Unit:
        """Lay out `parameters` one after another."""
        ordered = sorted(parameters, key=lambda one: one.tensor_dim is not None)
        spans, start = [], 0
        for parameter in ordered:
            spans.append(Span(parameter, start))
            start += parameter.num_elements
        return cls(name=name, spans=tuple(spans))

    @property
    def num_elements(self) -> int:
        """Elements of all parameters."""
        return self.spans[-1].stop if self.spans else 0

    @property
    def num_replicated(self) -> int:
        """Elements at the head of the buffer that every tensor rank holds alike."""
        return max((span.stop for span in self.spans if span.parameter.tensor_dim is None), default=0)

    def padded(self, num_shards: int) -> int:
        """Elements, rounded up to a multiple of `num_shards`."""
        return -(-self.num_elements // num_shards) * num_shards


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor that a segment takes or gives, by the segment's name for it.

    `tensor` names the buffer; `next_block` says that it is the one of the block after. `layout` is what the segment needs, or leaves.
    """

    name: str
    tensor: str = ""
    layout: Layout = REPLICATED
    next_block: bool = False

    @property
    def buffer(self) -> str:
        """The buffer's name."""
        return self.tensor or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One direction of a segment: what it reads and writes, what it costs, and the most it holds inside besides."""

    reads: tuple[Argument, ...] = ()
    writes: tuple[Argument, ...] = ()
    work: Work = NO_WORK
    temporary_bytes: Bytes = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of the model.

    `unit` holds its parameters (None: it has none). `keeps` names those of the forward's arguments and results that backward reads again.

    `saved` tells whether forward leaves a buffer of its own for backward ("<segment>.saved"). `saving` is the work of a forward that stops
    when it has made that buffer. `backward` is None if there is nothing to do.
    """

    name: str
    unit: str | None = None
    parameters: tuple[str, ...] = ()
    forward: Pass
    backward: Pass | None = None
    keeps: tuple[str, ...] = ()
    saved: bool = False
    saving: Work | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model in pieces: segments before the blocks, of each block, and after; units; and what each activation buffer is.

    `stream` names the activations that sequence parallelism cuts along the sequence.
    """

    before: tuple[Segment, ...]
    block: tuple[Segment, ...]
    after: tuple[Segment, ...]
    units: Mapping[str, Unit]
    activations: Mapping[str, Buffer]
    stream: frozenset[str] = frozenset()

    @property
    def units_before(self) -> tuple[str, ...]:
        """Units of the segments before the blocks, in order."""
        return tuple(dict.fromkeys(one.unit for one in self.before if one.unit))

    @property
    def units_after(self) -> tuple[str, ...]:
        """Units of the segments after the blocks, in order."""
        return tuple(dict.fromkeys(one.unit for one in self.after if one.unit))

    @property
    def tied(self) -> bool:
        """The head uses the embedding's table."""
        return "embed" in self.units_after

    def segment(self, name: str) -> Segment:
        """A segment by name."""
        return next(one for one in (*self.before, *self.block, *self.after) if one.name == name)
