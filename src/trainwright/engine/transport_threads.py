"""Ranks as threads of one process: a message is one copy, made when its send and its receive have met."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainwright.engine.wire import Handle, WireError, WireTimeout, WorldAborted
from trainwright.units import Seconds


class Switchboard:
    """Where the ranks of one process meet.

    Nothing is buffered: a send and a receive both complete when the later of the two is posted, and its thread makes the copy.
    `abort` frees every rank that waits, now and from then on.
    """

    def __init__(self, size: int) -> None:
        """Serve `size` ranks."""
        self.size = size
        self.failed: tuple[int, str] | None = None
        self._lock = threading.Lock()
        self._came = [threading.Condition() for _ in range(size)]
        self._sends: dict[tuple[int, int, str], deque[_Posted]] = defaultdict(deque)
        self._recvs: dict[tuple[int, int, str], deque[_Posted]] = defaultdict(deque)

    def transport(self, rank: int) -> ThreadTransport:
        """The transport of one rank."""
        return ThreadTransport(self, rank)

    def post(self, posted: _Posted, key: tuple[int, int, str], *, is_send: bool) -> None:
        """Put one transfer up; if its counterpart is there already, make the copy."""
        self.check()
        mine, theirs = (self._sends, self._recvs) if is_send else (self._recvs, self._sends)
        with self._lock:
            if not theirs[key]:
                mine[key].append(posted)
                return
            other = theirs[key].popleft()
        _deliver(*((posted, other) if is_send else (other, posted)))
        for one in (posted, other):
            self._complete(one)

    def await_(self, posted: _Posted, timeout_s: Seconds) -> None:
        """Block the calling thread until the transfer is complete."""
        came = self._came[posted.rank]
        with came:
            came.wait_for(lambda: posted.is_done or self.failed is not None, timeout_s)
        if posted.error is not None:
            raise WireError(posted.error)
        if posted.is_done:
            return
        self.check()
        message = f"rank {posted.rank}: no {posted.counterpart} after {timeout_s:g} s"
        raise WireTimeout(message)

    def abort(self, rank: int, reason: str) -> None:
        """Say that `rank` has failed; the first one counts."""
        with self._lock:
            if self.failed is None:
                self.failed = (rank, reason)
        for came in self._came:
            with came:
                came.notify_all()

    def check(self) -> None:
        """Raise WorldAborted if a rank has failed."""
        if self.failed is not None:
            raise WorldAborted(*self.failed)

    def _complete(self, posted: _Posted) -> None:
        came = self._came[posted.rank]
        with came:
            posted.is_done = True
            came.notify_all()


@dataclass(slots=True)
class _Posted:
    board: Switchboard
    rank: int
    tensor: Tensor
    counterpart: str
    is_done: bool = False
    error: str | None = field(default=None)

    def wait(self, timeout_s: Seconds) -> None:
        self.board.await_(self, timeout_s)


@dataclass(frozen=True, slots=True)
class ThreadTransport:
    """One rank's side of a Switchboard."""

    board: Switchboard
    rank: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.board.size

    def post_send(self, peer_rank: int, tensor: Tensor, channel: str) -> Handle:
        """Lend `tensor` until the receive has been posted."""
        posted = _Posted(self.board, self.rank, tensor, f"receive on rank {peer_rank} for a send on channel '{channel}'")
        self.board.post(posted, (self.rank, peer_rank, channel), is_send=True)
        return posted

    def post_recv(self, peer_rank: int, tensor: Tensor, channel: str) -> Handle:
        """Offer `tensor` to the peer's next send."""
        posted = _Posted(self.board, self.rank, tensor, f"send from rank {peer_rank} on channel '{channel}'")
        self.board.post(posted, (peer_rank, self.rank, channel), is_send=False)
        return posted

    def close(self) -> None:
        """Nothing is held."""


@torch.no_grad()
def _deliver(send: _Posted, recv: _Posted) -> None:
    given, place = send.tensor, recv.tensor
    if (given.numel(), given.dtype) != (place.numel(), place.dtype):
        error = f"rank {send.rank} sends {given.numel()} x {given.dtype}, rank {recv.rank} expects {place.numel()} x {place.dtype}"
        send.error = recv.error = error
        return
    place.copy_(given)
