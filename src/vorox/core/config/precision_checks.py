"""Checks of a configuration with ``precision.float8``."""

from __future__ import annotations

from collections.abc import Iterator

from vorox.core.config.tree import Problem
from vorox.core.extensions import is_extension
from vorox.core.schema import RunConfig

KEY = "precision.float8"


def float8_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the settings that products in 8-bit floats do not support."""
    if config.precision.float8 is None:
        return
    model, parallel = config.model, config.parallel
    needed: tuple[tuple[str, bool, str], ...] = (
        ("precision.dtype", config.precision.dtype != "fp16", "precision.dtype=bf16 or fp32"),
        ("model.kind", not is_extension(model.kind), "a decoder or a transformers model"),
        (
            "model.hidden_size", model.kind != "decoder" or model.hidden_size % 16 == 0,
            "a model.hidden_size that is a multiple of 16",
        ),
        *(
            (f"model.{key}", getattr(model, key) is None, f"model.{key}=null")
            for key in ("block", "mlp", "layer_pattern", "num_experts")
        ),
        ("model.vision.num_layers", not model.vision.num_layers, "a model without an image encoder"),
        ("adapter.kind", config.adapter.kind == "none", "adapter.kind=none"),
        ("train.quantization_aware", config.train.quantization_aware is None, "train.quantization_aware=null"),
        ("parallel.kind", parallel.kind == "native", "parallel.kind=native"),
        *(
            (f"parallel.{key}", getattr(parallel, key) == 1, f"parallel.{key}=1; replicas and FSDP2 are supported")
            for key in (
                "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size",
            )
        ),
    )  # fmt: skip
    for key, holds, remedy in needed:
        if not holds:
            yield Problem(f"{KEY} needs {remedy}", keys=(KEY, key))
