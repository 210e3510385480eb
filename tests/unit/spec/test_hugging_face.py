"""Hugging Face configs: read exactly, or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from trainwright.problems import PlanError
from trainwright.spec import catalog
from trainwright.spec.hugging_face import from_hf_config, read_hf_config
from trainwright.spec.model import num_parameters

LLAMA = json.loads(catalog.hugging_face_config("llama-3-8b").read_text())
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"do_sample": True}},
    "vocab_size": 50257,
}
LLAMA_3_1 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def problems(config):
    with pytest.raises(PlanError) as caught:
        from_hf_config(config, "folder/config.json")
    assert {"folder/config.json"} == {problem.file for problem in caught.value.problems}
    return [problem.path for problem in caught.value.problems]


def test_the_shipped_config_is_the_model_of_the_catalog():
    """Two ways to the same Llama 3 8B."""
    model = read_hf_config(catalog.hugging_face_config("llama-3-8b"))

    assert replace(catalog.model("llama-3-8b"), source="") == replace(model, source="")


def test_gpt2_is_the_model_of_the_catalog():
    """Width 4 h where n_inner is absent, tied where nothing is said; the dropout that cannot be built is noted."""
    model = from_hf_config(GPT2, "gpt2.json")

    assert replace(catalog.model("gpt2"), source="") == replace(model, source="")
    assert num_parameters(model) == 124_439_808
    assert "dropout 0.1 on attention" in model.source


def test_dropout_that_can_be_built_is_kept():
    """The same on embeddings and residuals, none on attention."""
    assert from_hf_config({**GPT2, "attn_pdrop": 0.0}, "gpt2.json").dropout == 0.1


def test_llama_3_1_scaling_is_carried_over_in_both_spellings():
    """rope_scaling of older files, rope_parameters of newer ones."""
    older = from_hf_config({**LLAMA, "rope_scaling": LLAMA_3_1}, "m.json")
    without = {key: value for key, value in LLAMA.items() if key not in {"rope_scaling", "rope_theta"}}
    newer = from_hf_config({**without, "rope_parameters": {**LLAMA_3_1, "rope_theta": 500_000.0}}, "m.json")

    assert older == newer
    assert older.rope_scaling is not None
    assert older.rope_scaling.factor == 8.0


def test_mistral_without_a_sliding_window_is_a_llama():
    """The mathematics is the same; with a window it is not."""
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}

    assert from_hf_config(LLAMA, "m.json") == from_hf_config({**mistral, "sliding_window": None}, "m.json")
    assert ["sliding_window"] == problems({**mistral, "sliding_window": 4096})


@pytest.mark.parametrize(
    ("change", "paths"),
    [
        ({"attention_bias": True}, ["attention_bias"]),
        ({"mlp_bias": True, "hidden_act": "gelu"}, ["hidden_act", "mlp_bias"]),
        ({"attention_dropout": 0.1}, ["attention_dropout"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling"]),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
        ),
        ({"rope_scaling": 8}, ["rope_scaling"]),
        ({"hidden_size": "4096"}, ["hidden_size"]),
        ({"hidden_size": 4097}, ["num_attention_heads"]),
        ({"num_hidden_layers": True, "vocab_size": 10**18}, ["num_hidden_layers", "vocab_size"]),
        ({"num_key_value_heads": 5}, ["num_key_value_heads"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings"]),
        ({"intermediate_size": None}, ["intermediate_size"]),
        ({"architectures": ["MixtralForCausalLM"]}, ["architectures"]),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, ["architectures"]),
        ({"architectures": None, "model_type": "qwen3"}, ["model_type"]),
        ({"architectures": 3}, ["architectures"]),
    ],
)
def test_what_cannot_be_built_is_named_and_nothing_is_guessed(change, paths):
    """Each unsupported field by its own name, all at once."""
    assert paths == problems({**LLAMA, **change})


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", "\ufeff{}", "null", "[" * 100_000, '{"architectures": []}'])
def test_a_file_that_is_no_config_is_refused(tmp_path, text):
    """With the file's name, never a traceback of json."""
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(PlanError) as caught:
        read_hf_config(path)

    assert str(path) == caught.value.problems[0].file


def test_a_missing_file_is_refused(tmp_path):
    """So is a folder."""
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(PlanError):
            read_hf_config(path)


def test_a_problem_stands_at_the_line_of_its_field(tmp_path):
    """Counted from 1."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "attention_bias": True}, indent=2))

    with pytest.raises(PlanError) as caught:
        read_hf_config(path)

    (problem,) = caught.value.problems
    assert '"attention_bias"' in path.read_text().splitlines()[problem.line - 1]
