"""Ranks as processes with a GPU each: NCCL's own collectives, one communicator a group.

Written after the documentation of torch.distributed; not run by this repository's tests, which have no GPU.
A wait orders the current stream behind the transfer; it does not block the processor. NCCL sums in the order of its own
algorithm: results are the same on every rank, but not to the bit those of `wire`'s ordered sums. Sent bytes are those of the formulas
in `trainwright.cost.wire`, which NCCL's ring and tree meet too; they are not counted message by message.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from trainwright.cost.wire import member_sent_bytes
from trainwright.engine.wire import DEFAULT_TIMEOUT_S, WORLD, Handle, Pending, Wire, WireError, p2p_key
from trainwright.units import Seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True, slots=True)
class _Posted:
    work: dist.Work
    tensors: tuple[Tensor, ...]  # lent until the wait

    def wait(self, timeout_s: Seconds) -> None:  # noqa: ARG002 - the process group's own time-out holds
        self.work.wait()


@dataclass(slots=True)
class NcclTransport:
    """Point-to-point over NCCL, one communicator a channel and direction, so that crossing transfers do not wait for each other."""

    rank: int
    size: int
    groups: _Groups

    def post_send(self, peer_rank: int, tensor: Tensor, channel: str) -> Handle:
        """Lend `tensor` until the peer's receive has run."""
        group = self.groups.find((self.rank, peer_rank), channel)
        return _posted(dist.isend(tensor, peer_rank, group=group), tensor)

    def post_recv(self, peer_rank: int, tensor: Tensor, channel: str) -> Handle:
        """Offer `tensor` to the peer's next send."""
        group = self.groups.find((peer_rank, self.rank), channel)
        return _posted(dist.irecv(tensor, peer_rank, group=group), tensor)

    def close(self) -> None:
        """Leave all groups."""
        if dist.is_initialized():
            dist.destroy_process_group()


class NcclWire(Wire):
    """The operations of `Wire`, with NCCL's collectives in place of the direct exchange."""

    def __init__(self, rank: int, size: int, timeout_s: Seconds = DEFAULT_TIMEOUT_S) -> None:
        """Use torch.distributed's default group, which must be an NCCL one."""
        self.groups = _Groups(timeout_s)
        super().__init__(NcclTransport(rank, size, self.groups), timeout_s)

    def start_all_gather(self, out: Tensor, shard: Tensor, ranks: Sequence[int], channel: str = "") -> Pending:
        """Fill `out` with the members' shards, which are of one size."""
        work = dist.all_gather_single(out, shard, group=self.groups.find(ranks, channel), async_op=True)
        return self._pending("all_gather", ranks, out, _posted(work, out, shard))

    def start_reduce_scatter(self, out: Tensor, full: Tensor, ranks: Sequence[int], channel: str = "") -> Pending:
        """Put the sum of the members' pieces into `out`; the size divides by the number of members."""
        work = dist.reduce_scatter_single(out, full, group=self.groups.find(ranks, channel), async_op=True)
        return self._pending("reduce_scatter", ranks, full, _posted(work, out, full))

    def start_all_reduce(self, tensor: Tensor, ranks: Sequence[int], op: str = "sum", channel: str = "") -> Pending:
        """Replace `tensor` by the sum or the largest over the members."""
        work = dist.all_reduce(tensor, _REDUCE_OPS[op], group=self.groups.find(ranks, channel), async_op=True)
        return self._pending("all_reduce", ranks, tensor, _posted(work, tensor))

    def start_all_to_all(self, out: Tensor, source: Tensor, ranks: Sequence[int], channel: str = "") -> Pending:
        """Send piece i to member i."""
        work = dist.all_to_all_single(out, source, group=self.groups.find(ranks, channel), async_op=True)
        return self._pending("all_to_all", ranks, source, _posted(work, out, source))

    def start_broadcast(self, tensor: Tensor, ranks: Sequence[int], root: int, channel: str = "") -> Pending:
        """Replace `tensor` by that of global rank `root`."""
        work = dist.broadcast(tensor, root, group=self.groups.find(ranks, channel), async_op=True)
        members = (root, *(rank for rank in ranks if rank != root))
        return self._pending("broadcast", members, tensor, _posted(work, tensor))

    def prepare(self, groups: Sequence[tuple[Sequence[int], str]], channels: Sequence[tuple[int, int, str]] = ()) -> None:
        """Make a communicator for each group, channel and direction; every rank names all of them in one order."""
        for ranks, channel in groups:
            self.groups.make(ranks, channel)
        for source, to, channel in channels:
            self.groups.make((source, to), p2p_key(channel))

    def _pending(self, op: str, ranks: Sequence[int], payload: Tensor, posted: Handle) -> Pending:
        payload_bytes, element_bytes = payload.numel() * payload.element_size(), payload.element_size()
        pending = Pending(self, op)
        pending.adopt(posted, member_sent_bytes(op, payload_bytes, len(ranks), index=ranks.index(self.rank), element_bytes=element_bytes))
        return pending


class _Groups:
    """Communicators by members and channel. `prepare` makes them: made when first needed, ranks could wait for each other in a circle."""

    def __init__(self, timeout_s: Seconds) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._found: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}

    def make(self, ranks: Sequence[int], channel: str) -> None:
        """Make a group; called by all ranks of the world."""
        group = dist.new_group(sorted(ranks), timeout=self._timeout)
        if dist.get_rank() in ranks:
            self._found[tuple(ranks), channel] = group

    def find(self, ranks: Sequence[int], channel: str) -> dist.ProcessGroup:
        group = self._found.get((tuple(ranks), channel))
        if group is not None:
            return group
        if channel == WORLD:
            everyone = dist.group.WORLD
            assert everyone is not None, "torch.distributed has been left"
            return everyone
        message = f"no communicator for ranks {tuple(ranks)} on channel '{channel}': call Wire.prepare before the first step"
        raise WireError(message)


def _posted(work: dist.Work | None, *tensors: Tensor) -> _Posted:
    assert work is not None, "this process is not in the group"
    return _Posted(work, tensors)
