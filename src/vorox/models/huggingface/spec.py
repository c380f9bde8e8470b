"""A causal language model in transformers (``models/module_spec.py``), described by its ``config.json``.

The engine that computes it (``backends/torch_engine/foreign/huggingface_model.py``) fills the table in from the
modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from vorox.models.module_spec import ModuleSpec

KIND = "huggingface"
VOLATILE_KEYS = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"})
"""Keys of ``config.json`` that do not describe the network."""
KERNEL_KEYS = frozenset(
    f"{before}{part}_implementation{after}"
    for before in ("", "_")
    for part in ("attn", "experts", "mlp", "norm")
    for after in ("", "_internal", "_autoset")
) | {"use_kernels", "kernel_config"}  # fmt: skip
"""Keys of a ``config.json`` by which transformers loads kernels from the hub."""
IMAGE_MODELS = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""Architectures that read images beside text (``model.image_processor``)."""
PIPELINE_MODELS = frozenset(
    {"gemma", "gemma2", "gemma3_text", "gpt2", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"}
)
"""Architectures that a pipeline divides: an embedding, blocks, a norm and a head, and nothing beside them."""
CONTEXT_MODELS = frozenset({*PIPELINE_MODELS, "gpt_neox", "mixtral", "olmo3", "qwen3_moe", "smollm3"})
"""Architectures that context parallelism supports: only attention reads other positions, through a function of
``AttentionInterface``."""
EXPERT_MODELS = frozenset({"gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"})
"""Architectures whose experts expert parallelism divides."""
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
"""Names of the number of experts of a layer, in a ``config.json`` or an attribute of a module."""
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts",
    "experts_per_token",
)  # fmt: skip
"""Keys of the number of experts that compute a token."""


@dataclass(frozen=True)
class HuggingFaceSpec(ModuleSpec):
    """A transformers model.

    Attributes:
        config: Content of ``config.json``, without ``VOLATILE_KEYS``.
        revision: Commit of its repository; ``None`` for a directory.
    """

    revision: str | None = None

    kind: ClassVar[str] = KIND
    free_to_change = frozenset({"revision"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", without_kernels(self.config))

    @property
    def label(self) -> str:
        return self.config["model_type"]


def without_kernels(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` without the keys that choose an implementation, also those of its parts.

    Their value may be a repository of the hub, whose newest code transformers would download and run. How a model is
    computed is for the engine to choose.
    """
    return {key: _without_kernels(value) for key, value in values.items() if key not in KERNEL_KEYS}


def load_configuration(transformers: Any, location: str, **options: Any) -> Any:
    """Load the configuration of a model with transformers, for its ``from_pretrained``; no code of others comes along.

    Args:
        transformers: The library.
        location: A directory or repository.
        options: Of ``AutoConfig.from_pretrained``.
    """
    found = transformers.AutoConfig.from_pretrained(location, trust_remote_code=False, **options)
    return type(found).from_dict(without_kernels(found.to_dict()))


def _without_kernels(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_kernels(cast("Mapping[str, Any]", value))
    return [_without_kernels(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value


def auto_class(model_type: object) -> str:
    """Return the class of transformers that loads models of an architecture."""
    return "AutoModelForImageTextToText" if model_type in IMAGE_MODELS else "AutoModelForCausalLM"
