"""The optimizer's update on flat shards: AdamW, and SGD with momentum.

A rank holds one flat piece (a *shard*) of each parameter unit. The update is elementwise, so a shard is updated without looking at the
others, and the result does not depend on where the cuts are: **the same value comes out to the last bit, however the unit is cut**.
Two things could break that law, and are avoided here:

- PyTorch's kernels treat whole vector registers and the few elements left over by two pieces of code that may round differently (a
  fused multiply-add in one, not in the other; measured: 2 in 5 left-over elements differ in the last bit). AdamW copies the left-over
  elements into a scratch vector and updates them there, so that every element takes the vector path; SGD rounds once an operation.
- The learning rate and the clip scale are Python floats, equal on all ranks.

The work goes through blocks that stay in the cache. Nothing here touches the default random generator or the default dtype.

Words
    weights    what forward and backward multiply by; may be bf16
    master     the same values in a wider format; then the update happens there and the weights are a rounded copy
    moments    AdamW: running means of the gradient and of its square; SGD: the velocity. Kept in the optimizer's own format
    decay      ranges of the shard that weight decay shrinks: parameters of two or more dimensions. Norms and biases are not decayed
    step       0 for the first update; AdamW corrects its moments with step + 1

Sources: Loshchilov and Hutter 2019, "Decoupled weight decay regularization"; Kingma and Ba 2015, "Adam". The arithmetic of AdamW is
PyTorch's own fused kernel, the one that `torch.optim.AdamW(fused=True)` calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from trainwright.spec.optimizer import Optimizer

BLOCK: Final = 1 << 18
"""Elements worked on at a time. Smaller blocks cost more calls; with larger ones nothing stays in the cache (2^15 … 2^30 measured)."""

VECTOR: Final = 64
"""A multiple of every vector register's length: 64 elements are 256 bytes in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's flat piece of a unit, with everything that its update reads and writes.

    All tensors are one-dimensional, contiguous and of one length. `gradient` is only read; the others are written in place.
    `decay` lists half-open ranges in ascending order, not overlapping.
    """

    weights: Tensor
    gradient: Tensor
    moments: tuple[Tensor, ...]
    master: Tensor | None = None
    decay: tuple[tuple[int, int], ...] = ()

    @property
    def target(self) -> Tensor:
        """The tensor that is updated: the master copy if there is one."""
        return self.weights if self.master is None else self.master


class UpdateRule(Protocol):
    """What the executor asks of an optimizer."""

    @property
    def num_moments(self) -> int:
        """Tensors of the shard's length that are kept beside the weights."""

    def update(self, shard: Shard, *, lr: float, step: int, clip_scale: float = 1.0) -> None:
        """Write the next weights and moments in place; the gradient counts clip_scale times."""


def update_rule(settings: Optimizer) -> UpdateRule:
    """The rule that the settings name."""
    match settings.name:
        case "adamw":
            return AdamW(betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)
        case "sgd":
            return SGD(momentum=settings.momentum, weight_decay=settings.weight_decay)
        case _:
            raise ValueError(f"no update rule is called {settings.name!r}")  # the plan's check has refused it already


def clip_scale(norm: float, clip_norm: float) -> float:
    """Factor that brings a gradient of this norm down to clip_norm: min(1, clip_norm / norm), 1 where clipping is off (clip_norm = 0).

    A norm that is not a number gives 1: the gradient is not a number either, and stays visible.

    >>> clip_scale(norm=5.0, clip_norm=1.0), clip_scale(norm=0.5, clip_norm=1.0), clip_scale(norm=5.0, clip_norm=0.0)
    (0.2, 1.0, 1.0)
    """
    return clip_norm / norm if 0.0 < clip_norm < norm else 1.0


def decay_ranges(parameters: Iterable[tuple[int, tuple[int, ...]]], start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """Ranges of the shard [start, stop) of a unit that are decayed, relative to the shard, neighbours joined.

    parameters: (offset in the unit, shape) of each, in the order of their offsets. Those with two or more dimensions are decayed.

    >>> decay_ranges([(0, (4,)), (4, (4, 2)), (12, (2, 3))], start=2, stop=16)
    ((2, 14),)
    """
    ranges: list[tuple[int, int]] = []
    for offset, shape in parameters:
        first, last = max(offset, start) - start, min(offset + prod(shape), stop) - start
        if len(shape) < 2 or first >= last:
            continue
        if ranges and ranges[-1][1] == first:
            first = ranges.pop()[0]
        ranges.append((first, last))
    return tuple(ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay.

    With g = clip_scale * gradient and t = step + 1:
    p -= lr * weight_decay * p (decayed ranges);  m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g²;
    p -= lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps).
    """

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    @property
    def num_moments(self) -> int:
        """The mean of the gradient and the mean of its square."""
        return 2

    @torch.no_grad()
    def update(self, shard: Shard, *, lr: float, step: int, clip_scale: float = 1.0) -> None:
        """One AdamW step on the shard; its moments are (m, v)."""
        count = torch.tensor(float(step + 1), dtype=torch.float32, device=shard.target.device)  # the kernel takes t as a tensor

        def kernel(part: Part) -> None:
            mean, square = part.moments
            torch._fused_adamw_(  # the kernel behind torch.optim.AdamW(fused=True); it has no public name
                [part.weights],
                [part.gradient],
                [mean],
                [square],
                [],
                [count],
                lr=lr,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=self.weight_decay if part.decayed else 0.0,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
            )

        _update_parts(shard, clip_scale, kernel)


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD:
    """Gradient descent with momentum and decoupled weight decay.

    With g = clip_scale * gradient: p -= lr * weight_decay * p (decayed ranges);  v = momentum * v + g;  p -= lr * v.
    Without momentum nothing is kept and v is g.
    """

    momentum: float = 0.9
    weight_decay: float = 0.0

    @property
    def num_moments(self) -> int:
        """The velocity, if there is momentum."""
        return 1 if self.momentum else 0

    @torch.no_grad()
    def update(self, shard: Shard, *, lr: float, step: int, clip_scale: float = 1.0) -> None:  # noqa: ARG002  every step is alike
        """One step of gradient descent on the shard; its moments are (v,), or () without momentum."""

        def kernel(part: Part) -> None:
            velocity = part.moments[0].mul_(self.momentum).add_(part.gradient) if self.momentum else part.gradient
            if part.decayed and self.weight_decay:
                part.weights.mul_(1.0 - lr * self.weight_decay)
            part.weights.sub_(torch.mul(velocity, lr))

        _update_parts(shard, clip_scale, kernel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stretch of a shard as the arithmetic sees it: in one format, a whole number of vectors long, the gradient already scaled."""

    weights: Tensor
    gradient: Tensor
    moments: tuple[Tensor, ...]
    decayed: bool


def _update_parts(shard: Shard, clip_scale: float, kernel: Callable[[Part], None]) -> None:
    """Run the kernel over the shard part by part, and round the master copy into the weights."""
    target = shard.target
    kept = (target, *shard.moments)
    compute = torch.float64 if target.dtype == torch.float64 else torch.float32
    block = BLOCK if target.device.type == "cpu" else max(len(target), VECTOR)  # a GPU wants one launch, and its kernels have no left-overs
    scratch = torch.empty((len(kept) + 1, min(block, len(target) + VECTOR)), dtype=compute, device=target.device)
    for start, stop, decayed in _parts(len(target), shard.decay, block):
        length = stop - start
        views = [tensor[start:stop] for tensor in kept]
        working = [_opened(view, length, row) for view, row in zip(views, scratch[1:], strict=True)]
        gradient = _opened(shard.gradient[start:stop], length, scratch[0], scale=clip_scale)
        kernel(Part(weights=working[0], gradient=gradient, moments=tuple(working[1:]), decayed=decayed))
        for view, worked in zip(views, working, strict=True):
            if worked is not view:
                view.copy_(worked[:length])
        if shard.master is not None:
            shard.weights[start:stop].copy_(views[0])


def _opened(view: Tensor, length: int, row: Tensor, scale: float = 1.0) -> Tensor:
    """The view itself if it can be worked on in place, otherwise a copy in the scratch row: converted, padded with zeros, scaled."""
    excess = -length % VECTOR
    if view.dtype == row.dtype and not excess and scale == 1.0:
        return view
    worked = row[: length + excess]
    if excess:
        worked[length:].zero_()
    inside = worked[:length] if excess else worked
    if view.dtype == row.dtype and scale != 1.0:
        torch.mul(view, scale, out=inside)
    else:
        inside.copy_(view)
        if scale != 1.0:
            inside.mul_(scale)
    return worked


def _parts(length: int, decay: tuple[tuple[int, int], ...], block: int) -> Iterator[tuple[int, int, bool]]:
    """(start, stop, decayed) of blocks that cover the shard; what does not fill a vector comes as a part of its own."""
    for first, last, decayed in _ranges(length, decay):
        whole = last - (last - first) % VECTOR
        for start in range(first, whole, block):
            yield start, min(start + block, whole), decayed
        if whole < last:
            yield whole, last, decayed


def _ranges(length: int, decay: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, bool]]:
    """The decayed ranges and the gaps between them, in order, none empty."""
    position = 0
    for start, stop in decay:
        if position < start:
            yield position, start, False
        yield start, stop, True
        position = stop
    if position < length:
        yield position, length, False
