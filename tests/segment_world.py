"""Ranks of a tensor axis that run the segments in turn, with the sums and gathers between them done by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainwright.engine.random import Key, Piece, dropout_mask
from trainwright.engine.segments import Call, Gradients, Tables, Weights, segment
from trainwright.engine.segments.weights import Place
from trainwright.spec.model import Model, RopeScaling

NUM_TOKENS = 8
SEQUENCE_IDS = (5, 2)
LLAMA = Model(
    name="llama-like", num_layers=2, width=16, num_heads=4, num_kv_heads=2, head_width=4, ffn_width=24, vocab=13, max_positions=32,
    rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=16),
)  # fmt: skip
GPT = Model(
    name="gpt-like", num_layers=2, width=16, num_heads=4, num_kv_heads=4, head_width=4, ffn_width=24, vocab=13, max_positions=12,
    norm="layernorm", positions="learned", activation="gelu_tanh", bias=True, tied=True, dropout=0.25,
)  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "gpt": GPT,
    "gpt-without-dropout": replace(GPT, dropout=0.0),
    "rope-with-dropout": replace(LLAMA, dropout=0.25, tied=True),
    "exact-gelu": replace(GPT, activation="gelu", tied=False, bias=False),
}
NAMES = ("embed", "enter", "norm1", "qkv", "core", "out", "norm2", "feed", "add", "final", "logits", "peak", "sums", "loss")


# The parameters: full shape and the dimension that the tensor axis cuts, by unit.


def unit_shapes(model: Model, unit: str) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Parameters of a unit in the order of its flat buffer: replicated ones first."""
    h, f, heads, kv = model.width, model.ffn_width, model.num_heads * model.head_width, model.num_kv_heads * model.head_width
    norms = ("weight", "bias") if model.norm_bias else ("weight",)
    if unit == "embed":
        return {"embed.tokens": ((model.vocab, h), 0)}
    if unit == "positions":
        return {"positions.table": ((model.max_positions, h), None)} if model.positions == "learned" else {}
    if unit == "head":
        return {f"final.{part}": ((h,), None) for part in norms} | ({} if model.tied else {"head.weight": ((model.vocab, h), 0)})
    inner = ("gate", "up") if model.gated else ("up",)
    shapes: dict[str, tuple[tuple[int, ...], int | None]] = {f"{n}.{part}": ((h,), None) for n in ("norm1", "norm2") for part in norms}
    if model.bias:
        shapes |= {"out.bias": ((h,), None), "feed.bias": ((h,), None)}
    shapes |= {"q.weight": ((heads, h), 0), "k.weight": ((kv, h), 0), "v.weight": ((kv, h), 0)}
    if model.bias:
        shapes |= {"q.bias": ((heads,), 0), "k.bias": ((kv,), 0), "v.bias": ((kv,), 0)}
    shapes |= {"out.weight": ((h, heads), 1)} | {f"{name}.weight": ((f, h), 0) for name in inner}
    if model.bias:
        shapes |= {f"{name}.bias": ((f,), 0) for name in inner}
    return shapes | {"down.weight": ((h, f), 1)}


def units(model: Model) -> list[str]:
    return ["embed", "positions", *(f"b{block}" for block in range(model.num_layers)), "head"]


def parameters(model: Model, dtype: torch.dtype = torch.float64) -> dict[str, dict[str, Tensor]]:
    """Full parameters by unit and name."""
    generator = torch.Generator().manual_seed(1)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * (0.1 if name.endswith("bias") else shape[-1] ** -0.5)
        return (values + 1 if name.endswith(("norm1.weight", "norm2.weight", "final.weight")) else values).to(dtype)

    return {unit: {name: draw(name, shape) for name, (shape, _) in unit_shapes(model, unit).items()} for unit in units(model)}


def shard(full: Tensor, dim: int | None, index: int, num: int) -> Tensor:
    """Part of a parameter; the vocabulary is filled up with zeros."""
    if dim is None or num == 1:
        return full
    each = -(-full.shape[dim] // num)
    missing = each * num - full.shape[dim]
    padded = torch.cat([full, full.new_zeros(missing, *full.shape[1:])]) if missing else full
    return padded.narrow(dim, index * each, each)


def unshard(parts: list[Tensor], dim: int | None, full: tuple[int, ...]) -> Tensor:
    """The whole parameter's gradient; the replicated parts are equal or were summed before."""
    return parts[0] if dim is None else torch.cat(parts, dim=dim)[: full[0], ...]


def mask(call: Call, site: str, like: Tensor) -> Tensor:
    """Dropout factors of the microbatch's sequences, cut out of those of the whole step."""
    whole = dropout_mask(Key.of(call.seed, call.step, site), Piece.whole((9, *like.shape[1:])), call.model.dropout, like.dtype)
    return whole[list(call.sequence_ids)]


# Ranks of a tensor axis, run in turn.


class Rank:
    """Flat buffers of one tensor rank, filled from the full parameters; gradient buffers hold garbage at first."""

    def __init__(
        self, model: Model, full: Mapping[str, Mapping[str, Tensor]], call: Call, gradient_dtype: torch.dtype | None = None
    ) -> None:
        self.weights: dict[str, Weights] = {}
        self.gradients: dict[str, Gradients] = {}
        self.flat_gradients: dict[str, Tensor] = {}
        self.tables: dict[str, dict[str, Place]] = {}
        for unit, values in full.items():
            shapes = unit_shapes(model, unit)
            local = {name: shard(value, shapes[name][1], call.tensor_index, call.num_tensor) for name, value in values.items()}
            table, end = {}, 0
            for name, value in local.items():
                table[name] = (end, end + value.numel(), tuple(value.shape))
                end += value.numel()
            flat = torch.cat([value.reshape(-1) for value in local.values()] + [torch.zeros(3, dtype=self.dtype(full))])
            gradients = torch.full(flat.shape, torch.nan, dtype=gradient_dtype or flat.dtype)
            self.tables[unit], self.flat_gradients[unit] = table, gradients
            self.weights[unit], self.gradients[unit] = Weights(flat, table), Gradients(gradients, table, fresh=True)
        self.call = call

    @staticmethod
    def dtype(full: Mapping[str, Mapping[str, Tensor]]) -> torch.dtype:
        """Format of the parameters."""
        return full["embed"]["embed.tokens"].dtype

    def at(self, name: str, block: int | None = None, *, keep_saved: bool = True) -> Call:
        """The call of a segment."""
        unit = unit_of(self.call.model, name, block)
        return replace(self.call, weights=self.weights[unit], gradients=self.gradients[unit], block=block, keep_saved=keep_saved)

    def forward(self, name: str, block: int | None = None, **inputs: Tensor) -> dict[str, Tensor]:
        """Run a forward on this rank."""
        return segment(name).forward(self.at(name, block), inputs)

    def backward(self, name: str, block: int | None = None, **inputs: Tensor) -> dict[str, Tensor]:
        """Run a backward on this rank; `saved_rstd` stands for saved.rstd."""
        return segment(name).backward(self.at(name, block), {key.replace("saved_", "saved."): value for key, value in inputs.items()})

    def gradient(self, unit: str, name: str) -> Tensor:
        """The local gradient of a parameter."""
        start, stop, shape = self.tables[unit][name]
        return self.flat_gradients[unit][start:stop].view(shape)


def unit_of(model: Model, name: str, block: int | None) -> str:
    if block is not None:
        return f"b{block}"
    return {"embed": "embed", "enter": "positions", "logits": "embed" if model.tied else "head"}.get(name, "head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a microbatch is made of, [b, s] each."""

    tokens: Tensor
    targets: Tensor


def batch(model: Model, num_tokens: int = NUM_TOKENS) -> Batch:
    """Two sequences; the last targets of the second are ignored."""
    drawn = torch.randint(model.vocab, (2, num_tokens + 1), generator=torch.Generator().manual_seed(2))
    targets = drawn[:, 1:].clone()
    targets[1, -3:] = -100
    return Batch(tokens=drawn[:, :-1].contiguous(), targets=targets)


def calls(model: Model, data: Batch, num_tensor: int, *, sequence: bool) -> list[Call]:
    return [
        Call(
            model=model, tensor_index=index, num_tensor=num_tensor, sequence=sequence,
            tokens=data.tokens, targets=data.targets, num_valid_tokens=int((data.targets >= 0).sum()), step=3, seed=7,
            sequence_ids=SEQUENCE_IDS, tables=Tables(),
        )
        for index in range(num_tensor)
    ]  # fmt: skip


class World:
    """Runs the whole chain on ranks in turn, with the sums and gathers of tensor (and sequence) parallelism done by hand."""

    def __init__(self, ranks: list[Rank], *, sequence: bool) -> None:
        self.ranks = ranks
        self.sequence = sequence
        self.model = ranks[0].call.model

    def summed(self, parts: list[Tensor]) -> list[Tensor]:
        """Stream parts from partial sums: all-reduce, or reduce-scatter along the tokens."""
        total = torch.stack(parts).sum(dim=0)
        return list(total.chunk(len(parts), dim=1)) if self.sequence else [total for _ in parts]

    def gathered(self, parts: list[Tensor]) -> list[Tensor]:
        """Full sequences from stream parts."""
        return [torch.cat(parts, dim=1) for _ in parts] if self.sequence else parts

    def each(self, phase: str, name: str, block: int | None = None, **inputs: list[Tensor]) -> dict[str, list[Tensor]]:
        """Run a segment on every rank."""
        outputs = [
            getattr(rank, phase)(name, block, **{key: values[index] for key, values in inputs.items()})
            for index, rank in enumerate(self.ranks)
        ]
        return {key.replace("saved.", "saved_"): [output[key] for output in outputs] for key in outputs[0]}

    def step(self) -> Tensor:
        """Forward and backward; returns the loss."""
        blocks, enters = range(self.model.num_layers), self.model.positions == "learned" or self.model.dropout > 0
        entered = self.each("forward", "embed")
        x = self.summed(entered["e" if enters else "x"])
        if enters:
            x = self.each("forward", "enter", e=x)["x"]
        kept = []
        for block in blocks:
            x, saved = self.block_forward(block, x)
            kept.append(saved)
        final = self.each("forward", "final", x=x)
        h = self.gathered(final.pop("h"))
        z = self.each("forward", "logits", h=h)["z"]
        m = [torch.stack(self.each("forward", "peak", z=z)["m"]).amax(dim=0)] * len(self.ranks)
        r = [torch.stack(self.each("forward", "sums", z=z, m=m)["r"]).sum(dim=0)] * len(self.ranks)
        loss = self.each("forward", "loss", r=r, m=m)["loss"]
        dr = self.each("backward", "loss", r=r)["dr"]
        dz = self.each("backward", "sums", z=z, m=m, dr=dr)["dz"]
        dh = self.summed(self.each("backward", "logits", h=h, dz=dz)["dh"])
        dx = self.each("backward", "final", x=x, dh=dh, **final)["dx"]
        for block in reversed(blocks):
            dx = self.block_backward(block, dx, kept[block])
        de = {"dx": dx}
        if enters:
            de = self.each("backward", "enter", dx=dx) or de
        self.each("backward", "embed", **{name: self.gathered(values) for name, values in de.items()})
        for rank in self.ranks:
            for gradients in rank.gradients.values():
                gradients.close()
        return loss[0]

    def block_forward(self, block: int, x: list[Tensor]) -> tuple[list[Tensor], dict[str, dict[str, list[Tensor]]]]:
        """One block; also what its backward needs."""
        norm1 = self.each("forward", "norm1", block, x=x)
        h1 = self.gathered(norm1.pop("h1"))
        qkv = self.each("forward", "qkv", block, h1=h1)["qkv"]
        core = self.each("forward", "core", block, qkv=qkv)
        a = self.summed(self.each("forward", "out", block, c=core["c"])["a"])
        norm2 = self.each("forward", "norm2", block, x=x, a=a)
        h2 = self.gathered(norm2.pop("h2"))
        feed = self.each("forward", "feed", block, h2=h2)
        f = self.summed(feed.pop("f"))
        after = self.each("forward", "add", block, x2=norm2["x2"], f=f)["x"]
        saved = {"norm1": norm1 | {"x": x}, "qkv": {"h1": h1}, "core": core | {"qkv": qkv}, "norm2": norm2, "feed": feed | {"h2": h2}}
        return after, saved

    def block_backward(self, block: int, dx: list[Tensor], saved: dict[str, dict[str, list[Tensor]]]) -> list[Tensor]:
        """One block, backwards."""
        df = self.each("backward", "add", block, dx=dx) or {"dx": dx}
        df = {name: self.gathered(values) for name, values in df.items()}
        dh2 = self.summed(self.each("backward", "feed", block, **df, **saved["feed"])["dh2"])
        dm = self.each("backward", "norm2", block, dh2=dh2, dx=dx, **saved["norm2"])
        da = {"da": self.gathered(dm["da"])} if "da" in dm else {"dm": self.gathered(dm["dm"])}
        dc = self.each("backward", "out", block, c=saved["core"]["c"], **da)["dc"]
        dqkv = self.each("backward", "core", block, dc=dc, **saved["core"])["dqkv"]
        dh1 = self.summed(self.each("backward", "qkv", block, dqkv=dqkv, **saved["qkv"])["dh1"])
        return self.each("backward", "norm1", block, dh1=dh1, dm=dm["dm"], **saved["norm1"])["dx"]

    def gradients(self) -> dict[tuple[str, str], Tensor]:
        """Full gradients. Under sequence parallelism those of replicated parameters are partial: summed here."""
        result = {}
        for unit in units(self.model):
            for name, (shape, dim) in unit_shapes(self.model, unit).items():
                parts = [rank.gradient(unit, name) for rank in self.ranks]
                if dim is None and self.sequence:
                    parts = [torch.stack(parts).sum(dim=0)]
                result[unit, name] = unshard(parts, dim, shape)
        return result


def world(model: Model, num_tensor: int = 1, *, sequence: bool = False, dtype: torch.dtype = torch.float64) -> World:
    data = batch(model)
    full = parameters(model, dtype)
    return World([Rank(model, full, call) for call in calls(model, data, num_tensor, sequence=sequence)], sequence=sequence)
