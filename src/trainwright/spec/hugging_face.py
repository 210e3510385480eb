"""Hugging Face: reads the config.json of a checkpoint as a Model.

Read are LlamaForCausalLM, MistralForCausalLM without a sliding window (the same model), and GPT2LMHeadModel. Every field that changes
the mathematics is either carried over exactly or refused by name. Other fields (special tokens, caches, versions) say nothing about
training and are passed over, as the architecture's own class does.

Dropout: the engine drops embeddings and both residual branches alike, never attention weights. A file that says so keeps its value; any
other mixture, such as the three 0.1 of GPT-2, becomes 0, and the model's `source` says it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from trainwright.problems import PlanError, Problem
from trainwright.spec.bounds import count_problems, range_problems
from trainwright.spec.model import Model, RopeScaling

Config: TypeAlias = Mapping[str, Any]

_MODEL_TYPES: Final = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "GPT2LMHeadModel": "gpt2"}
ARCHITECTURES: Final = tuple(_MODEL_TYPES)
_GPT2_ACTIVATIONS: Final = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def read_hf_config(path: Path) -> Model:
    """Read a config.json. Raises PlanError with every problem, each with its line."""
    file = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise PlanError(Problem(f"cannot read the model's config: {reason}", file=file, path="model.config", given=file)) from error
    try:
        config = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else None
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "too many brackets within brackets"
        raise PlanError(Problem(f"the model's config is not JSON: {reason}", file=file, line=line)) from error
    try:
        return from_hf_config(config, file)
    except PlanError as error:
        raise PlanError(problem.at(file, _line_of(problem.path, text)) for problem in error.problems) from None


def from_hf_config(config: object, file: str) -> Model:
    """Return the Model of a parsed config; `file` gives it its name and stands in its source.

    Raises PlanError with every problem; a problem's path is the key in the config.
    """
    if not isinstance(config, Mapping):
        raise PlanError(Problem("a model's config must be a JSON object", file=file, given=type(config).__name__))
    architecture = _architecture(config, file)
    read = _gpt2 if architecture == "GPT2LMHeadModel" else _llama
    problems = list(_gpt2_problems(config) if architecture == "GPT2LMHeadModel" else _llama_problems(config, architecture))
    if not problems:
        model = read(config, _name(config, file), file)
        problems = list(model.check())
        if not problems:
            return model
    raise PlanError(problem.at(file) for problem in problems)


def _architecture(config: Config, file: str) -> str:
    key = "architectures" if config.get("architectures") else "model_type"
    given: object = config.get(key)
    named = given[0] if isinstance(given, list) and len(given) == 1 else given
    for architecture, model_type in _MODEL_TYPES.items():
        if named == (architecture if key == "architectures" else model_type):
            return architecture
    what = "names no architecture" if given is None else f"has the architecture {named}, which cannot be read yet"
    raise PlanError(Problem(f"the model's config {what}", file=file, path=key, given=given, allowed=ARCHITECTURES))


def _llama(config: Config, name: str, file: str) -> Model:
    num_heads = config["num_attention_heads"]
    rope = _rope(config)
    return Model(
        name=name,
        num_layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        num_heads=num_heads,
        num_kv_heads=_or(config, "num_key_value_heads", num_heads),
        head_width=_or(config, "head_dim", config["hidden_size"] // num_heads),
        ffn_width=config["intermediate_size"],
        vocab=config["vocab_size"],
        max_positions=_or(config, "max_position_embeddings", 2048),
        norm="rmsnorm",
        norm_eps=float(_or(config, "rms_norm_eps", 1e-6)),
        positions="rope",
        rope_theta=float(_or(rope, "rope_theta", 10_000.0)),
        rope_scaling=_scaling(rope),
        activation="swiglu",
        bias=False,
        tied=_or(config, "tie_word_embeddings", False),
        source=file,
    )


def _gpt2(config: Config, name: str, file: str) -> Model:
    width, num_heads = config["n_embd"], config["n_head"]
    dropout, note = _dropout(config)
    return Model(
        name=name,
        num_layers=config["n_layer"],
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_width=width // num_heads,
        ffn_width=_or(config, "n_inner", 4 * width),
        vocab=config["vocab_size"],
        max_positions=_or(config, "n_positions", 1024),
        norm="layernorm",
        norm_eps=float(_or(config, "layer_norm_epsilon", 1e-5)),
        positions="learned",
        activation=_GPT2_ACTIVATIONS[_or(config, "activation_function", "gelu_new")],
        bias=True,
        tied=_or(config, "tie_word_embeddings", True),
        dropout=dropout,
        source=f"{file}{note}",
    )


def _llama_problems(config: Config, architecture: str) -> Iterator[Problem]:
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    yield from _counts(config, sizes, required=True)
    yield from _counts(config, ("num_key_value_heads", "head_dim", "max_position_embeddings"), required=False)
    yield from _divides(config, "num_attention_heads", "hidden_size", unless="head_dim")
    yield from _divides(config, "num_key_value_heads", "num_attention_heads", unless=None)
    yield from _numbers(config, ("rms_norm_eps",))
    yield from _switches(config, ("tie_word_embeddings",))
    must = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0}
    if architecture == "MistralForCausalLM":
        must["sliding_window"] = None
    yield from _musts(config, must)
    yield from _rope_problems(config)


def _gpt2_problems(config: Config) -> Iterator[Problem]:
    yield from _counts(config, ("n_layer", "n_embd", "n_head", "vocab_size"), required=True)
    yield from _counts(config, ("n_inner", "n_positions"), required=False)
    yield from _divides(config, "n_head", "n_embd", unless=None)
    yield from _numbers(config, ("layer_norm_epsilon", "attn_pdrop", "embd_pdrop", "resid_pdrop"))
    yield from _switches(config, ("tie_word_embeddings",))
    yield from _musts(config, {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False})
    activation = _or(config, "activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in _GPT2_ACTIVATIONS:
        allowed = tuple(_GPT2_ACTIVATIONS)
        yield Problem(f"the activation {activation} cannot be built", path="activation_function", given=activation, allowed=allowed)


def _rope(config: Config) -> Config:
    """Return the rotary settings, of the older form (rope_theta, rope_scaling) or the newer (rope_parameters), as one table."""
    newer = config.get("rope_parameters")
    if isinstance(newer, Mapping):
        return {"rope_theta": config.get("rope_theta"), **newer}
    older = config.get("rope_scaling")
    return {**(older if isinstance(older, Mapping) else {}), "rope_theta": config.get("rope_theta")}


def _rope_problems(config: Config) -> Iterator[Problem]:
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    given = config.get(key)
    if given is not None and not isinstance(given, Mapping):
        yield Problem(f"{key} must be an object or null", path=key, given=given)
        return
    rope = _rope(config)
    yield from _numbers(rope, ("rope_theta",))
    kind = _rope_kind(rope)
    if kind not in {"default", "llama3"}:
        yield Problem(
            f"rotary scaling of the type {kind} cannot be built yet", path=key, given=dict(given or {}), allowed=("default", "llama3")
        )
    elif kind == "llama3":
        yield from _numbers(rope, ("factor", "low_freq_factor", "high_freq_factor"), required=True)
        yield from _counts(rope, ("original_max_position_embeddings",), required=True)
    elif _or(rope, "partial_rotary_factor", 1) != 1:
        yield Problem("rotary positions on a part of each head cannot be built yet", path=key, given=dict(given or {}))


def _rope_kind(rope: Config) -> object:
    return _or(rope, "rope_type", _or(rope, "type", "default"))


def _scaling(rope: Config) -> RopeScaling | None:
    if _rope_kind(rope) != "llama3":
        return None
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_positions=rope["original_max_position_embeddings"],
    )


def _dropout(config: Config) -> tuple[float, str]:
    """Return the dropout that can be built, and a note where it differs from the file's."""
    attention, embeddings, residual = (float(_or(config, key, 0.1)) for key in ("attn_pdrop", "embd_pdrop", "resid_pdrop"))
    if attention == 0 and embeddings == residual:
        return residual, ""
    return 0.0, f" (dropout {attention:g} on attention, {embeddings:g} on embeddings, {residual:g} on residuals set to 0)"


def _counts(config: Config, keys: tuple[str, ...], *, required: bool) -> Iterator[Problem]:
    for key in keys:
        if config.get(key) is not None:
            yield from count_problems(key, config[key])
        elif required:
            yield Problem(f"the model's config lacks {key}", path=key)


def _numbers(config: Config, keys: tuple[str, ...], *, required: bool = False) -> Iterator[Problem]:
    for key in keys:
        if config.get(key) is not None:
            yield from range_problems(key, config[key], least=0.0, suggestion=1.0)
        elif required:
            yield Problem(f"the model's config lacks {key}", path=key)


def _switches(config: Config, keys: tuple[str, ...]) -> Iterator[Problem]:
    for key in keys:
        if config.get(key) is not None and not isinstance(config[key], bool):
            yield Problem(f"{key} must be true or false", path=key, given=config[key], allowed=("true", "false"))


def _musts(config: Config, must: Mapping[str, object]) -> Iterator[Problem]:
    """Refuse the values of fields that the decoder family does not vary; an absent one has the value it must have."""
    for key, value in must.items():
        given = config.get(key, value)
        if given is not None and given != value:
            shown = json.dumps(value)
            yield Problem(f"{key} = {json.dumps(given)} cannot be built", path=key, given=given, allowed=shown, attempt=f'"{key}": {shown}')


def _divides(config: Config, part: str, whole: str, *, unless: str | None) -> Iterator[Problem]:
    """Refuse a size that does not divide another, where both are counts; with `unless` given, the question does not arise."""
    small, large = config.get(part), config.get(whole)
    if unless is not None and config.get(unless) is not None:
        return
    if isinstance(small, int) and isinstance(large, int) and small > 0 and large % small:
        yield Problem(f"{part} = {small} does not divide {whole} = {large}", path=part, given=small, allowed=f"divisors of {large}")


def _or(config: Config, key: str, default: Any) -> Any:  # noqa: ANN401  # a JSON value
    value = config.get(key)
    return default if value is None else value


def _name(config: Config, file: str) -> str:
    """Name the model after the file, or after its folder where the file is called config.json."""
    given = config.get("_name_or_path")
    if isinstance(given, str) and given:
        return given.rsplit("/", 1)[-1]
    path = Path(file)
    return path.resolve().parent.name if path.stem == "config" else path.stem


def _line_of(key: str | None, text: str) -> int | None:
    """Return the first line that holds the key, counted from 1."""
    if key is None:
        return None
    return next((number for number, line in enumerate(text.splitlines(), start=1) if f'"{key}"' in line), None)
