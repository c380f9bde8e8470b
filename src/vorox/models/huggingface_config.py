"""Conversion between the model spec and the ``config.json`` of Hugging Face transformers.

Written for transformers 5, and for older readers that expect ``rope_theta``. Read with the defaults of transformers,
because files omit them. A setting that our engines do not implement (sliding windows, quantisation, remote code) is
refused with its key and value; keys that no model of the family reads are ignored.

Invariant: ``spec_from_huggingface(huggingface_config(spec, ...))`` describes the same network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from vorox.core.atomic import pretty_json
from vorox.core.schema.model import ModelConfig
from vorox.models.huggingface_rope import read_rope, refuse, write_rope
from vorox.models.huggingface_weights import Family, huggingface_family, require_family
from vorox.models.spec import ModelSpec

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"

_ARCHITECTURES: Mapping[Family, str] = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_GPT2_KEYS = {
    "num_layers": "n_layer", "hidden_size": "n_embd", "num_heads": "n_head", "intermediate_size": "n_inner",
    "vocab_size": "vocab_size", "max_positions_tokens": "n_positions", "norm_eps": "layer_norm_epsilon",
    "tie_embeddings": "tie_word_embeddings", "init_std": "initializer_range", "dropout_fraction": "resid_pdrop",
}  # fmt: skip
_QWEN3_KEYS = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size", "max_positions_tokens": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    "attention_bias": "attention_bias", "tie_embeddings": "tie_word_embeddings", "init_std": "initializer_range",
}  # fmt: skip
_KEYS: Mapping[Family, Mapping[str, str]] = {
    "gpt2": _GPT2_KEYS,
    "llama": _QWEN3_KEYS | {"mlp_bias": "mlp_bias"},
    "qwen3": _QWEN3_KEYS,
}
"""Our keys to theirs, for equal values."""

_GPT2_FIXED = {
    "positions": "learned", "norm": "layer_norm", "norm_bias": True, "attention_bias": True, "mlp_bias": True,
    "scale_residual_init": True,
}  # fmt: skip
_LLAMA_FIXED = {"positions": "rope", "norm": "rms_norm", "scale_residual_init": False, "dropout_fraction": 0.0}
_FIXED: Mapping[Family, Mapping[str, Any]] = {
    "gpt2": _GPT2_FIXED,
    "llama": _LLAMA_FIXED,
    "qwen3": _LLAMA_FIXED | {"qk_norm": True},
}
"""Values fixed by the family."""

_ACTIVATION_KEY = {"gpt2": "activation_function", "llama": "hidden_act", "qwen3": "hidden_act"}
_ACTIVATION_NAMES = {
    "gpt2": {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"},
    "llama": {"swiglu": "silu", "geglu": "gelu"},
    "qwen3": {"swiglu": "silu", "geglu": "gelu"},
}
_ACTIVATIONS = {
    "gpt2": {
        "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_python_tanh": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu",
    },
    "llama": {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_python": "geglu"},
    "qwen3": {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_python": "geglu"},
}  # fmt: skip

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {
        "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
        "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True,
    },
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "hidden_act": "silu", "max_position_embeddings": 2048,
        "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False, "head_dim": None,
    },
    "qwen3": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 32768, "initializer_range": 0.02, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "attention_bias": False,
    },
}  # fmt: skip
"""Defaults of transformers for keys that a file omits."""

_ONLY: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "gpt2": {
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
    },
    "llama": {"attention_dropout": (0, None), "partial_rotary_factor": (1, None), "sliding_window": (None,)},
    "qwen3": {"attention_dropout": (0, None), "partial_rotary_factor": (1, None), "mlp_bias": (False,)},
}  # fmt: skip
_ONLY_EVERYWHERE: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (None,), "auto_map": (None, {}), "is_encoder_decoder": (False, None),
    "pruned_heads": (None, {}), "per_layer_config": (None, {}),
}  # fmt: skip
"""Keys of features that we do not implement, and the values that disable them."""

DEFAULT_ROPE_THETA = 10_000.0


def huggingface_config(
    spec: ModelSpec, *, end_of_text_id: int | None, begin_of_text_id: int | None = None, dtype: str = "float32"
) -> dict[str, Any]:
    """Return the ``config.json`` of a spec.

    Args:
        spec: The model.
        end_of_text_id: The tokenizer's end of text (``eos_token_id``).
        begin_of_text_id: Its begin of text; by default the end of text, which separates documents in training.
        dtype: Dtype in which to load the weights: float32, bfloat16 or float16.

    Raises:
        ConfigError: transformers has no architecture for the spec.
    """
    family = require_family(spec)
    shared: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "bos_token_id": end_of_text_id if begin_of_text_id is None else begin_of_text_id,
        "eos_token_id": end_of_text_id,
        "dtype": dtype,
        "use_cache": True,
        _ACTIVATION_KEY[family]: _ACTIVATION_NAMES[family][spec.activation],
        **{key: getattr(spec, field) for field, key in _KEYS[family].items()},
    }
    if family == "gpt2":
        dropouts = dict.fromkeys(("embd_pdrop", "attn_pdrop"), spec.dropout_fraction)
        return shared | dropouts | {"n_ctx": spec.max_positions_tokens}
    # transformers applies dropout in fewer places, so none is the closest setting
    return shared | write_rope(spec) | {"attention_dropout": 0.0}


def generation_config(*, end_of_text_id: int | None, begin_of_text_id: int | None = None) -> dict[str, Any]:
    """Return ``generation_config.json`` with the ids of begin and end of text; padding is the end of text."""
    begin = end_of_text_id if begin_of_text_id is None else begin_of_text_id
    ids = {"bos_token_id": begin, "eos_token_id": end_of_text_id, "pad_token_id": end_of_text_id}
    return {name: value for name, value in ids.items() if value is not None}


def huggingface_files(spec: ModelSpec, *, end_of_text_id: int | None) -> dict[str, bytes]:
    """Return the files that make a checkpoint a transformers model; empty if the spec has no family."""
    if huggingface_family(spec) is None:
        return {}
    return {
        CONFIG_NAME: pretty_json(huggingface_config(spec, end_of_text_id=end_of_text_id)),
        GENERATION_CONFIG_NAME: pretty_json(generation_config(end_of_text_id=end_of_text_id)),
    }


def spec_from_huggingface(config: Mapping[str, Any]) -> ModelConfig:
    """Return the model section equivalent to a ``config.json``.

    Raises:
        ConfigError: A key has an invalid value, or one that we do not implement.
    """
    family: Family | None = next((name for name in _ARCHITECTURES if name == config.get("model_type")), None)
    if family is None:
        refuse("model_type", config.get("model_type"), f"known are {', '.join(_ARCHITECTURES)}")
    for key, accepted in {**_ONLY_EVERYWHERE, **_ONLY[family]}.items():
        if key in config and config[key] not in accepted:
            refuse(key, config[key], f"only {' or '.join(repr(value) for value in accepted)} is implemented")
    values = {key: config.get(key, default) for key, default in DEFAULTS[family].items()}
    fields = {field: values[key] for field, key in _KEYS[family].items()} | dict(_FIXED[family])
    fields["activation"] = _activation(family, values)
    if family == "gpt2":
        _check_dropouts(values)
    else:
        fields |= read_rope(config, default_theta=DEFAULT_ROPE_THETA)
    if family == "qwen3":
        _check_windows(config, fields["num_layers"])
    try:
        return ModelConfig.model_validate({"family": family, **fields}, strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        field = str(problem["loc"][0])
        refuse(_KEYS[family].get(field, field), problem["input"], problem["msg"])


def _check_dropouts(values: Mapping[str, Any]) -> None:
    dropouts = (values["embd_pdrop"], values["resid_pdrop"], values["attn_pdrop"])
    if dropouts.count(dropouts[0]) < 3:
        refuse("embd_pdrop, resid_pdrop, attn_pdrop", dropouts, "only equal values are implemented")


def _activation(family: Family, values: Mapping[str, Any]) -> str:
    key = _ACTIVATION_KEY[family]
    known, name = _ACTIVATIONS[family], values[key]
    if not isinstance(name, str) or name not in known:
        refuse(key, name, f"implemented are {', '.join(known)}")
    return known[name]


def _check_windows(config: Mapping[str, Any], num_layers: Any) -> None:
    layers = config.get("layer_types")
    if layers is not None:
        if layers != ["full_attention"] * len(layers if isinstance(layers, list) else ()):
            refuse("layer_types", layers, "only full_attention is implemented")
    elif config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None:
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int) or not isinstance(num_layers, int) or first < num_layers:
            refuse("use_sliding_window", True, f"sliding windows (from layer {first}) are not implemented")
