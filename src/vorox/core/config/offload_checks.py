"""Checks of a configuration with ``parallel.fsdp_offload``."""

from __future__ import annotations

from collections.abc import Iterator

from vorox.core.config.tree import Problem
from vorox.core.schema import RunConfig

KEY = "parallel.fsdp_offload"


def offload_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the settings that the state in host memory does not support."""
    parallel = config.parallel
    if not parallel.fsdp_offload:
        return
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    refused: tuple[tuple[bool, str, object, str], ...] = (
        (config.model.kind != "decoder", "model.kind", config.model.kind, "model.kind=decoder, or DeepSpeed"),
        (config.adapter.kind != "none", "adapter.kind", config.adapter.kind, "adapter.kind=none"),
        *(
            (getattr(parallel, size) != 1, f"parallel.{size}", getattr(parallel, size), "FSDP2, alone or with replicas")
            for size in sizes
        ),
        (config.optimizer.name != "adamw", "optimizer.name", config.optimizer.name, "optimizer.name=adamw"),
        (config.precision.dtype == "fp16", "precision.dtype", "fp16", "precision.dtype=bf16 or fp32"),
        (config.loss.name == "dpo", "loss.name", "dpo", "loss.name=cross_entropy"),
        (config.runtime.compile, "runtime.compile", "true", "runtime.compile=false"),
    )
    for is_refused, key, value, remedy in refused:
        if is_refused:
            yield Problem(f"{key}={value} is not supported with {KEY}; it needs {remedy}", keys=(key, KEY))
