"""The transformers architectures that the decoder computes: their tensors, keys, defaults and limits.

Each is one row of ``ARCHITECTURES``. A spec belongs to the first whose rules hold; a spec without one is stored under
canonical names and is not a transformers model. Rows may be added, but the family of a spec never changes, because
checkpoints are stored under its names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vorox.core.errors import ConfigError
from vorox.core.schema.model import Family
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.huggingface.modules import (
    GEMMA3_MODULES,
    GPT2_MODULES,
    LLAMA_MODULES,
    MIXTRAL_MODULES,
    NEMOTRON_H_MODULES,
    OLMO2_MODULES,
    PHI3_MODULES,
    QWEN3_MOE_MODULES,
)

Windows = Literal["none", "all_layers", "by_layer", "every_sixth_full"]

_GPT2_KEYS = {
    "num_layers": "n_layer", "hidden_size": "n_embd", "num_heads": "n_head", "intermediate_size": "n_inner",
    "vocab_size": "vocab_size", "max_positions_tokens": "n_positions", "norm_eps": "layer_norm_epsilon",
    "tie_embeddings": "tie_word_embeddings", "init_std": "initializer_range", "dropout_fraction": "resid_pdrop",
}  # fmt: skip
_LLAMA_KEYS = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size", "max_positions_tokens": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings", "init_std": "initializer_range",
}  # fmt: skip
_BIAS = {"attention_bias": "attention_bias"}
_NEMOTRON_H_KEYS = {key: name for key, name in _LLAMA_KEYS.items() if key != "num_layers"} | {
    "norm_eps": "layer_norm_epsilon", "mlp_bias": "mlp_bias", "mamba_num_heads": "mamba_num_heads",
    "mamba_head_dim": "mamba_head_dim", "mamba_state_size": "ssm_state_size", "mamba_num_groups": "n_groups",
    "mamba_conv_tokens": "conv_kernel", "mamba_conv_bias": "use_conv_bias", "mamba_bias": "use_bias",
    "mamba_chunk_tokens": "chunk_size", "mamba_time_step_min": "time_step_min", "mamba_time_step_max": "time_step_max",
}  # fmt: skip

_GPT2_ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip
_NEMOTRON_H_ACTIVATIONS = {"relu2": "relu2", **_GPT2_ACTIVATIONS}
_GATED_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_python": "geglu"}
_GEMMA_ACTIVATIONS = {"gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh", **_GATED_ACTIVATIONS}

_GPT2_FIXED = {
    "positions": "learned", "norm": "layer_norm", "norm_bias": True, "attention_bias": True, "mlp_bias": True,
    "scale_residual_init": True,
}  # fmt: skip
_LLAMA_FIXED = {"positions": "rope", "norm": "rms_norm", "scale_residual_init": False, "dropout_fraction": 0.0}
_GEMMA_FIXED = _LLAMA_FIXED | {"norm_unit_offset": True, "scale_embeddings": True}

_LLAMA_DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "hidden_act": "silu", "max_position_embeddings": 2048,
    "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "head_dim": None,
}  # fmt: skip
_QWEN_DEFAULTS = _LLAMA_DEFAULTS | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
}  # fmt: skip
_GEMMA_DEFAULTS = _LLAMA_DEFAULTS | {
    "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "attention_bias": False,
}  # fmt: skip

_EXPERTS = {"num_experts": "num_experts", "experts_per_token": "num_experts_per_tok"}
_WHOLE_HEADS = {"partial_rotary_factor": (1, None)}
_NO_PADDING = {"pad_token_id": None}
"""For architectures whose default is an id, which the vocabulary may lack."""
_NO_DROPOUT = {"attention_dropout": (0, None)}

_LLAMA_ACTIVATIONS = ("swiglu", "geglu")
Rules = Mapping[str, tuple[Any, ...] | None]
_PLAIN_RULES: Rules = {
    "positions": ("rope",), "norm": ("rms_norm",), "is_gated": (True,), "qk_norm": (False,),
    "attention_bias": (False,), "mlp_bias": (False,), "rotary_fraction": (1.0,), "norm_placement": ("pre",),
    "windows": ("none",), "has_even_heads": (True,), "norm_unit_offset": (False,), "scale_embeddings": (False,),
    "sliding_rope_theta": (None,), "query_pre_attn_scalar": (None,), "activation": _LLAMA_ACTIVATIONS,
    "tie_embeddings": (False, True), "mlp": (None,), "block": (None,), "vision": (None,), "has_experts": (False,),
    "has_pattern": (False,),
}  # fmt: skip
"""The values that a property of a spec may have, unless a row says otherwise; ``None`` for any value."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A transformers architecture.

    Attributes:
        class_name: Its class.
        rules: Properties of a spec that it computes, where they differ from ``_PLAIN_RULES``.
        modules: Canonical modules to the names of its modules; several may share one, which concatenates them. ``{i}``
            is the block, ``{e}`` the expert.
        keys: Our keys to the keys of ``config.json``, for equal values.
        fixed: Our keys that the architecture decides.
        defaults: Values of keys that a ``config.json`` omits, in transformers.
        only: Keys of features that we do not implement, and the values that disable them.
        activation_key: The key of the activation.
        activations: Its values to ours; the first name of each is written.
        windows: Which layers may have a sliding window.
        constants: Keys that are always written.
        aliases: Keys to the names under which other versions of transformers write them.
        default_theta: Base of the rotary frequencies that a ``config.json`` omits.
    """

    class_name: str
    rules: Rules
    modules: Mapping[str, str]
    keys: Mapping[str, str]
    fixed: Mapping[str, Any]
    defaults: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: _NO_DROPOUT | _WHOLE_HEADS)
    activation_key: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=lambda: _GATED_ACTIVATIONS)
    windows: Windows = "none"
    constants: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())
    aliases: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    default_theta: float = 10_000.0


_GEMMA_RULES: Rules = {
    "norm_unit_offset": (True,), "scale_embeddings": (True,), "attention_bias": (False, True),
    "activation": (*_LLAMA_ACTIVATIONS, "geglu_tanh"),
}  # fmt: skip
_GEMMA_ONLY = {"use_bidirectional_attention": (False, None)}
ARCHITECTURES: Mapping[Family, Architecture] = {
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        {
            "positions": ("learned",), "norm": ("layer_norm",), "norm_bias": (True,), "is_gated": (False,),
            "attention_bias": (True,), "mlp_bias": (True,), "has_gpt2_heads": (True,),
            "activation": tuple(_GPT2_ACTIVATIONS.values()),
        },
        GPT2_MODULES, _GPT2_KEYS, _GPT2_FIXED,
        {
            "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
            "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
            "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True,
        },
        only={
            "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        activation_key="activation_function",
        activations=_GPT2_ACTIVATIONS,
    ),
    "llama": Architecture(
        "LlamaForCausalLM",
        {"attention_bias": (False, True), "mlp_bias": (False, True)},
        LLAMA_MODULES, _LLAMA_KEYS | _BIAS | {"mlp_bias": "mlp_bias"}, _LLAMA_FIXED,
        _LLAMA_DEFAULTS | {"attention_bias": False, "mlp_bias": False},
        only=_NO_DROPOUT | _WHOLE_HEADS | {"sliding_window": (None,)},
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        {
            "qk_norm": (True,), "attention_bias": (False, True), "windows": ("none", "all_layers", "by_layer"),
            "has_even_heads": (False, True),
        },
        LLAMA_MODULES, _LLAMA_KEYS | _BIAS, _LLAMA_FIXED | {"qk_norm": True},
        _QWEN_DEFAULTS | {"head_dim": 128, "attention_bias": False},
        only=_NO_DROPOUT | _WHOLE_HEADS | {"mlp_bias": (False,)},
        windows="by_layer",
    ),
    "mistral": Architecture(
        "MistralForCausalLM",
        {"windows": ("all_layers",)},
        LLAMA_MODULES, _LLAMA_KEYS, _LLAMA_FIXED,
        _LLAMA_DEFAULTS | {
            "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 4096 * 32,
            "sliding_window": 4096,
        },
        windows="all_layers",
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        {"windows": ("none", "all_layers"), "has_experts": (True,), "normalize_expert_weights": (True,)},
        MIXTRAL_MODULES, _LLAMA_KEYS | _EXPERTS | {"num_experts": "num_local_experts"},
        _LLAMA_FIXED | {"normalize_expert_weights": True},
        _LLAMA_DEFAULTS | {
            "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 4096 * 32,
            "rms_norm_eps": 1e-5, "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2,
        },
        only=_NO_DROPOUT | _WHOLE_HEADS | {"router_jitter_noise": (0, None)},
        windows="all_layers",
        aliases={"num_local_experts": "num_experts"},
        default_theta=1_000_000.0,
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        {
            "qk_norm": (True,), "attention_bias": (False, True), "has_even_heads": (False, True),
            "has_experts": (True,), "normalize_expert_weights": (False, True),
        },
        QWEN3_MOE_MODULES,
        _LLAMA_KEYS | _BIAS | _EXPERTS | {
            "intermediate_size": "moe_intermediate_size", "normalize_expert_weights": "norm_topk_prob",
        },
        _LLAMA_FIXED | {"qk_norm": True},
        {key: value for key, value in _LLAMA_DEFAULTS.items() if key != "intermediate_size"} | {
            "vocab_size": 151936, "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 24,
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "attention_bias": False, "num_experts": 128,
            "num_experts_per_tok": 8, "norm_topk_prob": False,
        },
        only=_NO_DROPOUT | _WHOLE_HEADS | {
            "use_sliding_window": (False, None), "decoder_sparse_step": (1,), "mlp_only_layers": ([], None),
        },
        aliases={"num_experts": "num_local_experts"},
    ),
    "qwen2": Architecture(
        "Qwen2ForCausalLM",
        {"attention_bias": ("qkv",), "windows": ("none", "all_layers", "by_layer")},
        LLAMA_MODULES, _LLAMA_KEYS, _LLAMA_FIXED | {"attention_bias": "qkv"},
        _QWEN_DEFAULTS,
        windows="by_layer",
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        {"rotary_fraction": None, "windows": ("none", "all_layers"), "rope_scaling": (None,)},
        PHI3_MODULES, _LLAMA_KEYS, _LLAMA_FIXED,
        _LLAMA_DEFAULTS | {
            "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "sliding_window": None,
        },
        only=_NO_DROPOUT | {"resid_pdrop": (0, None), "embd_pdrop": (0, None)},
        windows="all_layers",
        constants=_NO_PADDING,
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        {"norm_placement": ("post",), "qk_norm": ("full_width",), "attention_bias": (False, True)},
        OLMO2_MODULES, _LLAMA_KEYS | _BIAS, _LLAMA_FIXED | {"norm_placement": "post", "qk_norm": "full_width"},
        _LLAMA_DEFAULTS | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False},
        constants=_NO_PADDING,
    ),
    "gemma": Architecture(
        "GemmaForCausalLM",
        _GEMMA_RULES,
        LLAMA_MODULES, _LLAMA_KEYS | _BIAS, _GEMMA_FIXED, _GEMMA_DEFAULTS,
        only=_NO_DROPOUT | _WHOLE_HEADS | _GEMMA_ONLY,
        activations=_GEMMA_ACTIVATIONS,
        constants=_NO_PADDING,
    ),
    "gemma3_text": Architecture(
        "Gemma3ForCausalLM",
        _GEMMA_RULES | {
            "norm_placement": ("both",), "qk_norm": (True,), "windows": ("none", "all_layers", "by_layer"),
            "sliding_rope_theta": None, "query_pre_attn_scalar": None, "has_unscaled_windows": (True,),
        },
        GEMMA3_MODULES, _LLAMA_KEYS | _BIAS | {"query_pre_attn_scalar": "query_pre_attn_scalar"},
        _GEMMA_FIXED | {"norm_placement": "both", "qk_norm": True},
        {key: value for key, value in _GEMMA_DEFAULTS.items() if key != "hidden_act"} | {
            "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256, "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh",
        },
        only=_NO_DROPOUT | _WHOLE_HEADS | _GEMMA_ONLY | {
            "final_logit_softcapping": (None,), "attn_logit_softcapping": (None,),
        },
        activation_key="hidden_activation",
        activations=_GEMMA_ACTIVATIONS,
        windows="every_sixth_full",
        constants=_NO_PADDING,
    ),
    "nemotron_h": Architecture(
        "NemotronHForCausalLM",
        {
            "positions": ("none",), "is_gated": (False,), "has_pattern": (True,), "mlp_bias": (False, True),
            "has_even_heads": (False, True), "tie_embeddings": (False,),
            "activation": tuple(_NEMOTRON_H_ACTIVATIONS.values()),
        },
        NEMOTRON_H_MODULES, _NEMOTRON_H_KEYS,
        {"positions": "none", "norm": "rms_norm", "scale_residual_init": True, "dropout_fraction": 0.0},
        {
            "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False, "mlp_bias": False, "mlp_hidden_act": "relu2",
            "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
            "use_conv_bias": True, "use_bias": False, "chunk_size": 128, "time_step_min": 0.001, "time_step_max": 0.1,
        },
        only=_NO_DROPOUT | {
            "mamba_hidden_act": ("silu",), "tie_word_embeddings": (False,), "num_nextn_predict_layers": (0,),
        },
        activation_key="mlp_hidden_act",
        activations=_NEMOTRON_H_ACTIVATIONS,
    ),
}  # fmt: skip
"""In the order in which a spec is compared with them."""


def huggingface_family(spec: DecoderSpec) -> Family | None:
    """Return the transformers architecture that computes exactly this model, or ``None``."""
    properties = _properties(spec)
    for family, architecture in ARCHITECTURES.items():
        rules = {**_PLAIN_RULES, **architecture.rules}
        if all(values is None or properties[name] in values for name, values in rules.items()):
            return family
    return None


def _properties(spec: DecoderSpec) -> dict[str, Any]:
    """Return the fields of a spec with the properties that rules name besides."""
    windows = set(spec.layer_windows)
    kind: Windows = "none" if windows == {None} else "by_layer" if None in windows else "all_layers"
    is_plain = spec.head_dim * spec.num_heads == spec.hidden_size and spec.num_kv_heads == spec.num_heads
    return {name: getattr(spec, name) for name in _FIELDS} | {
        "is_gated": spec.is_gated,
        "has_experts": spec.num_experts is not None,
        "windows": kind,
        "has_pattern": spec.layer_pattern is not None,
        "has_even_heads": spec.hidden_size % spec.num_heads == 0,
        "has_gpt2_heads": is_plain,
        "has_unscaled_windows": kind == "none" or spec.rope_scaling is None or spec.sliding_rope_theta is not None,
    }


_FIELDS = (
    "positions", "norm", "norm_bias", "activation", "qk_norm", "attention_bias", "mlp_bias", "norm_placement",
    "rotary_fraction", "rope_scaling", "sliding_window_tokens", "norm_unit_offset", "scale_embeddings",
    "sliding_rope_theta", "query_pre_attn_scalar", "mlp", "block", "num_experts", "normalize_expert_weights", "vision",
    "layer_pattern", "tie_embeddings",
)  # fmt: skip


def require_family(spec: DecoderSpec) -> Family:
    """Return ``huggingface_family``, or raise ``ConfigError`` with the properties that decide it."""
    family = huggingface_family(spec)
    if family is None:
        shape = f"{spec.num_heads} heads of {spec.head_dim}, {spec.num_kv_heads} key/value heads"
        *others, last = ARCHITECTURES
        raise ConfigError(
            "Transformers has no architecture that computes this model: "
            + ", ".join(f"{name} = {getattr(spec, name)}" for name in _FIELDS)
            + f", hidden_size = {spec.hidden_size}, {shape}",
            where="model",
            hint=f"only models equal to {', '.join(others)} or {last} can be exported to Hugging Face format",
        )
    return family
