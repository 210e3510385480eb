"""A plain PyTorch training loop of the same models: what the engine is measured against.

Written as a good programmer would write it without distributed training in mind: modules of torch.nn, autograd, PyTorch's fused
attention and cross-entropy, foreach AdamW and clipping, gradients set to None. `tuned` adds what a patient one would: one matrix for
queries, keys and values, one for gate and up, and the fused AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the customary name
from torch import Tensor, nn

if TYPE_CHECKING:
    from trainwright.spec.model import Model
    from trainwright.spec.optimizer import Optimizer

_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


class Block(nn.Module):
    """Attention and the feed-forward part, each behind a norm and beside the stream [b, s, h]."""

    def __init__(self, model: Model, *, tuned: bool) -> None:
        """Empty parameters."""
        super().__init__()
        self.model, self.tuned = model, tuned
        h, d, f, bias = model.width, model.head_width, model.ffn_width, model.bias
        self.widths = [model.num_heads * d, model.num_kv_heads * d, model.num_kv_heads * d]
        self.norm1, self.norm2 = norm(model), norm(model)
        if tuned:
            self.qkv = nn.Linear(h, sum(self.widths), bias=bias)
        else:
            self.q, self.k, self.v = (nn.Linear(h, width, bias=bias) for width in self.widths)
        self.out = nn.Linear(self.widths[0], h, bias=bias)
        if model.gated and tuned:
            self.gate_up = nn.Linear(h, 2 * f, bias=bias)
        elif model.gated:
            self.gate = nn.Linear(h, f, bias=bias)
        if not (model.gated and tuned):
            self.up = nn.Linear(h, f, bias=bias)
        self.down = nn.Linear(f, h, bias=bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """Stream in, stream out."""
        x = x + self.attention(self.norm1(x), rope)
        return x + self.feed(self.norm2(x))

    def attention(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """Causal attention of normalised x."""
        parts = self.qkv(x).split(self.widths, dim=-1) if self.tuned else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, self.model.head_width)).transpose(1, 2) for part in parts)
        if rope is not None:
            q, k = turned(q, *rope), turned(k, *rope)
        grouped = self.model.num_kv_heads != self.model.num_heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def feed(self, x: Tensor) -> Tensor:
        """The feed-forward part of normalised x."""
        if not self.model.gated:
            return self.down(F.gelu(self.up(x), approximate=_APPROXIMATE[self.model.activation]))
        gate, up = self.gate_up(x).chunk(2, dim=-1) if self.tuned else (self.gate(x), self.up(x))
        return self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Tokens [b, s] to logits [b, s, V]."""

    def __init__(self, model: Model, *, num_tokens: int, tuned: bool = False) -> None:
        """Empty parameters, tables of rotary positions for `num_tokens`."""
        super().__init__()
        self.model = model
        self.embed = nn.Embedding(model.vocab, model.width)
        self.positions = nn.Embedding(model.max_positions, model.width) if model.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(model, tuned=tuned) for _ in range(model.num_layers))
        self.final = norm(model)
        self.head = nn.Linear(model.width, model.vocab, bias=False)
        if model.tied:
            self.head.weight = self.embed.weight
        self.rope = rope_tables(model, num_tokens) if model.positions == "rope" else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, self.rope)
        return self.head(self.final(x))

    @torch.no_grad()
    def load(self, given: Mapping[str, Tensor]) -> None:
        """Copy parameters under the engine's names: `embed.tokens`, `b3.q.weight`, `head.weight`."""
        for name, parameter in self.named_parameters():
            parameter.copy_(torch.cat([given[one] for one in engine_names(name)]))


class Loop:
    """One training step after the other on a module that is already wrapped as it should be."""

    def __init__(self, module: nn.Module, optimizer: Optimizer, *, fused: bool = False) -> None:
        """AdamW with a constant rate; only parameters of two or more dimensions decay."""
        self.module, self.clip_norm = module, optimizer.clip_norm
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        groups = [
            {"params": [one for one in self.parameters if one.dim() >= 2], "weight_decay": optimizer.weight_decay},
            {"params": [one for one in self.parameters if one.dim() < 2], "weight_decay": 0.0},
        ]
        way = {"fused": True} if fused else {"foreach": True}
        self.optimizer = torch.optim.AdamW(groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, **way)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Mean loss of the batch, in nat a token."""
        loss = F.cross_entropy(self.module(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.clip_norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


def norm(model: Model) -> nn.Module:
    """The model's kind of norm."""
    if model.norm == "rmsnorm":
        return nn.RMSNorm(model.width, eps=model.norm_eps)
    return nn.LayerNorm(model.width, eps=model.norm_eps, bias=model.norm_bias)


def rope_tables(model: Model, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [s, d], the halves alike."""
    d = model.head_width
    frequencies = model.rope_theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angles = torch.outer(torch.arange(num_tokens, dtype=torch.float64), frequencies).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions on [b, H, s, d], as Hugging Face writes them."""
    left, right = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-right, left), dim=-1) * sine


def engine_names(name: str) -> Iterable[str]:
    """The engine's names of the parameters that one of ours is stacked from."""
    match name.split("."):
        case ["embed", _]:
            return ("embed.tokens",)
        case ["positions", _]:
            return ("positions.table",)
        case ["blocks", index, "qkv", kind]:
            return tuple(f"b{index}.{part}.{kind}" for part in "qkv")
        case ["blocks", index, "gate_up", kind]:
            return tuple(f"b{index}.{part}.{kind}" for part in ("gate", "up"))
        case ["blocks", index, "down", "bias"]:
            return (f"b{index}.feed.bias",)
        case ["blocks", index, *rest]:
            return (f"b{index}.{'.'.join(rest)}",)
    return (name,)


def data_parallel(module: nn.Module) -> nn.Module:
    """The module under PyTorch's own data parallelism, over the default process group."""
    return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True, static_graph=True)


def fully_sharded(module: Decoder) -> nn.Module:
    """The module under PyTorch's own ZeRO-3 (FSDP2), a group a block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


Wrap = Callable[[Decoder], nn.Module]
