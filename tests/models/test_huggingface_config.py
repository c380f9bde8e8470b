"""config.json in both directions, and refusal of everything that would be another network. No framework."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vorox.core.errors import ConfigError
from vorox.core.schema.model import ModelConfig
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.models.huggingface.config import huggingface_config, huggingface_files, spec_from_huggingface
from vorox.models.huggingface.families import ARCHITECTURES, huggingface_family
from vorox.models.huggingface.spec import HuggingFaceSpec

GPT2_HUB: dict[str, Any] = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 1600, "n_head": 25, "n_layer": 48, "n_positions": 1024,
    "output_past": True, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}  # fmt: skip
LLAMA_3_8B_HUB: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
QWEN3_HUB: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip


MISTRAL_HUB: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
QWEN2_HUB: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "transformers_version": "4.43.1", "use_cache": True, "vocab_size": 151936,
}  # fmt: skip
PHI3_HUB: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 199999,
    "embd_pdrop": 0.0, "eos_token_id": 199999, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
    "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 24,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0", "use_cache": True, "vocab_size": 200064,
}  # fmt: skip
OLMO2_HUB: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
    "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 16, "num_hidden_layers": 16,
    "num_key_value_heads": 16, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 500000, "tie_word_embeddings": False, "torch_dtype": "float32", "transformers_version": "4.50.0",
    "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
GEMMA3_HUB: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "bos_token_id": 2, "eos_token_id": 1, "final_logit_softcapping": None,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
    "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
    "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "use_cache": True,
    "transformers_version": "4.50.0.dev0", "vocab_size": 262144,
}  # fmt: skip
PUBLISHED = [MISTRAL_HUB, QWEN2_HUB, PHI3_HUB, OLMO2_HUB, GEMMA3_HUB]
COUNTS = {
    "mistral": 7_241_732_096, "qwen2": 494_032_768, "phi3": 3_836_021_760, "olmo2": 1_484_916_736,
    "gemma3_text": 999_885_952,
}  # fmt: skip
"""Parameters of Mistral 7B v0.1, Qwen2.5 0.5B, Phi-4 mini, OLMo 2 1B and Gemma 3 1B."""


def spec_of(config: ModelConfig) -> DecoderSpec:
    return decoder_spec(config, tokenizer_vocab_size=2, sequence_length_tokens=8)


def test_published_files_are_read() -> None:
    gpt2, llama, qwen3 = (spec_from_huggingface(config) for config in (GPT2_HUB, LLAMA_3_8B_HUB, QWEN3_HUB))
    assert (gpt2.num_layers, gpt2.hidden_size, gpt2.num_heads) == (48, 1600, 25)
    assert (gpt2.activation, gpt2.positions, gpt2.norm) == ("gelu_tanh", "learned", "layer_norm")
    assert (gpt2.tie_embeddings, gpt2.dropout_fraction, gpt2.max_positions_tokens) == (True, 0.1, 1024)
    assert (llama.num_kv_heads, llama.intermediate_size, llama.rope_theta) == (8, 14336, 500000.0)
    assert (llama.tie_embeddings, llama.norm_eps, llama.activation) == (False, 1e-5, "swiglu")
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.rope_theta, qwen3.norm_eps) == (128, True, 1e6, 1e-6)
    counts = [sum(prod(part.shape) for part in spec_of(model).parameters) for model in (gpt2, llama, qwen3)]
    assert counts == [1_557_611_200, 8_030_261_248, 596_049_920]


@pytest.mark.parametrize("hub", PUBLISHED, ids=lambda hub: hub["model_type"])
def test_other_published_files_are_read(hub: dict[str, Any]) -> None:
    spec = spec_of(spec_from_huggingface(hub))
    assert sum(prod(part.shape) for part in spec.parameters) == COUNTS[hub["model_type"]]
    assert huggingface_family(spec) == hub["model_type"]
    assert (spec.sliding_window_tokens, spec.rotary_dim) == (
        4096 if hub is MISTRAL_HUB else 512 if hub is GEMMA3_HUB else None,
        96 if hub is PHI3_HUB else spec.head_dim,
    )


@pytest.mark.parametrize("hub", [GPT2_HUB, LLAMA_3_8B_HUB, QWEN3_HUB, *PUBLISHED], ids=lambda hub: hub["model_type"])
def test_written_and_read_back_it_is_the_same_model(hub: dict[str, Any]) -> None:
    spec = spec_of(spec_from_huggingface(hub))
    config = json.loads(json.dumps(huggingface_config(spec, end_of_text_id=7)))
    assert spec_of(spec_from_huggingface(config)) == spec
    assert config["architectures"] == hub["architectures"]
    activation = ARCHITECTURES[hub["model_type"]].activation_key
    assert config[activation] == hub[activation]
    assert (config["bos_token_id"], config["eos_token_id"]) == (7, 7)
    assert huggingface_config(spec, end_of_text_id=None)["eos_token_id"] is None
    ids = {"bos_token_id": 5, "eos_token_id": [7, 9], "pad_token_id": 6}
    written = huggingface_config(spec, special_ids=ids)
    assert {name: written[name] for name in ids} == ids


def test_the_scale_of_queries_is_written_where_it_follows_from_the_heads() -> None:
    spec = replace(spec_of(spec_from_huggingface(GEMMA3_HUB)), query_pre_attn_scalar=None)
    assert huggingface_config(spec)["query_pre_attn_scalar"] == spec.head_dim == 256


def test_ids_of_special_tokens_replace_those_of_the_text_part_that_it_has() -> None:
    config = {"model_type": "gemma3", "eos_token_id": 1, "text_config": {"eos_token_id": 1, "vocab_size": 97}}
    spec = HuggingFaceSpec(config, (), 2, 32, 97, 64)
    (content,) = huggingface_files(spec, special_ids={"eos_token_id": 5, "bos_token_id": 6}).values()
    written = json.loads(content)
    assert (written["eos_token_id"], written["bos_token_id"]) == (5, 6)
    assert written["text_config"] == {"eos_token_id": 5, "vocab_size": 97}


def test_the_rotary_base_is_written_for_old_and_new_readers() -> None:
    config = huggingface_config(spec_of(spec_from_huggingface(QWEN3_HUB)), end_of_text_id=0)
    assert config["rope_theta"] == 1e6
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}


def test_rotary_base_is_found_wherever_it_is_kept() -> None:
    base = {key: value for key, value in LLAMA_3_8B_HUB.items() if not key.startswith("rope")}
    plain = {"rope_type": "default", "rope_theta": 123.0}
    for fields, theta in [
        ({}, 10_000.0),
        ({"rope_theta": 123}, 123.0),
        ({"rope_parameters": plain}, 123.0),
        ({"rope_theta": 123.0, "rope_parameters": plain}, 123.0),
        ({"rope_theta": 123.0, "rope_scaling": {"type": "default"}}, 123.0),
        ({"rope_parameters": plain | {"partial_rotary_factor": 1.0, "factor": None}}, 123.0),
    ]:
        assert spec_from_huggingface(base | fields).rope_theta == theta, fields


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (LLAMA_3_8B_HUB, {"model_type": "gemma2"}, "model_type = 'gemma2'.*gpt2, llama, qwen3, mistral"),
        (LLAMA_3_8B_HUB, {"model_type": None}, "model_type = None"),
        (LLAMA_3_8B_HUB, {"rope_scaling": {"type": "longrope"}}, "rope_scaling.type = 'longrope'.*llama3"),
        (LLAMA_3_8B_HUB, {"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor = '2'"),
        (LLAMA_3_8B_HUB, {"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor = 0"),
        (LLAMA_3_8B_HUB, {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type = 'yarn'.*factor"),
        (
            LLAMA_3_8B_HUB,
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}},
            "rope_parameters.mscale = 1.0",
        ),
        (
            LLAMA_3_8B_HUB,
            {"rope_scaling": {"rope_type": "llama3", "factor": 32.0}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling.rope_type and rope_parameters.rope_type.*contradict",
        ),
        (LLAMA_3_8B_HUB, {"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "factor = 2.0"),
        (LLAMA_3_8B_HUB, {"rope_parameters": {"rope_theta": 10.0}}, "contradict"),
        (LLAMA_3_8B_HUB, {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
        (LLAMA_3_8B_HUB, {"rope_parameters": 3}, "must be a mapping"),
        (LLAMA_3_8B_HUB, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (LLAMA_3_8B_HUB, {"sliding_window": 4096}, "sliding_window = 4096"),
        (LLAMA_3_8B_HUB, {"hidden_act": "relu"}, "hidden_act = 'relu'.*silu"),
        (LLAMA_3_8B_HUB, {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        (LLAMA_3_8B_HUB, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA_3_8B_HUB, {"auto_map": {"AutoModel": "x.py"}}, "auto_map"),
        (LLAMA_3_8B_HUB, {"hidden_size": "4096"}, "hidden_size = '4096'"),
        (LLAMA_3_8B_HUB, {"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        (LLAMA_3_8B_HUB, {"attention_bias": "yes"}, "attention_bias = 'yes'"),
        (QWEN3_HUB, {"use_sliding_window": True, "sliding_window": 0}, "sliding_window = 0"),
        (QWEN3_HUB, {"use_sliding_window": True, "sliding_window": True}, "sliding_window = True"),
        (
            QWEN3_HUB,
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": None},
            "max_window_layers = None",
        ),
        (QWEN3_HUB, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*28 layers"),
        (QWEN3_HUB, {"layer_types": ["chunked_attention"] * 28}, "layer_types"),
        (QWEN3_HUB, {"layer_types": ["sliding_attention"] * 28}, "layer_types.*use_sliding_window"),
        (MISTRAL_HUB, {"sliding_window": 0}, "sliding_window = 0"),
        (MISTRAL_HUB, {"sliding_window": "4096"}, "sliding_window = '4096'"),
        (PHI3_HUB, {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_scaling.type = 'longrope'"),
        (PHI3_HUB, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling.type = 'yarn'.*this model_type"),
        (PHI3_HUB, {"resid_pdrop": 0.1}, "resid_pdrop = 0.1"),
        (PHI3_HUB, {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (GEMMA3_HUB, {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        (GEMMA3_HUB, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3_HUB, {"sliding_window": None}, "sliding_window = None"),
        (GEMMA3_HUB, {"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        (GEMMA3_HUB, {"rope_parameters": {"chunked_attention": {}}}, "rope_parameters"),
        (
            GEMMA3_HUB | {"rope_theta": None, "rope_local_base_freq": None},
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters.rope_type = 'linear'",
        ),
        (OLMO2_HUB, {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        (QWEN3_HUB, {"mlp_bias": True}, "mlp_bias = True"),
        (GPT2_HUB, {"attn_pdrop": 0.0}, "embd_pdrop, resid_pdrop, attn_pdrop"),
        (GPT2_HUB, {"activation_function": "gelu_fast"}, "activation_function = 'gelu_fast'"),
        (GPT2_HUB, {"scale_attn_weights": False}, "scale_attn_weights = False"),
        (GPT2_HUB, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2_HUB, {"add_cross_attention": True}, "add_cross_attention"),
    ],
)
def test_another_network_is_refused_with_key_and_value(
    base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    spec_from_huggingface(base)
    with pytest.raises(ConfigError, match=message) as caught:
        spec_from_huggingface(base | change)
    assert caught.value.exit_code == 2


def test_windows_that_reach_no_layer_are_no_windows() -> None:
    wide = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}
    assert spec_from_huggingface(QWEN3_HUB | wide) == spec_from_huggingface(QWEN3_HUB)
    listed = {"layer_types": ["full_attention"] * 28}
    assert spec_from_huggingface(QWEN3_HUB | wide | listed) == spec_from_huggingface(QWEN3_HUB)


@pytest.mark.parametrize(("first", "listed"), [(0, None), (20, None), (28, [3, 27])])
def test_the_layers_of_a_window_are_read_and_written(first: int, listed: list[int] | None) -> None:
    change: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": first}
    if listed is not None:
        change["layer_types"] = ["sliding_attention" if layer in listed else "full_attention" for layer in range(28)]
    spec = spec_of(spec_from_huggingface(QWEN3_HUB | change))
    chosen = range(first, 28) if listed is None else listed
    assert spec.layer_windows == tuple(9 if layer in chosen else None for layer in range(28))
    written = huggingface_config(spec, end_of_text_id=0)
    assert spec_of(spec_from_huggingface(written)) == spec
    assert (written["sliding_window"], written["use_sliding_window"]) == (9, True)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**19) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None, database=None)
@given(data=st.data())
def test_any_file_is_read_or_refused_never_a_crash(data: st.DataObject) -> None:
    base = data.draw(st.sampled_from([GPT2_HUB, LLAMA_3_8B_HUB, QWEN3_HUB, *PUBLISHED]))
    keys = [*base, *ARCHITECTURES[base["model_type"]].defaults, "rope_parameters", "layer_types", "use_sliding_window"]
    config = base | {data.draw(st.sampled_from(keys)): data.draw(ANYTHING) for _ in range(2)}
    with contextlib.suppress(ConfigError):
        assert isinstance(spec_from_huggingface(config), ModelConfig)
