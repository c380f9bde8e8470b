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
from vorox.models.decoder_spec import DecoderSpec

Family = Literal[
    "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "olmo2", "gemma", "gemma3_text"
]  # fmt: skip
Windows = Literal["none", "all_layers", "by_layer", "every_sixth_full"]

_GPT2_MODULES = {
    "embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "attention_norm": "transformer.h.{i}.ln_1",
    "attention.query": "transformer.h.{i}.attn.c_attn",
    "attention.key": "transformer.h.{i}.attn.c_attn",
    "attention.value": "transformer.h.{i}.attn.c_attn",
    "attention.output": "transformer.h.{i}.attn.c_proj",
    "mlp_norm": "transformer.h.{i}.ln_2",
    "mlp.up": "transformer.h.{i}.mlp.c_fc",
    "mlp.down": "transformer.h.{i}.mlp.c_proj",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
_LLAMA_MODULES = {
    "embedding": "model.embed_tokens",
    "attention_norm": "model.layers.{i}.input_layernorm",
    "attention.query": "model.layers.{i}.self_attn.q_proj",
    "attention.key": "model.layers.{i}.self_attn.k_proj",
    "attention.value": "model.layers.{i}.self_attn.v_proj",
    "attention.output": "model.layers.{i}.self_attn.o_proj",
    "attention.query_norm": "model.layers.{i}.self_attn.q_norm",
    "attention.key_norm": "model.layers.{i}.self_attn.k_norm",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm",
    "mlp.gate": "model.layers.{i}.mlp.gate_proj",
    "mlp.up": "model.layers.{i}.mlp.up_proj",
    "mlp.down": "model.layers.{i}.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
_MIXTRAL_MODULES = _LLAMA_MODULES | {
    "mlp.router": "model.layers.{i}.block_sparse_moe.gate",
    "mlp.experts.gate": "model.layers.{i}.block_sparse_moe.experts.{e}.w1",
    "mlp.experts.up": "model.layers.{i}.block_sparse_moe.experts.{e}.w3",
    "mlp.experts.down": "model.layers.{i}.block_sparse_moe.experts.{e}.w2",
}
_QWEN3_MOE_MODULES = _LLAMA_MODULES | {
    "mlp.router": "model.layers.{i}.mlp.gate",
    "mlp.experts.gate": "model.layers.{i}.mlp.experts.{e}.gate_proj",
    "mlp.experts.up": "model.layers.{i}.mlp.experts.{e}.up_proj",
    "mlp.experts.down": "model.layers.{i}.mlp.experts.{e}.down_proj",
}
_PHI3_MODULES = _LLAMA_MODULES | {
    "attention.query": "model.layers.{i}.self_attn.qkv_proj",
    "attention.key": "model.layers.{i}.self_attn.qkv_proj",
    "attention.value": "model.layers.{i}.self_attn.qkv_proj",
    "mlp.gate": "model.layers.{i}.mlp.gate_up_proj",
    "mlp.up": "model.layers.{i}.mlp.gate_up_proj",
}
_OLMO2_MODULES = _LLAMA_MODULES | {
    "attention_output_norm": "model.layers.{i}.post_attention_layernorm",
    "mlp_output_norm": "model.layers.{i}.post_feedforward_layernorm",
}
_GEMMA3_MODULES = _LLAMA_MODULES | {
    "attention_output_norm": "model.layers.{i}.post_attention_layernorm",
    "mlp_norm": "model.layers.{i}.pre_feedforward_layernorm",
    "mlp_output_norm": "model.layers.{i}.post_feedforward_layernorm",
}

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

_GPT2_ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip
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
    "mlp": (None,), "block": (None,), "vision": (None,), "has_experts": (False,),
}  # fmt: skip
"""The values that a property of a spec may have, unless a row says otherwise; ``None`` for any value."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of transformers.

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
        _GPT2_MODULES, _GPT2_KEYS, _GPT2_FIXED,
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
        _LLAMA_MODULES, _LLAMA_KEYS | _BIAS | {"mlp_bias": "mlp_bias"}, _LLAMA_FIXED,
        _LLAMA_DEFAULTS | {"attention_bias": False, "mlp_bias": False},
        only=_NO_DROPOUT | _WHOLE_HEADS | {"sliding_window": (None,)},
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        {
            "qk_norm": (True,), "attention_bias": (False, True), "windows": ("none", "all_layers", "by_layer"),
            "has_even_heads": (False, True),
        },
        _LLAMA_MODULES, _LLAMA_KEYS | _BIAS, _LLAMA_FIXED | {"qk_norm": True},
        _QWEN_DEFAULTS | {"head_dim": 128, "attention_bias": False},
        only=_NO_DROPOUT | _WHOLE_HEADS | {"mlp_bias": (False,)},
        windows="by_layer",
    ),
    "mistral": Architecture(
        "MistralForCausalLM",
        {"windows": ("all_layers",)},
        _LLAMA_MODULES, _LLAMA_KEYS, _LLAMA_FIXED,
        _LLAMA_DEFAULTS | {
            "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 4096 * 32,
            "sliding_window": 4096,
        },
        windows="all_layers",
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        {"windows": ("none", "all_layers"), "has_experts": (True,), "normalize_expert_weights": (True,)},
        _MIXTRAL_MODULES, _LLAMA_KEYS | _EXPERTS | {"num_experts": "num_local_experts"},
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
        _QWEN3_MOE_MODULES,
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
        _LLAMA_MODULES, _LLAMA_KEYS, _LLAMA_FIXED | {"attention_bias": "qkv"},
        _QWEN_DEFAULTS,
        windows="by_layer",
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        {"rotary_fraction": None, "windows": ("none", "all_layers"), "rope_scaling": (None,)},
        _PHI3_MODULES, _LLAMA_KEYS, _LLAMA_FIXED,
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
        _OLMO2_MODULES, _LLAMA_KEYS | _BIAS, _LLAMA_FIXED | {"norm_placement": "post", "qk_norm": "full_width"},
        _LLAMA_DEFAULTS | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False},
        constants=_NO_PADDING,
    ),
    "gemma": Architecture(
        "GemmaForCausalLM",
        _GEMMA_RULES,
        _LLAMA_MODULES, _LLAMA_KEYS | _BIAS, _GEMMA_FIXED, _GEMMA_DEFAULTS,
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
        _GEMMA3_MODULES, _LLAMA_KEYS | _BIAS | {"query_pre_attn_scalar": "query_pre_attn_scalar"},
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
        "has_even_heads": spec.hidden_size % spec.num_heads == 0,
        "has_gpt2_heads": is_plain,
        "has_unscaled_windows": kind == "none" or spec.rope_scaling is None or spec.sliding_rope_theta is not None,
    }


_FIELDS = (
    "positions", "norm", "norm_bias", "activation", "qk_norm", "attention_bias", "mlp_bias", "norm_placement",
    "rotary_fraction", "rope_scaling", "sliding_window_tokens", "norm_unit_offset", "scale_embeddings",
    "sliding_rope_theta", "query_pre_attn_scalar", "mlp", "block", "num_experts", "normalize_expert_weights", "vision",
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
