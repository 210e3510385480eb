"""Rounds of transfers: what a collective algorithm is, what it sends, and how long it takes.

Glossary
    chunk     payload / num_ranks. Chunk j of a gather or reduction is the piece that rank j contributes or ends with. An
              all_to_all has num_ranks^2 chunks: number i * num_ranks + j goes from rank i to rank j.
    transfer  chunks that one rank hands to another; the receiver adds them to its own (`reduce`) or replaces its own
    round     transfers that happen at once; each reads what its sender held when the round began
    port      a rank's way in and out: it sends and receives at once, each at the rate of the link
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from trainwright.units import Bytes, BytesPerSecond, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Chunks on their way from one rank to another."""

    from_rank: int
    to_rank: int
    chunks: tuple[int, ...]
    reduce: bool = False


Round: TypeAlias = tuple[Transfer, ...]


def refuse(algorithm: str, op: str) -> ValueError:
    """Return the error of asking an algorithm for an operation that it does not have."""
    return ValueError(f'the algorithm "{algorithm}" has no operation "{op}"')


def chunks_on_links(rounds: Iterable[Round]) -> Counter[tuple[int, int]]:
    """Chunks that crossed from one rank to another, by (from, to)."""
    counts: Counter[tuple[int, int]] = Counter()
    for transfer in _transfers(rounds):
        counts[transfer.from_rank, transfer.to_rank] += len(transfer.chunks)
    return counts


def chunks_sent(rounds: Iterable[Round]) -> Counter[int]:
    """Chunks that each rank sent."""
    counts: Counter[int] = Counter()
    for transfer in _transfers(rounds):
        counts[transfer.from_rank] += len(transfer.chunks)
    return counts


def busiest_port_chunks(one_round: Round) -> int:
    """The most chunks that one port must pass in one direction in a round."""
    sent, received = Counter[int](), Counter[int]()
    for transfer in one_round:
        sent[transfer.from_rank] += len(transfer.chunks)
        received[transfer.to_rank] += len(transfer.chunks)
    return max([*sent.values(), *received.values()], default=0)


def rounds_s(rounds: Iterable[Round], *, payload_bytes: Bytes, num_ranks: int, link_bytes_per_s: BytesPerSecond, hop_s: Seconds) -> Seconds:
    """Time of all rounds, one after another: a hop and the busiest port's bytes each. Left out: the cost of adding."""
    chunk_s = payload_bytes / num_ranks / link_bytes_per_s
    return sum(hop_s + busiest_port_chunks(one_round) * chunk_s for one_round in rounds)


def _transfers(rounds: Iterable[Round]) -> Iterator[Transfer]:
    for one_round in rounds:
        yield from one_round
