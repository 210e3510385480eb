"""Ranks as processes on CPU: gloo's point-to-point operations on torch.distributed's default group.

gloo moves the bytes on threads of its own, so a posted transfer goes on while this rank computes. A send completes when its receive
is posted and does not copy: gloo has the semantics of `wire` by nature. After a failure or a time-out the process group is broken, and
the process had better end with `os._exit`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from trainwright.engine.wire import Handle, WireError, WireTimeout
from trainwright.units import Seconds

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class _Posted:
    work: dist.Work
    tensor: Tensor  # lent until the wait: must not be freed
    what: str

    def wait(self, timeout_s: Seconds) -> None:
        try:
            self.work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                message = f"{self.what}: no answer after {timeout_s:g} s"
                raise WireTimeout(message) from error
            message = f"{self.what}: connection lost ({error})"
            raise WireError(message) from error


@dataclass(slots=True)
class GlooTransport:
    """One rank of the default group. gloo tells messages apart by (from, to, tag); a channel's tag is a checksum of its name."""

    rank: int
    size: int
    _tags: dict[str, int] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)

    def post_send(self, peer_rank: int, tensor: Tensor, channel: str) -> Handle:
        """Lend `tensor` until the receive has been posted."""
        what = f"rank {self.rank}: send to rank {peer_rank} on channel '{channel}'"
        return _post(dist.isend, tensor, peer_rank, self._tag(channel), what)

    def post_recv(self, peer_rank: int, tensor: Tensor, channel: str) -> Handle:
        """Offer `tensor` to the peer's next send."""
        what = f"rank {self.rank}: receive from rank {peer_rank} on channel '{channel}'"
        return _post(dist.irecv, tensor, peer_rank, self._tag(channel), what)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _tag(self, channel: str) -> int:
        tag = self._tags.get(channel)
        if tag is None:
            tag = zlib.crc32(channel.encode()) & 0x7FFFFFFF
            other = self._names.setdefault(tag, channel)
            if other != channel:
                message = f"channels '{other}' and '{channel}' have one tag; rename one of them"
                raise WireError(message)
            self._tags[channel] = tag
        return tag


def _post(start: Callable[..., dist.Work | None], tensor: Tensor, peer_rank: int, tag: int, what: str) -> Handle:
    try:
        work = start(tensor, peer_rank, tag=tag)
    except RuntimeError as error:
        message = f"{what}: connection lost ({error})"
        raise WireError(message) from error
    assert work is not None, "this process is not in the default group"
    return _Posted(work, tensor, what)
