"""``model``: the decoder. Every knob is explicit; ``family`` and ``preset`` only fill in defaults while loading."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vorox.core.schema.section import Section

Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu"]


class ModelConfig(Section):
    preset: str | None = Field(
        default=None, description="Size to start from (gpt2-124m, llama-1b, qwen3-0.6b, ...); keys given beside it win."
    )
    family: Literal["gpt2", "llama", "qwen3"] = Field(
        default="llama", description="Architecture whose defaults fill the keys below that are not given."
    )
    num_layers: int = Field(default=6, ge=1, description="Decoder blocks.")
    hidden_size: int = Field(default=384, ge=1, description="Width of the residual stream.")
    num_heads: int = Field(default=6, ge=1, description="Query heads.")
    num_kv_heads: int | None = Field(
        default=None,
        ge=1,
        description="Key/value heads; fewer than num_heads is grouped-query, 1 is multi-query. None: all.",
    )
    head_dim: int | None = Field(default=None, ge=1, description="Width of a head. None: hidden_size / num_heads.")
    intermediate_size: int | None = Field(
        default=None,
        ge=1,
        description="Width of the MLP. None: 4 x hidden_size, or 8/3 x rounded up to 64 for gated ones.",
    )
    vocab_size: int | None = Field(
        default=None,
        ge=2,
        description="Rows of the embedding; at least the tokenizer's vocabulary. None: exactly that.",
    )
    max_positions_tokens: int | None = Field(
        default=None, ge=1, description="Longest sequence the model can take. None: data.sequence_length_tokens."
    )
    positions: Literal["rope", "learned"] = Field(default="rope", description="Rotary or learned absolute positions.")
    rope_theta: float = Field(default=10_000.0, gt=0, description="Base of the rotary frequencies.")
    norm: Literal["rms_norm", "layer_norm"] = Field(
        default="rms_norm", description="Normalisation layer, applied before."
    )
    norm_eps: float = Field(default=1e-5, gt=0, description="Added to the variance inside every norm.")
    activation: Activation = Field(default="swiglu", description="MLP non-linearity; swiglu and geglu are gated.")
    qk_norm: bool = Field(default=False, description="RMS norm of queries and keys per head (Qwen3).")
    attention_bias: bool = Field(default=False, description="Biases on the attention projections.")
    mlp_bias: bool = Field(default=False, description="Biases in the MLP.")
    norm_bias: bool = Field(default=False, description="Bias of layer_norm; rms_norm has none.")
    tie_embeddings: bool = Field(default=True, description="Output head shares the token embedding.")
    dropout_fraction: float = Field(
        default=0.0, ge=0, lt=1, description="Dropout on embeddings, attention weights and both residual branches."
    )
    init_std: float = Field(default=0.02, gt=0, description="Standard deviation of the initial weights.")
    scale_residual_init: bool = Field(
        default=True, description="Divide the initial std of output projections by sqrt(2 x num_layers) (GPT-2)."
    )
    attention_kernel: Literal["auto", "reference", "sdpa", "xla", "cudnn", "splash"] = Field(
        default="auto",
        description="How attention is computed; auto takes the engine's fastest, reference is plain algebra. "
        "sdpa: torch; xla, cudnn (GPU), splash (TPU): jax.",
    )
