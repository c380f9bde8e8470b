"""The native decoder: resolved dimensions and the parameter table (implements ``models/spec.py``).

``decoder_spec`` resolves the configuration into a frozen ``DecoderSpec`` without defaults.

Canonical weights are ``[out, in]``. Rotary embeddings rotate halves of a head (Hugging Face's convention). A gated MLP
is ``down(act(gate(x)) * up(x))``, a plain one ``down(act(up(x)))``; ``experts.py`` defines a mixture of them. A layer
with a sliding window of W lets position q attend to the positions from q - W + 1 to q.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from math import sqrt
from typing import Any, Literal, cast

from vorox.core.errors import ConfigError
from vorox.core.pluralize import pluralize
from vorox.core.schema.model import Activation, LayerType, ModelConfig, Norm, NormPlacement, Positions
from vorox.core.schema.section import ImportPath
from vorox.models.decoder import mamba
from vorox.models.decoder.experts import expert_parameters, resolve_experts
from vorox.models.decoder.rope_settings import resolve_scaling
from vorox.models.decoder.rotary import RopeScaling
from vorox.models.decoder.vision_spec import VisionSpec, stored_vision_spec, vision_spec
from vorox.models.spec import Init, ModelSpec, ParameterSpec, SavedActivations
from vorox.models.user_layer import block_parameters, layer_parameters

GATED_ACTIVATIONS: frozenset[str] = frozenset({"swiglu", "geglu", "geglu_tanh"})
GATED_WIDTH_MULTIPLE = 64
"""The default width of a gated MLP is 8/3 of the hidden size, rounded up to a multiple of this."""


FREE_TO_CHANGE = frozenset(
    {"dropout_fraction", "init_std", "scale_residual_init", "mup_base_hidden_size", *mamba.FREE_OF_MAMBA}
)
"""Fields that do not affect the meaning of stored weights."""


@dataclass(frozen=True)
class DecoderSpec(ModelSpec):
    """A decoder with all dimensions resolved. Fields as in ``ModelConfig``."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions_tokens: int
    positions: Positions
    rope_theta: float
    norm: Norm
    norm_eps: float
    norm_bias: bool
    activation: Activation | ImportPath
    qk_norm: bool | Literal["full_width"]
    attention_bias: bool | Literal["qkv"]
    mlp_bias: bool
    tie_embeddings: bool
    dropout_fraction: float
    init_std: float
    scale_residual_init: bool
    rotary_fraction: float
    rope_scaling: RopeScaling | None
    sliding_window_tokens: int | None
    layer_types: tuple[LayerType, ...] | None
    norm_placement: NormPlacement
    norm_unit_offset: bool
    scale_embeddings: bool
    sliding_rope_theta: float | None
    query_pre_attn_scalar: int | None
    mlp: ImportPath | None
    block: ImportPath | None
    vision: VisionSpec | None
    mup_base_hidden_size: int | None
    num_experts: int | None
    experts_per_token: int | None
    normalize_expert_weights: bool
    layer_pattern: str | None
    mamba_num_heads: int | None
    mamba_head_dim: int
    mamba_state_size: int
    mamba_num_groups: int
    mamba_conv_tokens: int
    mamba_conv_bias: bool
    mamba_bias: bool
    mamba_chunk_tokens: int
    mamba_time_step_min: float
    mamba_time_step_max: float

    free_to_change = FREE_TO_CHANGE

    def __post_init__(self) -> None:
        if self.layer_types is not None:  # JSON has lists
            object.__setattr__(self, "layer_types", tuple(self.layer_types))
        if isinstance(self.rope_scaling, Mapping):  # from JSON
            object.__setattr__(self, "rope_scaling", RopeScaling(**cast("dict[str, Any]", self.rope_scaling)))
        if isinstance(self.vision, Mapping):
            object.__setattr__(self, "vision", stored_vision_spec(cast("dict[str, Any]", self.vision)))

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that are rotated, the first ones."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def query_scale(self) -> float:
        """Factor on queries before attention, which divides scores by the root of ``head_dim``."""
        return 1.0 if self.query_pre_attn_scalar is None else sqrt(self.head_dim / self.query_pre_attn_scalar)

    @property
    def embedding_scale(self) -> float:
        return sqrt(self.hidden_size) if self.scale_embeddings else 1.0

    @property
    def width_factor(self) -> float:
        return 1.0 if self.mup_base_hidden_size is None else self.hidden_size / self.mup_base_hidden_size

    def mixer(self, layer: int) -> str:
        """Return the character of a layer in ``layer_pattern``; empty without one."""
        return "" if self.layer_pattern is None else self.layer_pattern[layer]

    def has_window(self, layer: int) -> bool:
        """Whether a layer with attention has the sliding window."""
        is_sliding = self.layer_types is None or self.layer_types[layer] == "sliding_attention"
        return is_sliding and self.sliding_window_tokens is not None

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer with attention, in positions; ``None`` for full attention."""
        if self.layer_pattern is not None:
            return (self.sliding_window_tokens,) * self.layer_pattern.count("*")
        if self.layer_types is None:
            return (self.sliding_window_tokens,) * self.num_layers
        return tuple(
            self.sliding_window_tokens if layer_type == "sliding_attention" else None for layer_type in self.layer_types
        )

    @property
    def is_gated(self) -> bool:
        return self.activation in GATED_ACTIVATIONS

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        return self._table

    @cached_property
    def _table(self) -> tuple[ParameterSpec, ...]:
        return _parameter_table(self)

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of the output projections."""
        branches = self.num_layers if self.layer_pattern is not None else 2 * self.num_layers
        std = self.init_std / sqrt(self.width_factor)
        return std / sqrt(branches) if self.scale_residual_init else std

    @property
    def attention_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def active_experts(self) -> float:
        if self.num_experts is None or self.experts_per_token is None:
            return 1.0
        return self.experts_per_token / self.num_experts

    @property
    def saved_per_position(self) -> int:
        width, query, key_value = self.hidden_size, self.attention_width, self.num_kv_heads * self.head_dim
        statistics = 2 if self.norm == "layer_norm" else 1
        num_norms = 4 if self.norm_placement == "both" else 2
        saved = num_norms * (width + statistics) + 2 * width  # inputs of the norms; inputs of attention and MLP
        saved += query + 2 * key_value + self.num_heads + query  # what attention reads, its statistics, its result
        if self.qk_norm:  # inputs of these norms, and the normed vectors beside the projections
            saved += 2 * (query + key_value) + self.num_heads + self.num_kv_heads
        kept = 1 if self.activation == "relu" else 2  # its gradient needs the result only
        mlp = (4 if self.is_gated else kept) * self.intermediate_size
        if self.num_experts is None or self.experts_per_token is None:
            return saved + mlp
        return saved + self.experts_per_token * (mlp + 2 * width) + 2 * self.num_experts  # sorted input and output

    def saved_activations(self, sequence_length_tokens: int, dtype_bytes: int) -> SavedActivations:
        whole = super().saved_activations(sequence_length_tokens, dtype_bytes)
        if self.layer_pattern is not None:
            layers = [sequence_length_tokens * dtype_bytes * saved for saved in mamba.mixer_saved_per_position(self)]
            return replace(whole, all_blocks_bytes=sum(layers), largest_block_bytes=max(layers))
        if self.vision is None:
            return whole
        images = sequence_length_tokens // self.vision.tokens_per_image  # at most
        extra = images * self.vision.saved_per_image * dtype_bytes
        return replace(whole, all_blocks_bytes=whole.all_blocks_bytes + extra)

    @property
    def scan_flops_per_position(self) -> float:
        return mamba.mamba_scan_flops(self)

    def summary(self) -> str:
        heads = pluralize(self.num_heads, "head")
        if self.num_kv_heads != self.num_heads:
            heads += f" ({self.num_kv_heads} key/value)"
        layers = pluralize(self.num_layers, "layer")
        layers += f" {self.layer_pattern}" if self.layer_pattern is not None else ""
        images = "" if self.vision is None else f", images by {pluralize(self.vision.num_layers, 'layer')}"
        mlp = f"MLP {self.intermediate_size}"
        if self.num_experts is not None:
            mlp = f"{self.experts_per_token} of {pluralize(self.num_experts, 'expert')} of {self.intermediate_size}"
        return f"{layers} x {self.hidden_size}, {heads}, {mlp}{images}"

    def to_json(self) -> dict[str, Any]:
        layer_types = None if self.layer_types is None else list(self.layer_types)
        return asdict(self) | {"layer_types": layer_types}

    def settings(self) -> dict[str, Any]:
        """Return the settings of the section ``model`` that give this spec, by dotted key."""
        sections = {"rope_scaling": {"rope_type": "default"}, "vision": {"num_layers": 0}}
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in sections}
        for name, default in sections.items():
            section = getattr(self, name)
            values |= {f"{name}.{key}": value for key, value in (asdict(section) if section else default).items()}
        return values


def decoder_spec(config: ModelConfig, *, tokenizer_vocab_size: int, sequence_length_tokens: int) -> DecoderSpec:
    """Resolve and check a model configuration.

    Args:
        config: The ``model`` section.
        tokenizer_vocab_size: Vocabulary size of the tokenizer.
        sequence_length_tokens: Positions of a training row.

    Raises:
        ConfigError: The dimensions contradict each other, the tokenizer or the data.
    """
    num_kv_heads = config.num_heads if config.num_kv_heads is None else config.num_kv_heads
    if config.head_dim is None and config.hidden_size % config.num_heads:
        raise _contradiction(
            f"hidden_size = {config.hidden_size} is not a multiple of num_heads = {config.num_heads}",
            "or set model.head_dim",
        )
    head_dim = config.hidden_size // config.num_heads if config.head_dim is None else config.head_dim
    vocab_size = tokenizer_vocab_size if config.vocab_size is None else config.vocab_size
    max_positions = sequence_length_tokens if config.max_positions_tokens is None else config.max_positions_tokens
    intermediate_size = config.intermediate_size
    if intermediate_size is None:
        intermediate_size = 4 * config.hidden_size
        if config.activation in GATED_ACTIVATIONS:
            multiples = -(-8 * config.hidden_size // (3 * GATED_WIDTH_MULTIPLE))
            intermediate_size = multiples * GATED_WIDTH_MULTIPLE
    pattern: tuple[LayerType, ...] = config.layer_types or ()
    layer_types = (pattern * config.num_layers)[: config.num_layers]
    if config.num_heads % num_kv_heads:
        raise _contradiction(f"num_heads = {config.num_heads} is not a multiple of num_kv_heads = {num_kv_heads}")
    if config.positions == "rope" and head_dim % 2:
        raise _contradiction(
            f"rotary positions need an even head_dim, but it is {head_dim}", "or set positions: learned"
        )
    if config.positions == "rope" and int(head_dim * config.rotary_fraction) % 2:
        raise _contradiction(
            f"rotary_fraction = {config.rotary_fraction} of head_dim = {head_dim} is "
            f"{int(head_dim * config.rotary_fraction)} dimensions; rotary positions need an even number"
        )
    if config.norm == "rms_norm" and config.norm_bias:
        raise _contradiction("norm_bias = true, but rms_norm has no bias", "set norm: layer_norm or norm_bias: false")
    if vocab_size < tokenizer_vocab_size:
        raise _contradiction(
            f"vocab_size = {vocab_size}, but the tokenizer has {tokenizer_vocab_size} tokens",
            f"set model.vocab_size={tokenizer_vocab_size} or remove it",
        )
    if max_positions < sequence_length_tokens:
        raise _contradiction(
            f"max_positions_tokens = {max_positions}, but data.sequence_length_tokens = {sequence_length_tokens}"
        )
    resolved: dict[str, Any] = {
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
        "max_positions_tokens": max_positions,
        "rope_scaling": resolve_scaling(config.rope_scaling, max_positions),
        "sliding_window_tokens": None if set(layer_types) == {"full_attention"} else config.sliding_window_tokens,
        "layer_types": layer_types if len(set(layer_types)) > 1 else None,
        "vision": vision_spec(config.vision),
        "query_pre_attn_scalar": None if config.query_pre_attn_scalar == head_dim else config.query_pre_attn_scalar,
        "experts_per_token": resolve_experts(config),
    }
    resolved |= mamba.resolve_pattern(config)
    return DecoderSpec(**{field.name: getattr(config, field.name) for field in fields(DecoderSpec)} | resolved)


def _contradiction(what: str, hint: str = "") -> ConfigError:
    return ConfigError(what, where="model", hint=hint)


def _parameter_table(spec: DecoderSpec) -> tuple[ParameterSpec, ...]:
    width, std = spec.hidden_size, spec.init_std
    vocabulary = ((spec.vocab_size, width), "normal", std, True)
    rows = [ParameterSpec("embedding.weight", *vocabulary, "embedding", ("vocab", "hidden"))]
    rows += [] if spec.vision is None else spec.vision.parameters(width, std)
    if spec.positions == "learned":
        shape = (spec.max_positions_tokens, width)
        name = "position_embedding.weight"
        rows.append(ParameterSpec(name, shape, "normal", std, True, "embedding", ("positions", "hidden")))
    for index in range(spec.num_layers):
        prefix = f"blocks.{index}."
        rows += _mixer_table(spec, prefix, index) if spec.layer_pattern is not None else _block_table(spec, prefix)
    rows += _norm(spec, "final_norm")
    if not spec.tie_embeddings:
        shape, init, _, decay = vocabulary
        rows.append(
            ParameterSpec("head.weight", shape, init, std / spec.width_factor, decay, "head", ("vocab", "hidden"))
        )
    return tuple(rows)


def _mixer_table(spec: DecoderSpec, prefix: str, layer: int) -> list[ParameterSpec]:
    """Return the rows of a layer of a pattern: a norm, and Mamba-2, or the attention or MLP of a block."""
    if spec.mixer(layer) == "M":
        rows = mamba.mamba_parameters(spec, f"{prefix}mamba.")
    else:
        part = f"{prefix}{'attention' if spec.mixer(layer) == '*' else 'mlp'}."
        rows = [row for row in _block_table(spec, prefix) if row.name.startswith(part)]
    return [*_norm(spec, f"{prefix}norm"), *rows]


def _block_table(spec: DecoderSpec, prefix: str) -> list[ParameterSpec]:
    width, inner = spec.hidden_size, spec.intermediate_size
    query, key_value = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if spec.block is not None:
        return block_parameters(spec.block, spec, prefix)
    init_std = spec.init_std / sqrt(spec.width_factor)
    residual_std = spec.residual_std

    def linear(name: str, out: tuple[int, str], into: tuple[int, str], std: float, bias: bool) -> list[ParameterSpec]:
        shape, axes = (out[0], into[0]), (out[1], into[1])
        weight = ParameterSpec(f"{prefix}{name}.weight", shape, "normal", std, True, "matrix", axes)
        extra = ParameterSpec(f"{prefix}{name}.bias", (out[0],), "zeros", 0.0, False, "bias", (out[1],))
        return [weight, extra] if bias else [weight]

    hidden, heads, kv_heads, mlp = (width, "hidden"), (query, "heads"), (key_value, "kv_heads"), (inner, "mlp")
    has_pre, has_post = spec.norm_placement != "post", spec.norm_placement != "pre"
    rows = _norm(spec, f"{prefix}attention_norm") if has_pre else []
    rows += linear("attention.query", heads, hidden, init_std, bool(spec.attention_bias))
    rows += linear("attention.key", kv_heads, hidden, init_std, bool(spec.attention_bias))
    rows += linear("attention.value", kv_heads, hidden, init_std, bool(spec.attention_bias))
    if spec.qk_norm:
        whole = spec.qk_norm == "full_width"
        rows += [
            ParameterSpec(f"{prefix}attention.{name}.weight", (width,), _norm_init(spec), 0.0, False, "norm", (axis,))
            for name, (width, axis) in (
                ("query_norm", heads if whole else (spec.head_dim, "head")),
                ("key_norm", kv_heads if whole else (spec.head_dim, "head")),
            )
        ]
    rows += linear("attention.output", hidden, heads, residual_std, spec.attention_bias is True)
    rows += _norm(spec, f"{prefix}attention_output_norm") if has_post else []
    rows += _norm(spec, f"{prefix}mlp_norm") if has_pre else []
    if spec.mlp is not None:
        rows += layer_parameters(spec.mlp, spec, f"{prefix}mlp.", spec.init_std)
    elif spec.num_experts is not None:
        rows += expert_parameters(
            f"{prefix}mlp.", spec.num_experts, width, inner, is_gated=spec.is_gated, std=init_std,
            residual_std=residual_std,
        )  # fmt: skip
    else:
        rows += linear("mlp.gate", mlp, hidden, init_std, spec.mlp_bias) if spec.is_gated else []
        rows += linear("mlp.up", mlp, hidden, init_std, spec.mlp_bias)
        rows += linear("mlp.down", hidden, mlp, residual_std, spec.mlp_bias)
    rows += _norm(spec, f"{prefix}mlp_output_norm") if has_post else []
    return rows


def _norm_init(spec: DecoderSpec) -> Init:
    return "zeros" if spec.norm_unit_offset else "ones"


def _norm(spec: DecoderSpec, name: str) -> list[ParameterSpec]:
    shape, axes = (spec.hidden_size,), ("hidden",)
    rows = [ParameterSpec(f"{name}.weight", shape, _norm_init(spec), 0.0, False, "norm", axes)]
    if spec.norm_bias:
        rows.append(ParameterSpec(f"{name}.bias", shape, "zeros", 0.0, False, "bias", axes))
    return rows
