"""What the direct exchange puts on the wire, and the buffers it needs meanwhile.

Direct exchange: every rank sends each other rank exactly what that rank needs, in one or two rounds. It is what the engine
runs on gloo, on threads and in proofs; `engine/wire.py` counts the bytes that these formulas foretell.

Words: `payload_bytes` is the full tensor as one rank sees it (the gathered side of an all_gather, the unreduced side of a
reduce_scatter, the whole input of an all_to_all), P the number of ranks. A tensor of n elements is cut at i*n//P, i = 0..P, so
the pieces differ by one element at most.

Summed over a group: all_gather, reduce_scatter, all_to_all and broadcast (P-1) * payload, all_reduce 2 (P-1) * payload, send payload.
Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH" (the lower bounds).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainwright.units import Bytes

TRANSFERS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1, "broadcast": 1}
"""How often the payload crosses to each of the P - 1 others, summed over the group."""

_PAIR = 2


def group_sent_bytes(op: str, payload_bytes: Bytes, num_ranks: int) -> Bytes:
    """Bytes sent by all ranks of a group together; exact for every size.

    >>> group_sent_bytes("all_reduce", payload_bytes=10, num_ranks=3)
    40
    """
    if op == "send":
        return payload_bytes
    return TRANSFERS[op] * (num_ranks - 1) * payload_bytes


def sent_bytes_per_rank(op: str, payload_bytes: Bytes, num_ranks: int) -> Bytes:
    """Bytes that one rank of the group sends: the group's bytes over its ranks, rounded up where they do not divide.

    Of a broadcast only the root sends; this is the mean all the same. A send is counted on the sender alone.

    >>> sent_bytes_per_rank("all_gather", payload_bytes=4_096, num_ranks=4)
    3072
    """
    if op == "send":
        return payload_bytes
    return -(-group_sent_bytes(op, payload_bytes, num_ranks) // num_ranks)


def member_sent_bytes(op: str, payload_bytes: Bytes, num_ranks: int, *, index: int, element_bytes: Bytes = 1) -> Bytes:
    """Bytes that the group's member `index` sends; exact where pieces differ by an element. The root of a broadcast is member 0.

    >>> [member_sent_bytes("all_reduce", 40, 3, index=i, element_bytes=4) for i in range(3)]
    [52, 52, 56]
    """
    if num_ranks == 1:
        return 0
    if op == "send":
        return payload_bytes
    if op == "broadcast":
        return (num_ranks - 1) * payload_bytes if index == 0 else 0
    piece_bytes = _piece_bytes(payload_bytes, num_ranks, index, element_bytes)
    match op:
        case "all_gather":
            return (num_ranks - 1) * piece_bytes
        case "reduce_scatter" | "all_to_all":
            return payload_bytes - piece_bytes
        case "all_reduce" if num_ranks == _PAIR:
            return payload_bytes
        case "all_reduce":
            return payload_bytes - piece_bytes + (num_ranks - 1) * piece_bytes
    raise KeyError(op)


def wire_buffer_bytes(op: str, payload_bytes: Bytes, num_ranks: int, element_bytes: Bytes = 1) -> Bytes:
    """Bytes that the exchange holds from its start to its Wait, beside source and target; the same on every rank.

    A reduction keeps the pieces of the others until it can add them in rank order. Two ranks that reduce a tensor exchange it whole.

    >>> wire_buffer_bytes("reduce_scatter", payload_bytes=4_096, num_ranks=4)
    3072
    >>> wire_buffer_bytes("all_gather", payload_bytes=4_096, num_ranks=4)
    0
    """
    if num_ranks == 1 or op not in {"reduce_scatter", "all_reduce"}:
        return 0
    if op == "all_reduce" and num_ranks == _PAIR:
        return payload_bytes
    largest_piece = -(-(payload_bytes // element_bytes) // num_ranks)
    return (num_ranks - 1) * largest_piece * element_bytes


def _piece_bytes(payload_bytes: Bytes, num_ranks: int, index: int, element_bytes: Bytes) -> Bytes:
    num_elements = payload_bytes // element_bytes
    return ((index + 1) * num_elements // num_ranks - index * num_elements // num_ranks) * element_bytes
