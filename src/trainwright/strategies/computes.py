"""From a family's segments to Compute actions, before any strategy has touched them."""

from __future__ import annotations

from dataclasses import replace

from trainwright.ir.action import Compute, Operand
from trainwright.ir.layout import Layout, Partial
from trainwright.ir.ref import Ref
from trainwright.ir.site import Site
from trainwright.spec.families.segment import Argument, Segment, Unit
from trainwright.strategies.setting import Setting

STREAM = ("x", "dx")
"""Buffers of the residual stream: one before each block, one after the last."""

PER_STEP = ("valid", "scalars")
"""Buffers of the position as a whole, not of a microbatch."""


def forward_compute(segment: Segment, block: int | None, setting: Setting) -> Compute:
    """The forward pass of a segment in the stage's block number `block` (None: before or after the blocks)."""
    saved = (Operand("saved", _saved(segment, block)),) if segment.saved else ()
    return Compute(
        site=Site(block=block, segment=segment.name, phase="fwd"),
        function="forward",
        reads=tuple(_operand(one, segment, block, setting) for one in segment.forward.reads),
        writes=(*(_operand(one, segment, block, setting) for one in segment.forward.writes), *saved),
        weights=_weights(segment, block),
        work=segment.forward.work,
        temporary_bytes=segment.forward.temporary_bytes,
    )


def backward_compute(segment: Segment, block: int | None, setting: Setting, *, fresh: bool) -> Compute | None:
    """The backward pass of a segment, None if it has none. With `fresh` it is the first of the step to touch its unit's gradients."""
    if segment.backward is None:
        return None
    arguments = {one.name: one for one in (*segment.forward.reads, *segment.forward.writes)}
    kept = tuple(_operand(arguments[name], segment, block, setting) for name in segment.keeps)
    saved = (Operand("saved", _saved(segment, block)),) if segment.saved else ()
    gradients = tuple(_operand(one, segment, block, setting) for one in segment.backward.reads)
    return Compute(
        site=Site(block=block, segment=segment.name, phase="bwd"),
        function="backward",
        reads=(*kept, *saved, *gradients),
        writes=tuple(_operand(one, segment, block, setting) for one in segment.backward.writes),
        weights=_weights(segment, block),
        accumulates=_gradients(segment, block, setting),
        fresh=fresh,
        work=segment.backward.work,
        temporary_bytes=segment.backward.temporary_bytes,
    )


def forgetful(action: Compute, setting: Setting) -> Compute:
    """A forward that keeps nothing for backward: what it would have saved it holds only while it runs."""
    dropped = sum(setting.buffers[one.ref.tensor].num_bytes for one in action.writes if one.name == "saved")
    kept = tuple(one for one in action.writes if one.name != "saved")
    return replace(action, keeps=False, writes=kept, temporary_bytes=action.temporary_bytes + dropped)


def unit_ref(unit: str, kind: str, block: int | None) -> Ref:
    """A flat buffer of a unit: `weights` of a block, `embed.weights` of the embedding."""
    return Ref(kind, block) if unit == "block" else Ref(f"{unit}.{kind}")


def gradient_layout(unit: Unit, setting: Setting) -> Layout:
    """How gradients lie right after a backward.

    Still to be summed over data and zero, over both ends of the pipeline if tied, and over a cut sequence
    if replicated.
    """
    layout = Layout()
    for axis in ("data", "zero"):
        if setting.size(axis) > 1:
            layout = layout.on(axis, Partial())
    if setting.size("pipeline") > 1 and unit.name == "embed" and setting.tied:
        layout = layout.on("pipeline", Partial())
    if setting.sequence and unit.num_replicated:
        layout = layout.on("tensor", Partial())
    return layout


def _operand(argument: Argument, segment: Segment, block: int | None, setting: Setting) -> Operand:
    return Operand(argument.name, _ref(argument, segment, block, setting), argument.layout)


def _ref(argument: Argument, segment: Segment, block: int | None, setting: Setting) -> Ref:
    if argument.buffer in PER_STEP:
        return Ref(argument.buffer)
    if block is not None:
        return Ref(argument.buffer, block + argument.next_block, 0)
    if argument.buffer in STREAM:
        return Ref(argument.buffer, 0 if segment in setting.family.before else setting.shape.num_blocks, 0)
    return Ref(argument.buffer, None, 0)


def _saved(segment: Segment, block: int | None) -> Ref:
    return Ref(f"{segment.name}.saved", block, 0)


def _weights(segment: Segment, block: int | None) -> Operand | None:
    return Operand("weights", unit_ref(segment.unit, "weights", block)) if segment.unit else None


def _gradients(segment: Segment, block: int | None, setting: Setting) -> Operand | None:
    if segment.unit is None:
        return None
    layout = gradient_layout(setting.family.units[segment.unit], setting)
    return Operand("gradients", unit_ref(segment.unit, "gradients", block), layout)
