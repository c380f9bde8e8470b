"""Small transformers models by their ``config.json``: every family, and every part that a family may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GPT2 = {"model_type": "gpt2", "vocab_size": 97, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 4}
LLAMA = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}  # fmt: skip
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 2}


def scaled(**parameters: Any) -> dict[str, Any]:
    return LLAMA | {"rope_parameters": {"rope_theta": 1000.0, **parameters}}


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 11}
QWEN2 = LLAMA | {"model_type": "qwen2"}
EXPERTS = {key: value for key, value in LLAMA.items() if key != "intermediate_size"}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = EXPERTS | {
    "model_type": "qwen3_moe", "moe_intermediate_size": 40, "num_experts": 5, "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}  # fmt: skip
PHI3 = LLAMA | {"model_type": "phi3", "pad_token_id": None}
GEMMA = LLAMA | {"model_type": "gemma", "head_dim": 16, "tie_word_embeddings": True}
GEMMA3 = {key: value for key, value in GEMMA.items() if key != "rope_parameters"} | {
    "model_type": "gemma3_text", "sliding_window": 9, "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
NEMOTRON_H = {
    "model_type": "nemotron_h", "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 64, "mamba_num_heads": 6, "mamba_head_dim": 8,
    "ssm_state_size": 7, "n_groups": 2, "chunk_size": 16, "pad_token_id": None,
    "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention", "mlp"],
}  # fmt: skip
CASES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": GPT2,
    "gpt2-untied": GPT2 | {"tie_word_embeddings": False},
    "gpt2-gelu-narrow-mlp": GPT2 | {"activation_function": "gelu", "n_inner": 40},
    "gpt2-relu": GPT2 | {"activation_function": "relu"},
    "gpt2-silu": GPT2 | {"activation_function": "silu", "layer_norm_epsilon": 1e-2},
    "llama-grouped-query": LLAMA,
    "llama-tied": LLAMA | {"tie_word_embeddings": True},
    "llama-multi-head": LLAMA | {"num_key_value_heads": 4},
    "llama-multi-query": LLAMA | {"num_key_value_heads": 1, "rms_norm_eps": 1e-2},
    "llama-biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama-mlp-bias": LLAMA | {"mlp_bias": True},
    "llama-wide-heads": LLAMA | {"head_dim": 20},
    "llama-gelu": LLAMA | {"hidden_act": "gelu"},
    "llama-rope-llama3": scaled(**LLAMA3) | {"head_dim": 20},
    "llama-rope-linear": scaled(rope_type="linear", factor=2.5),
    "llama-rope-dynamic": scaled(rope_type="dynamic", factor=2.0),
    "llama-rope-yarn": scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    "mistral": MISTRAL,
    "mistral-no-window": MISTRAL | {"sliding_window": None},
    "mistral-yarn": MISTRAL | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 2.0}},
    "mixtral": MIXTRAL,
    "mixtral-window": MIXTRAL | {"sliding_window": 11, "num_experts_per_tok": 1, "tie_word_embeddings": True},
    "qwen3-moe": QWEN3_MOE,
    "qwen3-moe-unnormalised": QWEN3_MOE | {"norm_topk_prob": False, "head_dim": 16, "num_attention_heads": 6},
    "qwen2": QWEN2,
    "qwen2-windows": QWEN2 | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "phi3": PHI3,
    "phi3-window": PHI3 | {"sliding_window": 12},
    "phi3-partial": PHI3 | {"partial_rotary_factor": 0.5, "sliding_window": 12},
    "olmo2": LLAMA | {"model_type": "olmo2"},
    "olmo2-biases": LLAMA | {"model_type": "olmo2", "attention_bias": True, "num_key_value_heads": 4},
    "gemma": GEMMA | {"tie_word_embeddings": False},
    "gemma3": GEMMA3,
    "gemma3-scaled": GEMMA3 | {
        "tie_word_embeddings": False, "num_attention_heads": 2, "num_key_value_heads": 1,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "nemotron-h": NEMOTRON_H,
    "nemotron-h-biases": NEMOTRON_H | {
        "use_bias": True, "mlp_bias": True, "use_conv_bias": False, "mlp_hidden_act": "silu", "n_groups": 3,
        "head_dim": 16, "conv_kernel": 3, "time_step_min": 0.0005,
    },
    "qwen3": QWEN3,
    "qwen3-windows": QWEN3 | {
        "use_sliding_window": True, "sliding_window": 10,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3-tied": QWEN3 | {"tie_word_embeddings": True},
    "qwen3-attention-bias": QWEN3 | {"attention_bias": True},
    "qwen3-multi-head": QWEN3 | {"num_key_value_heads": 6, "num_attention_heads": 6},
}  # fmt: skip
"""Windows are shorter than the sequences of the tests."""
