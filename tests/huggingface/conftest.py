"""Small random models of transformers, scaled so that logits are far from trivial, and a slow, obvious numpy decoder.

Nothing touches the network: models are made from configurations, and ``HF_HUB_OFFLINE`` is set before the import.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

GPT2 = {"model_type": "gpt2", "vocab_size": 97, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 4}
LLAMA = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}  # fmt: skip
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 2}
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
    "qwen3": QWEN3,
    "qwen3-tied": QWEN3 | {"tie_word_embeddings": True},
    "qwen3-attention-bias": QWEN3 | {"attention_bias": True},
    "qwen3-multi-head": QWEN3 | {"num_key_value_heads": 6, "num_attention_heads": 6},
}


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A config.json, with token ids that lie inside the vocabulary."""
    return dict(CASES[request.param]) | {"bos_token_id": 1, "eos_token_id": 1}


@pytest.fixture
def random_model() -> Callable[..., Any]:
    """(config dict, seed) to a transformers model with random weights, biases and norms, in evaluation mode."""

    def make(config: Mapping[str, Any], seed: int = 0) -> Any:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        fields = dict(config)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                matrix = parameter.ndim == 2
                # Wide enough that attention is far from uniform and logits of different tokens lie apart.
                parameter.copy_(noise * 0.2 if matrix else 1 + noise * 0.3 if parameter.mean() > 0.5 else noise * 0.3)
        return model.float().eval()

    return make


def _norm(spec: Any, x: np.ndarray, weights: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if spec.norm == "layer_norm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.norm_eps)
    return x * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0)


def _activation(name: str, x: np.ndarray) -> np.ndarray:
    if name == "relu":
        return np.maximum(x, 0)
    if name in ("silu", "swiglu"):
        return x / (1 + np.exp(-x))
    if name == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert name in ("gelu", "geglu")
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def _rotate(x_BTNH: np.ndarray, theta: float) -> np.ndarray:
    width = x_BTNH.shape[-1]
    half = width // 2
    angles_TH = np.outer(np.arange(x_BTNH.shape[1]), theta ** (-2 * np.arange(half) / width))
    turn_TH = np.exp(1j * angles_TH)[None, :, None, :]
    turned = (x_BTNH[..., :half] + 1j * x_BTNH[..., half:]) * turn_TH
    return np.concatenate([turned.real, turned.imag], axis=-1)


def numpy_logits(spec: Any, parameters: Mapping[str, np.ndarray], tokens_BT: np.ndarray) -> np.ndarray:
    """The decoder in float64, as the parameter table of ``models/spec.py`` means it."""
    weights = {name: array.astype(np.float64) for name, array in parameters.items()}

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    batch, length = tokens_BT.shape
    x = weights["embedding.weight"][tokens_BT]
    if spec.positions == "learned":
        x = x + weights["position_embedding.weight"][:length]
    future = np.triu(np.ones((length, length), bool), 1)
    for index in range(spec.num_layers):
        block = f"blocks.{index}"
        h = _norm(spec, x, weights, f"{block}.attention_norm")
        heads = [
            linear(h, f"{block}.attention.{part}").reshape(batch, length, -1, spec.head_dim)
            for part in ("query", "key", "value")
        ]
        for place, part in enumerate(("query", "key") if spec.qk_norm else ()):
            square = (heads[place] ** 2).mean(-1, keepdims=True)
            scale = weights[f"{block}.attention.{part}_norm.weight"]
            heads[place] = heads[place] / np.sqrt(square + spec.norm_eps) * scale
        if spec.positions == "rope":
            heads[0], heads[1] = (_rotate(head, spec.rope_theta) for head in heads[:2])
        groups = spec.num_heads // spec.num_kv_heads
        key, value = (np.repeat(head, groups, axis=2) for head in heads[1:])
        scores = np.einsum("bqnh,bknh->bnqk", heads[0], key) / math.sqrt(spec.head_dim)
        scores = np.where(future, -np.inf, scores)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("bnqk,bknh->bqnh", scores / scores.sum(-1, keepdims=True), value)
        x = x + linear(mixed.reshape(batch, length, -1), f"{block}.attention.output")
        h = _norm(spec, x, weights, f"{block}.mlp_norm")
        inner = linear(h, f"{block}.mlp.up")
        if f"{block}.mlp.gate.weight" in weights:
            inner = _activation(spec.activation, linear(h, f"{block}.mlp.gate")) * inner
        else:
            inner = _activation(spec.activation, inner)
        x = x + linear(inner, f"{block}.mlp.down")
    head = weights.get("head.weight", weights["embedding.weight"])
    return _norm(spec, x, weights, "final_norm") @ head.T


@pytest.fixture
def reference_logits() -> Callable[..., np.ndarray]:
    return numpy_logits
