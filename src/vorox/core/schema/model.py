"""``model``: the model. ``family`` and ``preset`` only fill in defaults while the configuration is loaded."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vorox.core.schema.image_processor import ImageProcessorConfig
from vorox.core.schema.section import ImportPath, Section
from vorox.core.schema.vision import VisionConfig

Activation = Literal["gelu", "gelu_tanh", "relu", "relu2", "silu", "swiglu", "geglu", "geglu_tanh"]
LayerType = Literal["full_attention", "sliding_attention"]


class RopeScalingConfig(Section):
    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3"] = Field(
        default="default",
        description="Scaling of the rotary frequencies, as in transformers. default: none; dynamic: none up to "
        "max_positions_tokens, and longer rows are refused.",
    )
    factor: float | None = Field(default=None, gt=0, description="By how much the frequencies are divided.")
    original_max_positions_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum sequence length before scaling (llama3, yarn). None: max_positions_tokens.",
    )
    low_freq_factor: float | None = Field(
        default=None, gt=0, description="llama3: scale fully below this many rotations per original length. None: 1."
    )
    high_freq_factor: float | None = Field(
        default=None, gt=0, description="llama3: no scaling above this many rotations per original length. None: 4."
    )
    beta_fast: float | None = Field(
        default=None, gt=0, description="yarn: no scaling above this many rotations per original length. None: 32."
    )
    beta_slow: float | None = Field(
        default=None, gt=0, description="yarn: scale fully below this many rotations per original length. None: 1."
    )
    attention_factor: float | None = Field(
        default=None, gt=0, description="yarn: factor on cosines and sines. None: 0.1 x ln(factor) + 1."
    )
    truncate: bool | None = Field(
        default=None, description="yarn: round the ends of the ramp to whole dimensions. None: true."
    )


class ModelConfig(Section):
    kind: Literal["decoder", "huggingface"] | ImportPath = Field(
        default="decoder",
        description="decoder: the native decoder, described by this section. huggingface: a causal language model of "
        "transformers (PyTorch), described by name_or_path. Or your class or function (PyTorch): f(config) returns a "
        "torch.nn.Module from token ids to logits, where config is this section.",
    )
    name_or_path: str | None = Field(
        default=None,
        description="huggingface: a directory with config.json and safetensors, OWNER/NAME or hf://OWNER/NAME@REVISION.",
    )
    revision: str | None = Field(
        default=None,
        description="huggingface: commit, tag or branch of name_or_path on the hub; the run records the commit.",
    )
    pretrained: bool = Field(
        default=True, description="huggingface: start from the weights at name_or_path; false: from random weights."
    )
    preset: str | None = Field(
        default=None,
        description="Model size (gpt2-124m, llama-1b, qwen3-0.6b, ...) whose values fill in this section; explicit "
        "keys take precedence.",
    )
    family: Literal[
        "gpt2",
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "phi3",
        "olmo2",
        "gemma",
        "gemma3_text",
        "nemotron_h",
    ] = Field(default="llama", description="Architecture whose defaults fill in the keys below.")
    num_layers: int = Field(default=6, ge=1, description="Number of decoder blocks.")
    hidden_size: int = Field(default=384, ge=1, description="Width of the residual stream.")
    num_heads: int = Field(default=6, ge=1, description="Number of query heads.")
    num_kv_heads: int | None = Field(
        default=None,
        ge=1,
        description="Number of key/value heads: fewer than num_heads is grouped-query attention, 1 is multi-query. "
        "None: num_heads.",
    )
    head_dim: int | None = Field(default=None, ge=1, description="Width of a head. None: hidden_size / num_heads.")
    intermediate_size: int | None = Field(
        default=None,
        ge=1,
        description="Width of the MLP, or of each expert. None: 4 x hidden_size; for gated MLPs 8/3 x hidden_size, "
        "rounded up to a multiple of 64.",
    )
    num_experts: int | None = Field(
        default=None, ge=2, description="Mixture of experts: number of MLPs in each block. None: one MLP, no router."
    )
    experts_per_token: int | None = Field(
        default=None, ge=1, description="Experts that a router chooses for each token. None: 2."
    )
    normalize_expert_weights: bool = Field(
        default=True,
        description="Divide the router probabilities of the chosen experts by their sum (Mixtral); false: use them "
        "as they are.",
    )
    vocab_size: int | None = Field(
        default=None,
        ge=2,
        description="Rows of the embedding, at least the tokenizer's vocabulary. None: the tokenizer's vocabulary.",
    )
    max_positions_tokens: int | None = Field(
        default=None, ge=1, description="Maximum sequence length of the model. None: data.sequence_length_tokens."
    )
    positions: Literal["rope", "learned", "none"] = Field(
        default="rope", description="Rotary or learned absolute positions, or none (Nemotron-H)."
    )
    rope_theta: float = Field(default=10_000.0, gt=0, description="Base of the rotary frequencies.")
    rope_scaling: RopeScalingConfig = Field(
        default=RopeScalingConfig(), description="Scaling of the rotary frequencies for longer rows (Llama 3.x)."
    )
    sliding_rope_theta: float | None = Field(
        default=None,
        gt=0,
        description="Base of the rotary frequencies of sliding layers, which are then never scaled (Gemma 3). None: as "
        "in other layers.",
    )
    rotary_fraction: float = Field(
        default=1.0, gt=0, le=1, description="Share of each head's dimensions that is rotated, the first ones."
    )
    sliding_window_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Sliding-window attention: a position attends to itself and the positions before it, this many in "
        "all. None: to the whole row.",
    )
    query_pre_attn_scalar: int | None = Field(
        default=None, ge=1, description="Attention scores are divided by the root of this. None: head_dim."
    )
    layer_types: tuple[LayerType, ...] | None = Field(
        default=None,
        min_length=1,
        description="Which layers have the sliding window; a list shorter than num_layers repeats. None: all layers.",
    )
    layer_pattern: str | None = Field(
        default=None,
        min_length=1,
        description="torch: one mixer per layer, each with a norm before it: M is Mamba-2, * attention, - an MLP "
        "(Nemotron-H). A pattern shorter than num_layers repeats. None: attention and MLP in every layer.",
    )
    mamba_num_heads: int | None = Field(
        default=None, ge=1, description="Mamba-2: number of heads. None: 2 x hidden_size / mamba_head_dim."
    )
    mamba_head_dim: int = Field(default=64, ge=1, description="Mamba-2: width of a head.")
    mamba_state_size: int = Field(default=128, ge=1, description="Mamba-2: columns of the state of a head.")
    mamba_num_groups: int = Field(
        default=1, ge=1, description="Mamba-2: groups of heads that share B and C; each group is normalised by itself."
    )
    mamba_conv_tokens: int = Field(
        default=4, ge=2, description="Mamba-2: positions that the causal convolution reads, including its own."
    )
    mamba_conv_bias: bool = Field(default=True, description="Mamba-2: bias of the convolution.")
    mamba_bias: bool = Field(default=False, description="Mamba-2: biases of input and output projection.")
    mamba_chunk_tokens: int = Field(
        default=128, ge=1, description="Mamba-2: positions of a chunk of the scan; changes memory and speed only."
    )
    mamba_time_step_min: float = Field(
        default=0.001,
        gt=0,
        description="Mamba-2: smallest time step, at the start and in every forward pass (Nemotron-H).",
    )
    mamba_time_step_max: float = Field(default=0.1, gt=0, description="Mamba-2: largest time step at the start.")
    norm: Literal["rms_norm", "layer_norm"] = Field(default="rms_norm", description="Normalisation layer.")
    norm_placement: Literal["pre", "post", "both"] = Field(
        default="pre",
        description="Norms before attention and MLP, after them on the residual branch (OLMo 2), or both (Gemma 3).",
    )
    norm_unit_offset: bool = Field(
        default=False, description="RMS norms multiply by 1 + weight, and weights start at 0 (Gemma)."
    )
    scale_embeddings: bool = Field(
        default=False, description="Multiply token embeddings by the root of hidden_size (Gemma)."
    )
    norm_eps: float = Field(default=1e-5, gt=0, description="Epsilon added to the variance in every norm.")
    activation: Activation | ImportPath = Field(
        default="swiglu",
        description="MLP non-linearity; swiglu, geglu and geglu_tanh are gated. Or a user function: f(x) returns an "
        "array of the same shape, in an MLP without a gate.",
    )
    mlp: ImportPath | None = Field(
        default=None,
        description="torch: a user function that replaces the MLP: f(x, weights) acts on each position; its attribute "
        "parameters(spec) returns the shapes of its weights by name. None: the MLP of activation.",
    )
    block: ImportPath | None = Field(
        default=None,
        description="torch: a user class in the place of the blocks: f(spec, layer) returns a torch.nn.Module from the "
        "residual stream [rows, positions, width], positions and attn_mask to the next. None: the built-in blocks.",
    )
    qk_norm: bool | Literal["full_width"] = Field(
        default=False,
        description="RMS norm of queries and keys: true per head (Qwen3), full_width over all heads together (OLMo 2).",
    )
    attention_bias: bool | Literal["qkv"] = Field(
        default=False, description="Biases on the attention projections; qkv: not on the output projection (Qwen2)."
    )
    mlp_bias: bool = Field(default=False, description="Biases in the MLP.")
    norm_bias: bool = Field(default=False, description="Bias of layer_norm; rms_norm has none.")
    tie_embeddings: bool = Field(default=True, description="Share the token embedding with the output head.")
    dropout_fraction: float = Field(
        default=0.0, ge=0, lt=1, description="Dropout on embeddings, attention weights and both residual branches."
    )
    init_std: float = Field(default=0.02, gt=0, description="Standard deviation of the initial weights.")
    scale_residual_init: bool = Field(
        default=True,
        description="Divide the initial std of output projections by the root of the number of residual "
        "branches: 2 x num_layers (GPT-2), or num_layers with layer_pattern.",
    )
    vision: VisionConfig = Field(
        default=VisionConfig(), description="torch: an image encoder before the decoder (data.sources.N.images_field)."
    )
    image_processor: ImageProcessorConfig = Field(
        default=ImageProcessorConfig(),
        description="huggingface: how the model reads images (data.sources.N.images_field).",
    )
    mup_base_hidden_size: int | None = Field(
        default=None,
        ge=1,
        description="Maximal update parametrisation: settings tuned at this hidden_size transfer to wider models. With "
        "m = hidden_size / mup_base_hidden_size, matrices in the blocks start with init_std / sqrt(m), the head with "
        "init_std / m, and both learn at optimizer.lr / m.",
    )
    attention_kernel: Literal["auto", "reference", "sdpa", "xla", "cudnn", "splash"] | ImportPath = Field(
        default="auto",
        description="Attention implementation. auto: the engine's fastest; reference: plain matrix products. sdpa: "
        "torch; xla, cudnn (GPU), splash (TPU): jax. Or a user function with the signature of the framework's own: "
        "torch.nn.functional.scaled_dot_product_attention or jax.nn.dot_product_attention.",
    )


MAMBA_KEYS = tuple(key for key in ModelConfig.model_fields if key.startswith("mamba_"))
"""Settings of the Mamba-2 layers of ``layer_pattern``."""
IMAGE_PROCESSOR_KEYS = tuple(f"image_processor.{key}" for key in ImageProcessorConfig.model_fields)
"""Settings of the image processor of a transformers model."""
