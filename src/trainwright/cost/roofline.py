"""Roofline: how long one operator takes on one device, and what holds it back.

An operator needs arithmetic and memory traffic; the slower of the two sets its time. Small ones wait for their launch.
Everything here takes plain numbers; where they come from (data sheet, calibration) is the caller's business.

Glossary
    peak         arithmetic rate of the device for the operator's format, dense
    efficiency   share of the peak that large operators sustain, by software stack: 0.5 to 0.9
    k0           a GEMM whose inner dimension is k0 runs at half of that: filling and draining a tile costs k0 steps of the sum
    traffic      bytes read and written, each tensor once
    bound_by     "compute", "memory" or "launch": the largest part of the time
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from trainwright.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds

BoundBy: TypeAlias = Literal["compute", "memory", "launch"]

MEMORY_EFFICIENCY = 0.85
"""Share of the memory's peak rate that streaming kernels sustain."""

LAUNCH_S = 5e-6
"""Least time between two kernels of a stream, as a default; devices carry their own."""

BACKWARD_ATTENTION = 2.5
"""Arithmetic of the backward pass of fused attention over its forward: five products of score size against two.

Source: Dao 2023, FlashAttention-2, section 4.1.
"""

UNFUSED_EFFICIENCY = 0.55
"""Rate of the two batched products of unfused attention over that of a large GEMM, at head widths that suit the tiles."""

UNFUSED_FORWARD_TRAFFIC = 13
UNFUSED_BACKWARD_TRAFFIC = 17
"""Bytes of score traffic for each score, 16-bit: mask, softmax and dropout kernels, forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """How long one operator takes, for what work, and what holds it back."""

    duration_s: Seconds
    flops: float
    traffic_bytes: Bytes
    bound_by: BoundBy


def gemm(
    *,
    m: int,
    n: int,
    k: int,
    peak_flops_per_s: FlopsPerSecond,
    memory_bytes_per_s: BytesPerSecond,
    efficiency: float = 1.0,
    k0: float = 0.0,
    launch_s: Seconds = LAUNCH_S,
    element_bytes: Bytes = 2,
    memory_efficiency: float = MEMORY_EFFICIENCY,
) -> OperatorTime:
    """Time of a matrix product [m, k] x [k, n].

    2 m n (k + k0) / (peak x efficiency) + launch, never below the time of its traffic. Left out: whether m and n fill whole
    tiles and whole waves of processors, and where operands still lie in cache.

    >>> t = gemm(m=8192, n=8192, k=8192, peak_flops_per_s=1e15, memory_bytes_per_s=3e12, launch_s=0.0)
    >>> f"{t.duration_s * 1e3:.3f} ms, {t.bound_by}"
    '1.100 ms, compute'
    """
    flops = 2 * m * n * k
    compute_s = 2 * m * n * (k + k0) / (peak_flops_per_s * efficiency)
    traffic_bytes = element_bytes * (m * k + k * n + m * n)
    return _slowest(compute_s, traffic_bytes / (memory_bytes_per_s * memory_efficiency), launch_s, flops, traffic_bytes)


def attention(
    *,
    num_sequences: int,
    num_heads: int,
    num_kv_heads: int,
    sequence_tokens: int,
    head_width: int,
    peak_flops_per_s: FlopsPerSecond,
    memory_bytes_per_s: BytesPerSecond,
    efficiency: float = 1.0,
    launch_s: Seconds = LAUNCH_S,
    element_bytes: Bytes = 2,
    memory_efficiency: float = MEMORY_EFFICIENCY,
    causal: bool = True,
    backward: bool = False,
) -> OperatorTime:
    """Time of fused attention: softmax(q k') v without ever writing the scores.

    Two products of tokens x tokens x head width for each head, half of each under a causal mask; backward 2.5 times as much.
    Traffic: q, k, v in and the result out; backward also their gradients. Left out: the softmax itself; the efficiency of the
    kernel in use (0.2 to 0.75 of the peak, by generation and device) stands for it.

    >>> shape = dict(num_sequences=1, num_heads=32, num_kv_heads=8, sequence_tokens=8192, head_width=128)
    >>> f"{attention(**shape, peak_flops_per_s=1e15, memory_bytes_per_s=3e12).flops:.4g}"
    '5.498e+11'
    """
    num_scores = num_sequences * num_heads * sequence_tokens**2
    flops = 4 * num_scores * head_width * (0.5 if causal else 1.0) * (BACKWARD_ATTENTION if backward else 1.0)
    passes = 2 if backward else 1  # backward reads all four and writes three gradients, reading one more
    traffic_bytes = passes * element_bytes * num_sequences * sequence_tokens * head_width * 2 * (num_heads + num_kv_heads)
    compute_s = flops / (peak_flops_per_s * efficiency)
    return _slowest(compute_s, traffic_bytes / (memory_bytes_per_s * memory_efficiency), launch_s, flops, traffic_bytes)


def unfused_attention(
    *,
    num_sequences: int,
    num_heads: int,
    sequence_tokens: int,
    head_width: int,
    peak_flops_per_s: FlopsPerSecond,
    memory_bytes_per_s: BytesPerSecond,
    efficiency: float = 1.0,
    launch_s: Seconds = LAUNCH_S,
    memory_efficiency: float = MEMORY_EFFICIENCY,
    backward: bool = False,
) -> OperatorTime:
    """Time of attention that writes its scores: products at full size (a mask saves nothing), then score traffic on top.

    The products and the passes over the scores are kernels of their own, so their times add up.

    >>> shape = dict(num_sequences=1, num_heads=32, sequence_tokens=2048, head_width=128)
    >>> unfused_attention(**shape, peak_flops_per_s=312e12, memory_bytes_per_s=2e12).bound_by
    'memory'
    """
    num_scores = num_sequences * num_heads * sequence_tokens**2
    flops = 4.0 * num_scores * head_width * (2 if backward else 1)
    compute_s = flops / (peak_flops_per_s * efficiency * UNFUSED_EFFICIENCY * head_alignment(head_width))
    traffic_bytes = num_scores * (UNFUSED_BACKWARD_TRAFFIC if backward else UNFUSED_FORWARD_TRAFFIC)
    traffic_s = traffic_bytes / (memory_bytes_per_s * memory_efficiency)
    bound_by: BoundBy = "compute" if compute_s >= traffic_s else "memory"
    if launch_s > max(compute_s, traffic_s):
        bound_by = "launch"
    return OperatorTime(duration_s=compute_s + traffic_s + launch_s, flops=flops, traffic_bytes=traffic_bytes, bound_by=bound_by)


def elementwise(
    *,
    traffic_bytes: Bytes,
    memory_bytes_per_s: BytesPerSecond,
    launch_s: Seconds = 0.0,
    memory_efficiency: float = MEMORY_EFFICIENCY,
    flops: float = 0.0,
) -> OperatorTime:
    """Time of operators that only stream: norms, residuals, activations, casts, the optimizer.

    >>> elementwise(traffic_bytes=1_700_000, memory_bytes_per_s=2e12).duration_s
    1e-06
    """
    traffic_s = traffic_bytes / (memory_bytes_per_s * memory_efficiency)
    bound_by: BoundBy = "launch" if launch_s > traffic_s else "memory"
    return OperatorTime(duration_s=traffic_s + launch_s, flops=flops, traffic_bytes=traffic_bytes, bound_by=bound_by)


def head_alignment(head_width: int) -> float:
    """Return the share of the unfused products' rate that a head width leaves: tensor cores want multiples of 64.

    Fitted to the head-width sweeps of the BLOOM engineering logs (bigscience-workshop/bigscience, "train/tr11-176B-ml").

    >>> [head_alignment(width) for width in (128, 96, 80, 72, 100, 98, 81)]
    [1.0, 0.95, 0.9, 0.85, 0.14, 0.12, 0.07]
    """
    by_divisor = ((64, 1.0), (32, 0.95), (16, 0.9), (8, 0.85), (4, 0.14), (2, 0.12), (1, 0.07))
    return next(share for divisor, share in by_divisor if head_width % divisor == 0)


def attainable_flops_per_s(intensity: float, *, peak_flops_per_s: FlopsPerSecond, memory_bytes_per_s: BytesPerSecond) -> FlopsPerSecond:
    """Return the roof over an operator: min(peak, memory rate x intensity), intensity in FLOP per byte.

    Source: Williams, Waterman and Patterson 2009, Roofline: an insightful visual performance model.

    >>> attainable_flops_per_s(1 / 6, peak_flops_per_s=989e12, memory_bytes_per_s=3.36e12)
    560000000000.0
    """
    return min(peak_flops_per_s, memory_bytes_per_s * intensity)


def ridge(*, peak_flops_per_s: FlopsPerSecond, memory_bytes_per_s: BytesPerSecond) -> float:
    """Return the intensity, in FLOP per byte, from which arithmetic is the bound.

    >>> round(ridge(peak_flops_per_s=989e12, memory_bytes_per_s=3.35e12))
    295
    """
    return peak_flops_per_s / memory_bytes_per_s


def gemm_intensity(*, m: int, n: int, k: int, element_bytes: Bytes = 2) -> float:
    """Return the FLOP per byte of a matrix product whose tensors cross the memory bus once each.

    >>> gemm_intensity(m=3000, n=3000, k=3000)
    1000.0
    """
    return 2 * m * n * k / (element_bytes * (m * k + k * n + m * n))


def _slowest(compute_s: Seconds, traffic_s: Seconds, launch_s: Seconds, flops: float, traffic_bytes: Bytes) -> OperatorTime:
    """Launch and arithmetic follow each other; traffic hides both where it takes longer."""
    parts: dict[BoundBy, Seconds] = {"compute": compute_s, "memory": traffic_s, "launch": launch_s}
    bound_by = max(parts, key=lambda part: parts[part])
    return OperatorTime(duration_s=max(compute_s + launch_s, traffic_s), flops=flops, traffic_bytes=traffic_bytes, bound_by=bound_by)
