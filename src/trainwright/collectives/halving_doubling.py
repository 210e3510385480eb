"""Halving and doubling: exchange half of what is left with ever nearer partners, then gather it back with ever farther ones.

    8 ranks, reduce_scatter   round 1   partner at distance 4, half the payload
                              round 2   partner at distance 2, a quarter
                              round 3   partner at distance 1, an eighth

As few bytes as the ring in log2 P rounds, for powers of two. Otherwise the r = P - 2^k ranks too many first hand all they have to
a neighbour and sit out; `core` numbers the 2^k ranks that take part, and each core stands for its own chunk and its neighbour's.

Source: Thakur, Rabenseifner and Gropp 2005, Optimization of Collective Communication Operations in MPICH (recursive halving,
recursive doubling, and Rabenseifner's all-reduce).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.collectives.rounds import Round, Transfer, refuse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainwright.units import Bytes, BytesPerSecond, Seconds

NAME = "halving-doubling"
OPS = ("all_gather", "reduce_scatter", "all_reduce")


def rounds(op: str, num_ranks: int) -> Iterator[Round]:
    """Yield the rounds of an operation."""
    everything = tuple(range(num_ranks))
    match op:
        case "all_gather":
            yield from _fold(num_ranks, reduce=False)
            yield from _doubling(num_ranks)
            yield from _unfold(num_ranks, everything, but_own=True)
        case "reduce_scatter":
            yield from _fold(num_ranks, reduce=True)
            yield from _halving(num_ranks)
            yield from _unfold(num_ranks, None)
        case "all_reduce":
            yield from _fold(num_ranks, reduce=True)
            yield from _halving(num_ranks)
            yield from _doubling(num_ranks)
            yield from _unfold(num_ranks, everything)
        case _:
            raise refuse(NAME, op)


def num_chunks_sent(op: str, rank: int, num_ranks: int) -> int:
    """Chunks that one rank sends: num_ranks - 1 each way for powers of two.

    >>> [num_chunks_sent("reduce_scatter", rank, num_ranks=6) for rank in range(6)]
    [5, 6, 5, 6, 5, 5]
    """
    num_extra = _num_extra(num_ranks)
    if rank < 2 * num_extra and rank % 2:
        return {"all_gather": 1, "reduce_scatter": num_ranks, "all_reduce": num_ranks}[op]
    core = rank // 2 if rank < 2 * num_extra else rank - num_extra
    stands_for_two = core < num_extra
    scatter = num_ranks - (2 if stands_for_two else 1)  # all but its own block, half by half
    gather = sum(_block_chunks(core, distance, num_extra) for distance in _distances(num_ranks))
    match op:
        case "all_gather":
            return gather + (num_ranks - 1 if stands_for_two else 0)
        case "reduce_scatter":
            return scatter + (1 if stands_for_two else 0)
        case "all_reduce":
            return scatter + gather + (num_ranks if stands_for_two else 0)
    raise refuse(NAME, op)


def duration_s(op: str, *, payload_bytes: Bytes, num_ranks: int, link_bytes_per_s: BytesPerSecond, hop_s: Seconds) -> Seconds:
    """Time of an operation: the largest block of each distance sets the pace. Left out: the cost of adding.

    >>> duration_s("reduce_scatter", payload_bytes=8_000, num_ranks=4, link_bytes_per_s=1e3, hop_s=0.5)
    7.0
    """
    num_extra = _num_extra(num_ranks)
    distances = _distances(num_ranks)
    one_way = sum(distance + min(distance, num_extra) for distance in distances)
    num_folds = 2 if num_extra else 0
    match op:
        case "all_gather":
            num_rounds, num_chunks = len(distances), one_way + (num_ranks if num_extra else 0)
        case "reduce_scatter":
            num_rounds, num_chunks = len(distances), one_way + (num_ranks + 1 if num_extra else 0)
        case "all_reduce":
            num_rounds, num_chunks = 2 * len(distances), 2 * one_way + (2 * num_ranks if num_extra else 0)
        case _:
            raise refuse(NAME, op)
    return (num_rounds + num_folds) * hop_s + num_chunks * payload_bytes / num_ranks / link_bytes_per_s


def _num_extra(num_ranks: int) -> int:
    """Return how many ranks there are above the largest power of two."""
    return num_ranks - (1 << (num_ranks.bit_length() - 1))


def _distances(num_ranks: int) -> list[int]:
    """Return 1, 2, 4, … below the number of cores."""
    return [1 << level for level in range(num_ranks.bit_length() - 1)]


def _rank(core: int, num_extra: int) -> int:
    return 2 * core if core < num_extra else core + num_extra


def _block_chunks(core: int, distance: int, num_extra: int) -> int:
    """Count the chunks of the aligned block of `distance` cores that holds `core`."""
    first = core // distance * distance
    return distance + min(max(num_extra - first, 0), distance)


def _block(core: int, distance: int, num_extra: int) -> tuple[int, ...]:
    """Return the chunks of that block: each core's own, and its neighbour's."""
    first = _rank(core // distance * distance, num_extra)
    return tuple(range(first, first + _block_chunks(core, distance, num_extra)))


def _fold(num_ranks: int, *, reduce: bool) -> Iterator[Round]:
    """Extra ranks hand over all they hold: the whole payload of a reduction, their own chunk of a gather."""
    if num_extra := _num_extra(num_ranks):
        yield tuple(
            Transfer(from_rank=2 * core + 1, to_rank=2 * core, chunks=tuple(range(num_ranks)) if reduce else (2 * core + 1,), reduce=reduce)
            for core in range(num_extra)
        )


def _unfold(num_ranks: int, result: tuple[int, ...] | None, *, but_own: bool = False) -> Iterator[Round]:
    """Extra ranks get their result: all of it, all but the chunk they began with, or (None) just their own chunk."""
    if num_extra := _num_extra(num_ranks):
        yield tuple(
            Transfer(
                from_rank=2 * core,
                to_rank=2 * core + 1,
                chunks=(2 * core + 1,)
                if result is None
                else tuple(number for number in result if not (but_own and number == 2 * core + 1)),
            )
            for core in range(num_extra)
        )


def _halving(num_ranks: int) -> Iterator[Round]:
    """Each core gives away the half in which its partner lies."""
    for distance in reversed(_distances(num_ranks)):
        yield _exchange(num_ranks, distance, give_partners_block=True)


def _doubling(num_ranks: int) -> Iterator[Round]:
    """Each core passes on the block that it has gathered so far."""
    for distance in _distances(num_ranks):
        yield _exchange(num_ranks, distance, give_partners_block=False)


def _exchange(num_ranks: int, distance: int, *, give_partners_block: bool) -> Round:
    num_extra = _num_extra(num_ranks)
    return tuple(
        Transfer(
            from_rank=_rank(core, num_extra),
            to_rank=_rank(core ^ distance, num_extra),
            chunks=_block(core ^ distance if give_partners_block else core, distance, num_extra),
            reduce=give_partners_block,
        )
        for core in range(num_ranks - num_extra)
    )
