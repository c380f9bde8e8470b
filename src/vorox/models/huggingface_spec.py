"""A causal language model in transformers (``module_spec.py``), described by its ``config.json``.

The engine that computes it (``backends/torch_engine/huggingface_model.py``) fills the table in from the modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vorox.models.module_spec import ModuleSpec

KIND = "huggingface"
VOLATILE_KEYS = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"})
"""Keys of ``config.json`` that do not describe the network."""
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

    @property
    def label(self) -> str:
        return self.config["model_type"]


def auto_class(model_type: object) -> str:
    """Return the class of transformers that loads models of an architecture."""
    return "AutoModelForImageTextToText" if model_type in IMAGE_MODELS else "AutoModelForCausalLM"
