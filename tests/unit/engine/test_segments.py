"""Segments against plain expressions and autograd, on one tensor rank and on several that are run in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # its usual name

from segment_world import GPT, LLAMA, MODELS, NAMES, NUM_TOKENS, Batch, Rank, World, batch, calls, mask, parameters, unit_of, world
from trainwright.engine.segments import SEGMENTS, Call, Gradients, Weights, segment
from trainwright.engine.segments.attention import attend, attend_backward, attend_plainly, attend_plainly_backward
from trainwright.engine.segments.tables import frequencies
from trainwright.spec.model import Model, RopeScaling

# The same mathematics, plainly, for autograd.


class Plain:
    """Each segment as an expression of full tensors. Rotary positions as a product of complex numbers."""

    def __init__(self, model: Model, full: Mapping[str, Mapping[str, Tensor]], call: Call) -> None:
        self.model, self.full, self.call = model, full, call

    def get(self, name: str, block: int | None = None) -> Tensor | None:
        """A parameter of a block or of the head, or None."""
        unit = "head" if block is None else f"b{block}"
        return self.full[unit].get(name)

    def drop(self, x: Tensor, site: str, block: int | None) -> Tensor:
        """Dropout of a whole stream tensor."""
        if self.model.dropout == 0:
            return x
        return x * mask(self.call, site if block is None else f"b{block}.{site}", x)

    def norm(self, x: Tensor, name: str, block: int | None) -> Tensor:
        """Either norm."""
        weight, bias = self.get(f"{name}.weight", block), self.get(f"{name}.bias", block)
        if self.model.norm == "layernorm":
            return F.layer_norm(x, x.shape[-1:], weight, bias, self.model.norm_eps)
        return weight * x / (x.pow(2).mean(-1, keepdim=True) + self.model.norm_eps).sqrt()

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the tokens."""
        return F.embedding(tokens, self.full["embed"]["embed.tokens"])

    def enter(self, e: Tensor) -> Tensor:
        """Positions and dropout."""
        if self.model.positions == "learned":
            e = e + self.full["positions"]["positions.table"][: e.shape[1]]
        return self.drop(e, "enter", None)

    def turn(self, x: Tensor) -> Tensor:
        """[b, s, n, d] turned."""
        if self.model.positions != "rope":
            return x
        left, right = x.chunk(2, dim=-1)
        angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), frequencies(self.model))[:, None]
        turned = torch.complex(left, right) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], dim=-1)

    def raw(self, h1: Tensor, block: int) -> Tensor:
        """Queries, keys and values before their turn."""
        return torch.cat([F.linear(h1, self.get(f"{n}.weight", block), self.get(f"{n}.bias", block)) for n in ("q", "k", "v")], dim=-1)

    def turned(self, raw: Tensor) -> Tensor:
        """Queries, keys and values, turned."""
        heads = raw.unflatten(-1, (-1, self.model.head_width))
        num_turned = self.model.num_heads + self.model.num_kv_heads
        return torch.cat([self.turn(heads[:, :, :num_turned]), heads[:, :, num_turned:]], dim=2).flatten(2)

    def core(self, qkv: Tensor) -> Tensor:
        """Attention from a softmax."""
        heads = qkv.unflatten(-1, (-1, self.model.head_width)).transpose(1, 2)
        n, k = self.model.num_heads, self.model.num_kv_heads
        q, key, value = heads[:, :n], heads[:, n : n + k].repeat_interleave(n // k, 1), heads[:, n + k :].repeat_interleave(n // k, 1)
        scores = (q @ key.transpose(-1, -2)) / self.model.head_width**0.5
        future = torch.ones(qkv.shape[1], qkv.shape[1], dtype=torch.bool).triu(1)
        return (scores.masked_fill(future, -torch.inf).softmax(-1) @ value).transpose(1, 2).flatten(2)

    def out(self, c: Tensor, block: int) -> Tensor:
        """The mix of the heads."""
        return F.linear(c, self.get("out.weight", block))

    def join(self, x: Tensor, branch: Tensor, bias: str, site: str, block: int) -> Tensor:
        """Bias, dropout, residual."""
        offset = self.get(bias, block)
        return x + self.drop(branch if offset is None else branch + offset, site, block)

    def feed(self, h2: Tensor, block: int) -> Tensor:
        """The feed-forward part."""
        up = F.linear(h2, self.get("up.weight", block), self.get("up.bias", block))
        if self.model.gated:
            act = F.silu(F.linear(h2, self.get("gate.weight", block))) * up
        else:
            act = F.gelu(up, approximate="tanh" if self.model.activation == "gelu_tanh" else "none")
        return F.linear(act, self.get("down.weight", block))

    def logits(self, h: Tensor) -> Tensor:
        """Scores."""
        return F.linear(h, self.full["embed"]["embed.tokens"] if self.model.tied else self.get("head.weight"))

    def loss(self, data: Batch) -> Tensor:
        """Mean cross-entropy of the whole model."""
        x = self.embed(data.tokens)
        if self.model.positions == "learned" or self.model.dropout > 0:
            x = self.enter(x)
        for block in range(self.model.num_layers):
            a = self.out(self.core(self.turned(self.raw(self.norm(x, "norm1", block), block))), block)
            x = self.join(x, a, "out.bias", "attention", block)
            x = self.join(x, self.feed(self.norm(x, "norm2", block), block), "feed.bias", "feed", block)
        z = self.logits(self.norm(x, "final", None))
        return F.cross_entropy(z.flatten(0, 1), data.targets.flatten(), ignore_index=-100)


def plain(model: Model, dtype: torch.dtype = torch.float64) -> tuple[Plain, dict[tuple[str, str], Tensor]]:
    """A plain model whose parameters ask for gradients, and its parameters."""
    full = {u: {n: v.requires_grad_() for n, v in values.items()} for u, values in parameters(model, dtype).items()}
    call = calls(model, batch(model), 1, sequence=False)[0]
    return Plain(model, full, call), {(u, n): v for u, values in full.items() for n, v in values.items()}


def assert_close(expected: Tensor, actual: Tensor, limit: float = 1e-12) -> None:
    """Within `limit` of the largest value; values that are 0 but for rounding (the gradient of a key's bias) count as 0.01."""
    assert expected.shape == actual.shape
    scale = max(float(expected.abs().max()), 0.01)
    assert float((expected - actual).abs().max()) <= limit * scale


# The whole chain.


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("num_tensor", "sequence"), [(1, False), (2, False), (2, True)])
def test_the_chain_equals_autograd(model, num_tensor, sequence):
    """Loss and every gradient are those of a plain model, whether or not the tensor axis cuts it."""
    reference, leaves = plain(model)
    expected_loss = reference.loss(batch(model))
    expected = dict(zip(leaves, torch.autograd.grad(expected_loss, list(leaves.values())), strict=True))
    with torch.no_grad():
        cut = world(model, num_tensor, sequence=sequence)
        loss = cut.step()

    assert_close(expected_loss.detach(), loss)
    actual = cut.gradients()
    for key, value in expected.items():
        assert_close(value, actual[key])


@pytest.mark.parametrize("num_tensor", [1, 2])
def test_padding_of_gradients_is_zero_after_close(num_tensor):
    """Rows beyond the vocabulary and the tail of a unit hold 0, not garbage."""
    cut = world(LLAMA, num_tensor)
    with torch.no_grad():
        cut.step()

    for rank in cut.ranks:
        for unit, gradients in rank.flat_gradients.items():
            assert gradients.isfinite().all()
            assert (gradients[-3:] == 0).all()
            last = rank.tables[unit].get("embed.tokens")
            if last is not None and rank.call.tensor_index == num_tensor - 1 and num_tensor == 2:
                assert (rank.gradient(unit, "embed.tokens")[-1] == 0).all()


# Each segment.


@dataclass(frozen=True, slots=True)
class Case:
    """A plain expression of a segment: formal inputs, outputs in the order of the cotangents' names, gradients by name."""

    plain: Callable[..., tuple[Tensor, ...]]
    cotangents: tuple[str, ...]
    gradients: Mapping[str, str]  # formal input -> name of its gradient


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs_of(model: Model, name: str) -> dict[str, Tensor]:
    """Random inputs of a forward."""
    stream, heads = (2, NUM_TOKENS, model.width), model.num_heads * model.head_width
    shapes = {
        "enter": {"e": stream}, "norm1": {"x": stream}, "qkv": {"h1": stream}, "core": {"qkv": (*stream[:2], model.qkv_width)},
        "out": {"c": (*stream[:2], heads)}, "norm2": {"x": stream, "a": stream}, "feed": {"h2": stream}, "add": {"x2": stream, "f": stream},
        "final": {"x": stream}, "logits": {"h": stream}, "sums": {"z": (*stream[:2], model.vocab), "m": stream[:2]},
        "loss": {"r": (2, *stream[:2])},
    }  # fmt: skip
    values = {key: drawn(index + 11, *shape) for index, (key, shape) in enumerate(shapes.get(name, {}).items())}
    if name == "loss":
        values["r"][0].exp_()
    return values


def case(p: Plain, name: str) -> Case:
    """The plain form of a segment. `core` starts before the turn, as its gradient does."""
    dropped = p.model.dropout > 0
    targets = batch(p.model).targets

    def sums(z: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        hit = (z - m[..., None]).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return (torch.stack([(z - m[..., None]).exp().sum(-1), torch.where(targets >= 0, hit, 0.0)]),)

    def loss(r: Tensor) -> tuple[Tensor, ...]:
        valid = targets >= 0
        return ((r[0].log() - r[1])[valid].sum() / valid.sum(),)

    def norm2(x: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        x2 = p.join(x, a, "out.bias", "attention", 0)
        return p.norm(x2, "norm2", 0), x2

    df = "df" if dropped else "dx"
    return {
        "embed": Case(lambda: (p.embed(batch(p.model).tokens),), ("de" if dropped else "dx",), {}),
        "enter": Case(lambda e: (p.enter(e),), ("dx",), {"e": "de"} if dropped else {}),
        "norm1": Case(lambda x: (p.norm(x, "norm1", 0), x * 1), ("dh1", "dm"), {"x": "dx"}),
        "qkv": Case(lambda h1: (p.raw(h1, 0),), ("dqkv",), {"h1": "dh1"}),
        "core": Case(lambda qkv: (p.core(p.turned(qkv)),), ("dc",), {"qkv": "dqkv"}),
        "out": Case(lambda c: (p.out(c, 0),), ("da" if dropped else "dm",), {"c": "dc"}),
        "norm2": Case(norm2, ("dh2", "dx"), {"x": "dm", "a": "da"} if dropped else {"x": "dm"}),
        "feed": Case(lambda h2: (p.feed(h2, 0),), (df,), {"h2": "dh2"}),
        "add": Case(lambda x2, f: (p.join(x2, f, "feed.bias", "feed", 0),), ("dx",), {"f": "df"} if dropped else {}),
        "final": Case(lambda x: (p.norm(x, "final", None),), ("dh",), {"x": "dx"}),
        "logits": Case(lambda h: (p.logits(h),), ("dz",), {"h": "dh"}),
        "sums": Case(sums, ("dr",), {"z": "dz"}),
        "loss": Case(loss, (), {"r": "dr"}),
    }[name]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "peak"])
def test_a_backward_is_the_gradient_of_its_forward(model, name):
    """Gradients of inputs and parameters equal those that autograd finds for a plain expression; no input is changed."""
    if name == "enter" and model.positions != "learned" and model.dropout == 0:
        pytest.skip("this model has no such segment")
    reference, leaves = plain(model)
    one = case(reference, name)
    inputs = {key: value.requires_grad_() for key, value in inputs_of(model, name).items()}
    expected_outputs = one.plain(**inputs)
    cotangents = [drawn(31 + i, *output.shape) for i, output in enumerate(expected_outputs[: len(one.cotangents)])]
    wanted = [*(inputs[key] for key in one.gradients), *leaves.values()]
    total = sum((o * c).sum() for o, c in zip(expected_outputs, cotangents or [torch.ones(())], strict=False))
    found = torch.autograd.grad(total, wanted, allow_unused=True)

    with torch.no_grad():
        rank = world(model).ranks[0]
        block = 0 if name in {"norm1", "qkv", "core", "out", "norm2", "feed", "add"} else None
        given = {key: value.detach().clone() for key, value in inputs.items()}
        if name == "core":
            given["qkv"] = reference.turned(given["qkv"])
        kept = {key: value.clone() for key, value in given.items()}
        outputs = segment(name).forward(rank.at(name, block), given)
        forms = {"norm2": ("h2", "x2"), "norm1": ("h1",)}.get(name, tuple(key for key in outputs if not key.startswith("saved.")))
        if name == "qkv":
            expected_outputs = (reference.turned(expected_outputs[0]),)
        for key, value in zip(forms, expected_outputs, strict=False):
            assert_close(value.detach(), outputs[key])
        without = segment(name).forward(rank.at(name, block, keep_saved=False), given)
        assert set(without) == {key for key in outputs if not key.startswith("saved.")}
        given |= outputs | dict(zip(one.cotangents, cotangents, strict=True))
        kept |= {key: value.clone() for key, value in given.items() if key not in kept}
        gradients = segment(name).backward(rank.at(name, block), given)
        for key, value in kept.items():
            assert torch.equal(value, given[key]), f"{key} was changed"
        rank.gradients[unit_of(model, name, block)].close()

    assert set(gradients) == set(one.gradients.values())
    for key, value in zip(one.gradients.values(), found, strict=False):
        assert_close(value, gradients[key])
    for (unit, parameter), value in zip(leaves, found[len(one.gradients) :], strict=True):
        if unit == unit_of(model, name, block):
            actual = rank.gradient(unit, parameter)
            assert_close(torch.zeros_like(actual) if value is None else value, actual)


def test_the_folder_holds_the_segments_of_the_family():
    """The registry finds exactly the segments of the decoder family."""
    assert set(NAMES) == set(SEGMENTS.names())


def expected_kept(model: Model, name: str, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What forward returns for backward: shape and format."""
    b, s, wide = 2, NUM_TOKENS, torch.float64 if dtype == torch.float64 else torch.float32
    norm = {"saved.rstd": ((b, s), wide)} | ({"saved.mean": ((b, s), wide)} if model.norm == "layernorm" else {})
    inner = ("saved.gate_up", 2 * model.ffn_width) if model.gated else ("saved.pre", model.ffn_width)
    return {
        "norm1": norm, "norm2": norm, "final": norm, "core": {"saved.lse": ((b, model.num_heads, s), wide)},
        "feed": {inner[0]: ((b, s, inner[1]), dtype), "saved.act": ((b, s, model.ffn_width), dtype)},
    }.get(name, {})  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_has_the_declared_shape_and_format(model, name, dtype):
    """Saved tensors are what the memory ledger counts: no byte more, and no view of something larger."""
    if name == "enter" and model is LLAMA:
        pytest.skip("this model has no such segment")
    block = 0 if name in {"norm1", "qkv", "core", "out", "norm2", "feed", "add"} else None
    inputs = {
        key: value.to(dtype if key not in {"m", "r"} else torch.promote_types(dtype, torch.float32))
        for key, value in inputs_of(model, name).items()
    }
    if name == "peak":
        inputs = {"z": drawn(3, 2, NUM_TOKENS, model.vocab).to(dtype)}
    outputs = world(model, dtype=dtype).ranks[0].forward(name, block, **inputs)

    assert expected_kept(model, name, dtype) == {k: (tuple(v.shape), v.dtype) for k, v in outputs.items() if k.startswith("saved.")}
    storages = {value.untyped_storage().data_ptr() for value in outputs.values()}
    assert len(storages) == len(outputs)
    for value in outputs.values():
        assert value.untyped_storage().nbytes() == value.nbytes


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
def test_bf16_stays_near_float64(model):
    """In bf16, with float32 gradients, loss and gradients agree with float64 to the few digits that bf16 has."""
    data = batch(model)
    exact = world(model)
    rounded = {u: {n: v.double() for n, v in values.items()} for u, values in parameters(model, torch.bfloat16).items()}
    exact.ranks = [Rank(model, rounded, call) for call in calls(model, data, 1, sequence=False)]
    coarse = world(model, dtype=torch.bfloat16)
    coarse.ranks = [Rank(model, parameters(model, torch.bfloat16), call, torch.float32) for call in calls(model, data, 1, sequence=False)]
    with torch.no_grad():
        expected, actual = exact.step(), coarse.step()

    assert actual.dtype == torch.float32
    assert float(actual) == pytest.approx(float(expected), rel=1e-2)
    actual_gradients = coarse.gradients()
    for key, value in exact.gradients().items():
        assert actual_gradients[key].dtype == torch.float32
        assert float((value - actual_gradients[key]).norm()) <= 0.05 * float(value.norm()) + 3e-3


# Parts.


def test_a_buffer_that_is_not_fresh_is_added_to():
    """Two backwards into one buffer give twice the gradient of one."""
    cut = world(GPT)
    with torch.no_grad():
        cut.step()
        once = {key: value.clone() for key, value in cut.gradients().items()}
        cut.step()

    for key, value in once.items():
        assert_close(2 * value, cut.gradients()[key])


def test_a_parameter_written_before_its_neighbours_is_kept():
    """A fused write after a write to one of its parts adds to that part and overwrites the garbage of the others."""
    table = {"a": (0, 4, (2, 2)), "b": (4, 6, (1, 2))}
    buffer = torch.full((7,), torch.nan)
    gradients = Gradients(buffer, table, fresh=True)
    gradients.add("a", torch.ones(2, 2))
    gradients.linear(("a", "b"), torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0, 3.0]]))
    gradients.close()

    assert [2.0, 3.0, 1.0, 1.0, 3.0, 6.0, 0.0] == buffer.tolist()


def test_adjacent_parameters_must_be_adjacent():
    """Fusing parameters with others between them is a mistake of the layout."""
    weights = Weights(torch.zeros(6), {"a": (0, 2, (1, 2)), "b": (2, 4, (1, 2)), "c": (4, 6, (1, 2))})

    with pytest.raises(AssertionError, match="c does not follow"):
        weights.fused(("a", "c"))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_plain_attention_equals_the_kernel(num_kv_heads):
    """The way without a kernel gives the same output, log-sum-exp and gradients."""
    q, dout = (drawn(seed, 2, 6, 4, 8).transpose(1, 2) for seed in (1, 2))
    k, v = (drawn(seed, 2, 6, num_kv_heads, 8).transpose(1, 2) for seed in (3, 4))
    out, lse = attend(q, k, v)
    expected = (out, lse, *attend_backward(dout, q, k, v, out, lse))
    plain_out, plain_lse = attend_plainly(q, k, v)
    actual = (plain_out, plain_lse, *attend_plainly_backward(dout, q, k, v, plain_out, plain_lse))

    for one, other in zip(expected, actual, strict=True):
        assert_close(one, other)


def test_llama_3_frequencies_follow_the_three_ranges():
    """Short waves are kept, long ones divided by the factor, those between lie between."""
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    model = replace(LLAMA, head_width=128, rope_theta=500_000.0, rope_scaling=scaling)
    stretched, kept = frequencies(model), frequencies(replace(model, rope_scaling=None))
    turns = 8192 * kept / (2 * torch.pi)

    assert torch.equal(kept[turns > 4], stretched[turns > 4])
    torch.testing.assert_close(kept[turns < 1] / 8, stretched[turns < 1], rtol=1e-15, atol=0)
    between = (turns < 4) & (turns > 1)
    assert between.any()
    assert ((stretched < kept) & (stretched > kept / 8))[between].all()


def test_a_step_without_targets_has_loss_zero():
    """If every target is ignored, loss and gradients are 0, not NaN."""
    data = replace(batch(LLAMA), targets=torch.full((2, NUM_TOKENS), -1))
    cut = World([Rank(LLAMA, parameters(LLAMA), call) for call in calls(LLAMA, data, 1, sequence=False)], sequence=False)
    with torch.no_grad():
        loss = cut.step()

    assert float(loss) == 0
    assert all(not value.any() for value in cut.gradients().values())


def test_every_parameter_is_local_and_whole():
    """The shards of a unit hold each of its elements once (and the padding of the vocabulary)."""
    for rank_count in (1, 2):
        sizes = [sum(len(w) for w in rank.weights.values()) for rank in world(LLAMA, rank_count).ranks]
        assert len(set(sizes)) == 1
    first, second = (rank.weights["b0"] for rank in world(LLAMA, 2).ranks)
    full = parameters(LLAMA)["b0"]
    assert torch.equal(full["out.weight"], torch.cat([first["out.weight"], second["out.weight"]], dim=1))
    assert prod(full["q.weight"].shape) == first["q.weight"].numel() + second["q.weight"].numel()
