"""presets/models.yaml: pure data, complete families, true shapes, published parameter counts."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any, get_args

import pytest
import yaml

from vorox.core.config.layers.presets import model_presets
from vorox.core.schema.model import ModelConfig
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.models.huggingface.families import ARCHITECTURES, huggingface_family

PRESETS: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(
    files("vorox").joinpath("presets/models.yaml").read_text(encoding="utf-8")
)
SHAPE = {"num_layers", "hidden_size", "num_heads"}
NOT_ARCHITECTURE = {
    "preset", "family", "attention_kernel", "kind", "block", "name_or_path", "revision", "pretrained",
    "image_processor",
}  # fmt: skip
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-350m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
}


def spec_of(size: str, tokenizer_vocab_size: int = 512) -> DecoderSpec:
    fields = PRESETS["sizes"][size]
    config = ModelConfig(**(PRESETS["families"][fields["family"]] | fields))
    return decoder_spec(config, tokenizer_vocab_size=tokenizer_vocab_size, sequence_length_tokens=64)


LEFT_TO_WEIGHTS = {"mlp", "rope_scaling", "vision", "mup_base_hidden_size"}
"""No family and no size sets them."""


def test_families_fill_every_knob_that_a_size_leaves_open() -> None:
    assert set(PRESETS) == {"families", "sizes"}
    named = set(get_args(ModelConfig.model_fields["family"].annotation))
    assert set(ARCHITECTURES) == named, "a family is named in core/schema/model.py, with a row in families.py"
    assert set(PRESETS["families"]) == named, "each family has defaults in presets/models.yaml"
    for family, knobs in model_presets().families.items():
        assert set(knobs) == set(ModelConfig.model_fields) - NOT_ARCHITECTURE - SHAPE - LEFT_TO_WEIGHTS, family
        config = ModelConfig.model_validate_json(json.dumps({"family": family, **knobs}), strict=True)
        spec = decoder_spec(config, tokenizer_vocab_size=1000, sequence_length_tokens=64)
        assert huggingface_family(spec) == family


@pytest.mark.parametrize("size", PRESETS["sizes"])
def test_a_size_is_a_valid_model_of_its_family(size: str) -> None:
    fields = PRESETS["sizes"][size]
    assert SHAPE | {"family"} <= set(fields) <= set(ModelConfig.model_fields) - {"preset", "attention_kernel"}
    assert size.startswith(fields["family"].removesuffix("_moe"))
    ModelConfig.model_validate(fields, strict=True)
    assert huggingface_family(spec_of(size)) == fields["family"]


@pytest.mark.parametrize(("size", "count"), PUBLISHED.items())
def test_parameter_counts_are_the_published_ones(size: str, count: int) -> None:
    assert spec_of(size).num_parameters == count


def test_own_sizes_are_what_their_names_say() -> None:
    assert set(PRESETS["sizes"]) - set(PUBLISHED) == {"llama-tiny", "llama-125m", "nemotron_h-140m"}
    assert spec_of("nemotron_h-140m", 50257).num_parameters == 139_562_160
    assert spec_of("llama-125m", 50257).num_parameters == 123_551_232
    assert spec_of("llama-tiny", 4096).num_parameters < 5_000_000
