"""Small random models of transformers, scaled so that logits are far from trivial.

Nothing touches the network: models are made from configurations, and the hub's client is offline while a test runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def hub_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """For these tests only: others of the same process talk to a hub on this machine."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


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
