"""Carries out rounds of transfers on numbers: the proof that an algorithm computes what its name says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from trainwright.collectives.rounds import Round

Numbers: TypeAlias = NDArray[np.float64]
Held: TypeAlias = tuple[Mapping[int, Numbers], ...]  # for each rank the chunks it holds, by number

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


def execute(op: str, rounds: Iterable[Round], inputs: Sequence[Numbers]) -> list[Numbers]:
    """Return what each rank holds in the end.

    inputs: one vector a rank; its own piece for an all_gather, else the whole payload. Sizes need not divide by the number of
    ranks: a payload of n elements is cut at i * n // num_ranks. A broadcast is from rank 0.

    Raises KeyError where a rank sends a chunk that it does not hold.
    """
    first = begin(op, inputs)
    *_, last = first, *steps(first, rounds)
    return [np.concatenate([chunks[number] for number in result_chunks(op, rank, len(last))]) for rank, chunks in enumerate(last)]


def begin(op: str, inputs: Sequence[Numbers]) -> Held:
    """Return the chunks that each rank holds at the start."""
    num_ranks = len(inputs)
    match op:
        case "all_gather":
            return tuple({rank: own} for rank, own in enumerate(inputs))
        case "reduce_scatter" | "all_reduce":
            return tuple(dict(enumerate(_pieces(own, num_ranks))) for own in inputs)
        case "broadcast":
            return (dict(enumerate(_pieces(inputs[0], num_ranks))), *({} for _ in inputs[1:]))
        case "all_to_all":
            return tuple(
                {rank * num_ranks + to_rank: piece for to_rank, piece in enumerate(_pieces(own, num_ranks))}
                for rank, own in enumerate(inputs)
            )
    raise ValueError(f'"{op}" is not one of {", ".join(OPS)}')


def steps(held: Held, rounds: Iterable[Round]) -> Iterator[Held]:
    """Yield what the ranks hold after each round. Transfers of one round read what was there before it."""
    for one_round in rounds:
        after = [dict(chunks) for chunks in held]
        for transfer in one_round:
            for number in transfer.chunks:
                arriving = held[transfer.from_rank][number]
                own = after[transfer.to_rank]
                own[number] = own[number] + arriving if transfer.reduce else arriving
        held = tuple(after)
        yield held


def result_chunks(op: str, rank: int, num_ranks: int) -> range:
    """Return the numbers of the chunks that make up a rank's result, in order."""
    match op:
        case "reduce_scatter":
            return range(rank, rank + 1)
        case "all_to_all":
            return range(rank, num_ranks * num_ranks, num_ranks)
        case _:
            return range(num_ranks)


def _pieces(whole: Numbers, num_ranks: int) -> list[Numbers]:
    cuts = [rank * len(whole) // num_ranks for rank in range(1, num_ranks)]
    return list(np.split(whole, cuts))
