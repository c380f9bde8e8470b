"""Conversion between the model spec and the ``config.json`` of Hugging Face transformers.

Written for transformers 5, and for older readers that expect ``rope_theta``. Read with the defaults of transformers,
because files omit them. A setting that our engines do not implement (quantisation, remote code, ...) is
refused with its key and value; keys that no model of the family reads are ignored.

Invariant: ``spec_from_huggingface(huggingface_config(spec, ...))`` describes the same network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import ValidationError

from vorox.core.files.atomic import pretty_json
from vorox.core.schema.model import Family, ModelConfig
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.huggingface.adapter_spec import AdapterSpec
from vorox.models.huggingface.families import ARCHITECTURES, Architecture, huggingface_family, require_family
from vorox.models.huggingface.pattern import read_pattern, write_pattern
from vorox.models.huggingface.rope import read_rope, refuse, write_rope
from vorox.models.huggingface.spec import HuggingFaceSpec
from vorox.models.huggingface.windows import read_windows, write_windows
from vorox.models.spec import ModelSpec

CONFIG_NAME = "config.json"
PREPROCESSOR_NAME = "preprocessor_config.json"

FIXED_IMAGE_VALUES: Mapping[str, Any] = {
    "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3,
    "rescale_factor": 1 / 255,
}  # fmt: skip
"""Values of an image processor that are implemented, where only one is."""

_ONLY_EVERYWHERE: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (None,), "auto_map": (None, {}), "is_encoder_decoder": (False, None),
    "pruned_heads": (None, {}), "per_layer_config": (None, {}),
}  # fmt: skip
"""Keys of features that we do not implement, and the values that disable them."""


def huggingface_config(
    spec: DecoderSpec, *, end_of_text_id: int | None = None, special_ids: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the ``config.json`` of a spec.

    Args:
        spec: The model.
        end_of_text_id: The id that begins and ends texts, unless ``special_ids`` says otherwise.
        special_ids: ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``, as far as the tokenizer has them.

    Raises:
        ConfigError: transformers has no architecture for the spec.
    """
    family = require_family(spec)
    architecture = ARCHITECTURES[family]
    activations = {ours: theirs for theirs, ours in reversed(list(architecture.activations.items()))}
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    if spec.query_pre_attn_scalar is None:
        values["query_pre_attn_scalar"] = spec.head_dim
    shared: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": family,
        "dtype": "float32",
        "use_cache": True,
        **architecture.constants,
        **({"bos_token_id": end_of_text_id, "eos_token_id": end_of_text_id} if special_ids is None else special_ids),
        architecture.activation_key: activations[spec.activation],
        **{key: values[name] for name, key in architecture.keys.items()},
    }
    if family == "gpt2":
        dropouts = dict.fromkeys(("embd_pdrop", "attn_pdrop"), spec.dropout_fraction)
        return shared | dropouts | {"n_ctx": spec.max_positions_tokens}
    if spec.layer_pattern is not None:
        return shared | write_pattern(spec) | {"attention_dropout": 0.0}
    # transformers applies dropout in fewer places, so none is the closest setting
    return (
        shared
        | write_rope(spec, by_layer="sliding_rope_theta" in architecture.rules)
        | write_windows(spec, architecture.windows)
        | {"attention_dropout": 0.0}
    )


def huggingface_files(
    spec: ModelSpec, *, end_of_text_id: int | None = None, special_ids: Mapping[str, Any] | None = None
) -> dict[str, bytes]:
    """Return ``config.json``, which makes a checkpoint a transformers model; empty for adapters, and without a family.

    Args:
        spec: The model.
        end_of_text_id: As for ``huggingface_config``.
        special_ids: As for ``huggingface_config``; of a model of transformers, only these ids change.
    """
    if isinstance(spec, AdapterSpec):
        return {}
    if isinstance(spec, HuggingFaceSpec):
        return {CONFIG_NAME: pretty_json({**_with_ids(spec.config, special_ids or {}), "dtype": "float32"})}
    if not isinstance(spec, DecoderSpec) or huggingface_family(spec) is None:
        return {}
    config = huggingface_config(spec, end_of_text_id=end_of_text_id, special_ids=special_ids)
    return {CONFIG_NAME: pretty_json(config)}


def _with_ids(config: Mapping[str, Any], special_ids: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``config.json`` of a base with the ids of special tokens, where it has them already."""
    values = {**config, **special_ids}
    if isinstance(nested := config.get("text_config"), Mapping):
        own = {key: value for key, value in special_ids.items() if key in nested}
        values["text_config"] = {**nested, **own}
    return values


def image_processor_files(model: ModelConfig) -> dict[str, bytes]:
    """Return the file of the image processor of a model; empty if it reads text only."""
    processor = model.image_processor
    if processor.patch_size_pixels is None:
        return {}
    values = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "patch_size": processor.patch_size_pixels,
        "temporal_patch_size": processor.temporal_patch_size,
        "merge_size": processor.merge_size,
        "size": {"shortest_edge": processor.min_pixels, "longest_edge": processor.max_pixels},
        "image_mean": list(processor.mean),
        "image_std": list(processor.std),
        **FIXED_IMAGE_VALUES,
    }
    return {PREPROCESSOR_NAME: pretty_json(values)}


def spec_from_huggingface(config: Mapping[str, Any]) -> ModelConfig:
    """Return the model section equivalent to a ``config.json``.

    Raises:
        ConfigError: A key has an invalid value, or one that we do not implement.
    """
    family: Family | None = next((name for name in ARCHITECTURES if name == config.get("model_type")), None)
    if family is None:
        known = ", ".join(ARCHITECTURES)
        refuse("model_type", config.get("model_type"), f"known are {known}; others train with model.kind=huggingface")
    architecture = ARCHITECTURES[family]
    for key, accepted in {**_ONLY_EVERYWHERE, **architecture.only}.items():
        if key in config and config[key] not in accepted:
            refuse(key, config[key], f"only {' or '.join(repr(value) for value in accepted)} is implemented")
    config = {key: config[name] for key, name in architecture.aliases.items() if name in config} | dict(config)
    values = {key: config.get(key, default) for key, default in architecture.defaults.items()}
    found = {field: values[key] for field, key in architecture.keys.items()} | dict(architecture.fixed)
    found["activation"] = _activation(architecture, values)
    if family == "gpt2":
        _check_dropouts(values)
    elif "has_pattern" in architecture.rules:
        found |= read_pattern(config)
    else:
        found |= read_rope(config, architecture.rules, default_theta=architecture.default_theta)
        found |= read_windows({**values, **config}, architecture.windows, found["num_layers"])
        if found.get("sliding_window_tokens") is None:
            found.pop("sliding_rope_theta", None)
    try:
        return ModelConfig.model_validate({"family": family, **found}, strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        field = str(problem["loc"][0])
        theirs = {"rotary_fraction": "partial_rotary_factor", **architecture.keys}.get(field, field)
        refuse(theirs, problem["input"], problem["msg"])


def _check_dropouts(values: Mapping[str, Any]) -> None:
    dropouts = (values["embd_pdrop"], values["resid_pdrop"], values["attn_pdrop"])
    if dropouts.count(dropouts[0]) < 3:
        refuse("embd_pdrop, resid_pdrop, attn_pdrop", dropouts, "only equal values are implemented")


def _activation(architecture: Architecture, values: Mapping[str, Any]) -> str:
    key = architecture.activation_key
    known, name = architecture.activations, values[key]
    if not isinstance(name, str) or name not in known:
        refuse(key, name, f"implemented are {', '.join(known)}")
    return known[name]
