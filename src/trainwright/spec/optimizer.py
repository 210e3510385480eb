"""Optimizer: the update rule, its constants, and the learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from trainwright.spec.bounds import choice_problems, count_problems, range_problems

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainwright.problems import Problem

NUM_MOMENTS: Final = {"adamw": 2, "sgd": 1}
DECAYS: Final = ("cosine", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """AdamW, or SGD with momentum.

    lr                peak learning rate.
    weight_decay      decoupled: p -= lr * weight_decay * p, for parameters of two or more dimensions; norms and biases do not decay.
    momentum          of sgd; 0 keeps no moment.
    warmup_steps      the rate rises linearly to lr over these.
    decay             "cosine" falls to min_lr_fraction * lr at the last step; "none" stays.
    clip_norm         gradients are scaled down to this global norm; 0 switches it off.

    Sources: Loshchilov and Hutter 2019, decoupled weight decay; the same 2017, cosine annealing.
    """

    name: str = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.9
    warmup_steps: int = 0
    decay: str = "cosine"
    min_lr_fraction: float = 0.1
    clip_norm: float = 1.0

    @property
    def num_moments(self) -> int:
        """Values kept per parameter beside the weight: 2 for adamw, 1 for sgd with momentum, 0 for sgd without."""
        return 0 if self.name == "sgd" and self.momentum == 0 else NUM_MOMENTS[self.name]

    def lr_at(self, step: int, num_steps: int) -> float:
        """Return the learning rate of step 0 … num_steps - 1.

        >>> optimizer = Optimizer(lr=1.0, warmup_steps=2, min_lr_fraction=0.1)
        >>> [round(optimizer.lr_at(step, num_steps=5), 3) for step in range(5)]
        [0.5, 1.0, 1.0, 0.55, 0.1]
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.decay == "none":
            return self.lr
        num_decay = max(num_steps - 1 - self.warmup_steps, 1)
        progress = min((step - self.warmup_steps) / num_decay, 1.0)
        return self.lr * (self.min_lr_fraction + (1 - self.min_lr_fraction) * 0.5 * (1 + math.cos(math.pi * progress)))

    def check(self) -> Iterator[Problem]:
        """Unknown names, and constants with which no update makes sense."""
        yield from choice_problems("optimizer.name", self.name, tuple(NUM_MOMENTS))
        yield from choice_problems("optimizer.decay", self.decay, DECAYS)
        yield from range_problems("optimizer.lr", self.lr, least=0.0, suggestion=3e-4, open_below=True)
        for index, beta in enumerate(self.betas):
            name, usual = f"optimizer.betas[{index}]", (0.9, 0.95)[index]
            yield from range_problems(name, beta, least=0.0, most=1.0, suggestion=usual, open_above=True)
        yield from range_problems("optimizer.eps", self.eps, least=0.0, suggestion=1e-8, open_below=True)
        yield from range_problems("optimizer.weight_decay", self.weight_decay, least=0.0, suggestion=0.1)
        yield from range_problems("optimizer.momentum", self.momentum, least=0.0, most=1.0, suggestion=0.9, open_above=True)
        yield from range_problems("optimizer.min_lr_fraction", self.min_lr_fraction, least=0.0, most=1.0, suggestion=0.1)
        yield from range_problems("optimizer.clip_norm", self.clip_norm, least=0.0, suggestion=1.0)
        yield from count_problems("optimizer.warmup_steps", self.warmup_steps, least=0)
