"""Names in both directions, bit for bit, and every disorder refused. No framework; numbers are in tests/huggingface."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.schema.model import ModelConfig
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.models.huggingface.families import huggingface_family, require_family
from vorox.models.huggingface.weights import from_huggingface, huggingface_entries, huggingface_tensors, to_huggingface

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 12, "num_heads": 3, "vocab_size": 11, "intermediate_size": 20}
GPT2 = SMALL | {
    "family": "gpt2", "positions": "learned", "norm": "layer_norm", "norm_bias": True, "activation": "gelu_tanh",
    "attention_bias": True, "mlp_bias": True, "max_positions_tokens": 9,
}  # fmt: skip
LLAMA = SMALL | {"family": "llama", "head_dim": 4}
QWEN3 = SMALL | {"family": "qwen3", "head_dim": 6, "num_kv_heads": 1, "qk_norm": True}


def spec_of(fields: dict[str, Any]) -> DecoderSpec:
    return decoder_spec(ModelConfig(**fields), tokenizer_vocab_size=11, sequence_length_tokens=9)


def random_weights(spec: DecoderSpec) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    return {part.name: generator.normal(size=part.shape).astype(np.float32) for part in spec.parameters}


VARIANTS = {
    "gpt2": GPT2,
    "gpt2-untied": GPT2 | {"tie_embeddings": False},
    "llama": LLAMA,
    "llama-untied": LLAMA | {"tie_embeddings": False},
    "llama-biases": LLAMA | {"attention_bias": True, "mlp_bias": True, "num_kv_heads": 1},
    "qwen3": QWEN3,
    "qwen3-untied": QWEN3 | {"tie_embeddings": False, "attention_bias": True},
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_there_and_back_is_the_same_bits(fields: dict[str, Any]) -> None:
    spec = spec_of(fields)
    weights = random_weights(spec)
    out = list(to_huggingface(spec, weights.items()))
    assert [(name, array.shape) for name, array in out] == [
        (entry.name, entry.shape) for entry in huggingface_entries(spec)
    ]
    assert all(array.flags.c_contiguous and array.dtype == np.float32 for _, array in out)
    for order in (out, out[::-1]):
        back = dict(from_huggingface(spec, order))
        assert back.keys() == weights.keys()
        assert all(back[name].tobytes() == weights[name].tobytes() for name in weights)


def test_gpt2_is_fused_and_transposed() -> None:
    spec = spec_of(GPT2)
    weights = random_weights(spec)
    out = dict(to_huggingface(spec, weights.items()))
    query, key, value = (weights[f"blocks.1.attention.{part}.weight"] for part in ("query", "key", "value"))
    fused = out["transformer.h.1.attn.c_attn.weight"]
    assert fused.shape == (12, 36)
    assert np.array_equal(fused[:, :12], query.T)
    assert np.array_equal(fused[:, 12:24], key.T)
    assert np.array_equal(fused[:, 24:], value.T)
    assert np.array_equal(out["transformer.h.0.mlp.c_fc.weight"], weights["blocks.0.mlp.up.weight"].T)
    assert np.array_equal(out["transformer.wpe.weight"], weights["position_embedding.weight"])
    assert "lm_head.weight" not in out


def test_at_most_one_fused_tensor_is_held() -> None:
    spec = spec_of(GPT2 | {"num_layers": 5})
    alive = 0

    def stream() -> Iterator[tuple[str, np.ndarray]]:
        nonlocal alive
        for name, array in random_weights(spec).items():
            alive += 1
            yield name, array

    waiting = []
    for _, _ in to_huggingface(spec, stream()):
        waiting.append(alive)
        alive = 0
    assert sum(waiting) == len(spec.parameters)
    assert max(waiting) <= 6, "query, key and value with their biases"


def test_names_without_the_model_in_front_and_old_constants() -> None:
    """The gpt2 files of the hub have no ``transformer.`` and carry their causal masks."""
    for fields, prefix, constants in [
        (GPT2, "transformer.", ["h.0.attn.bias", "h.1.attn.masked_bias", "transformer.h.1.attn.bias"]),
        (LLAMA, "model.", ["layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]),
    ]:
        spec = spec_of(fields)
        weights = random_weights(spec)
        stored = [(name.removeprefix(prefix), array) for name, array in to_huggingface(spec, weights.items())]
        stored += [(name, np.zeros((1, 1, 9, 9), np.uint8)) for name in constants]
        assert dict(from_huggingface(spec, stored)).keys() == weights.keys()


def test_a_stored_tied_head_must_be_the_embedding() -> None:
    spec = spec_of(LLAMA)
    stored = dict(to_huggingface(spec, random_weights(spec).items()))
    embedding = stored["model.embed_tokens.weight"]
    for head_first in (False, True):
        head = {"lm_head.weight": embedding.copy()}
        both = head | stored if head_first else stored | head
        assert dict(from_huggingface(spec, both.items())).keys() == random_weights(spec).keys()
        head["lm_head.weight"][3, 4] = np.nextafter(embedding[3, 4], np.float32(9))
        both = head | stored if head_first else stored | head
        with pytest.raises(CheckpointError, match="differs from the embedding"):
            dict(from_huggingface(spec, both.items()))


def test_disorder_is_refused_on_the_way_out() -> None:
    spec = spec_of(GPT2)
    weights = list(random_weights(spec).items())
    for broken, message in [
        (weights[:-1], "final_norm.bias is missing"),
        ([*weights, ("blocks.2.mlp.up.weight", weights[0][1])], "blocks.2.mlp.up.weight is unknown"),
        ([weights[0], weights[0]], "embedding.weight is unknown or duplicated"),
        ([("embedding.weight", np.zeros((12, 11), np.float32))], r"shape \(12, 11\).*\(11, 12\)"),
        ([(name, array) for name, array in weights if "key.bias" not in name], "key.bias is missing"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            list(to_huggingface(spec, broken))


def test_disorder_is_refused_on_the_way_in() -> None:
    spec = spec_of(LLAMA)
    stored = list(to_huggingface(spec, random_weights(spec).items()))
    name, array = stored[2]
    for broken, message in [
        (stored[:-1], "model.norm.weight is missing"),
        ([*stored, ("model.layers.7.mlp.up_proj.weight", array)], "layers.7.* is not part of this llama"),
        ([*stored, (name, array)], f"{name} is duplicated"),
        ([*stored, (name.removeprefix("model."), array)], f"{name} is duplicated"),
        ([(name, array[:, :-1])], "has shape"),
        ([*stored, ("model.layers.0.self_attn.q_proj.bias", array)], "has no such bias"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            list(from_huggingface(spec, broken))


def test_the_family_follows_what_is_computed_not_the_label() -> None:
    assert huggingface_family(spec_of(LLAMA | {"family": "gpt2"})) == "llama"
    assert huggingface_family(spec_of(GPT2 | {"family": "qwen3"})) == "gpt2"
    assert huggingface_family(spec_of(LLAMA | {"qk_norm": True})) == "qwen3"
    assert huggingface_family(spec_of(LLAMA | {"dropout_fraction": 0.1, "activation": "geglu"})) == "llama"
    for fields in [
        LLAMA | {"positions": "learned"},
        LLAMA | {"norm": "layer_norm"},
        LLAMA | {"activation": "silu"},
        QWEN3 | {"mlp_bias": True},
        GPT2 | {"norm_bias": False},
        GPT2 | {"attention_bias": False},
        GPT2 | {"mlp_bias": False},
        GPT2 | {"activation": "swiglu"},
        GPT2 | {"num_kv_heads": 1},
        GPT2 | {"head_dim": 8},
        GPT2 | {"qk_norm": True},
        GPT2 | {"positions": "rope"},
        GPT2 | {"norm": "rms_norm", "norm_bias": False},
        SMALL | {"num_heads": 5, "head_dim": 4},
    ]:
        spec = spec_of(fields)
        assert huggingface_family(spec) is None, fields
        with pytest.raises(ConfigError, match="no architecture"):
            require_family(spec)
        with pytest.raises(ConfigError, match=f"positions = {spec.positions}"):
            huggingface_tensors(spec)


def first_family(spec: DecoderSpec) -> str | None:
    """The rule of the first version, which decides the names in its checkpoints."""
    plain = spec.head_dim * spec.num_heads == spec.hidden_size and spec.num_kv_heads == spec.num_heads
    if spec.positions == "learned":
        layers = spec.norm == "layer_norm" and spec.norm_bias and spec.attention_bias and spec.mlp_bias
        return "gpt2" if plain and layers and not spec.is_gated and not spec.qk_norm else None
    if spec.norm != "rms_norm" or not spec.is_gated:
        return None
    if spec.qk_norm:
        return None if spec.mlp_bias else "qwen3"
    return "llama" if spec.hidden_size % spec.num_heads == 0 else None


def test_the_family_of_an_earlier_checkpoint_never_changes() -> None:
    booleans = (False, True)
    found = set()
    for positions, norm, activation, heads, kv_heads in product(
        ("rope", "learned"), ("rms_norm", "layer_norm"), ("swiglu", "geglu", "relu"), (3, 5), (1, None)
    ):
        for norm_bias, qk_norm, attention_bias, mlp_bias in product(booleans, repeat=4):
            if norm == "rms_norm" and norm_bias:
                continue
            fields = {
                "positions": positions, "norm": norm, "activation": activation, "num_heads": heads, "head_dim": 4,
                "num_kv_heads": kv_heads, "norm_bias": norm_bias, "qk_norm": qk_norm, "attention_bias": attention_bias,
                "mlp_bias": mlp_bias,
            }  # fmt: skip
            spec = spec_of(SMALL | fields)
            assert huggingface_family(spec) == first_family(spec), fields
            found.add(first_family(spec))
    assert found == {"gpt2", "llama", "qwen3", None}


def test_fused_projections_are_read_into_separate_ones() -> None:
    """Phi-3 without windows and with whole heads is a Llama; its files have fused projections."""
    spec = spec_of(LLAMA)
    fused = replace(spec, rotary_fraction=0.5)
    assert (huggingface_family(spec), huggingface_family(fused)) == ("llama", "phi3")
    weights = random_weights(spec)
    stored = dict(to_huggingface(fused, weights.items()))
    assert "model.layers.0.self_attn.qkv_proj.weight" in stored
    found = dict(from_huggingface(spec, stored.items()))
    assert found.keys() == weights.keys()
    assert all(np.array_equal(found[name], array) for name, array in weights.items())
    separate = dict(to_huggingface(spec, weights.items()))
    for name, array in separate.items():
        if ".q_proj." in name:
            with pytest.raises(CheckpointError, match="duplicated"):
                dict(from_huggingface(spec, [*stored.items(), (name, array)]))
    del stored["model.layers.1.mlp.gate_up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.gate_proj\.weight is missing"):
        dict(from_huggingface(spec, stored.items()))
