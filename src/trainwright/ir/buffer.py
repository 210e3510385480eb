"""What a buffer is: how large, of which part of memory, in which format."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.ir.layout import REPLICATED, Layout
from trainwright.units import Bytes

PARTS = ("weights", "gathered", "gradients", "master", "optimizer", "activations", "temporary", "wire_buffers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A kind of buffer, as one rank holds it: local shape, format, the part of memory that it counts in.

    `shape` is local, after every sharding. A buffer of parts that differ in shape or format (what a segment saves) lists them in
    `pieces`: name, shape, format. `persistent` buffers live across steps.
    """

    shape: tuple[int, ...]
    format: str
    part: str
    num_bytes: Bytes
    layout: Layout = REPLICATED
    persistent: bool = False
    pieces: tuple[tuple[str, tuple[int, ...], str], ...] = ()
