"""The reference against pieces written by others: PyTorch's transformer layer and optimizers, finite differences, and numpy by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the customary name
from torch import nn

from trainwright.engine.optimizer import Shard, clip_scale, decay_ranges, update_rule
from trainwright.prove.diagnose import Evidence, Share, diagnose
from trainwright.prove.reference import (
    Batch,
    Decoder,
    contribution,
    learning_rate,
    parameter_shapes,
    reference_loss,
    reference_steps,
    rotary_frequencies,
    rotated,
    tied_uses,
)
from trainwright.spec.model import Model, RopeScaling, num_parameters
from trainwright.spec.optimizer import Optimizer

LLAMA = Model(
    name="llama", num_layers=2, width=8, num_heads=4, num_kv_heads=2, head_width=4, ffn_width=12, vocab=11, max_positions=6
)  # head width x heads is not the width
GPT = Model(
    name="gpt",
    num_layers=2,
    width=8,
    num_heads=2,
    num_kv_heads=2,
    head_width=4,
    ffn_width=16,
    vocab=11,
    max_positions=6,
    norm="layernorm",
    positions="learned",
    activation="gelu_tanh",
    bias=True,
    tied=True,
)
MODELS = (LLAMA, GPT, replace(LLAMA, tied=True), replace(GPT, tied=False, activation="gelu"))
PLAIN = Optimizer(name="sgd", momentum=0.0, weight_decay=0.0, lr=0.1, decay="none", clip_norm=0.0)


def initial(model: Model) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in parameter_shapes(model)}


def batch(model: Model, num_sequences: int = 3, num_tokens: int = 5, seed: int = 2) -> Batch:
    """Random tokens; the first sequence counts one target, the last all."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(model.vocab, (num_sequences, num_tokens + 1), generator=generator)
    targets = text[:, 1:].clone()
    targets[0, 1:] = -1
    return Batch(tokens=text[:, :-1], targets=targets)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.name}-{model.activation}-{'tied' if model.tied else 'untied'}")
class TestEveryModel:
    """Llama and GPT, tied and not."""

    def test_has_as_many_parameters_as_its_shape_claims(self, model):
        """Names and shapes add up to the exact parameter count, which was computed elsewhere."""
        assert sum(math.prod(shape) for _, shape in parameter_shapes(model)) == num_parameters(model)

    def test_gradients_are_the_slopes_of_the_loss(self, model):
        """The gradient along a random direction is the central difference of the loss, parameter by parameter."""
        parameters, data = initial(model), batch(model)
        gradients = reference_steps(model=model, parameters=parameters, batches=[data], optimizer=PLAIN).steps[0].gradients
        generator = torch.Generator().manual_seed(3)
        for name, value in parameters.items():
            direction = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            above, below = (
                reference_loss(model=model, parameters=parameters | {name: value + sign * 1e-5 * direction}, batch=data) for sign in (1, -1)
            )
            expected = (above - below) / 2e-5
            assert expected == pytest.approx(float((gradients[name] * direction).sum()), rel=1e-6, abs=1e-9), name

    def test_the_loss_is_the_mean_over_valid_tokens(self, model):
        """One target of the first sequence and all of the others count alike, whatever sequence they are in."""
        parameters, data = initial(model), batch(model)
        decoder = Decoder(model)
        decoder.load(parameters)
        log_probabilities = torch.log_softmax(decoder(data.tokens, lambda _, x: x), dim=-1).detach()
        losses = [
            -float(log_probabilities[sequence, token, target])
            for sequence, row in enumerate(data.targets.tolist())
            for token, target in enumerate(row)
            if target >= 0
        ]

        assert len(losses) == 11 == data.num_valid_tokens
        assert reference_loss(model=model, parameters=parameters, batch=data) == pytest.approx(sum(losses) / 11, rel=1e-14)

    def test_a_token_does_not_see_what_comes_after_it(self, model):
        """Changing the last token changes no earlier logits."""
        decoder = Decoder(model)
        decoder.load(initial(model))
        tokens = batch(model).tokens
        changed = tokens.clone()
        changed[:, -1] = (changed[:, -1] + 1) % model.vocab

        before, after = (decoder(each, lambda _, x: x) for each in (tokens, changed))

        assert torch.equal(before[:, :-1], after[:, :-1])
        assert not torch.equal(before[:, -1], after[:, -1])

    def test_contributions_of_the_parts_sum_to_the_gradient(self, model):
        """However the sequences are dealt out."""
        parameters, data = initial(model), batch(model)
        whole = reference_steps(model=model, parameters=parameters, batches=[data], optimizer=PLAIN).steps[0].gradients
        parts = [contribution(model=model, parameters=parameters, batch=data, sequences=part) for part in ([0], [2, 1])]
        for name, expected in whole.items():
            torch.testing.assert_close(parts[0][name] + parts[1][name], expected, rtol=1e-12, atol=1e-14)

    def test_plain_descent_steps_along_the_gradient(self, model):
        """The new p is p - lr * g, for every parameter, and what was given is left alone."""
        parameters = initial(model)
        given = {name: value.clone() for name, value in parameters.items()}
        found = reference_steps(model=model, parameters=parameters, batches=[batch(model)], optimizer=PLAIN)
        for name, value in parameters.items():
            assert torch.equal(given[name], value)
            assert torch.equal(value - 0.1 * found.steps[0].gradients[name], found.parameters[name])


def test_a_gpt_block_is_the_encoder_layer_of_pytorch():
    """nn.TransformerEncoderLayer, norm first, with a causal mask and the same weights, gives the same logits."""
    model = replace(GPT, activation="gelu")
    parameters = initial(model)
    decoder = Decoder(model)
    decoder.load(parameters)
    tokens = batch(model).tokens
    x = parameters["embed.tokens"][tokens] + parameters["positions.table"][: tokens.shape[1]]
    mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=torch.float64)

    for index in range(model.num_layers):
        part = {name.removeprefix(f"b{index}."): value for name, value in parameters.items() if name.startswith(f"b{index}.")}
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, dtype=torch.float64)
        layer.load_state_dict(
            {
                "self_attn.in_proj_weight": torch.cat([part["q.weight"], part["k.weight"], part["v.weight"]]),
                "self_attn.in_proj_bias": torch.cat([part["q.bias"], part["k.bias"], part["v.bias"]]),
                "self_attn.out_proj.weight": part["out.weight"],
                "self_attn.out_proj.bias": part["out.bias"],
                "linear1.weight": part["up.weight"],
                "linear1.bias": part["up.bias"],
                "linear2.weight": part["down.weight"],
                "linear2.bias": part["feed.bias"],
                "norm1.weight": part["norm1.weight"],
                "norm1.bias": part["norm1.bias"],
                "norm2.weight": part["norm2.weight"],
                "norm2.bias": part["norm2.bias"],
            }
        )
        x = layer(x, src_mask=mask)
    x = F.layer_norm(x, (8,), parameters["final.weight"], parameters["final.bias"], eps=1e-5)

    torch.testing.assert_close(decoder(tokens, lambda _, y: y), x @ parameters["embed.tokens"].T, rtol=1e-11, atol=1e-12)


def test_a_llama_is_its_formula_in_numpy():
    """One block of Llama with grouped heads, token by token and head by head, with complex numbers for the rotation."""
    model = replace(LLAMA, num_layers=1)
    weights = {name: value.numpy() for name, value in initial(model).items()}
    tokens = [3, 1, 4, 1, 5]
    decoder = Decoder(model)
    decoder.load(initial(model))

    def normed(x, name):
        return x / np.sqrt((x**2).mean() + 1e-5) * weights[name]

    def turned(x, position):
        turn = np.exp(1j * position * 10_000.0 ** (-np.arange(2) / 2))
        pair = (x[:2] + 1j * x[2:]) * turn
        return np.concatenate([pair.real, pair.imag])

    stream = [weights["embed.tokens"][token] for token in tokens]
    inputs = [normed(x, "b0.norm1.weight") for x in stream]
    outputs = []
    for now, x in enumerate(inputs):
        heads = []
        for head in range(4):
            group = head // 2
            query = turned((weights["b0.q.weight"] @ x)[4 * head : 4 * head + 4], now)
            past = inputs[: now + 1]
            keys = [turned((weights["b0.k.weight"] @ y)[4 * group : 4 * group + 4], then) for then, y in enumerate(past)]
            values = [(weights["b0.v.weight"] @ y)[4 * group : 4 * group + 4] for y in past]
            shares = np.exp([query @ key / 2 for key in keys])
            heads.append(sum(share * value for share, value in zip(shares / shares.sum(), values, strict=True)))
        outputs.append(stream[now] + weights["b0.out.weight"] @ np.concatenate(heads))
    logits = []
    for x in outputs:
        y = normed(x, "b0.norm2.weight")
        gate = weights["b0.gate.weight"] @ y
        fed = x + weights["b0.down.weight"] @ (gate / (1 + np.exp(-gate)) * (weights["b0.up.weight"] @ y))
        logits.append(weights["head.weight"] @ normed(fed, "final.weight"))

    np.testing.assert_allclose(decoder(torch.tensor([tokens]), lambda _, y: y).detach().numpy()[0], logits, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("clip_norm", [0.0, 0.01])
def test_adamw_is_the_adamw_of_pytorch(clip_norm):
    """Three steps of torch.optim.AdamW with two groups, clipped and with a schedule, end in the same parameters."""
    model, data = GPT, [batch(GPT, seed=seed) for seed in range(3)]
    optimizer = Optimizer(lr=0.05, weight_decay=0.2, warmup_steps=1, clip_norm=clip_norm)
    found = reference_steps(model=model, parameters=initial(model), batches=data, optimizer=optimizer, num_steps=5)
    decoder = Decoder(model)
    decoder.load(initial(model))
    matrices = [p for p in decoder.parameters() if p.dim() > 1]
    vectors = [p for p in decoder.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0.0}]
    peer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)

    for step, part in enumerate(data):
        for group in peer.param_groups:
            group["lr"] = optimizer.lr_at(step, num_steps=5)
        peer.zero_grad()
        logits = decoder(part.tokens, lambda _, x: x)
        F.cross_entropy(logits.transpose(1, 2), part.targets, ignore_index=-1).backward()
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in decoder.parameters()]))
        assert found.steps[step].gradient_norm == pytest.approx(norm, rel=1e-11)
        for parameter in decoder.parameters():
            parameter.grad *= min(1.0, clip_norm / norm) if clip_norm else 1.0
        peer.step()

    for name, expected in decoder.copy().items():
        torch.testing.assert_close(found.parameters[name], expected, rtol=1e-10, atol=1e-11)


def test_sgd_with_momentum_is_that_of_pytorch():
    """Three steps, no weight decay."""
    data = [batch(LLAMA, seed=seed) for seed in range(3)]
    optimizer = replace(PLAIN, momentum=0.9)
    found = reference_steps(model=LLAMA, parameters=initial(LLAMA), batches=data, optimizer=optimizer)
    decoder = Decoder(LLAMA)
    decoder.load(initial(LLAMA))
    peer = torch.optim.SGD(decoder.parameters(), lr=0.1, momentum=0.9)
    for part in data:
        peer.zero_grad()
        F.cross_entropy(decoder(part.tokens, lambda _, x: x).transpose(1, 2), part.targets, ignore_index=-1).backward()
        peer.step()

    for name, expected in decoder.copy().items():
        torch.testing.assert_close(found.parameters[name], expected, rtol=1e-11, atol=1e-12)


def test_clipping_leaves_the_direction_and_brings_the_norm_down():
    """With plain descent the whole step has length lr * clip_norm."""
    optimizer = replace(PLAIN, clip_norm=0.01)
    parameters = initial(LLAMA)
    found = reference_steps(model=LLAMA, parameters=parameters, batches=[batch(LLAMA)], optimizer=optimizer)
    length = math.sqrt(sum(float((found.parameters[name] - value).square().sum()) for name, value in parameters.items()))

    assert found.steps[0].gradient_norm > 0.01
    assert length == pytest.approx(0.1 * 0.01, rel=1e-12)


def test_masks_multiply_at_their_places():
    """Dropout asks once a place with the global shape; masks of ones change nothing, masks of zeros leave the embedding alone to speak."""
    model = replace(LLAMA, dropout=0.5)
    asked = []

    def ones(step, place, shape):
        asked.append((step, place, shape))
        return torch.ones(shape)

    parameters, data = initial(model), batch(model)
    with_ones = reference_loss(model=model, parameters=parameters, batch=data, masks=ones, step=7)
    assert asked == [(7, place, (3, 5, 8)) for place in ("enter", "b0.norm2", "b0.add", "b1.norm2", "b1.add")]
    assert with_ones == reference_loss(model=LLAMA, parameters=parameters, batch=data)

    without_blocks = reference_loss(
        model=model, parameters=parameters, batch=data, masks=lambda _, place, shape: torch.full(shape, float(place == "enter"))
    )
    no_blocks = {name: value * 0 if name.endswith(("out.weight", "down.weight")) else value for name, value in parameters.items()}
    assert without_blocks == pytest.approx(reference_loss(model=LLAMA, parameters=no_blocks, batch=data), rel=1e-14)


def test_a_contribution_uses_the_masks_of_its_own_sequences():
    """Masks belong to the global batch, not to the part."""
    model = replace(LLAMA, dropout=0.5)
    parameters, data = initial(model), batch(model)

    def masks(step, place, shape):
        generator = torch.Generator().manual_seed(hash((step, len(place))))
        return torch.randint(2, shape, generator=generator) * 2.0

    whole = reference_steps(model=model, parameters=parameters, batches=[data], optimizer=PLAIN, masks=masks).steps[0].gradients
    parts = [contribution(model=model, parameters=parameters, batch=data, sequences=[each], masks=masks) for each in range(3)]
    for name, expected in whole.items():
        torch.testing.assert_close(sum(part[name] for part in parts), expected, rtol=1e-12, atol=1e-14)


def test_rotation_depends_on_distance_only():
    """Scores of a query and a key are the same when both move."""
    q, k = torch.randn(2, 1, 1, 1, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = rotated(q.expand(1, 1, 6, 4), LLAMA)[0, 0] @ rotated(k.expand(1, 1, 6, 4), LLAMA)[0, 0].T
    for distance in range(6):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12, atol=1e-13)


def test_llama_3_stretches_slow_frequencies_only():
    """Hugging Face's formula by wave length, for the constants of Llama 3.1."""
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    model = replace(LLAMA, head_width=128, rope_theta=500_000.0, rope_scaling=scaling)
    plain, found = (rotary_frequencies(each) for each in (replace(model, rope_scaling=None), model))
    expected = []
    for frequency in plain:
        wave = 2 * math.pi / frequency
        if wave < 8192 / 4:
            expected.append(frequency)
        elif wave > 8192:
            expected.append(frequency / 8)
        else:
            smooth = (8192 / wave - 1) / 3
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)

    assert found == pytest.approx(expected, rel=1e-13)
    assert found[0] == plain[0] == 1.0
    assert all(slower < faster for faster, slower in pairwise(found))
    assert 0 < sum(1 for a, b in zip(plain, found, strict=True) if b not in (a, a / 8))


@pytest.mark.parametrize(
    "optimizer", [Optimizer(), Optimizer(warmup_steps=3), Optimizer(decay="none"), Optimizer(warmup_steps=20)], ids=repr
)
def test_the_learning_rate_is_that_of_the_settings(optimizer):
    """Two formulas, written apart, agree at every step and beyond the last."""
    for step in range(15):
        assert learning_rate(optimizer, step=step, num_steps=12) == pytest.approx(optimizer.lr_at(step, num_steps=12), rel=1e-14)


def test_the_uses_of_a_tied_embedding_sum_to_its_gradient():
    """The head's part reaches every row, the embedding's part only the rows of tokens that occur."""
    parameters, data = initial(GPT), batch(GPT)
    whole = reference_steps(model=GPT, parameters=parameters, batches=[data], optimizer=PLAIN).steps[0].gradients["embed.tokens"]
    as_embedding, as_head = tied_uses(model=GPT, parameters=parameters, batch=data)
    absent = sorted(set(range(GPT.vocab)) - set(data.tokens.flatten().tolist()))

    torch.testing.assert_close(as_embedding + as_head, whole, rtol=1e-12, atol=1e-14)
    assert absent
    assert not as_embedding[absent].any()
    assert as_head[absent].all()


@pytest.mark.parametrize("optimizer", [Optimizer(lr=0.05, clip_norm=0.1), Optimizer(name="sgd", lr=0.05, clip_norm=0.1)], ids=repr)
def test_the_engine_updates_flat_shards_to_the_same_parameters(optimizer):
    """Three steps with clipping: the flat buffer, cut in three, ends where the reference ends."""
    data = [batch(GPT, seed=seed) for seed in range(3)]
    found = reference_steps(model=GPT, parameters=initial(GPT), batches=data, optimizer=optimizer)
    rule = update_rule(optimizer)
    flat = torch.cat([value.flatten() for value in initial(GPT).values()])
    offsets, extents = 0, []
    for value in initial(GPT).values():
        extents.append((offsets, tuple(value.shape)))
        offsets += value.numel()
    cuts = [0, 101, 1000, len(flat)]
    moments = [tuple(torch.zeros(stop - start, dtype=torch.float64) for _ in range(rule.num_moments)) for start, stop in pairwise(cuts)]

    for index, step in enumerate(found.steps):
        gradient = torch.cat([value.flatten() for value in step.gradients.values()])
        for (start, stop), kept in zip(pairwise(cuts), moments, strict=True):
            shard = Shard(
                weights=flat[start:stop], gradient=gradient[start:stop], moments=kept, decay=decay_ranges(extents, start=start, stop=stop)
            )
            scale = clip_scale(step.gradient_norm, optimizer.clip_norm)
            rule.update(shard, lr=optimizer.lr_at(index, num_steps=3), step=index, clip_scale=scale)

    expected = torch.cat([value.flatten() for value in found.parameters.values()])
    torch.testing.assert_close(flat, expected, rtol=1e-12, atol=1e-12)


def test_a_failed_proof_is_explained_from_the_contributions():
    """The mean of the means of two unequal microbatches, told apart by gradients of a real model."""
    parameters, data = initial(LLAMA), batch(LLAMA)
    whole = reference_steps(model=LLAMA, parameters=parameters, batches=[data], optimizer=PLAIN).steps[0].gradients
    shares = tuple(
        Share(
            data_rank=0,
            microbatch=index,
            num_tokens=int((data.targets[part] >= 0).sum()),
            gradients={
                name: value.numpy() for name, value in contribution(model=LLAMA, parameters=parameters, batch=data, sequences=part).items()
            },
        )
        for index, part in enumerate(([0, 1], [2]))
    )
    means = {name: sum(11 / (2 * share.num_tokens) * share.gradients[name] for share in shares) for name in whole}
    causes = diagnose({name: value.numpy() for name, value in whole.items()}, means, Evidence(shares=shares, num_microbatches=2))

    assert [cause.name for cause in causes] == ["mean-of-means"]
    assert "token counts 6, 5" in causes[0].text


def test_a_batch_without_targets_is_refused():
    """The mean over no token has no value."""
    nothing = Batch(tokens=torch.zeros(1, 3, dtype=torch.int64), targets=torch.full((1, 3), -1))
    with pytest.raises(ValueError, match="no target that counts"):
        reference_loss(model=LLAMA, parameters=initial(LLAMA), batch=nothing)


def test_missing_and_unknown_parameters_are_named():
    """A proof must not run on half a model."""
    parameters = initial(LLAMA)
    parameters["b7.norm1.weight"] = parameters.pop("b0.norm1.weight")
    with pytest.raises(RuntimeError, match=r"(?s)b0\.norm1\.weight.*b7\.norm1\.weight"):
        reference_loss(model=LLAMA, parameters=parameters, batch=batch(LLAMA))


def test_the_default_generator_and_dtype_are_not_touched():
    """Ranks may be threads of the process in which the reference runs."""
    before, dtype = torch.random.get_rng_state(), torch.get_default_dtype()
    reference_steps(model=GPT, parameters=initial(GPT), batches=[batch(GPT)], optimizer=Optimizer())
    assert torch.equal(before, torch.random.get_rng_state())
    assert dtype == torch.get_default_dtype()
