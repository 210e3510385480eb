"""The buffers that a rank holds, and how many bytes they take.

A buffer is a tensor, or several under one name (what a segment saves). Bytes are those of the storages, each counted once however many
tensors look at it: this is the record that predicted memory is compared with, and it knows nothing of what was predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from torch import Tensor

from trainwright.ir.ref import Ref
from trainwright.units import Bytes

Held: TypeAlias = Tensor | Mapping[str, Tensor]


class Store:
    """Live buffers by name. `live_bytes` is what they and the wire hold at this moment, `peak_bytes` the most it has been."""

    def __init__(self) -> None:
        """Begin empty."""
        self._held: dict[Ref, Held] = {}
        self._users: dict[int, int] = {}
        self.live_bytes = 0
        self.peak_bytes = 0

    def __contains__(self, ref: Ref) -> bool:
        """Tell whether the buffer is live."""
        return ref in self._held

    def __iter__(self) -> Iterator[Ref]:
        """The live buffers."""
        return iter(self._held)

    def held(self, ref: Ref) -> Held:
        """What the buffer holds."""
        return self._held[ref]

    def tensor(self, ref: Ref) -> Tensor:
        """A buffer that is one tensor."""
        held = self._held[ref]
        assert isinstance(held, Tensor), f"{ref} holds several tensors"
        return held

    def several(self, ref: Ref) -> Mapping[str, Tensor]:
        """A buffer that is several tensors."""
        held = self._held[ref]
        assert not isinstance(held, Tensor), f"{ref} is one tensor"
        return held

    def put(self, ref: Ref, held: Held) -> None:
        """Bring a buffer to life."""
        assert ref not in self._held, f"{ref} is already live"
        self._held[ref] = held
        for tensor in _tensors(held):
            storage = tensor.untyped_storage()
            users = self._users.get(storage.data_ptr(), 0)
            self._users[storage.data_ptr()] = users + 1
            if not users:
                self.live_bytes += storage.nbytes()

    def drop(self, ref: Ref) -> None:
        """End a buffer's life."""
        held = self._held.pop(ref)
        for tensor in _tensors(held):
            storage = tensor.untyped_storage()
            users = self._users.pop(storage.data_ptr()) - 1
            if users:
                self._users[storage.data_ptr()] = users
            else:
                self.live_bytes -= storage.nbytes()

    def on_the_wire(self, num_bytes: Bytes) -> None:
        """The wire holds so many bytes more (or fewer)."""
        self.live_bytes += num_bytes

    def mark(self) -> None:
        """An action has ended: remember the peak."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def _tensors(held: Held) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    else:
        yield from held.values()
