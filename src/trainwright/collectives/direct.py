"""Direct exchange: every rank hands each other rank exactly what that rank needs, in rounds of disjoint pairs.

In round k rank i sends to rank i + k (mod P). Each rank gets every contribution itself, so it can add them in rank order and
the sum does not depend on who was fast. An all_reduce scatters the sums and gathers them again; a broadcast is sent by the root
to one rank after another.

Bytes as few as the ring's, rounds as many, but every pair of ranks needs a link.
Source: Thakur, Rabenseifner and Gropp 2005, Optimization of Collective Communication Operations in MPICH (pairwise exchange).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.collectives.rounds import Round, Transfer, refuse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainwright.units import Bytes, BytesPerSecond, Seconds

NAME = "direct"
OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


def rounds(op: str, num_ranks: int) -> Iterator[Round]:
    """Yield the rounds of an operation."""
    match op:
        case "all_gather":
            yield from _gather(num_ranks)
        case "reduce_scatter":
            yield from _scatter(num_ranks)
        case "all_reduce":
            yield from _scatter(num_ranks)
            yield from _gather(num_ranks)
        case "all_to_all":
            for shift in range(1, num_ranks):
                yield tuple(
                    Transfer(from_rank=rank, to_rank=to_rank, chunks=(rank * num_ranks + to_rank,))
                    for rank, to_rank in _pairs(num_ranks, shift)
                )
        case "broadcast":
            for to_rank in range(1, num_ranks):
                yield (Transfer(from_rank=0, to_rank=to_rank, chunks=tuple(range(num_ranks))),)
        case _:
            raise refuse(NAME, op)


def num_chunks_sent(op: str, rank: int, num_ranks: int) -> int:
    """Chunks that one rank sends.

    >>> [num_chunks_sent("broadcast", rank, num_ranks=3) for rank in range(3)]
    [6, 0, 0]
    """
    if op not in OPS:
        raise refuse(NAME, op)
    if op == "broadcast":
        return 0 if rank else (num_ranks - 1) * num_ranks
    return (2 if op == "all_reduce" else 1) * (num_ranks - 1)


def duration_s(op: str, *, payload_bytes: Bytes, num_ranks: int, link_bytes_per_s: BytesPerSecond, hop_s: Seconds) -> Seconds:
    """Time of an operation, pair after pair. Left out: the cost of adding.

    >>> duration_s("all_to_all", payload_bytes=8_000, num_ranks=4, link_bytes_per_s=1e3, hop_s=0.5)
    7.5
    """
    if op not in OPS:
        raise refuse(NAME, op)
    num_rounds = (2 if op == "all_reduce" else 1) * (num_ranks - 1)
    round_bytes = payload_bytes if op == "broadcast" else payload_bytes / num_ranks
    return num_rounds * (hop_s + round_bytes / link_bytes_per_s)


def _pairs(num_ranks: int, shift: int) -> Iterator[tuple[int, int]]:
    for rank in range(num_ranks):
        yield rank, (rank + shift) % num_ranks


def _scatter(num_ranks: int) -> Iterator[Round]:
    """Everybody's piece j goes to rank j, which adds it."""
    for shift in range(1, num_ranks):
        yield tuple(Transfer(from_rank=rank, to_rank=to_rank, chunks=(to_rank,), reduce=True) for rank, to_rank in _pairs(num_ranks, shift))


def _gather(num_ranks: int) -> Iterator[Round]:
    """Rank j's piece j goes to everybody."""
    for shift in range(1, num_ranks):
        yield tuple(Transfer(from_rank=rank, to_rank=to_rank, chunks=(rank,)) for rank, to_rank in _pairs(num_ranks, shift))
