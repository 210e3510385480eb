"""The decoder family in numpy: GPT-like and Llama-like models without dropout, forward and backward written out.

Letters of shapes: b sequences, s tokens of a sequence, u of them on this rank's residual stream, h width, H heads and K key-value heads
of this rank, d head width, f this rank's part of the feed-forward width, V this rank's part of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainwright.prove.numeric.call import Array, Call, Samples, Saved, Values
from trainwright.spec.model import Model

NAME: Final = "decoder"


def num_valid(samples: Samples) -> float:
    """Targets that are not ignored."""
    return float((samples.targets >= 0).sum())


def forward(segment: str, call: Call, inputs: Values) -> Values:
    """What the segment writes. Raises ValueError for a model with dropout."""
    if call.model.dropout:
        raise ValueError("the numpy interpreter has no dropout")
    return _FORWARD[segment](call, inputs)


def backward(segment: str, call: Call, inputs: Values) -> Values:
    """Gradients of the segment's inputs."""
    return _BACKWARD[segment](call, inputs)


# --- linear layers ---------------------------------------------------------------------------------------------------------------


def _apply(call: Call, layer: str, x: Array) -> Array:
    """Return x W' + bias, if there is one: [..., in] -> [..., out]."""
    y: Array = np.einsum("...i,oi->...o", x, call.weights[f"{layer}.weight"], optimize=True)
    return y + call.weights[f"{layer}.bias"] if f"{layer}.bias" in call.weights else y


def _apply_backward(call: Call, layer: str, x: Array, dy: Array, *, bias: bool = True) -> Array:
    """Gradient of x; gradients of weight and bias are added up."""
    call.gradients[f"{layer}.weight"][...] += np.tensordot(dy, x, axes=((0, 1), (0, 1)))
    if bias and f"{layer}.bias" in call.weights:
        call.gradients[f"{layer}.bias"][...] += dy.sum(axis=(0, 1))
    dx: Array = np.einsum("...o,oi->...i", dy, call.weights[f"{layer}.weight"], optimize=True)
    return dx


# --- embedding -------------------------------------------------------------------------------------------------------------------


def _mine(call: Call, ids: NDArray[np.int64], num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Rows of `ids` in this rank's part of the vocabulary, and which of them lie in it."""
    rows = ids - call.tensor_index * num_rows
    inside = (ids >= 0) & (rows >= 0) & (rows < num_rows)
    return np.where(inside, rows, 0), inside


def _embed(call: Call, inputs: Values) -> Values:
    del inputs
    table = call.weights["embed.tokens"]
    rows, inside = _mine(call, call.samples.inputs, len(table))
    return {"e" if call.model.positions == "learned" else "x": table[rows] * inside[..., None]}


def _embed_backward(call: Call, inputs: Values) -> Values:
    table = call.gradients["embed.tokens"]
    rows, inside = _mine(call, call.samples.inputs, len(table))
    np.add.at(table, rows[inside], inputs["dx"][inside])
    return {}


def _places(call: Call, num_tokens: int) -> slice:
    start = call.tensor_index * num_tokens if call.sequence else 0
    return slice(start, start + num_tokens)


def _enter(call: Call, inputs: Values) -> Values:
    return {"x": inputs["e"] + call.weights["positions.table"][_places(call, inputs["e"].shape[1])]}


def _enter_backward(call: Call, inputs: Values) -> Values:
    dx = inputs["dx"]
    call.gradients["positions.table"][_places(call, dx.shape[1])] += dx.sum(axis=0)
    return {}


# --- norms -----------------------------------------------------------------------------------------------------------------------


def _norm(call: Call, name: str, x: Array) -> tuple[Array, Saved]:
    """(x - mean) / deviation * weight + bias; a root-mean-square norm takes no mean and adds no bias."""
    centred = call.model.norm == "layernorm"
    mean = x.mean(axis=-1) if centred else np.zeros(x.shape[:-1])
    rstd = ((x - mean[..., None]) ** 2).mean(axis=-1)
    rstd = 1.0 / np.sqrt(rstd + call.model.norm_eps)
    y = (x - mean[..., None]) * rstd[..., None] * call.weights[f"{name}.weight"]
    if f"{name}.bias" in call.weights:
        y = y + call.weights[f"{name}.bias"]
    return y, {"mean": mean, "rstd": rstd} if centred else {"rstd": rstd}


def _norm_backward(call: Call, name: str, x: Array, saved: Saved, dy: Array) -> Array:
    rstd = saved["rstd"][..., None]
    unit = (x - saved["mean"][..., None]) * rstd if "mean" in saved else x * rstd
    call.gradients[f"{name}.weight"][...] += (dy * unit).sum(axis=(0, 1))
    if f"{name}.bias" in call.weights:
        call.gradients[f"{name}.bias"][...] += dy.sum(axis=(0, 1))
    dunit = dy * call.weights[f"{name}.weight"]
    along = (dunit * unit).mean(axis=-1, keepdims=True) * unit
    across = dunit.mean(axis=-1, keepdims=True) if "mean" in saved else 0.0
    dx: Array = rstd * (dunit - along - across)
    return dx


def _norm1(call: Call, inputs: Values) -> Values:
    h1, saved = _norm(call, "norm1", inputs["x"])
    return {"h1": h1, "saved": saved}


def _norm1_backward(call: Call, inputs: Values) -> Values:
    return {"dx": _norm_backward(call, "norm1", inputs["x"], inputs["saved"], inputs["dh1"]) + inputs["dm"]}


def _with_bias(call: Call, name: str, branch: Array) -> Array:
    return branch + call.weights[name] if name in call.weights else branch


def _bias_gradient(call: Call, name: str, dy: Array) -> None:
    if name in call.weights:
        call.gradients[name][...] += dy.sum(axis=(0, 1))


def _norm2(call: Call, inputs: Values) -> Values:
    x2 = inputs["x"] + _with_bias(call, "out.bias", inputs["a"])
    h2, saved = _norm(call, "norm2", x2)
    return {"x2": x2, "h2": h2, "saved": saved}


def _norm2_backward(call: Call, inputs: Values) -> Values:
    dm = _norm_backward(call, "norm2", inputs["x2"], inputs["saved"], inputs["dh2"]) + inputs["dx"]
    _bias_gradient(call, "out.bias", dm)
    return {"dm": dm}


# --- attention -------------------------------------------------------------------------------------------------------------------


def _frequencies(model: Model) -> Array:
    """Radians a token, [d / 2]; long wave lengths are stretched as Llama 3.1 does, if the model asks for it."""
    plain = np.array([model.rope_theta ** (-2.0 * i / model.head_width) for i in range(model.head_width // 2)])
    scaling = model.rope_scaling
    if scaling is None:
        return plain
    waves_inside = scaling.original_max_positions / (2 * math.pi / plain)
    smooth = (waves_inside - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - smooth) * plain / scaling.factor + smooth * plain
    return np.where(
        waves_inside < scaling.low_freq_factor, plain / scaling.factor, np.where(waves_inside > scaling.high_freq_factor, plain, blended)
    )


def _turn(model: Model, heads: Array, sign: float) -> Array:
    """Turn every pair (i, i + d / 2) of [b, s, n, d] by its angle, forward (1) or back (-1): a product of complex numbers."""
    half = model.head_width // 2
    angles = np.outer(np.arange(heads.shape[1]), _frequencies(model))
    turned = (heads[..., :half] + 1j * heads[..., half:]) * np.exp(1j * sign * angles)[:, None, :]
    return np.concatenate((turned.real, turned.imag), axis=-1)


def _heads(call: Call, qkv: Array) -> tuple[Array, Array, Array]:
    """Queries [b, s, H, d], keys and values [b, s, K, d]."""
    model = call.model
    heads = qkv.reshape(*qkv.shape[:2], -1, model.head_width)
    num_q, num_kv = model.num_heads // call.num_tensor, model.num_kv_heads // call.num_tensor
    return heads[:, :, :num_q], heads[:, :, num_q : num_q + num_kv], heads[:, :, num_q + num_kv :]


def _qkv(call: Call, inputs: Values) -> Values:
    q, k, v = (_apply(call, name, inputs["h1"]) for name in "qkv")
    if call.model.positions == "rope":
        q, k = (_turn(call.model, part.reshape(*part.shape[:2], -1, call.model.head_width), 1.0).reshape(part.shape) for part in (q, k))
    return {"qkv": np.concatenate((q, k, v), axis=-1)}


def _qkv_backward(call: Call, inputs: Values) -> Values:
    """Of dqkv, the gradient before the turn: `core` has turned it back."""
    dq, dk, dv = (part.reshape(*part.shape[:2], -1) for part in _heads(call, inputs["dqkv"]))
    return {"dh1": sum(_apply_backward(call, name, inputs["h1"], dy) for name, dy in zip("qkv", (dq, dk, dv), strict=True))}


def _weights_of(call: Call, q: Array, k: Array) -> tuple[Array, Array]:
    """Scaled scores with the future masked [b, H, s, s], and the logarithm of the sum of their exponentials [b, H, s]."""
    repeats = q.shape[2] // k.shape[2]
    scores = np.einsum("bqhd,bkhd->bhqk", q, np.repeat(k, repeats, axis=2), optimize=True) / math.sqrt(call.model.head_width)
    scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
    peak = scores.max(axis=-1)
    return scores, peak + np.log(np.exp(scores - peak[..., None]).sum(axis=-1))


def _core(call: Call, inputs: Values) -> Values:
    q, k, v = _heads(call, inputs["qkv"])
    scores, lse = _weights_of(call, q, k)
    values = np.repeat(v, q.shape[2] // v.shape[2], axis=2)
    c = np.einsum("bhqk,bkhd->bqhd", np.exp(scores - lse[..., None]), values, optimize=True)
    return {"c": np.ascontiguousarray(c).reshape(*c.shape[:2], -1), "saved": {"lse": lse}}


def _core_backward(call: Call, inputs: Values) -> Values:
    """Softmax' = p (dp - sum of p dp); the turn is undone."""
    q, k, v = _heads(call, inputs["qkv"])
    repeats = q.shape[2] // k.shape[2]
    scores, _ = _weights_of(call, q, k)
    p = np.exp(scores - inputs["saved"]["lse"][..., None])
    dc = inputs["dc"].reshape(q.shape)
    dp = np.einsum("bqhd,bkhd->bhqk", dc, np.repeat(v, repeats, axis=2), optimize=True)
    dscores = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) / math.sqrt(call.model.head_width)
    dq = np.einsum("bhqk,bkhd->bqhd", dscores, np.repeat(k, repeats, axis=2), optimize=True)
    dk, dv = np.einsum("bhqk,bqhd->bkhd", dscores, q, optimize=True), np.einsum("bhqk,bqhd->bkhd", p, dc, optimize=True)
    dk, dv = (part.reshape(*k.shape[:3], repeats, -1).sum(axis=3) for part in (dk, dv))
    if call.model.positions == "rope":
        dq, dk = (_turn(call.model, part, -1.0) for part in (dq, dk))
    return {"dqkv": np.concatenate(tuple(part.reshape(*part.shape[:2], -1) for part in (dq, dk, dv)), axis=-1)}


def _out(call: Call, inputs: Values) -> Values:
    return {"a": np.einsum("...i,oi->...o", inputs["c"], call.weights["out.weight"], optimize=True)}


def _out_backward(call: Call, inputs: Values) -> Values:
    return {"dc": _apply_backward(call, "out", inputs["c"], inputs["dm"], bias=False)}


# --- feed-forward ----------------------------------------------------------------------------------------------------------------

_erf: Callable[[Array], Array] = np.vectorize(math.erf, otypes=[np.float64])
_GELU_SCALE = math.sqrt(2.0 / math.pi)


def _gelu(model: Model, x: Array) -> tuple[Array, Array]:
    """GELU of x, and its derivative."""
    if model.activation == "gelu":
        below = 0.5 * (1.0 + _erf(x / math.sqrt(2.0)))
        return x * below, below + x * np.exp(-(x**2) / 2.0) / math.sqrt(2.0 * math.pi)
    tanh = np.tanh(_GELU_SCALE * (x + 0.044715 * x**3))
    slope = (1.0 - tanh**2) * _GELU_SCALE * (1.0 + 3.0 * 0.044715 * x**2)
    return 0.5 * x * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * x * slope


def _feed(call: Call, inputs: Values) -> Values:
    up = _apply(call, "up", inputs["h2"])
    if call.model.gated:
        gate = _apply(call, "gate", inputs["h2"])
        act = gate / (1.0 + np.exp(-gate)) * up
        saved: Saved = {"gate_up": np.concatenate((gate, up), axis=-1), "act": act}
    else:
        act, _ = _gelu(call.model, up)
        saved = {"pre": up, "act": act}
    return {"f": np.einsum("...i,oi->...o", act, call.weights["down.weight"], optimize=True), "saved": saved}


def _feed_backward(call: Call, inputs: Values) -> Values:
    saved: Saved = inputs["saved"]
    dact = _apply_backward(call, "down", saved["act"], inputs["dx"], bias=False)
    if not call.model.gated:
        return {"dh2": _apply_backward(call, "up", inputs["h2"], dact * _gelu(call.model, saved["pre"])[1])}
    gate, up = np.split(saved["gate_up"], 2, axis=-1)
    sigmoid = 1.0 / (1.0 + np.exp(-gate))
    dgate = dact * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dup = dact * gate * sigmoid
    return {"dh2": _apply_backward(call, "gate", inputs["h2"], dgate) + _apply_backward(call, "up", inputs["h2"], dup)}


def _add(call: Call, inputs: Values) -> Values:
    return {"x": inputs["x2"] + _with_bias(call, "feed.bias", inputs["f"])}


def _add_backward(call: Call, inputs: Values) -> Values:
    _bias_gradient(call, "feed.bias", inputs["dx"])
    return {}


# --- head and loss ---------------------------------------------------------------------------------------------------------------


def _final(call: Call, inputs: Values) -> Values:
    h, saved = _norm(call, "final", inputs["x"])
    return {"h": h, "saved": saved}


def _final_backward(call: Call, inputs: Values) -> Values:
    return {"dx": _norm_backward(call, "final", inputs["x"], inputs["saved"], inputs["dh"])}


def _table(call: Call) -> str:
    return "embed.tokens" if call.model.tied else "head.weight"


def _logits(call: Call, inputs: Values) -> Values:
    table = call.weights[_table(call)]
    z = np.einsum("bsh,vh->bsv", inputs["h"], table, optimize=True)
    beyond = call.tensor_index * len(table) + np.arange(len(table)) >= call.model.vocab
    return {"z": np.where(beyond, -np.inf, z)}


def _logits_backward(call: Call, inputs: Values) -> Values:
    call.gradients[_table(call)][...] += np.einsum("bsv,bsh->vh", inputs["dz"], inputs["h"], optimize=True)
    return {"dh": np.einsum("bsv,vh->bsh", inputs["dz"], call.weights[_table(call)], optimize=True)}


def _peak(call: Call, inputs: Values) -> Values:
    del call
    return {"m": inputs["z"].max(axis=-1)}


def _hits(call: Call, num_columns: int) -> NDArray[np.bool_]:
    """[b, s, V]: true at each target that lies in this rank's part of the vocabulary."""
    columns, inside = _mine(call, call.samples.targets, num_columns)
    hits: NDArray[np.bool_] = (np.arange(num_columns) == columns[..., None]) & inside[..., None]
    return hits


def _sums(call: Call, inputs: Values) -> Values:
    lowered = inputs["z"] - inputs["m"][..., None]
    picked = np.where(_hits(call, lowered.shape[-1]), lowered, 0.0).sum(axis=-1)
    return {"r": np.stack((np.exp(lowered).sum(axis=-1), picked))}


def _sums_backward(call: Call, inputs: Values) -> Values:
    lowered = inputs["z"] - inputs["m"][..., None]
    dr = inputs["dr"][..., None]
    return {"dz": np.exp(lowered) * dr[0] + _hits(call, lowered.shape[-1]) * dr[1]}


def _counts(call: Call) -> Array:
    """1 / num_valid where the target counts, else 0: [b, s]."""
    return (call.samples.targets >= 0) / max(call.num_valid, 1.0)


def _loss(call: Call, inputs: Values) -> Values:
    return {"loss": np.array(((np.log(inputs["r"][0]) - inputs["r"][1]) * _counts(call)).sum())}


def _loss_backward(call: Call, inputs: Values) -> Values:
    return {"dr": np.stack((_counts(call) / inputs["r"][0], -_counts(call)))}


_Function = Callable[[Call, Values], Values]

_FORWARD: Final[dict[str, _Function]] = {
    "embed": _embed,
    "enter": _enter,
    "norm1": _norm1,
    "qkv": _qkv,
    "core": _core,
    "out": _out,
    "norm2": _norm2,
    "feed": _feed,
    "add": _add,
    "final": _final,
    "logits": _logits,
    "peak": _peak,
    "sums": _sums,
    "loss": _loss,
}

_BACKWARD: Final[dict[str, _Function]] = {
    "embed": _embed_backward,
    "enter": _enter_backward,
    "norm1": _norm1_backward,
    "qkv": _qkv_backward,
    "core": _core_backward,
    "out": _out_backward,
    "norm2": _norm2_backward,
    "feed": _feed_backward,
    "add": _add_backward,
    "final": _final_backward,
    "logits": _logits_backward,
    "sums": _sums_backward,
    "loss": _loss_backward,
}
