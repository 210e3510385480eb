"""Random numbers without a generator: a number is a function of (seed, step, site, global index of the element) alone.

So dropout and initial weights do not depend on the mesh: whoever holds an element computes the same number for it, in any order, again
in recompute, and no state needs saving.

How: the words of the key are hashed to 128 bits; element i's 64 bits are two rounds of the SplitMix64 finaliser over i, one
for each half of the key. Everything is int64 arithmetic of torch, which wraps around like the unsigned arithmetic of the original.
Sources: Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators" (the increment 0x9E3779B97F4A7C15, the odd
number nearest to 2^64 over the golden ratio); Stafford 2011, "Better Bit Mixing", variant 13 (the two multipliers and three shifts).

Exactness: normal numbers and weights are equal to the bit on machines whose vector units compute logarithm and cosine alike; uniform
numbers and masks on every machine.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_INCREMENT = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_SLAB_ELEMENTS = 1 << 16
_UNIFORM_BITS = 53  # what the significand of a float64 holds


@dataclass(frozen=True, slots=True)
class Key:
    """Names one endless sequence of random numbers, numbered by element."""

    first: int
    second: int

    @staticmethod
    def of(seed: int, step: int, site: str) -> Key:
        """The sequence of one place in one step; equal words give equal numbers on every rank."""
        digest = hashlib.blake2b(f"{seed}/{step}/{site}".encode(), digest_size=16).digest()
        return Key(_signed(int.from_bytes(digest[:8], "little")), _signed(int.from_bytes(digest[8:], "little")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Which part of a global tensor a rank holds: a box of `shape` that begins at `offsets`."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Piece:
        """All of it."""
        return Piece(global_shape=tuple(shape), offsets=(0,) * len(shape), shape=tuple(shape))

    def indices(self, device: torch.device | str = "cpu") -> Tensor:
        """The global index of each local element, row-major: int64, of the piece's shape."""
        index = torch.zeros((), dtype=torch.int64, device=device)
        stride = 1
        for dim in reversed(range(len(self.shape))):
            along = torch.arange(self.offsets[dim], self.offsets[dim] + self.shape[dim], dtype=torch.int64, device=device) * stride
            index = index + along.view(-1, *[1] * (len(self.shape) - 1 - dim))
            stride *= self.global_shape[dim]
        return index.expand(self.shape).contiguous()

    def slabs(self) -> Iterator[tuple[slice, Piece]]:
        """The piece cut along its first dimension into slabs that stay in the processor's cache, each with its rows."""
        num_rows = self.shape[0] if self.shape else 0
        step = max(1, _SLAB_ELEMENTS // max(1, math.prod(self.shape[1:])))
        for begin in range(0, num_rows, step):
            rows = slice(begin, min(begin + step, num_rows))
            offsets, shape = (self.offsets[0] + begin, *self.offsets[1:]), (rows.stop - begin, *self.shape[1:])
            yield rows, Piece(global_shape=self.global_shape, offsets=offsets, shape=shape)


def bits(key: Key, indices: Tensor) -> Tensor:
    """64 random bits for each index, as int64."""
    mixed = _mix(indices * _signed(_INCREMENT) + key.first)
    return _mix(mixed + key.second)


def uniform(key: Key, indices: Tensor) -> Tensor:
    """Numbers in [0, 1), float64, of the shape of `indices`: multiples of 2^-53."""
    return _shift_right(bits(key, indices), 64 - _UNIFORM_BITS).to(torch.float64) * 2.0**-_UNIFORM_BITS


def normal(key: Key, indices: Tensor) -> Tensor:
    """Numbers of mean 0 and deviation 1, float64; two uniform ones make one.

    Source: Box and Muller 1958, "A Note on the Generation of Random Normal Deviates". Nothing lies beyond 8.6 deviations.
    """
    radius = torch.log1p(-uniform(key, indices * 2)).mul_(-2.0).sqrt_()
    return radius.mul_(torch.cos(uniform(key, indices * 2 + 1).mul_(2.0 * math.pi)))


def integers(key: Key, indices: Tensor, bound: int) -> Tensor:
    """Whole numbers in [0, bound), int64; the bias is below bound / 2^53."""
    return (uniform(key, indices) * bound).to(torch.int64).clamp_(max=bound - 1)


def dropout_mask(key: Key, piece: Piece, probability: float, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """What to multiply a rank's piece of an activation with: 0 with the given probability, else 1 / (1 - probability)."""
    mask = torch.empty(piece.shape, dtype=dtype, device=device)
    for rows, slab in piece.slabs():
        torch.ge(uniform(key, slab.indices(device)), probability, out=mask[rows])
    return mask.mul_(1.0 / (1.0 - probability))


def init_parameter(
    name: str,
    piece: Piece,
    *,
    kind: str,
    std: float = 0.02,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """A rank's piece of the initial value of parameter `name`: kind "normal" (of deviation `std`), "ones" or "zeros".

    The value of an element depends on the seed, the name and its place in the global tensor only. It is computed in float64 and
    rounded once.
    """
    match kind:
        case "zeros":
            return torch.zeros(piece.shape, dtype=dtype, device=device)
        case "ones":
            return torch.ones(piece.shape, dtype=dtype, device=device)
        case "normal":
            value = torch.empty(piece.shape, dtype=dtype, device=device)
            for rows, slab in piece.slabs():
                value[rows] = normal(init_key(name, seed), slab.indices(device)).mul_(std)
            return value
    message = f"parameter {name}: unknown kind of initial value '{kind}'"
    raise ValueError(message)


def init_key(name: str, seed: int) -> Key:
    """The sequence that initial values of parameter `name` come from."""
    return Key.of(seed, 0, f"init/{name}")


def _mix(words: Tensor) -> Tensor:
    """The finaliser of SplitMix64, element by element; `words` is overwritten."""
    first, second, third = _SHIFTS
    words ^= _shift_right(words, first)
    words *= _signed(_MULTIPLIERS[0])
    words ^= _shift_right(words, second)
    words *= _signed(_MULTIPLIERS[1])
    words ^= _shift_right(words, third)
    return words


def _shift_right(words: Tensor, count: int) -> Tensor:
    """Shift int64 to the right as if it were unsigned."""
    return (words >> count).bitwise_and_((1 << (64 - count)) - 1)


def _signed(word: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit number."""
    return word - (1 << 64) if word >= 1 << 63 else word
