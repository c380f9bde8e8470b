"""Rotary frequencies against those of transformers, which keeps its formulas in ``modeling_rope_utils``.

Frequencies within 1e-5, relative: transformers computes the ramp of yarn in fp32.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vorox.models.decoder.rotary import scale_frequencies
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.models.huggingface.config import huggingface_config, spec_from_huggingface

pytestmark = [pytest.mark.hf, pytest.mark.torch]
LLAMA_32 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
SCALINGS: dict[str, dict[str, Any]] = {
    "llama 3.2": LLAMA_32,
    "llama3, other bounds": LLAMA_32 | {"factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn, no rounding": {
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "truncate": False,
        "beta_fast": 20.0, "beta_slow": 2.0,
    },
    "yarn, own factor": {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048, "attention_factor": 0.7
    },
    "yarn, factor below one": {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 2048},
}  # fmt: skip


def config_of(scaling: dict[str, Any], theta: float, head_dim: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "vocab_size": 97, "hidden_size": 4 * head_dim, "intermediate_size": 80,
        "head_dim": head_dim,
        "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 131072, "rope_theta": theta,
        "rope_scaling": scaling,
    }  # fmt: skip


def frequencies_of(spec: DecoderSpec) -> tuple[np.ndarray, float]:
    exponents = np.arange(0, spec.rotary_dim, 2, dtype=np.float32) / np.float32(spec.rotary_dim)
    return scale_frequencies((1 / spec.rope_theta**exponents).astype(np.float32), spec.rope_theta, spec.rope_scaling)


@pytest.mark.parametrize("theta", [1_000.0, 500_000.0])
@pytest.mark.parametrize("head_dim", [6, 64, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name: str, head_dim: int, theta: float) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = config_of(SCALINGS[name], theta, head_dim)
    spec = decoder_spec(spec_from_huggingface(fields), tokenizer_vocab_size=2, sequence_length_tokens=2)
    written = huggingface_config(spec, end_of_text_id=1)
    written["rope_parameters"], old = None, dict(written)  # readers of rope_scaling, and of rope_parameters
    old["rope_scaling"] = old["rope_theta"] = None
    for given in (fields, written, old):
        copied = {key: value for key, value in deepcopy(given).items() if value is not None}
        config = AutoConfig.for_model(copied.pop("model_type"), **copied)
        theirs, factor = ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]](config, "cpu")
        ours, our_factor = frequencies_of(spec)
        assert np.allclose(ours, theirs.numpy(), rtol=1e-5, atol=0)
        assert our_factor == pytest.approx(factor, rel=1e-12)
    if (head_dim, theta) == (128, 500_000.0):
        changes = not np.array_equal(ours, frequencies_of(replace(spec, rope_scaling=None))[0])
        assert changes == (name != "dynamic"), "up to the longest row, dynamic scaling does nothing"
