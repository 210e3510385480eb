"""A toy for lessons: square layers with tanh between them, and half the squared distance to a target.

    sample   -> x                       layer   x -> y = tanh(W x), the last without tanh                loss   x -> loss

x is [b, h]: one row for each sample of a microbatch; every layer is one matrix [h, h]. The loss is the mean over the samples of the
step of 1/2 |y - target|^2. Small enough to follow every number, and yet it goes through the same strategies as any other family.
Of a Model it reads `num_layers` and `width` alone. Plans cannot name it.
"""

from __future__ import annotations

from math import prod
from typing import Final

from trainwright.ir.buffer import Buffer
from trainwright.spec.families.local import Local
from trainwright.spec.families.segment import Argument, Family, Parameter, Pass, Segment, Unit
from trainwright.spec.formats import bytes_of
from trainwright.spec.model import Model

NAME: Final = "toy"

WEIGHT: Final = "layer.weight"
"""The parameter of a layer."""


def toy_model(num_layers: int = 2, width: int = 2) -> Model:
    """A Model of this family; what a decoder has beside layers and width is set to 1.

    >>> toy_model().width
    2
    """
    return Model(
        name=NAME,
        family=NAME,
        num_layers=num_layers,
        width=width,
        num_heads=1,
        num_kv_heads=1,
        head_width=width,
        ffn_width=1,
        vocab=1,
        max_positions=1,
    )


def describe(model: Model, local: Local) -> Family:
    """The family as one rank sees it. It knows no tensor axis."""
    width, num_samples = model.width, local.num_sequences
    weight = Parameter(name=WEIGHT, shape=(width, width), local_shape=(width, width), std=1.0)

    def buffer(*shape: int) -> Buffer:
        return Buffer(shape=shape, format=local.compute, part="activations", num_bytes=prod(shape) * bytes_of(local.compute))

    return Family(
        before=(Segment(name="sample", forward=Pass(writes=(Argument("x"),))),),
        block=(_layer(),),
        after=(_loss(),),
        units={"block": Unit.of("block", (weight,))},
        activations={"x": buffer(num_samples, width), "dx": buffer(num_samples, width), "loss": buffer()},
    )


def _layer() -> Segment:
    result, gradient = Argument("y", "x", next_block=True), Argument("dy", "dx", next_block=True)
    return Segment(
        name="layer",
        unit="block",
        parameters=(WEIGHT,),
        forward=Pass(reads=(Argument("x"),), writes=(result,)),
        backward=Pass(reads=(gradient,), writes=(Argument("dx"),)),
        keeps=("x", "y"),
    )


def _loss() -> Segment:
    return Segment(
        name="loss",
        forward=Pass(reads=(Argument("x"), Argument("valid")), writes=(Argument("loss"),)),
        backward=Pass(reads=(Argument("valid"),), writes=(Argument("dx"),)),
        keeps=("x",),
    )
