"""Little's law: what is under way = rate x time under way.

For a memory or a wire: bytes in flight = bandwidth x latency. With fewer requests outstanding the bandwidth cannot be reached,
however fast the memory is.
Source: Little 1961, A proof for the queuing formula L = lambda W.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainwright.units import Bytes, BytesPerSecond, Seconds


def in_flight_bytes(*, rate_bytes_per_s: BytesPerSecond, latency_s: Seconds) -> float:
    """Return the bytes that must be under way at all times to sustain a rate.

    >>> in_flight_bytes(rate_bytes_per_s=50e9, latency_s=4e-6)
    200000.0
    """
    return rate_bytes_per_s * latency_s


def reachable_bytes_per_s(*, in_flight_bytes: float, latency_s: Seconds) -> BytesPerSecond:
    """Return the rate that so many bytes under way can sustain.

    >>> reachable_bytes_per_s(in_flight_bytes=100_000, latency_s=4e-6)
    25000000000.0
    """
    return in_flight_bytes / latency_s


def num_requests(*, rate_bytes_per_s: BytesPerSecond, latency_s: Seconds, request_bytes: Bytes) -> int:
    """Return how many requests of one size must be outstanding to sustain a rate, rounded up.

    >>> num_requests(rate_bytes_per_s=3.35e12, latency_s=600e-9, request_bytes=128)
    15704
    """
    return -int(-rate_bytes_per_s * latency_s // request_bytes)
