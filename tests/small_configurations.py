"""Tiny models and batches that the engines are tested with; no framework is imported here.

Shape legend: A micro-batches, B rows, T positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from training_device import DEVICE
from vorox.core.batch import IGNORED_LABEL, Batch, DataCursor
from vorox.core.schema import RunConfig

VOCAB = 61
POSITIONS = 24
LR = 3e-3
SMOOTH_EPS = 1e-5
"""An epsilon of AdamW for comparing whole trainings. Where a gradient nearly cancels, the first step divides it by
epsilon: rounding of 1e-9 moves the weight by a tenth of a step with the usual 1e-8, and by a ten-thousandth with this
one. Typical gradients of these models are 1e-4 to 1e-2."""

GPT2: dict[str, Any] = {
    "family": "gpt2", "positions": "learned", "norm": "layer_norm", "norm_bias": True, "activation": "gelu_tanh",
    "attention_bias": True, "mlp_bias": True,
}  # fmt: skip
LLAMA: dict[str, Any] = {"family": "llama"}
QWEN3: dict[str, Any] = {"family": "qwen3", "qk_norm": True, "head_dim": 12, "num_kv_heads": 2}
SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 40}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2 exact gelu, untied": GPT2 | {"activation": "gelu", "tie_embeddings": False},
    "gpt2 relu, grouped": GPT2 | {"activation": "relu", "num_kv_heads": 2},
    "gpt2 silu, rotary": GPT2 | {"activation": "silu", "positions": "rope"},
    "gpt2 no biases": GPT2 | {"norm_bias": False, "attention_bias": False, "mlp_bias": False},
    "llama": LLAMA,
    "llama grouped, untied": LLAMA | {"num_kv_heads": 2, "tie_embeddings": False},
    "llama multi-query, biases": LLAMA | {"num_kv_heads": 1, "attention_bias": True, "mlp_bias": True},
    "llama geglu, learned positions": LLAMA | {"activation": "geglu", "positions": "learned"},
    "llama layer norm": LLAMA | {"norm": "layer_norm"},
    "qwen3": QWEN3,
    "qwen3 learned positions": QWEN3 | {"positions": "learned"},
    "mistral, scaled positions": LLAMA
    | {
        "sliding_window_tokens": 5,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
    },
    "qwen2, some windows": LLAMA
    | {
        "attention_bias": "qkv",
        "sliding_window_tokens": 6,
        "layer_types": ("full_attention", "sliding_attention"),
    },
    "gemma3": QWEN3
    | {
        "activation": "geglu_tanh",
        "norm_placement": "both",
        "norm_unit_offset": True,
        "scale_embeddings": True,
        "sliding_window_tokens": 6,
        "layer_types": ("sliding_attention", "full_attention"),
        "rope_theta": 500.0,
        "sliding_rope_theta": 100.0,
        "query_pre_attn_scalar": 20,
    },
    "no positions, relu2": LLAMA | {"positions": "none", "activation": "relu2"},
    "phi3": LLAMA | {"rotary_fraction": 0.5},
    "olmo2": LLAMA | {"qk_norm": "full_width", "norm_placement": "post", "num_kv_heads": 2},
    "mixtral": LLAMA | {"num_kv_heads": 2, "tie_embeddings": False, "num_experts": 4},
    "qwen3 experts": QWEN3 | {"num_experts": 5, "experts_per_token": 3, "normalize_expert_weights": False},
    "experts without gate": LLAMA
    | {
        "activation": "relu",
        "num_experts": 3,
        "experts_per_token": 1,
        "normalize_expert_weights": False,
        "norm_placement": "both",
    },
}
HYBRID: dict[str, Any] = {
    "layer_pattern": "M*-M", "num_layers": 5, "positions": "none", "activation": "relu2", "num_kv_heads": 2,
    "mamba_num_heads": 6, "mamba_head_dim": 8, "mamba_state_size": 7, "mamba_num_groups": 2, "mamba_chunk_tokens": 5,
    "tie_embeddings": False,
}  # fmt: skip
"""As Nemotron-H, in PyTorch: the pattern repeats, chunks do not divide rows."""
PATTERNS: dict[str, dict[str, Any]] = {
    "hybrid": HYBRID,
    "hybrid, biases": HYBRID | {"mamba_bias": True, "mamba_conv_bias": False, "mlp_bias": True, "norm": "layer_norm"},
    "hybrid, rotary, gated": HYBRID | {
        "layer_pattern": "-M*", "positions": "rope", "activation": "swiglu", "sliding_window_tokens": 6,
        "tie_embeddings": True, "mamba_num_groups": 1, "mamba_conv_tokens": 3,
    },
    "mamba only": HYBRID | {"layer_pattern": "M", "num_layers": 2},
    "one mixer per layer": HYBRID | {"layer_pattern": "*-", "num_layers": 4},
}  # fmt: skip


def configuration(model: dict[str, Any] | None = None, **overrides: Any) -> RunConfig:
    """A run of tiny rows; ``section__key=value`` sets any other key."""
    sections: dict[str, Any] = {
        "model": SHAPE | (LLAMA if model is None else model),
        "data": {"sources": [{"name": "text", "format": "txt"}], "sequence_length_tokens": POSITIONS},
        "train": {"num_steps": 10, "global_batch_sequences": 8, "micro_batch_sequences": 8},
        "optimizer": {"lr": LR},
        "runtime": {"device": DEVICE, "num_threads": 1},
    }
    for name, value in overrides.items():
        section, _, key = name.partition("__")
        if key:
            sections.setdefault(section, {})[key] = value
        else:
            sections[section] = value
    return RunConfig.model_validate(sections)


def random_rows(number: int, seed: int = 0, positions: int = POSITIONS) -> np.ndarray:
    """Token ids, one longer than the positions."""
    return np.random.default_rng([7, seed]).integers(0, VOCAB, (number, positions + 1), np.int32)


def batch_of(rows: np.ndarray, micro_batches: int = 1, *, step: int = 0, keep: np.ndarray | None = None) -> Batch:
    """Whole rows; ``keep`` (bool, ``[rows, T]``) says which positions are trained on."""
    labels = rows[:, 1:].copy()
    if keep is not None:
        labels[~keep] = IGNORED_LABEL
    shape = (micro_batches, len(rows) // micro_batches, rows.shape[1] - 1)
    return Batch(
        step=step,
        tokens_ABT=np.ascontiguousarray(rows[:, :-1].reshape(shape)),
        labels_ABT=np.ascontiguousarray(labels.reshape(shape)),
        segment_ids_ABT=None,
        position_ids_ABT=None,
        row_digests_AB=np.zeros(shape[:2], np.uint64),
        num_target_tokens=int((labels != IGNORED_LABEL).sum()),
        cursor_after=DataCursor("", 0, step + 1, 0, 0),
    )


def randomise(engine: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights under which nothing is near its initial value; returns them."""
    generator = np.random.default_rng(seed)
    weights = {
        name: (
            generator.normal(0, 0.25, array.shape)
            if array.ndim == 2
            else generator.normal(0 if name.endswith("bias") else 1, 0.3, array.shape)
        ).astype(np.float32)
        for name, array in engine.export_weights()
    }
    engine.import_weights(weights.items())
    return weights
