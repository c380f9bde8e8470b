"""The names mean what transformers means: its weights under our names compute its logits, and ours compute under its.

The oracle on our side is a float64 numpy decoder written from the parameter table, not an engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference_decoder import numpy_logits
from vorox.core.files.staged_directory import StagedDirectory
from vorox.models.arrays.weights_file import open_directory, write_weights
from vorox.models.decoder.spec import decoder_spec
from vorox.models.huggingface.config import huggingface_config, spec_from_huggingface
from vorox.models.huggingface.families import ARCHITECTURES, huggingface_family
from vorox.models.huggingface.weights import from_huggingface, huggingface_entries, to_huggingface

pytestmark = [pytest.mark.hf, pytest.mark.torch]
TOLERANCE = 1e-4


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.inference_mode():
        return model(input_ids=torch.from_numpy(tokens)).logits.float().numpy()


def random_tokens(vocab_size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, size=(3, 41))


def test_a_transformers_model_comes_in(case: dict[str, Any], random_model: Callable[..., Any], tmp_path: Path) -> None:
    model = random_model(case, seed=1)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    spec = decoder_spec(spec_from_huggingface(config), tokenizer_vocab_size=7, sequence_length_tokens=16)
    stored = (pair for file in open_directory(tmp_path) for pair in file)
    weights = dict(from_huggingface(spec, stored))
    assert [parameter.name for parameter in spec.parameters if parameter.name not in weights] == []
    assert sum(array.size for array in weights.values()) == model.num_parameters()

    tokens = random_tokens(97, seed=2)
    theirs, ours = logits_of(model, tokens), numpy_logits(spec, weights, tokens)
    assert theirs.std() > 0.5, "the comparison would be trivial"
    assert np.abs(theirs - ours).max() <= TOLERANCE


EXPORTED_AS = {"mistral-no-window": "llama", "phi3": "llama", "phi3-window": "mistral"}
"""Cases that an earlier architecture computes as well."""


def test_our_model_goes_out(case: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    from transformers import AutoModelForCausalLM

    spec = decoder_spec(spec_from_huggingface(case), tokenizer_vocab_size=7, sequence_length_tokens=16)
    assert huggingface_family(spec) == EXPORTED_AS.get(request.node.callspec.params["case"], case["model_type"])
    generator = np.random.default_rng(5)
    weights = {
        parameter.name: (
            generator.normal(0, 0.2, parameter.shape)
            if len(parameter.shape) == 2
            else generator.normal(0 if parameter.name.endswith("bias") else 1, 0.3, parameter.shape)
        ).astype(np.float32)
        for parameter in spec.parameters
    }
    with StagedDirectory(tmp_path / "model") as directory:
        with directory.open("model.safetensors") as writer:
            write_weights(writer, huggingface_entries(spec), to_huggingface(spec, weights.items()))
        config = huggingface_config(spec, end_of_text_id=1)
        directory.write("config.json", json.dumps(config).encode())
        directory.write("generation_config.json", b'{"eos_token_id": 1}')
        directory.commit({})
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values()), report
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 1
    assert model.dtype.is_floating_point
    assert model.dtype.itemsize == 4

    tokens = random_tokens(97, seed=6)
    theirs, ours = logits_of(model.eval(), tokens), numpy_logits(spec, weights, tokens)
    assert theirs.std() > 0.5, "the comparison would be trivial"
    assert np.abs(theirs - ours).max() <= TOLERANCE
    assert spec_from_huggingface(model.config.to_dict()) == spec_from_huggingface(config)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_our_defaults_are_those_of_transformers(family: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family)
    derived = {"head_dim", "num_key_value_heads"}  # some architectures derive them after the defaults
    for key, value in ARCHITECTURES[family].defaults.items():
        if not (key in derived and value is None):
            assert getattr(config, key) == value, key
    layers = {"hybrid_override_pattern": "M-*-"} if family == "nemotron_h" else {}  # by default it has experts
    assert spec_from_huggingface({"model_type": family, "tie_word_embeddings": config.tie_word_embeddings} | layers)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_setting_of_the_family_is_understood(family: str) -> None:
    """A new version of transformers with a new knob fails here, so that nobody imports past it in silence."""
    from dataclasses import fields

    from transformers import AutoConfig, PreTrainedConfig

    own = {field.name for field in fields(type(AutoConfig.for_model(family)))} - {
        field.name for field in fields(PreTrainedConfig)
    }
    without_effect = {
        "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "pretraining_tp", "reorder_and_upcast_attn",
        "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    }  # fmt: skip
    elsewhere = {"rope_parameters", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
    elsewhere |= {"original_max_position_embeddings"} if family == "phi3" else set()  # of longrope, which is refused
    if family in ("mixtral", "qwen3_moe"):  # of training, and the width of layers without experts, which are refused
        elsewhere |= {"router_aux_loss_coef", "output_router_logits", "intermediate_size"}
    if family == "nemotron_h":  # of experts, which are refused; read by no layer; of initial values
        elsewhere |= {
            name for name in own if "moe" in name or "expert" in name or name.startswith(("topk", "norm_topk"))
        }
        elsewhere |= {"layers_block_type", "n_group", "routed_scaling_factor", "mtp_layers_block_type"}
        without_effect |= {
            "num_logits_to_keep", "attention_bias", "hidden_dropout", "use_mamba_kernels", "expand", "time_step_limit",
            "time_step_floor", "mamba_proj_bias", "mamba_ssm_cache_dtype", "residual_in_fp32", "output_router_logits",
            "rescale_prenorm_residual",
        }  # fmt: skip
    architecture = ARCHITECTURES[family]
    known = {*architecture.defaults, *architecture.only, *without_effect, *elsewhere}
    assert own <= known, sorted(own - known)
