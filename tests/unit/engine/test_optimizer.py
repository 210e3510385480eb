"""The update on flat shards: equal to PyTorch's, and the same to the last bit however the unit is cut."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trainwright.engine.optimizer import BLOCK, SGD, VECTOR, AdamW, Shard, UpdateRule, clip_scale, decay_ranges, update_rule
from trainwright.spec.optimizer import Optimizer

LENGTH = 3 * VECTOR + 37
RULES = (AdamW(weight_decay=0.1), SGD(momentum=0.9, weight_decay=0.1), SGD(momentum=0.0, weight_decay=0.1))


def unit(rule: UpdateRule, dtype: torch.dtype, length: int = LENGTH, decay: tuple[tuple[int, int], ...] = ((20, 150),)) -> Shard:
    """A whole unit with random contents, the same at each call."""
    generator = torch.Generator().manual_seed(0)

    def random(scale: float) -> Tensor:
        return torch.randn(length, generator=generator, dtype=torch.float64).mul_(scale).to(dtype)

    moments = (random(1e-2), random(1e-2).square())[: rule.num_moments]
    return Shard(weights=random(1.0), gradient=random(1e-2), moments=moments, decay=decay)


def cut(whole: Shard, start: int, stop: int) -> Shard:
    """The shard [start, stop), in memory of its own."""
    decay = tuple(
        (max(first, start) - start, min(last, stop) - start) for first, last in whole.decay if max(first, start) < min(last, stop)
    )
    moments = tuple(moment[start:stop].clone() for moment in whole.moments)
    return Shard(weights=whole.weights[start:stop].clone(), gradient=whole.gradient[start:stop].clone(), moments=moments, decay=decay)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("num_shards", [2, 3, 7, LENGTH])
def test_a_sharded_update_is_the_unsharded_one_to_the_last_bit(rule, dtype, num_shards):
    """Where a unit is cut does not show in the result, not even where the pieces do not fill a vector register."""
    whole = unit(rule, dtype)
    size = math.ceil(LENGTH / num_shards)
    shards = [cut(whole, start, min(start + size, LENGTH)) for start in range(0, LENGTH, size)]

    for step in range(3):
        for shard in (whole, *shards):
            rule.update(shard, lr=1e-2, step=step, clip_scale=0.37)

    assert torch.equal(whole.weights, torch.cat([shard.weights for shard in shards]))
    for index, moment in enumerate(whole.moments):
        assert torch.equal(moment, torch.cat([shard.moments[index] for shard in shards]))


def test_blocks_do_not_show():
    """A unit longer than a block is updated like its halves."""
    rule = AdamW()
    whole = unit(rule, torch.float32, length=BLOCK + 3 * VECTOR + 5, decay=((0, BLOCK + 7),))
    halves = [cut(whole, 0, 1001), cut(whole, 1001, len(whole.weights))]

    for shard in (whole, *halves):
        rule.update(shard, lr=1e-2, step=0, clip_scale=0.5)

    assert torch.equal(whole.weights, torch.cat([half.weights for half in halves]))


def test_adamw_is_the_adamw_of_pytorch():
    """Decayed and undecayed ranges equal two parameter groups of torch.optim.AdamW, fused, to the last bit."""
    shard = unit(AdamW(), torch.float64, length=4 * VECTOR, decay=((0, 2 * VECTOR),))
    for moment in shard.moments:
        moment.zero_()
    decayed, other = (torch.nn.Parameter(half.clone()) for half in shard.weights.chunk(2))
    groups = [{"params": [decayed], "weight_decay": 0.1}, {"params": [other], "weight_decay": 0.0}]
    peer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)

    for step in range(4):
        AdamW(weight_decay=0.1).update(shard, lr=1e-2, step=step)
        decayed.grad, other.grad = (half.clone() for half in shard.gradient.chunk(2))
        peer.step()

    assert torch.equal(torch.cat([decayed, other]), shard.weights)


def test_adamw_follows_its_formula():
    """One step by hand, from moments that are not zero."""
    shard = unit(AdamW(), torch.float64)
    weights, gradient = shard.weights.clone(), shard.gradient * 0.5
    mean, square = 0.9 * shard.moments[0] + 0.1 * gradient, 0.95 * shard.moments[1] + 0.05 * gradient**2
    decay = torch.zeros(LENGTH, dtype=torch.float64)
    decay[20:150] = 0.1
    step_size = 1e-2 * (mean / (1 - 0.9**5)) / ((square / (1 - 0.95**5)).sqrt() + 1e-8)

    AdamW(weight_decay=0.1).update(shard, lr=1e-2, step=4, clip_scale=0.5)

    torch.testing.assert_close(shard.weights, weights - 1e-2 * decay * weights - step_size, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(shard.moments, (mean, square), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_the_sgd_of_pytorch(momentum):
    """Without weight decay, which PyTorch couples and we do not."""
    rule = SGD(momentum=momentum, weight_decay=0.0)
    shard = unit(rule, torch.float64)
    for moment in shard.moments:
        moment.zero_()
    peer_weights = torch.nn.Parameter(shard.weights.clone())
    peer = torch.optim.SGD([peer_weights], lr=0.1, momentum=momentum)

    for step in range(3):
        rule.update(shard, lr=0.1, step=step)
        peer_weights.grad = shard.gradient.clone()
        peer.step()

    torch.testing.assert_close(shard.weights, peer_weights.detach(), rtol=1e-14, atol=1e-15)


def test_sgd_shrinks_only_the_decayed_range():
    """Weight decay is decoupled: it multiplies the weight and never enters the velocity."""
    rule = SGD(momentum=0.9, weight_decay=0.5)
    shard = unit(rule, torch.float64)
    shard.gradient.zero_()
    for moment in shard.moments:
        moment.zero_()
    expected = shard.weights.clone()
    expected[20:150] *= 1 - 0.1 * 0.5

    rule.update(shard, lr=0.1, step=0)

    assert torch.equal(expected, shard.weights)
    assert not shard.moments[0].any()


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_weights_are_the_rounded_master(gradient_dtype, moment_dtype):
    """The update happens in float32 on the master copy; bf16 weights are that copy, rounded, and every tensor keeps its format."""
    plain = unit(AdamW(), torch.float32)
    gradient = plain.gradient.to(gradient_dtype)
    moments = tuple(moment.to(moment_dtype) for moment in plain.moments)
    expected = Shard(
        weights=plain.weights.clone(),
        gradient=gradient.float(),
        moments=tuple(moment.float().clone() for moment in moments),
        decay=plain.decay,
    )
    mixed = Shard(weights=plain.weights.bfloat16(), gradient=gradient, moments=moments, master=plain.weights.clone(), decay=plain.decay)

    for shard in (expected, mixed):
        AdamW().update(shard, lr=1e-2, step=2, clip_scale=0.5)

    assert torch.equal(expected.weights, mixed.master)
    assert torch.equal(expected.weights.bfloat16(), mixed.weights)
    for moment, rounded in zip(expected.moments, mixed.moments, strict=True):
        assert torch.equal(moment.to(moment_dtype), rounded)


def test_bf16_weights_without_a_master_are_updated_in_float32_and_rounded_once():
    """No intermediate value of the update is bf16."""
    shard = unit(AdamW(), torch.float32)
    mixed = Shard(
        weights=shard.weights.bfloat16(),
        gradient=shard.gradient,
        moments=tuple(moment.clone() for moment in shard.moments),
        decay=shard.decay,
    )
    wide = Shard(weights=mixed.weights.float(), gradient=shard.gradient, moments=shard.moments, decay=shard.decay)

    for each in (mixed, wide):
        AdamW().update(each, lr=1e-2, step=0)

    assert torch.equal(wide.weights.bfloat16(), mixed.weights)


def test_the_gradient_is_only_read():
    """Proofs compare gradients after the update."""
    for rule in RULES:
        shard = unit(rule, torch.float32)
        before = shard.gradient.clone()
        rule.update(shard, lr=1e-2, step=0, clip_scale=0.5)
        assert torch.equal(before, shard.gradient)


def test_padding_stays_zero():
    """Elements with weight, gradient and moments 0 are a fixed point of every rule."""
    for rule in RULES:
        zeros = [torch.zeros(10) for _ in range(2 + rule.num_moments)]
        shard = Shard(weights=zeros[0], gradient=zeros[1], moments=tuple(zeros[2:]), decay=((0, 5),))
        rule.update(shard, lr=1e-2, step=0, clip_scale=0.5)
        assert not any(tensor.any() for tensor in zeros)


def test_an_empty_shard_is_left_alone():
    """A rank may own nothing of a small unit: its neighbours' values, before and behind the empty piece, stay as they are."""
    for rule in RULES:
        wholes = [torch.ones(4) for _ in range(2 + rule.num_moments)]
        weights, gradient, *moments = (whole[2:2] for whole in wholes)
        rule.update(Shard(weights=weights, gradient=gradient, moments=tuple(moments)), lr=1e-2, step=0, clip_scale=0.5)
        assert all(torch.equal(torch.ones(4), whole) for whole in wholes)


def test_the_default_generator_is_not_touched():
    """Ranks may be threads of one process."""
    before = torch.random.get_rng_state()
    for rule in RULES:
        rule.update(unit(rule, torch.float32), lr=1e-2, step=0)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("optimizer", [Optimizer(name="adamw"), Optimizer(name="sgd"), Optimizer(name="sgd", momentum=0.0)], ids=repr)
def test_a_rule_keeps_as_many_moments_as_its_settings_claim(optimizer):
    """State bytes are predicted from the settings."""
    assert update_rule(optimizer).num_moments == optimizer.num_moments


def test_an_unknown_rule_is_refused():
    """The plan's check names the allowed ones; here it is our own mistake."""
    with pytest.raises(ValueError, match="adagrad"):
        update_rule(Optimizer(name="adagrad"))


def test_clipping_never_enlarges_and_keeps_what_is_not_a_number():
    """The scale is min(1, clip / norm)."""
    assert clip_scale(norm=10.0, clip_norm=1.0) == 0.1
    assert clip_scale(norm=0.0, clip_norm=1.0) == 1.0
    assert clip_scale(norm=1.0, clip_norm=1.0) == 1.0
    assert clip_scale(norm=10.0, clip_norm=0.0) == 1.0
    assert clip_scale(norm=math.nan, clip_norm=1.0) == 1.0
    assert clip_scale(norm=math.inf, clip_norm=1.0) == 0.0


def test_decayed_ranges_are_cut_with_the_shard():
    """Norms and biases are left out, neighbours are joined, and the rest is shifted into the shard."""
    parameters = [(0, (4,)), (4, (4,)), (8, (2, 4)), (16, (4, 2)), (24, (3,)), (27, (1, 3))]

    assert decay_ranges(parameters, 0, 32) == ((8, 24), (27, 30))
    assert decay_ranges(parameters, 10, 20) == ((0, 10),)
    assert decay_ranges(parameters, 0, 8) == ()
    assert decay_ranges(parameters, 30, 32) == ()
