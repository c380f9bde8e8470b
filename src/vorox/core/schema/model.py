"""``model``: the model. ``family`` and ``preset`` only fill in defaults while the configuration is loaded."""

from __future__ import annotations

from typing import Literal

from vorox.core.schema.image_processor import ImageProcessorConfig
from vorox.core.schema.section import ImportPath, Section
from vorox.core.schema.setting import FUNCTION, Need, setting
from vorox.core.schema.vision import VisionConfig

Activation = Literal["gelu", "gelu_tanh", "relu", "relu2", "silu", "swiglu", "geglu", "geglu_tanh"]
Norm = Literal["rms_norm", "layer_norm"]
NormPlacement = Literal["pre", "post", "both"]
Positions = Literal["rope", "learned", "none"]
LayerType = Literal["full_attention", "sliding_attention"]

_FOREIGN = Need("kind", ("huggingface",))
_DECODER = Need("kind", ("decoder", FUNCTION))
_HAS_MAMBA = Need("layer_pattern", contains="M", remedy="model.layer_pattern with M")

Family = Literal[
    "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "olmo2", "gemma", "gemma3_text",
    "nemotron_h",
]  # fmt: skip
"""The architectures of transformers that the decoder computes. Each has a row in ``models/huggingface/families.py`` and
defaults in ``presets/models.yaml``."""


class RopeScalingConfig(Section):
    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3"] = setting(
        default="default",
        description="Scaling of the rotary frequencies, as in transformers. default: none; dynamic: none up to "
        "max_positions_tokens, and longer rows are refused.",
        needs=(Need("model.kind", ("decoder", FUNCTION)), Need("model.positions", ("rope",))),
    )
    factor: float | None = setting(
        default=None,
        gt=0,
        description="By how much the frequencies are divided.",
        needs=Need("rope_type", ("linear", "dynamic", "yarn", "llama3")),
    )
    original_max_positions_tokens: int | None = setting(
        default=None,
        ge=1,
        description="Maximum sequence length before scaling (llama3, yarn). None: max_positions_tokens.",
        needs=Need("rope_type", ("yarn", "llama3")),
    )
    low_freq_factor: float | None = setting(
        default=None,
        gt=0,
        description="llama3: scale fully below this many rotations per original length. None: 1.",
        needs=Need("rope_type", ("llama3",)),
    )
    high_freq_factor: float | None = setting(
        default=None,
        gt=0,
        description="llama3: no scaling above this many rotations per original length. None: 4.",
        needs=Need("rope_type", ("llama3",)),
    )
    beta_fast: float | None = setting(
        default=None,
        gt=0,
        description="yarn: no scaling above this many rotations per original length. None: 32.",
        needs=Need("rope_type", ("yarn",)),
    )
    beta_slow: float | None = setting(
        default=None,
        gt=0,
        description="yarn: scale fully below this many rotations per original length. None: 1.",
        needs=Need("rope_type", ("yarn",)),
    )
    attention_factor: float | None = setting(
        default=None,
        gt=0,
        description="yarn: factor on cosines and sines. None: 0.1 x ln(factor) + 1.",
        needs=Need("rope_type", ("yarn",)),
    )
    truncate: bool | None = setting(
        default=None,
        description="yarn: round the ends of the ramp to whole dimensions. None: true.",
        needs=Need("rope_type", ("yarn",)),
    )


class ModelConfig(Section):
    kind: Literal["decoder", "huggingface"] | ImportPath = setting(
        default="decoder",
        description="decoder: the native decoder, described by this section. huggingface: a causal language model of "
        "transformers (PyTorch), described by name_or_path. Or your class or function (PyTorch): f(config) returns a "
        "torch.nn.Module from token ids to logits, where config is this section.",
    )
    name_or_path: str | None = setting(
        default=None,
        description="huggingface: a directory with config.json and safetensors, OWNER/NAME or hf://OWNER/NAME@REVISION.",
        resume="allowed",
        location="model",
        needs=_FOREIGN,
    )
    revision: str | None = setting(
        default=None,
        description="huggingface: commit, tag or branch of name_or_path on the hub; the run records the commit.",
        resume="allowed",
        location="model",
        needs=_FOREIGN,
    )
    pretrained: bool = setting(
        default=True,
        description="huggingface: start from the weights at name_or_path; false: from random weights.",
        needs=_FOREIGN,
    )
    preset: str | None = setting(
        default=None,
        description="Model size (gpt2-124m, llama-1b, qwen3-0.6b, ...) whose values fill in this section; explicit "
        "keys take precedence.",
        digest="none",
        resume="allowed",
        needs=_DECODER,
    )
    family: Family = setting(
        default="llama",
        description="Architecture whose defaults fill in the keys below.",
        digest="none",
        resume="allowed",
        needs=_DECODER,
    )
    num_layers: int = setting(
        default=6, ge=1, description="Number of decoder blocks.", needs=_DECODER, synonyms=("n_layer", "num_layers")
    )
    hidden_size: int = setting(
        default=384,
        ge=1,
        description="Width of the residual stream.",
        needs=_DECODER,
        synonyms=("n_embd", "d_model", "hidden_size"),
    )
    num_heads: int = setting(
        default=6, ge=1, description="Number of query heads.", needs=_DECODER, synonyms=("n_head", "num_heads")
    )
    num_kv_heads: int | None = setting(
        default=None,
        ge=1,
        description="Number of key/value heads: fewer than num_heads is grouped-query attention, 1 is multi-query. "
        "None: num_heads.",
        needs=_DECODER,
    )
    head_dim: int | None = setting(
        default=None, ge=1, description="Width of a head. None: hidden_size / num_heads.", needs=_DECODER
    )
    intermediate_size: int | None = setting(
        default=None,
        ge=1,
        description="Width of the MLP, or of each expert. None: 4 x hidden_size; for gated MLPs 8/3 x hidden_size, "
        "rounded up to a multiple of 64.",
        needs=_DECODER,
    )
    num_experts: int | None = setting(
        default=None,
        ge=2,
        description="Mixture of experts: number of MLPs in each block. None: one MLP, no router.",
        needs=_DECODER,
    )
    experts_per_token: int | None = setting(
        default=None,
        ge=1,
        description="Experts that a router chooses for each token. None: 2.",
        needs=(_DECODER, Need("num_experts")),
    )
    normalize_expert_weights: bool = setting(
        default=True,
        description="Divide the router probabilities of the chosen experts by their sum (Mixtral); false: use them "
        "as they are.",
        needs=(_DECODER, Need("num_experts")),
    )
    vocab_size: int | None = setting(
        default=None,
        ge=2,
        description="Rows of the embedding, at least the tokenizer's vocabulary. None: the tokenizer's vocabulary.",
    )
    max_positions_tokens: int | None = setting(
        default=None,
        ge=1,
        description="Maximum sequence length of the model. None: data.sequence_length_tokens.",
        needs=_DECODER,
    )
    positions: Positions = setting(
        default="rope", description="Rotary or learned absolute positions, or none (Nemotron-H).", needs=_DECODER
    )
    rope_theta: float = setting(
        default=10_000.0,
        gt=0,
        description="Base of the rotary frequencies.",
        needs=(_DECODER, Need("positions", ("rope",))),
    )
    rope_scaling: RopeScalingConfig = setting(
        default=RopeScalingConfig(), description="Scaling of the rotary frequencies for longer rows (Llama 3.x)."
    )
    sliding_rope_theta: float | None = setting(
        default=None,
        gt=0,
        description="Base of the rotary frequencies of sliding layers, which are then never scaled (Gemma 3). None: as "
        "in other layers.",
        needs=(_DECODER, Need("sliding_window_tokens")),
    )
    rotary_fraction: float = setting(
        default=1.0,
        gt=0,
        le=1,
        description="Share of each head's dimensions that is rotated, the first ones.",
        needs=(_DECODER, Need("positions", ("rope",))),
    )
    sliding_window_tokens: int | None = setting(
        default=None,
        ge=1,
        description="Sliding-window attention: a position attends to itself and the positions before it, this many in "
        "all. None: to the whole row.",
        needs=_DECODER,
    )
    query_pre_attn_scalar: int | None = setting(
        default=None,
        ge=1,
        description="Attention scores are divided by the root of this. None: head_dim.",
        needs=_DECODER,
    )
    layer_types: tuple[LayerType, ...] | None = setting(
        default=None,
        min_length=1,
        description="Which layers have the sliding window; a list shorter than num_layers repeats. None: all layers.",
        needs=(_DECODER, Need("sliding_window_tokens")),
    )
    layer_pattern: str | None = setting(
        default=None,
        min_length=1,
        description="torch: one mixer per layer, each with a norm before it: M is Mamba-2, * attention, - an MLP "
        "(Nemotron-H). A pattern shorter than num_layers repeats. None: attention and MLP in every layer.",
        needs=_DECODER,
    )
    mamba_num_heads: int | None = setting(
        default=None,
        ge=1,
        description="Mamba-2: number of heads. None: 2 x hidden_size / mamba_head_dim.",
        needs=(_DECODER, _HAS_MAMBA),
    )
    mamba_head_dim: int = setting(
        default=64, ge=1, description="Mamba-2: width of a head.", needs=(_DECODER, _HAS_MAMBA)
    )
    mamba_state_size: int = setting(
        default=128, ge=1, description="Mamba-2: columns of the state of a head.", needs=(_DECODER, _HAS_MAMBA)
    )
    mamba_num_groups: int = setting(
        default=1,
        ge=1,
        description="Mamba-2: groups of heads that share B and C; each group is normalised by itself.",
        needs=(_DECODER, _HAS_MAMBA),
    )
    mamba_conv_tokens: int = setting(
        default=4,
        ge=2,
        description="Mamba-2: positions that the causal convolution reads, including its own.",
        needs=(_DECODER, _HAS_MAMBA),
    )
    mamba_conv_bias: bool = setting(
        default=True, description="Mamba-2: bias of the convolution.", needs=(_DECODER, _HAS_MAMBA)
    )
    mamba_bias: bool = setting(
        default=False, description="Mamba-2: biases of input and output projection.", needs=(_DECODER, _HAS_MAMBA)
    )
    mamba_chunk_tokens: int = setting(
        default=128,
        ge=1,
        description="Mamba-2: positions of a chunk of the scan; changes memory and speed only.",
        needs=(_DECODER, _HAS_MAMBA),
    )
    mamba_time_step_min: float = setting(
        default=0.001,
        gt=0,
        description="Mamba-2: smallest time step, at the start and in every forward pass (Nemotron-H).",
        needs=(_DECODER, _HAS_MAMBA),
    )
    mamba_time_step_max: float = setting(
        default=0.1, gt=0, description="Mamba-2: largest time step at the start.", needs=(_DECODER, _HAS_MAMBA)
    )
    norm: Norm = setting(default="rms_norm", description="Normalisation layer.", needs=_DECODER)
    norm_placement: NormPlacement = setting(
        default="pre",
        description="Norms before attention and MLP, after them on the residual branch (OLMo 2), or both (Gemma 3).",
        needs=_DECODER,
    )
    norm_unit_offset: bool = setting(
        default=False,
        description="RMS norms multiply by 1 + weight, and weights start at 0 (Gemma).",
        needs=(_DECODER, Need("norm", ("rms_norm",))),
    )
    scale_embeddings: bool = setting(
        default=False, description="Multiply token embeddings by the root of hidden_size (Gemma).", needs=_DECODER
    )
    norm_eps: float = setting(
        default=1e-5, gt=0, description="Epsilon added to the variance in every norm.", needs=_DECODER
    )
    activation: Activation | ImportPath = setting(
        default="swiglu",
        description="MLP non-linearity; swiglu, geglu and geglu_tanh are gated. Or a user function: f(x) returns an "
        "array of the same shape, in an MLP without a gate.",
        needs=_DECODER,
    )
    mlp: ImportPath | None = setting(
        default=None,
        description="torch: a user function that replaces the MLP: f(x, weights) acts on each position; its attribute "
        "parameters(spec) returns the shapes of its weights by name. None: the MLP of activation.",
        engines=("torch",),
        needs=(_DECODER, Need("block", (None,), remedy="the built-in blocks (no model.block)")),
    )
    block: ImportPath | None = setting(
        default=None,
        description="torch: a user class in the place of the blocks: f(spec, layer) returns a torch.nn.Module from the "
        "residual stream [rows, positions, width], positions and attn_mask to the next. None: the built-in blocks.",
        engines=("torch",),
        needs=Need("kind", ("decoder",)),
    )
    qk_norm: bool | Literal["full_width"] = setting(
        default=False,
        description="RMS norm of queries and keys: true per head (Qwen3), full_width over all heads together (OLMo 2).",
        needs=_DECODER,
    )
    attention_bias: bool | Literal["qkv"] = setting(
        default=False,
        description="Biases on the attention projections; qkv: not on the output projection (Qwen2).",
        needs=_DECODER,
    )
    mlp_bias: bool = setting(default=False, description="Biases in the MLP.", needs=_DECODER)
    norm_bias: bool = setting(
        default=False,
        description="Bias of layer_norm; rms_norm has none.",
        needs=(_DECODER, Need("norm", ("layer_norm",))),
    )
    tie_embeddings: bool = setting(
        default=True, description="Share the token embedding with the output head.", needs=_DECODER
    )
    dropout_fraction: float = setting(
        default=0.0,
        ge=0,
        lt=1,
        description="Dropout on embeddings, attention weights and both residual branches.",
        needs=_DECODER,
        synonyms=("dropout",),
    )
    init_std: float = setting(
        default=0.02, gt=0, description="Standard deviation of the initial weights.", needs=_DECODER
    )
    scale_residual_init: bool = setting(
        default=True,
        description="Divide the initial std of output projections by the root of the number of residual "
        "branches: 2 x num_layers (GPT-2), or num_layers with layer_pattern.",
        needs=_DECODER,
    )
    vision: VisionConfig = setting(
        default=VisionConfig(), description="torch: an image encoder before the decoder (data.sources.N.images_field)."
    )
    image_processor: ImageProcessorConfig = setting(
        default=ImageProcessorConfig(),
        description="huggingface: how the model reads images (data.sources.N.images_field).",
    )
    mup_base_hidden_size: int | None = setting(
        default=None,
        ge=1,
        description="Maximal update parametrisation: settings tuned at this hidden_size transfer to wider models. With "
        "m = hidden_size / mup_base_hidden_size, matrices in the blocks start with init_std / sqrt(m), the head with "
        "init_std / m, and both learn at optimizer.lr / m.",
        needs=_DECODER,
    )
    attention_kernel: Literal["auto", "reference", "sdpa", "xla", "cudnn", "splash"] | ImportPath = setting(
        default="auto",
        description="Attention implementation. auto: the engine's fastest; reference: plain matrix products. sdpa: "
        "torch; xla, cudnn (GPU), splash (TPU): jax. Or a user function with the signature of the framework's own: "
        "torch.nn.functional.scaled_dot_product_attention or jax.nn.dot_product_attention.",
        engines={"sdpa": ("torch",), "xla": ("jax",), "cudnn": ("jax",), "splash": ("jax",)},
        needs=Need("block", (None,), remedy="the built-in blocks (no model.block)"),
    )


MAMBA_KEYS = tuple(key for key in ModelConfig.model_fields if key.startswith("mamba_"))
"""Settings of the Mamba-2 layers of ``layer_pattern``."""
