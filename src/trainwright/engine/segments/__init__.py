"""Segments: the tensor maths of the decoder family, forward and backward by hand, over plain tensors.

A segment is one file that declares NAME and the functions of `Segment`. It sees only what lies on its own rank: sums and gathers
between ranks are the strategies' business. Nothing is kept between a forward and its backward but what forward returns.

Letters of shapes: b sequences of the microbatch, s tokens of a sequence, t tensor size, u = s / t under sequence parallelism and s
otherwise, h width, H heads, K key-value heads, d head width, f ffn width, V vocabulary rounded up to a multiple of t.
"""

from __future__ import annotations

from functools import cache
from typing import Final, cast

from trainwright.engine.segments.call import Call, Segment
from trainwright.engine.segments.gradients import Gradients, Sink
from trainwright.engine.segments.tables import Tables
from trainwright.engine.segments.weights import Weights
from trainwright.registry import Registry

SEGMENTS: Final = Registry("trainwright.engine.segments", noun="segment")


@cache
def segment(name: str) -> Segment:
    """The segment `name`. Raises PlanError, with the nearest name, if there is none."""
    return cast("Segment", SEGMENTS.get(name))


__all__ = ["SEGMENTS", "Call", "Gradients", "Segment", "Sink", "Tables", "Weights", "segment"]
