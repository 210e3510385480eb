"""The temporary meter: what a function holds inside, beyond what it is given and what it gives back.

Every storage that an operator returns is noted when it comes to be and when it goes. It costs several times the operator itself at proof
size, so it is on for the first step of a proof only. What native kernels take and give back within one operator is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainwright.units import Bytes


class TemporaryMeter(TorchDispatchMode):
    """Use as a context around one function; `known` are the tensors that it is given."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Storages of `known` are not counted."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._alive: dict[int, int] = {}
        self._watched: list[Any] = []
        self._changes: list[tuple[int, int]] = []
        self._num_storages = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  # torch's signature
        """Run an operator and look at what it returns."""
        del types
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._see(value.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if address in self._known or address in self._alive or not num_bytes:
            return
        self._num_storages += 1
        serial = self._num_storages
        self._alive[address] = serial
        self._changes.append((serial, num_bytes))

        def gone(_: object) -> None:
            self._alive.pop(address, None)
            self._changes.append((serial, -num_bytes))

        self._watched.append(weakref.ref(storage, gone))

    def peak_bytes(self, returned: Iterable[Tensor]) -> Bytes:
        """The most that was held at once, without what was given back."""
        given_back = {self._alive.get(tensor.untyped_storage().data_ptr()) for tensor in returned}
        held = peak = 0
        for serial, num_bytes in self._changes:
            if serial not in given_back:
                held += num_bytes
                peak = max(peak, held)
        return peak
