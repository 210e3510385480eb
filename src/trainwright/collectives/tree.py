"""Tree: sums climb a binomial tree to rank 0, the result comes down the same way.

    8 ranks, going up        round 1   1>0  3>2  5>4  7>6
                             round 2   2>0  6>4
                             round 3   4>0

Few rounds, ceil(log2 P) each way, but the whole payload in each of them: good for small messages, up to 2x to 8x slower than the
ring for large ones. (Libraries cut the payload into segments and use two complementary trees, which mends that; left out here.)
Source: Thakur, Rabenseifner and Gropp 2005, Optimization of Collective Communication Operations in MPICH.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.collectives.rounds import Round, Transfer, refuse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainwright.units import Bytes, BytesPerSecond, Seconds

NAME = "tree"
OPS = ("all_reduce", "broadcast")


def rounds(op: str, num_ranks: int) -> Iterator[Round]:
    """Yield the rounds of an operation."""
    match op:
        case "all_reduce":
            yield from _up(num_ranks)
            yield from _down(num_ranks)
        case "broadcast":
            yield from _down(num_ranks)
        case _:
            raise refuse(NAME, op)


def num_chunks_sent(op: str, rank: int, num_ranks: int) -> int:
    """Chunks that one rank sends: the whole payload to each child coming down, once to its parent going up.

    >>> [num_chunks_sent("all_reduce", rank, num_ranks=4) // 4 for rank in range(4)]
    [2, 1, 2, 1]
    """
    if op not in OPS:
        raise refuse(NAME, op)
    reach = rank & -rank if rank else 1 << _depth(num_ranks)  # the subtree below a rank has at most as many ranks
    subtree = min(reach, num_ranks - rank)
    num_children = _depth(subtree)
    num_parents = 1 if rank and op == "all_reduce" else 0
    return num_ranks * (num_children + num_parents)


def duration_s(op: str, *, payload_bytes: Bytes, num_ranks: int, link_bytes_per_s: BytesPerSecond, hop_s: Seconds) -> Seconds:
    """Time of an operation. Left out: the cost of adding.

    >>> duration_s("all_reduce", payload_bytes=8_000, num_ranks=4, link_bytes_per_s=1e3, hop_s=0.5)
    34.0
    """
    if op not in OPS:
        raise refuse(NAME, op)
    num_rounds = (2 if op == "all_reduce" else 1) * _depth(num_ranks)
    return num_rounds * (hop_s + payload_bytes / link_bytes_per_s)


def _depth(num_ranks: int) -> int:
    """Return ceil(log2 num_ranks)."""
    return (num_ranks - 1).bit_length()


def _up(num_ranks: int) -> Iterator[Round]:
    """In the round of distance d, ranks d, 3d, 5d, … hand their sums to the rank d below."""
    for distance in (1 << level for level in range(_depth(num_ranks))):
        yield tuple(
            Transfer(from_rank=rank, to_rank=rank - distance, chunks=tuple(range(num_ranks)), reduce=True)
            for rank in range(distance, num_ranks, 2 * distance)
        )


def _down(num_ranks: int) -> Iterator[Round]:
    """The same rounds backwards, without adding."""
    for one_round in reversed(list(_up(num_ranks))):
        yield tuple(Transfer(from_rank=step.to_rank, to_rank=step.from_rank, chunks=step.chunks) for step in one_round)
