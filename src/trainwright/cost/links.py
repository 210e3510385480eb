"""Links: at what rate a group of ranks exchanges, and how long its collectives take.

Glossary
    scale-up      the fast fabric inside a domain (NVLink, xGMI), one direction, per device
    domain        devices that reach each other over it: a server, or a rack
    NIC           the network card of a device, one direction; traffic that leaves the domain passes it
    group rate    bytes per second that each member can send while all members do ("bus bandwidth")
    half message  the message size at which a collective reaches half of its rate: protocols need large pieces to fill a wire

Sizes are those of the full tensor as one rank sees it: the gathered side of an all_gather, the unreduced side of a
reduce_scatter, the whole input of an all_to_all. Left out: contention between groups, and the choice of algorithm; measured
curves, where they exist, replace these formulas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainwright.units import Bytes, BytesPerSecond, Seconds

NIC_EFFICIENCY = 0.85
"""Share of a network card's rate that collectives reach across nodes."""

HALF_MESSAGE_BYTES: Bytes = 3_000_000
"""The half message of a ring on NVLink-class fabrics, fitted to published step times of tensor-parallel runs."""

LATENCY_S: Seconds = 20e-6
"""Start of one collective: launch, handshake, and the first hops."""


def group_bytes_per_s(
    *,
    num_ranks: int,
    members_per_node: int,
    domain_size: int,
    scale_up_bytes_per_s: BytesPerSecond,
    nic_bytes_per_s: BytesPerSecond,
    nic_efficiency: float = NIC_EFFICIENCY,
) -> BytesPerSecond:
    """Return the rate of a group: scale-up if it fits in the domain, else what the cards of its members in one node carry together.

    members_per_node: members of the group inside one node (or domain); their cards share the traffic that leaves it, up to the
    scale-up rate, over which they must hand it to each other.

    >>> rates = dict(domain_size=8, scale_up_bytes_per_s=450e9, nic_bytes_per_s=50e9)
    >>> [group_bytes_per_s(num_ranks=n, members_per_node=m, **rates) / 1e9 for n, m in ((8, 8), (64, 8), (64, 1))]
    [450.0, 340.0, 42.5]
    """
    fits = num_ranks <= domain_size and members_per_node >= num_ranks
    if fits:
        return scale_up_bytes_per_s
    return min(scale_up_bytes_per_s, nic_bytes_per_s * nic_efficiency * members_per_node)


def all_gather_s(
    *,
    payload_bytes: Bytes,
    num_ranks: int,
    group_bytes_per_s: BytesPerSecond,
    half_message_bytes: Bytes = HALF_MESSAGE_BYTES,
    latency_s: Seconds = LATENCY_S,
) -> Seconds:
    """Time of an all-gather: (P - 1)/P of the payload, and of the half message, at the group's rate, after the latency.

    >>> all_gather_s(payload_bytes=8_000, num_ranks=4, group_bytes_per_s=1e3, half_message_bytes=0, latency_s=0.5)
    6.5
    """
    if num_ranks == 1:
        return 0.0
    return latency_s + (num_ranks - 1) / num_ranks * (payload_bytes + half_message_bytes) / group_bytes_per_s


def reduce_scatter_s(
    *,
    payload_bytes: Bytes,
    num_ranks: int,
    group_bytes_per_s: BytesPerSecond,
    half_message_bytes: Bytes = HALF_MESSAGE_BYTES,
    latency_s: Seconds = LATENCY_S,
) -> Seconds:
    """Time of a reduce-scatter: an all-gather backwards. Left out: the cost of adding."""
    return all_gather_s(
        payload_bytes=payload_bytes,
        num_ranks=num_ranks,
        group_bytes_per_s=group_bytes_per_s,
        half_message_bytes=half_message_bytes,
        latency_s=latency_s,
    )


def all_reduce_s(
    *,
    payload_bytes: Bytes,
    num_ranks: int,
    group_bytes_per_s: BytesPerSecond,
    half_message_bytes: Bytes = HALF_MESSAGE_BYTES,
    latency_s: Seconds = LATENCY_S,
) -> Seconds:
    """Time of an all-reduce: 2 (P - 1)/P of the payload and of the half message, one latency.

    A reduce-scatter and an all-gather in one launch.

    >>> all_reduce_s(payload_bytes=8_000, num_ranks=4, group_bytes_per_s=1e3, half_message_bytes=0, latency_s=0.5)
    12.5
    """
    if num_ranks == 1:
        return 0.0
    return latency_s + 2 * (num_ranks - 1) / num_ranks * (payload_bytes + half_message_bytes) / group_bytes_per_s


def all_to_all_s(
    *,
    payload_bytes: Bytes,
    num_ranks: int,
    group_bytes_per_s: BytesPerSecond,
    half_message_bytes: Bytes = HALF_MESSAGE_BYTES,
    latency_s: Seconds = LATENCY_S,
) -> Seconds:
    """Time of an all-to-all: each rank keeps 1/P of its payload and sends the rest. Left out: pairs at unequal distance."""
    return all_gather_s(
        payload_bytes=payload_bytes,
        num_ranks=num_ranks,
        group_bytes_per_s=group_bytes_per_s,
        half_message_bytes=half_message_bytes,
        latency_s=latency_s,
    )


def broadcast_s(
    *,
    payload_bytes: Bytes,
    num_ranks: int,
    group_bytes_per_s: BytesPerSecond,
    half_message_bytes: Bytes = HALF_MESSAGE_BYTES,
    latency_s: Seconds = LATENCY_S,
) -> Seconds:
    """Time of a broadcast that streams the payload through a chain: every link carries it once."""
    return 0.0 if num_ranks == 1 else latency_s + (payload_bytes + half_message_bytes) / group_bytes_per_s


def send_s(*, payload_bytes: Bytes, link_bytes_per_s: BytesPerSecond, latency_s: Seconds = LATENCY_S) -> Seconds:
    """Time of one message between two ranks.

    >>> send_s(payload_bytes=1_000, link_bytes_per_s=1e3, latency_s=0.5)
    1.5
    """
    return latency_s + payload_bytes / link_bytes_per_s


def collective_s(
    op: str,
    *,
    payload_bytes: Bytes,
    num_ranks: int,
    group_bytes_per_s: BytesPerSecond,
    half_message_bytes: Bytes = HALF_MESSAGE_BYTES,
    latency_s: Seconds = LATENCY_S,
) -> Seconds:
    """Time of the operation named `op`, as Collective actions name it. Raises KeyError for any other name.

    >>> collective_s("all_to_all", payload_bytes=8_000, num_ranks=4, group_bytes_per_s=1e3, half_message_bytes=0, latency_s=0.5)
    6.5
    """
    return _BY_OP[op](
        payload_bytes=payload_bytes,
        num_ranks=num_ranks,
        group_bytes_per_s=group_bytes_per_s,
        half_message_bytes=half_message_bytes,
        latency_s=latency_s,
    )


_BY_OP = {
    "all_gather": all_gather_s,
    "reduce_scatter": reduce_scatter_s,
    "all_reduce": all_reduce_s,
    "all_to_all": all_to_all_s,
    "broadcast": broadcast_s,
}


def bus_bytes_per_s(op: str, *, payload_bytes: Bytes, num_ranks: int, duration_s: Seconds) -> BytesPerSecond:
    """Return the group rate that a measured collective reached: bytes that one rank had to send over the time.

    Source: nccl-tests, doc/PERFORMANCE.md.

    >>> f"{bus_bytes_per_s('all_reduce', payload_bytes=2**34, num_ranks=8, duration_s=0.127997) / 1e9:.1f} GB/s"
    '234.9 GB/s'
    """
    factor = {"all_reduce": 2 * (num_ranks - 1) / num_ranks, "broadcast": 1.0}.get(op, (num_ranks - 1) / num_ranks)
    return factor * payload_bytes / duration_s
