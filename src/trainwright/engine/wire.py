"""The wire: every byte that one rank gives another passes here.

Glossary
    transport   moves one tensor from one rank to another; threads, gloo and NCCL are one file each
    channel     (from, to, name): the n-th send of a channel meets the n-th receive
    handle      one posted send or receive
    pending     one started collective, send or receive, until its `wait`
    piece i     elements i*n//P up to (i+1)*n//P of a tensor of n elements, for P ranks: the part that member i owns

Nothing is buffered: a send lends its tensor until its wait and completes when its receive is posted. Every operation is split in
two, `start_...` and `Pending.wait`; between them neither source nor target may be touched.

Collectives go by direct exchange: each rank sends each other rank what that one needs. Sums are added in rank order, so that
they are deterministic and the same bits on every rank. `trainwright.cost.wire` holds the formulas of their bytes and buffers.
"""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from trainwright.cost.wire import wire_buffer_bytes
from trainwright.units import Bytes, Seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DEFAULT_TIMEOUT_S = 300.0
"""How long a wait may take before it is called a hang."""

WORLD = "world"
"""The channel of what all ranks do together beside a Program: barriers and agreements."""

_PAIR = 2
_NUM_SECOND_CHANNELS = 16
"""Channels for the second round of all_reduces of one group: ranks may begin second rounds in different orders."""


class WireError(RuntimeError):
    """A transfer cannot be completed."""


class WireTimeout(WireError):  # noqa: N818 - named for what happened
    """A peer did not come in time."""


class WorldAborted(WireError):  # noqa: N818 - named for what happened
    """Another rank failed; `rank` is the one that failed first."""

    def __init__(self, rank: int, reason: str) -> None:
        """Name the rank and what it said."""
        super().__init__(f"rank {rank} failed: {reason}")
        self.rank = rank


class Handle(Protocol):
    """One posted transfer."""

    def wait(self, timeout_s: Seconds) -> None:
        """Return when the transfer is complete; raise WireTimeout, WorldAborted or WireError otherwise."""


class Transport(Protocol):
    """What a backend offers: one tensor from one rank to another.

    Tensors are contiguous and not empty; both sides name the same number of bytes. Posting never blocks.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks in the world."""

    def post_send(self, peer_rank: int, tensor: Tensor, channel: str) -> Handle:
        """Lend `tensor` to the channel until the handle's wait."""

    def post_recv(self, peer_rank: int, tensor: Tensor, channel: str) -> Handle:
        """Offer `tensor` as the place where the channel's next message goes."""

    def close(self) -> None:
        """Give back what the transport holds."""


class Pending:
    """A started operation. `wait` ends it.

    `sent_bytes` is what this rank has sent for it, final after `wait`; `held_bytes` what the wire holds for it until then.
    """

    def __init__(self, wire: Wire, name: str) -> None:
        """Begin with nothing posted."""
        self.name = name
        self.sent_bytes = 0
        self.held_bytes = 0
        self._wire = wire
        self._handles: list[Handle] = []
        self._then: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def post_send(self, peer_rank: int, tensor: Tensor, channel: str) -> None:
        """Post one send of this operation. The one place where bytes are counted."""
        if tensor.numel():
            self.sent_bytes += tensor.numel() * tensor.element_size()
            self._wire.num_messages += 1
            self._handles.append(self._wire.transport.post_send(peer_rank, tensor, channel))

    def post_recv(self, peer_rank: int, tensor: Tensor, channel: str) -> None:
        """Post one receive of this operation."""
        if tensor.numel():
            self._handles.append(self._wire.transport.post_recv(peer_rank, tensor, channel))

    def adopt(self, handle: Handle, sent_bytes: Bytes) -> None:
        """Take over a transfer that a backend has posted by itself, with the bytes that this rank sends for it."""
        self.sent_bytes += sent_bytes
        self._handles.append(handle)

    def then(self, action: Callable[[], None], *, posts_more: bool = False) -> None:
        """Run `action` when all that is posted so far has arrived; with `posts_more` it begins a second round."""
        self._then = action
        if posts_more:
            self._wire.unfinished.append(self)

    def wait(self) -> None:
        """Return when the result is in place and everything lent is given back.

        Other operations that still owe a second round go on in threads of their own meanwhile: a rank that waits never holds up
        its peers, in whatever order they wait.
        """
        for other in tuple(self._wire.unfinished):
            if other is not self:
                other.go_on_in_a_thread()
        if self._thread is not None:
            self._thread.join()
        else:
            self._finish()
        if self._failure is not None:
            raise self._failure

    def go_on_in_a_thread(self) -> None:
        """Finish this operation while the caller waits for another one."""
        self._wire.unfinished.remove(self)
        self._thread = threading.Thread(target=self._finish_quietly, name=f"wire {self.name}", daemon=True)
        self._thread.start()

    def _finish_quietly(self) -> None:
        try:
            self._finish()
        except BaseException as failure:  # noqa: BLE001 - raised again by wait
            self._failure = failure

    @torch.no_grad()
    def _finish(self) -> None:
        if self in self._wire.unfinished:
            self._wire.unfinished.remove(self)
        while True:
            posted, self._handles = self._handles, []
            for handle in posted:
                handle.wait(self._wire.timeout_s)
            if self._then is None:
                return
            action, self._then = self._then, None
            action()


class Wire:
    """Split-phase operations of one rank over one transport.

    `ranks` are the global ranks of a group, in the order that all its members use; this rank is among them. `channel` keeps groups
    of equal ranks apart whose operations are not started in one order.
    """

    def __init__(self, transport: Transport, timeout_s: Seconds = DEFAULT_TIMEOUT_S) -> None:
        """Work over `transport`; a wait of more than `timeout_s` is a WireTimeout."""
        self.transport = transport
        self.timeout_s = timeout_s
        self.unfinished: list[Pending] = []
        self.num_messages = 0
        self._num_second_rounds: dict[str, int] = {}

    @property
    def rank(self) -> int:
        """This rank."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """Number of ranks in the world."""
        return self.transport.size

    def start_send(self, tensor: Tensor, to: int, channel: str = "") -> Pending:
        """Lend `tensor` to rank `to` until the wait."""
        pending = Pending(self, f"send to {to} {channel}")
        pending.post_send(to, _flat(tensor), p2p_key(channel))
        return pending

    def start_recv(self, tensor: Tensor, source: int, channel: str = "") -> Pending:
        """Let `tensor` be filled by rank `source`'s next send on the channel."""
        pending = Pending(self, f"recv from {source} {channel}")
        pending.post_recv(source, _flat(tensor), p2p_key(channel))
        return pending

    @torch.no_grad()
    def start_all_gather(self, out: Tensor, shard: Tensor, ranks: Sequence[int], channel: str = "") -> Pending:
        """Fill `out` with the shards of all members, one after another; `shard` may be this member's own piece of `out`."""
        me, pieces, own = ranks.index(self.rank), _pieces(_flat(out), len(ranks)), _flat(shard)
        pending = Pending(self, "all_gather")
        key = _key(ranks, channel)
        for index in _others(me, len(ranks)):
            pending.post_recv(ranks[index], pieces[index], key)
        for index in _others(me, len(ranks)):
            pending.post_send(ranks[index], own, key)
        _copy(pieces[me], own)
        return pending

    def start_reduce_scatter(self, out: Tensor, full: Tensor, ranks: Sequence[int], channel: str = "") -> Pending:
        """Put the sum of all members' piece `me` of `full` into `out`, which may be that piece itself."""
        me, pieces, target = ranks.index(self.rank), _pieces(_flat(full), len(ranks)), _flat(out)
        pending = Pending(self, "reduce_scatter")
        key = _key(ranks, channel)
        arrived = _rows(self._buffer(pending, "reduce_scatter", full, len(ranks)), len(ranks) - 1, target.numel())
        for row, index in zip(arrived, _others(me, len(ranks)), strict=True):
            pending.post_recv(ranks[index], row, key)
        for index in _others(me, len(ranks)):
            pending.post_send(ranks[index], pieces[index], key)
        pending.then(lambda: _reduce(target, me, pieces[me], arrived, "sum"))
        return pending

    def start_all_reduce(self, tensor: Tensor, ranks: Sequence[int], op: str = "sum", channel: str = "") -> Pending:
        """Replace `tensor` by the sum ("sum") or the largest ("max") over all members, element by element.

        Two members exchange whole tensors. More of them reduce one piece each and then gather the pieces: the second round.
        """
        me, flat, key = ranks.index(self.rank), _flat(tensor), _key(ranks, channel)
        pending = Pending(self, "all_reduce")
        if len(ranks) == 1:
            return pending
        buffer = self._buffer(pending, "all_reduce", flat, len(ranks))
        if len(ranks) == _PAIR:
            peer = ranks[1 - me]
            pending.post_recv(peer, buffer, key)
            pending.post_send(peer, flat, key)
            pending.then(lambda: _reduce(flat, me, flat, [buffer], op))
            return pending
        pieces = _pieces(flat, len(ranks))
        arrived = _rows(buffer, len(ranks) - 1, pieces[me].numel())
        second_key = self._second_key(key)

        def second_round() -> None:
            _reduce(pieces[me], me, pieces[me], arrived, op)
            for index in _others(me, len(ranks)):
                pending.post_recv(ranks[index], pieces[index], second_key)
            for index in _others(me, len(ranks)):
                pending.post_send(ranks[index], pieces[me], second_key)

        for row, index in zip(arrived, _others(me, len(ranks)), strict=True):
            pending.post_recv(ranks[index], row, key)
        for index in _others(me, len(ranks)):
            pending.post_send(ranks[index], pieces[index], key)
        pending.then(second_round, posts_more=True)
        return pending

    @torch.no_grad()
    def start_all_to_all(self, out: Tensor, source: Tensor, ranks: Sequence[int], channel: str = "") -> Pending:
        """Send piece i of `source` to member i; piece i of `out` comes from member i. Sizes divide by the number of members."""
        me, key = ranks.index(self.rank), _key(ranks, channel)
        sent, received = _pieces(_flat(source), len(ranks)), _pieces(_flat(out), len(ranks))
        pending = Pending(self, "all_to_all")
        for index in _others(me, len(ranks)):
            pending.post_recv(ranks[index], received[index], key)
        for index in _others(me, len(ranks)):
            pending.post_send(ranks[index], sent[index], key)
        _copy(received[me], sent[me])
        return pending

    def start_broadcast(self, tensor: Tensor, ranks: Sequence[int], root: int, channel: str = "") -> Pending:
        """Replace `tensor` by that of global rank `root`."""
        me, key = ranks.index(self.rank), _key(ranks, channel)
        pending = Pending(self, "broadcast")
        if self.rank != root:
            pending.post_recv(root, _flat(tensor), key)
            return pending
        for index in _others(me, len(ranks)):
            pending.post_send(ranks[index], _flat(tensor), key)
        return pending

    def prepare(self, groups: Sequence[tuple[Sequence[int], str]], channels: Sequence[tuple[int, int, str]] = ()) -> None:
        """Make ready for a Program: its groups (ranks, channel) and its point-to-point channels (from, to, channel).

        Every rank names all of them, its own or not, in one order. Nothing to do where ranks are reached directly; NCCL makes a
        communicator for each.
        """

    @staticmethod
    def _buffer(pending: Pending, op: str, like: Tensor, num_ranks: int) -> Tensor:
        element_bytes = like.element_size()
        num_bytes = wire_buffer_bytes(op, like.numel() * element_bytes, num_ranks, element_bytes)
        buffer = torch.empty(num_bytes // element_bytes, dtype=like.dtype, device=like.device)
        pending.held_bytes += buffer.untyped_storage().nbytes()
        return buffer

    def _second_key(self, key: str) -> str:
        serial = self._num_second_rounds.get(key, 0)
        self._num_second_rounds[key] = serial + 1
        return f"{key} second {serial % _NUM_SECOND_CHANNELS}"


def p2p_key(channel: str) -> str:
    """The transport's name for a point-to-point channel; groups have names of another form."""
    return f"p2p {channel}"


def _key(ranks: Sequence[int], channel: str) -> str:
    return f"group {','.join(map(str, ranks))} {channel}"


def _flat(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous(), "the wire takes contiguous tensors"
    return tensor.detach().view(-1)


def _pieces(flat: Tensor, num_ranks: int) -> list[Tensor]:
    num_elements = flat.numel()
    bounds = [index * num_elements // num_ranks for index in range(num_ranks + 1)]
    return [flat[begin:end] for begin, end in pairwise(bounds)]


def _rows(buffer: Tensor, num_rows: int, row_elements: int) -> list[Tensor]:
    return [buffer[row * row_elements : (row + 1) * row_elements] for row in range(num_rows)]


def _others(me: int, num_ranks: int) -> list[int]:
    """The other members, beginning behind this one, so that not all send to the same rank first."""
    return [(me + distance) % num_ranks for distance in range(1, num_ranks)]


def _reduce(target: Tensor, me: int, own: Tensor, arrived: Sequence[Tensor], op: str) -> None:
    """Fold the parts of all members into `target`, in rank order; `target` may be `own`, `arrived` is in the order of `_others`.

    What is added up before this member's own part is reached stays in the place of rank 0's part.
    """
    assert op in {"sum", "max"}, op
    combine = torch.add if op == "sum" else torch.maximum
    num_ranks = len(arrived) + 1
    parts = [own if index == me else arrived[(index - me - 1) % num_ranks] for index in range(num_ranks)]
    total = parts[0]
    for index in range(1, num_ranks):
        total = combine(total, parts[index], out=target if index >= me else total)
    _copy(target, total)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.numel() == other.numel()


def _copy(target: Tensor, source: Tensor) -> None:
    if not _same(target, source):
        target.copy_(source)
