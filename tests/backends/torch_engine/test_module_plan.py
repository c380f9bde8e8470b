"""Models of transformers that tensor parallelism divides by their own plan, and those that it refuses.

That divided models compute what one process computes is tested in ``tests/ranks``.
"""

from __future__ import annotations

from typing import Any

import pytest

from backends.torch_engine.transformers_models import MODELS, SHARED
from small_configurations import configuration
from vorox.backends.torch_engine.foreign import huggingface_model
from vorox.backends.torch_engine.parallel.module_plan import tensor_plan
from vorox.backends.torch_engine.ranks.tensor_parallel import TensorGroup
from vorox.core.errors import ConfigError
from vorox.models.divisibility import check_divisible
from vorox.models.huggingface.spec import HuggingFaceSpec

pytestmark = [pytest.mark.torch, pytest.mark.hf]

GROUP: Any = TensorGroup(1, 2, None)  # pyright: ignore[reportArgumentType] - nothing is sent


def spec_of(name: str, **values: Any) -> HuggingFaceSpec:
    return huggingface_model.describe({**SHARED, **MODELS[name], **values, "model_type": name}, revision=None)[0]


def shares(spec: HuggingFaceSpec) -> dict[str, tuple[int, ...]]:
    """The shapes of rank 1 of 2."""
    plan = tensor_plan(huggingface_model.build(spec.config))
    return {row.name: row.shape for row in plan.share(spec.parameters, GROUP)}


def test_layers_are_divided_by_the_plan_and_the_vocabulary_unequally() -> None:
    found = shares(spec_of("qwen3", tie_word_embeddings=False))
    layer = "model.layers.0."
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"] == (48, 32)  # of 97 rows
    assert found[f"{layer}self_attn.q_proj.weight"] == (16, 32)
    assert found[f"{layer}self_attn.k_proj.weight"] == (8, 32)
    assert found[f"{layer}self_attn.q_norm.weight"] == (8,)
    assert found[f"{layer}self_attn.o_proj.weight"] == (32, 16)
    assert found[f"{layer}mlp.down_proj.weight"] == (32, 24)
    assert found[f"{layer}input_layernorm.weight"] == (32,)


def test_what_the_plan_gathers_at_once_and_tied_scaled_embeddings_stay_whole() -> None:
    found = shares(spec_of("olmo2"))
    assert found["model.layers.0.self_attn.q_proj.weight"] == (32, 32)
    assert found["model.layers.0.mlp.up_proj.weight"] == (24, 32)
    assert shares(spec_of("gemma3_text", tie_word_embeddings=True))["model.embed_tokens.weight"] == (97, 32)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("gpt2", {}, "GPT2LMHeadModel has no tensor-parallel plan"),
        ("phi3", {}, "Phi3ForCausalLM has no tensor-parallel plan"),
        ("mixtral", {}, "The tensor-parallel plan of MixtralForCausalLM has model.layers.0.mlp.experts"),
        ("llama", {"intermediate_size": 47}, "mlp.gate_proj.weight has 47 rows, which 2 ranks cannot divide"),
    ],
)
def test_models_without_a_plan_that_divides_are_refused(name: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shares(spec_of(name, **values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads = 1 of the llama model is not divisible"),
        ({"attention_dropout": 0.1}, "attention_dropout of config.json = 0.1"),
    ],
)
def test_settings_of_the_model_that_are_not_supported_are_refused(values: dict[str, Any], message: str) -> None:
    model = {"kind": "huggingface", "name_or_path": "somewhere"}
    config = configuration(parallel__tensor_parallel_size=2)
    config = config.model_copy(update={"model": config.model.model_copy(update=model)})
    with pytest.raises(ConfigError, match=message):
        check_divisible(config, spec_of("llama", **values))
    alone = config.parallel.model_copy(update={"tensor_parallel_size": 1})
    check_divisible(config.model_copy(update={"parallel": alone}), spec_of("llama", **values))
