"""Resolving a configuration: defaults filled in, contradictions refused, and a table that published counts confirm."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.schema.model import ModelConfig
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.models.stored.spec import spec_from_json

GPT2: dict[str, Any] = {
    "num_layers": 12, "hidden_size": 768, "num_heads": 12, "positions": "learned", "norm": "layer_norm",
    "norm_bias": True, "attention_bias": True, "mlp_bias": True, "activation": "gelu_tanh",
}  # fmt: skip


def resolve(vocab: int = 100, length: int = 64, **fields: Any) -> DecoderSpec:
    return decoder_spec(ModelConfig(**fields), tokenizer_vocab_size=vocab, sequence_length_tokens=length)


def test_what_is_left_open_is_resolved() -> None:
    spec = resolve(hidden_size=384, num_heads=6)
    assert (spec.num_kv_heads, spec.head_dim, spec.vocab_size, spec.max_positions_tokens) == (6, 64, 100, 64)
    assert spec.intermediate_size == 1024, "8/3 x 384"
    assert resolve(hidden_size=400, num_heads=4).intermediate_size == 1088, "8/3 x 400 = 1066.7, up to a multiple of 64"
    assert resolve(hidden_size=384, num_heads=6, activation="gelu").intermediate_size == 4 * 384


def test_what_is_given_wins() -> None:
    given = {"num_kv_heads": 2, "head_dim": 10, "intermediate_size": 77, "vocab_size": 128, "max_positions_tokens": 500}
    spec = resolve(hidden_size=32, num_heads=4, **given)
    assert {name: getattr(spec, name) for name in given} == given


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 100, "num_heads": 6}, "hidden_size = 100 is not a multiple of num_heads = 6"),
        ({"num_heads": 6, "num_kv_heads": 4}, "num_heads = 6 is not a multiple of num_kv_heads = 4"),
        ({"hidden_size": 30, "num_heads": 6}, "even head_dim, but it is 5"),
        ({"norm_bias": True}, "rms_norm has no bias"),
        ({"vocab_size": 99}, "vocab_size = 99, but the tokenizer has 100 tokens"),
        ({"rotary_fraction": 0.6, "head_dim": 6}, "rotary_fraction = 0.6 of head_dim = 6 is 3 dimensions"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type = yarn needs rope_scaling.factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}},
            "high_freq_factor = 4.0 is not above low_freq_factor = 4.0",
        ),
        ({"max_positions_tokens": 63}, "max_positions_tokens = 63, but data.sequence_length_tokens = 64"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(**fields)


def test_odd_heads_are_fine_with_learned_positions() -> None:
    assert resolve(hidden_size=30, num_heads=6, positions="learned").head_dim == 5


@pytest.mark.parametrize(
    ("fields", "vocab", "length", "count"),
    [
        (GPT2, 50257, 1024, 124_439_808),
        (GPT2 | {"num_layers": 48, "hidden_size": 1600, "num_heads": 25}, 50257, 1024, 1_557_611_200),
        ({"num_layers": 16, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8, "intermediate_size": 8192},
         128256, 8192, 1_235_814_400),
        ({"num_layers": 28, "hidden_size": 1024, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128,
          "intermediate_size": 3072, "qk_norm": True}, 151936, 40960, 596_049_920),
    ],
    ids=["gpt2", "gpt2-xl", "llama-3.2-1b", "qwen3-0.6b"],
)  # fmt: skip
def test_published_parameter_counts(fields: dict[str, Any], vocab: int, length: int, count: int) -> None:
    assert resolve(vocab, length, **fields).num_parameters == count


def test_the_table_of_a_small_model() -> None:
    fields = GPT2 | {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "qk_norm": True}
    spec = resolve(10, 5, **fields, tie_embeddings=False)
    assert [(row.name, row.shape) for row in spec.parameters] == [
        ("embedding.weight", (10, 8)),
        ("position_embedding.weight", (5, 8)),
        ("blocks.0.attention_norm.weight", (8,)),
        ("blocks.0.attention_norm.bias", (8,)),
        ("blocks.0.attention.query.weight", (8, 8)),
        ("blocks.0.attention.query.bias", (8,)),
        ("blocks.0.attention.key.weight", (4, 8)),
        ("blocks.0.attention.key.bias", (4,)),
        ("blocks.0.attention.value.weight", (4, 8)),
        ("blocks.0.attention.value.bias", (4,)),
        ("blocks.0.attention.query_norm.weight", (4,)),
        ("blocks.0.attention.key_norm.weight", (4,)),
        ("blocks.0.attention.output.weight", (8, 8)),
        ("blocks.0.attention.output.bias", (8,)),
        ("blocks.0.mlp_norm.weight", (8,)),
        ("blocks.0.mlp_norm.bias", (8,)),
        ("blocks.0.mlp.up.weight", (32, 8)),
        ("blocks.0.mlp.up.bias", (32,)),
        ("blocks.0.mlp.down.weight", (8, 32)),
        ("blocks.0.mlp.down.bias", (8,)),
        ("final_norm.weight", (8,)),
        ("final_norm.bias", (8,)),
        ("head.weight", (10, 8)),
    ]


def test_rows_are_consistent() -> None:
    spec = resolve(num_layers=3, hidden_size=48, num_heads=4, num_kv_heads=2, qk_norm=True, attention_bias=True)
    names = [row.name for row in spec.parameters]
    assert len(set(names)) == len(names)
    for row in spec.parameters:
        assert len(row.axes) == len(row.shape)
        assert row.decay == (row.kind in {"matrix", "embedding", "head"}) == (len(row.shape) == 2)
        assert (row.init == "normal") == (row.std > 0) == (len(row.shape) == 2)
        assert row.init == "zeros" if row.kind == "bias" else True
    kinds = {row.name.split(".")[-2]: row.kind for row in spec.parameters if row.name.endswith("weight")}
    assert {name for name, kind in kinds.items() if kind == "matrix"} == {
        "query", "key", "value", "output", "gate", "up", "down",
    }  # fmt: skip


@pytest.mark.parametrize("scaled", [True, False])
def test_residual_projections_start_smaller(scaled: bool) -> None:
    spec = resolve(num_layers=8, init_std=0.02, scale_residual_init=scaled)
    for row in spec.parameters:
        if row.init == "normal":
            is_residual = row.name.endswith(("attention.output.weight", "mlp.down.weight"))
            assert row.std == pytest.approx(0.02 / math.sqrt(16) if scaled and is_residual else 0.02)


OPTIONAL = {
    "sliding_window_tokens": 12,
    "layer_types": ("full_attention", "sliding_attention"),
    "norm_placement": "both",
    "norm_unit_offset": True,
    "scale_embeddings": True,
    "sliding_rope_theta": 100.0,
    "query_pre_attn_scalar": 24,
    "rotary_fraction": 0.5,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_positions_tokens": 32},
}


def test_json_has_every_field() -> None:
    names = {field.name for field in dataclasses.fields(DecoderSpec)}
    assert set(resolve().to_json()) == set(resolve(**OPTIONAL).to_json()) == names
    for name in names:
        values = resolve().to_json()
        del values[name]
        with pytest.raises(CheckpointError, match=f"not one of this version.*{name}"):
            spec_from_json(values)


@pytest.mark.parametrize(
    "fields", [{}, GPT2, OPTIONAL, *({key: OPTIONAL[key]} for key in OPTIONAL if key != "layer_types")], ids=str
)
def test_a_spec_is_read_back_from_json_and_from_its_settings(fields: dict[str, Any]) -> None:
    spec = resolve(**fields)
    assert DecoderSpec(**json.loads(json.dumps(spec.to_json()))) == spec
    sections: dict[str, Any] = {}
    for key, value in spec.settings().items():
        section, _, name = key.rpartition(".")
        (sections.setdefault(section, {}) if section else sections)[name] = value
    assert resolve(**sections) == spec


def test_windows_are_told_by_layer() -> None:
    windows = {"sliding_window_tokens": 12, "num_layers": 3}
    assert resolve(num_layers=3).layer_windows == (None,) * 3
    assert resolve(**windows).layer_windows == (12,) * 3
    mixed = resolve(**windows, layer_types=("sliding_attention", "full_attention"))
    assert mixed.layer_windows == (12, None, 12)
    assert mixed.layer_types == ("sliding_attention", "full_attention", "sliding_attention")
    assert resolve(**windows, layer_types=("full_attention",)) == resolve(num_layers=3), "no layer has it"
    assert resolve(**windows, layer_types=("sliding_attention",)) == resolve(**windows), "all have it"


def test_json_tells_specs_apart() -> None:
    assert resolve().to_json() == resolve().to_json()
    assert resolve(rope_theta=5e5).to_json() != resolve().to_json()
