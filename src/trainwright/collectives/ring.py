"""Ring: every rank passes one chunk to its neighbour, num_ranks - 1 times around.

Reduction, sends i -> i + 1; in the first round rank i sends chunk i, then always the chunk that it has just added to:
    after P - 1 rounds rank i holds the whole sum of chunk i + 1 (mod P), not of chunk i.
An all_reduce gathers from there. A reduce_scatter must end with chunk i on rank i, so it begins one chunk earlier.

Bytes: 2 (P - 1) / P of the payload on every link for an all_reduce, half of that for its halves: the least possible.
Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.collectives.rounds import Round, Transfer, refuse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainwright.units import Bytes, BytesPerSecond, Seconds

NAME = "ring"
OPS = ("all_gather", "reduce_scatter", "all_reduce")


def rounds(op: str, num_ranks: int) -> Iterator[Round]:
    """Yield the rounds of an operation. Every rank sends once and receives once in each."""
    match op:
        case "all_gather":
            yield from _around(num_ranks, first_chunk=0, reduce=False)
        case "reduce_scatter":
            yield from _around(num_ranks, first_chunk=-1, reduce=True)
        case "all_reduce":
            yield from _around(num_ranks, first_chunk=0, reduce=True)
            yield from _around(num_ranks, first_chunk=1, reduce=False)
        case _:
            raise refuse(NAME, op)


def num_chunks_sent(
    op: str,
    rank: int,  # noqa: ARG001 - the same on every rank
    num_ranks: int,
) -> int:
    """Chunks that one rank sends.

    >>> num_chunks_sent("all_reduce", 0, num_ranks=8) / 8
    1.75
    """
    if op not in OPS:
        raise refuse(NAME, op)
    return (2 if op == "all_reduce" else 1) * (num_ranks - 1)


def duration_s(op: str, *, payload_bytes: Bytes, num_ranks: int, link_bytes_per_s: BytesPerSecond, hop_s: Seconds) -> Seconds:
    """Time of an operation, all links at once. Left out: the cost of adding.

    >>> duration_s("reduce_scatter", payload_bytes=8_000, num_ranks=4, link_bytes_per_s=1e3, hop_s=0.5)
    7.5
    """
    num_rounds = num_chunks_sent(op, 0, num_ranks)
    return num_rounds * (hop_s + payload_bytes / num_ranks / link_bytes_per_s)


def _around(num_ranks: int, first_chunk: int, *, reduce: bool) -> Iterator[Round]:
    """In the first round rank i sends chunk i + first_chunk, in each later one the chunk that has just arrived."""
    for step in range(num_ranks - 1):
        yield tuple(
            Transfer(from_rank=rank, to_rank=(rank + 1) % num_ranks, chunks=((rank + first_chunk - step) % num_ranks,), reduce=reduce)
            for rank in range(num_ranks)
        )
