"""Naive: everybody sends everything to rank 0, which adds it up and sends everybody the result.

Rank 0 takes in (P - 1) payloads and gives out as many, while every other rank waits: what the other algorithms are measured
against.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.collectives.rounds import Round, Transfer, refuse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainwright.units import Bytes, BytesPerSecond, Seconds

NAME = "naive"
OPS = ("all_reduce",)


def rounds(op: str, num_ranks: int) -> Iterator[Round]:
    """Yield the rounds of an operation; one transfer each, for rank 0 has one port."""
    if op not in OPS:
        raise refuse(NAME, op)
    everything = tuple(range(num_ranks))
    for rank in range(1, num_ranks):
        yield (Transfer(from_rank=rank, to_rank=0, chunks=everything, reduce=True),)
    for rank in range(1, num_ranks):
        yield (Transfer(from_rank=0, to_rank=rank, chunks=everything),)


def num_chunks_sent(op: str, rank: int, num_ranks: int) -> int:
    """Chunks that one rank sends.

    >>> [num_chunks_sent("all_reduce", rank, num_ranks=4) // 4 for rank in range(4)]
    [3, 1, 1, 1]
    """
    if op not in OPS:
        raise refuse(NAME, op)
    return num_ranks if rank else (num_ranks - 1) * num_ranks


def duration_s(op: str, *, payload_bytes: Bytes, num_ranks: int, link_bytes_per_s: BytesPerSecond, hop_s: Seconds) -> Seconds:
    """Time of an operation. Left out: the cost of adding.

    >>> duration_s("all_reduce", payload_bytes=8_000, num_ranks=4, link_bytes_per_s=1e3, hop_s=0.5)
    51.0
    """
    if op not in OPS:
        raise refuse(NAME, op)
    return 2 * (num_ranks - 1) * (hop_s + payload_bytes / link_bytes_per_s)
