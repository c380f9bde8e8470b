"""Checks of settings that replace linear layers: 8-bit floats, quantization-aware training."""

from __future__ import annotations

from collections.abc import Iterator

from vorox.core.config.tree import Problem
from vorox.core.extensions import is_extension
from vorox.core.schema import RunConfig

KEY = "precision.float8"
Need = tuple[str, bool, str]
"""A setting, whether its value is supported, and what is needed."""


def float8_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the settings that products in 8-bit floats do not support."""
    if config.precision.float8 is None:
        return
    model = config.model
    needed: tuple[Need, ...] = (
        ("precision.dtype", config.precision.dtype != "fp16", "precision.dtype=bf16 or fp32"),
        (
            "model.hidden_size", model.kind != "decoder" or model.hidden_size % 16 == 0,
            "a model.hidden_size that is a multiple of 16",
        ),
        (
            "model.image_processor.patch_size_pixels", model.image_processor.patch_size_pixels is None,
            "a model that reads no images",
        ),
        ("train.quantization_aware", config.train.quantization_aware is None, "train.quantization_aware=null"),
        *linear_layer_needs(config, other_sizes=(), supported="replicas and FSDP2 are supported"),
    )  # fmt: skip
    for key, holds, remedy in needed:
        if not holds:
            yield Problem(f"{KEY} needs {remedy}", keys=(KEY, key))


def linear_layer_needs(config: RunConfig, *, other_sizes: tuple[str, ...], supported: str) -> tuple[Need, ...]:
    """Return what every replacement of the linear layers needs of a model and its layout.

    Args:
        config: The run.
        other_sizes: Sizes of ``parallel`` that must be 1, besides those that divide the computation of a row.
        supported: Which layouts are supported, for the message.
    """
    model, parallel = config.model, config.parallel
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size")
    return (
        ("model.kind", not is_extension(model.kind), "a decoder or a transformers model"),
        *(
            (f"model.{key}", getattr(model, key) is None, f"model.{key}=null")
            for key in ("block", "mlp", "layer_pattern", "num_experts")
        ),
        ("model.vision.num_layers", not model.vision.num_layers, "a model without an image encoder"),
        ("adapter.kind", config.adapter.kind == "none", "adapter.kind=none"),
        ("parallel.kind", parallel.kind == "native", "parallel.kind=native"),
        *(
            (f"parallel.{key}", getattr(parallel, key) == 1, f"parallel.{key}=1; {supported}")
            for key in (*other_sizes, *sizes)
        ),
    )
