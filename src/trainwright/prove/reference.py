"""The reference: the same training step, unsharded, in plain PyTorch.

Proofs compare the engine with this file, so it shares nothing with it: modules of torch.nn, attention written out as a softmax,
autograd, and the optimizer as its paper states it. Where a line could be clever or obvious, it is obvious.

Conventions, and with them the contract that the engine is held to:

- loss = sum of token losses / number of valid tokens in the whole batch of the step. A target below 0 is ignored.
- gradient norm = square root of the sum of squares of every parameter, each counted once; before clipping.
- clipping multiplies every gradient by min(1, clip_norm / norm); clip_norm = 0 switches it off.
- weight decay is decoupled, and shrinks parameters of two or more dimensions only: norms and biases are left alone.
- learning rate: of step 0, 1, …; linear warm-up, then half a cosine to min_lr_fraction at the last step.
- dropout multiplies by masks that the caller gives (0 or 1 / (1 - p)), one for each place; nothing random happens here.
- names are those of the parameter table: embed.tokens, positions.table, b0.norm1.weight, …, final.weight, head.weight.

Shape letters: G sequences of the step, s tokens of a sequence, h width, H heads, K key-value heads, d head width, V vocabulary.

Sources: Touvron et al. 2023, "Llama 2"; Llama 3.1 config.json (rope_type "llama3"); Radford et al. 2019, "Language models are unsupervised
multitask learners"; Su et al. 2021, "RoFormer"; Loshchilov and Hutter 2019, "Decoupled weight decay regularization".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  the customary name
from torch import Tensor, nn

if TYPE_CHECKING:
    from trainwright.spec.model import Model
    from trainwright.spec.optimizer import Optimizer

Parameters: TypeAlias = dict[str, Tensor]

Masks: TypeAlias = Callable[[int, str, tuple[int, ...]], Tensor]
"""(step, place, shape [G, s, h]) -> what dropout multiplies by. Places: "enter", and "b0.norm2", "b0.add" for each block."""

Dropout: TypeAlias = Callable[[str, Tensor], Tensor]
"""(place, x) -> x after dropout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The data of one step: tokens [G, s] and targets [G, s], where a target below 0 is ignored."""

    tokens: Tensor
    targets: Tensor

    @property
    def num_valid_tokens(self) -> int:
        """Targets that count in the loss."""
        return int((self.targets >= 0).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step computed, before its update."""

    loss: float
    num_valid_tokens: int
    gradient_norm: float
    gradients: Parameters
    lr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The steps in order, and the parameters after the last update."""

    steps: tuple[Step, ...]
    parameters: Parameters


def reference_steps(
    *,
    model: Model,
    parameters: Mapping[str, Tensor],
    batches: Sequence[Batch],
    optimizer: Optimizer,
    num_steps: int | None = None,
    masks: Masks | None = None,
) -> Reference:
    """Train for one step a batch, in the format of the given parameters (float64 for a proof).

    num_steps: the length of the whole run, which the learning rate depends on; by default as many as there are batches.
    The given parameters are not changed. Dropout happens where masks are given and model.dropout is above 0.
    """
    decoder = Decoder(model)
    decoder.load(parameters)
    rule = _Rule(optimizer, dict(decoder.named_parameters()))
    steps = []
    for index, batch in enumerate(batches):
        lr = learning_rate(optimizer, step=index, num_steps=num_steps or len(batches))
        steps.append(_step(decoder, batch, lr=lr, dropout=_dropout(model, masks, index)))
        rule.apply(steps[-1], step=index)
    return Reference(steps=tuple(steps), parameters=decoder.copy())


def reference_loss(*, model: Model, parameters: Mapping[str, Tensor], batch: Batch, masks: Masks | None = None, step: int = 0) -> float:
    """The loss of a batch without training on it."""
    decoder = Decoder(model)
    decoder.load(parameters)
    with torch.no_grad():
        return float(_loss(decoder, batch, batch.num_valid_tokens, _dropout(model, masks, step)))


def contribution(
    *,
    model: Model,
    parameters: Mapping[str, Tensor],
    batch: Batch,
    sequences: Sequence[int],
    masks: Masks | None = None,
    step: int = 0,
) -> Parameters:
    """The part of the step's gradient that comes from some sequences of its batch.

    The loss of these sequences is divided by the valid tokens of the whole batch, so that the contributions of all parts of a batch sum
    to its gradient. When a proof fails, they show which parts the engine has lost or weighted wrongly.
    """
    decoder = Decoder(model)
    decoder.load(parameters)
    chosen = list(sequences)
    part = Batch(tokens=batch.tokens[chosen], targets=batch.targets[chosen])
    whole = _dropout(model, masks, step)
    shape = (*batch.tokens.shape, model.width)

    def dropout(place: str, x: Tensor) -> Tensor:
        return x * whole(place, x.new_ones(shape))[chosen]

    _loss(decoder, part, batch.num_valid_tokens, dropout).backward()
    return decoder.gradients()


def tied_uses(
    *, model: Model, parameters: Mapping[str, Tensor], batch: Batch, masks: Masks | None = None, step: int = 0
) -> tuple[Tensor, Tensor]:
    """The gradient of a tied embedding by use: (as embedding, as head). They sum to its gradient."""
    untied = replace(model, tied=False)
    decoder = Decoder(untied)
    decoder.load({**parameters, "head.weight": parameters["embed.tokens"]})
    _loss(decoder, batch, batch.num_valid_tokens, _dropout(untied, masks, step)).backward()
    gradients = decoder.gradients()
    return gradients["embed.tokens"], gradients["head.weight"]


def learning_rate(optimizer: Optimizer, *, step: int, num_steps: int) -> float:
    """Learning rate of step 0 … num_steps - 1: a line up to lr over warmup_steps, then half a cosine down to min_lr_fraction * lr.

    >>> from trainwright.spec.optimizer import Optimizer
    >>> rates = [learning_rate(Optimizer(lr=1.0, warmup_steps=2, min_lr_fraction=0.1), step=step, num_steps=5) for step in range(5)]
    >>> [round(rate, 3) for rate in rates]
    [0.5, 1.0, 1.0, 0.55, 0.1]
    """
    warmup = optimizer.warmup_steps
    if step < warmup:
        return (step + 1) / warmup * optimizer.lr
    if optimizer.decay == "none":
        return optimizer.lr
    done = 1.0 if step >= num_steps else (step - warmup) / max(num_steps - warmup - 1, 1)
    lowest = optimizer.min_lr_fraction * optimizer.lr
    return lowest + (optimizer.lr - lowest) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


# The model


class Decoder(nn.Module):
    """Tokens [G, s] to logits [G, s, V]. Empty until parameters are loaded."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.embed = _Table("tokens", model.vocab, model.width)
        if model.positions == "learned":
            self.positions = _Table("table", model.max_positions, model.width)
        for index in range(model.num_layers):
            self.add_module(f"b{index}", _Block(model, place=f"b{index}"))
        self.final = _norm(model)
        if not model.tied:
            self.head = _linear(model.width, model.vocab, bias=False)

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Take copies of the parameters. Missing, unknown and ill-shaped ones raise a RuntimeError that names them."""
        self.load_state_dict({name: value.detach().clone() for name, value in parameters.items()}, strict=True, assign=True)
        for parameter in self.parameters():
            parameter.requires_grad_(True)

    def copy(self) -> Parameters:
        """The parameters by name, in model order."""
        return {name: parameter.detach().clone() for name, parameter in self.named_parameters()}

    def gradients(self) -> Parameters:
        """The gradients by name, in model order; zeros where nothing has reached a parameter."""
        return {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
            for name, parameter in self.named_parameters()
        }

    def forward(self, tokens: Tensor, dropout: Dropout) -> Tensor:
        """Embed, pass the blocks, and read the logits off the normalised stream."""
        num_tokens = tokens.shape[1]
        x = self.get_parameter("embed.tokens")[tokens]
        if self.model.positions == "learned":
            x = x + self.get_parameter("positions.table")[:num_tokens]
        x = dropout("enter", x)
        for index in range(self.model.num_layers):
            x = self.get_submodule(f"b{index}")(x, dropout)
        return F.linear(self.final(x), self.get_parameter("embed.tokens" if self.model.tied else "head.weight"))


class _Block(nn.Module):
    """x + attention(norm1(x)), then x + feed(norm2(x))."""

    def __init__(self, model: Model, place: str) -> None:
        super().__init__()
        h, d, bias = model.width, model.head_width, model.bias
        self.model, self.place = model, place
        self.norm1 = _norm(model)
        self.q = _linear(h, model.num_heads * d, bias=bias)
        self.k = _linear(h, model.num_kv_heads * d, bias=bias)
        self.v = _linear(h, model.num_kv_heads * d, bias=bias)
        self.out = _linear(model.num_heads * d, h, bias=bias)
        self.norm2 = _norm(model)
        if model.activation == "swiglu":
            self.gate = _linear(h, model.ffn_width, bias=bias)
        self.up = _linear(h, model.ffn_width, bias=bias)
        self.down = _linear(model.ffn_width, h, bias=False)
        if bias:
            self.feed = _Table("bias", h)

    def forward(self, x: Tensor, dropout: Dropout) -> Tensor:
        x = x + dropout(f"{self.place}.norm2", self.attention(self.norm1(x)))
        return x + dropout(f"{self.place}.add", self.feed_forward(self.norm2(x)))

    def attention(self, x: Tensor) -> Tensor:
        """Every token looks at itself and the tokens before it; groups of H / K heads share a key and a value."""
        model = self.model
        q, k, v = (_heads(linear(x), model.head_width) for linear in (self.q, self.k, self.v))
        if model.positions == "rope":
            q, k = rotated(q, model), rotated(k, model)
        k, v = (heads.repeat_interleave(model.num_heads // model.num_kv_heads, dim=1) for heads in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(model.head_width)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(diagonal=1)
        weights = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1)
        attended: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return attended

    def feed_forward(self, x: Tensor) -> Tensor:
        """Up, the activation, down."""
        match self.model.activation:
            case "swiglu":
                inner = F.silu(self.gate(x)) * self.up(x)
            case "gelu":
                inner = F.gelu(self.up(x))
            case "gelu_tanh":
                inner = F.gelu(self.up(x), approximate="tanh")
            case other:
                raise ValueError(f"the reference knows no activation {other!r}")
        fed: Tensor = self.down(inner)
        return fed + self.get_parameter("feed.bias") if self.model.bias else fed


class _Table(nn.Module):
    """One parameter under a name of its own."""

    def __init__(self, name: str, *shape: int) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))


def _linear(num_inputs: int, num_outputs: int, *, bias: bool) -> nn.Linear:
    return nn.Linear(num_inputs, num_outputs, bias=bias, device="meta")  # on "meta" the random initialisation draws nothing


def _norm(model: Model) -> nn.Module:
    match model.norm:
        case "rmsnorm":
            return nn.RMSNorm(model.width, eps=model.norm_eps, device="meta")
        case "layernorm":
            return nn.LayerNorm(model.width, eps=model.norm_eps, bias=model.bias, device="meta")
        case other:
            raise ValueError(f"the reference knows no norm {other!r}")


def _heads(x: Tensor, head_width: int) -> Tensor:
    """[G, s, heads * d] -> [G, heads, s, d]."""
    num_sequences, num_tokens, _ = x.shape
    return x.view(num_sequences, num_tokens, -1, head_width).transpose(1, 2)


def rotated(x: Tensor, model: Model) -> Tensor:
    """Rotary positions: in x [..., s, d] the pair (x[i], x[i + d/2]) turns by position * frequency[i].

    The angles are computed in float64, whatever the format of x.
    """
    half = model.head_width // 2
    positions = torch.arange(x.shape[-2], dtype=torch.float64)
    angles = positions[:, None] * torch.tensor(rotary_frequencies(model), dtype=torch.float64)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotary_frequencies(model: Model) -> list[float]:
    """Radians a position, one for each of the d/2 pairs: theta^(-2i/d), stretched where the model says so."""
    plain = [model.rope_theta ** (-2 * index / model.head_width) for index in range(model.head_width // 2)]
    scaling = model.rope_scaling
    if scaling is None:
        return plain
    stretched = []
    for frequency in plain:
        turns = scaling.original_max_positions * frequency / (2 * math.pi)  # how often it turns within the original context
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        stretched.append(kept * frequency + (1 - kept) * frequency / scaling.factor)
    return stretched


# The step


def _dropout(model: Model, masks: Masks | None, step: int) -> Dropout:
    if masks is None or model.dropout == 0:
        return lambda _, x: x
    return lambda place, x: x * masks(step, place, tuple(x.shape)).to(x.dtype)


def _loss(decoder: Decoder, batch: Batch, num_valid_tokens: int, dropout: Dropout) -> Tensor:
    if num_valid_tokens == 0:
        raise ValueError("the batch has no target that counts: every one is below 0")
    logits = decoder(batch.tokens, dropout)
    valid = batch.targets >= 0
    return F.cross_entropy(logits[valid], batch.targets[valid], reduction="sum") / num_valid_tokens


def _step(decoder: Decoder, batch: Batch, *, lr: float, dropout: Dropout) -> Step:
    decoder.zero_grad()
    loss = _loss(decoder, batch, batch.num_valid_tokens, dropout)
    loss.backward()
    gradients = decoder.gradients()
    norm = math.sqrt(math.fsum(float(gradient.double().square().sum()) for gradient in gradients.values()))
    return Step(loss=float(loss.detach()), num_valid_tokens=batch.num_valid_tokens, gradient_norm=norm, gradients=gradients, lr=lr)


class _Rule:
    """AdamW or SGD on whole parameters, one after the other."""

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        self.first = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        self.second = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}

    @torch.no_grad()
    def apply(self, step_record: Step, step: int) -> None:
        clip_norm, norm = self.optimizer.clip_norm, step_record.gradient_norm
        clip = min(1.0, clip_norm / norm) if clip_norm > 0 and norm > 0 else 1.0
        for name, parameter in self.parameters.items():
            gradient = step_record.gradients[name] * clip
            if parameter.dim() >= 2:
                parameter.mul_(1 - step_record.lr * self.optimizer.weight_decay)
            match self.optimizer.name:
                case "adamw":
                    self._adamw(name, parameter, gradient, lr=step_record.lr, count=step + 1)
                case "sgd":
                    velocity = self.first[name].mul_(self.optimizer.momentum).add_(gradient)
                    parameter.sub_(step_record.lr * velocity)
                case other:
                    raise ValueError(f"the reference knows no optimizer {other!r}")

    def _adamw(self, name: str, parameter: Tensor, gradient: Tensor, *, lr: float, count: int) -> None:
        beta1, beta2 = self.optimizer.betas
        mean = self.first[name].mul_(beta1).add_((1 - beta1) * gradient)
        square = self.second[name].mul_(beta2).add_((1 - beta2) * gradient**2)
        unbiased_mean, unbiased_square = mean / (1 - beta1**count), square / (1 - beta2**count)
        parameter.sub_(lr * unbiased_mean / (unbiased_square.sqrt() + self.optimizer.eps))


def parameter_shapes(model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every parameter, in model order."""
    for name, parameter in Decoder(model).named_parameters():
        yield name, tuple(parameter.shape)
