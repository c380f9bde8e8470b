"""Checks of a configuration with ``parallel.expert_parallel_size`` above 1."""

from __future__ import annotations

from collections.abc import Iterator

from vorox.core.config.tree import Problem
from vorox.core.extensions import is_extension
from vorox.core.schema import RunConfig

SIZE = "parallel.expert_parallel_size"


def expert_parallel_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the settings that expert parallelism does not support, and sizes that do not divide."""
    parallel = config.parallel
    size, num_experts, replicas = parallel.expert_parallel_size, config.model.num_experts, parallel.data_parallel_size
    if size == 1:
        return
    for is_refused, key, value, remedy in _unsupported(config):
        if is_refused:
            shown = str(value).lower() if isinstance(value, bool) else value
            yield Problem(f"{key}={shown} is not supported with {SIZE} above 1; it needs {remedy}", keys=(key, SIZE))
    if num_experts is not None and num_experts % size:
        yield Problem(
            f"model.num_experts={num_experts} is not divisible by {SIZE}={size}", keys=("model.num_experts", SIZE)
        )
    if replicas != "auto" and replicas % size:
        yield Problem(
            f"parallel.data_parallel_size={replicas} is not divisible by {SIZE}={size}, which divides the experts "
            f"among replicas; set it to auto or to a multiple of {size}",
            keys=("parallel.data_parallel_size", SIZE),
        )


def _unsupported(config: RunConfig) -> tuple[tuple[bool, str, object, str], ...]:
    parallel, runtime, train = config.parallel, config.runtime, config.train
    others = ("fsdp_size", "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    return (
        *((getattr(parallel, key) > 1, f"parallel.{key}", getattr(parallel, key), f"{key}=1") for key in others),
        (parallel.kind != "native", "parallel.kind", parallel.kind, "parallel.kind=native"),
        (config.loss.name == "dpo", "loss.name", "dpo", "another loss"),
        (
            train.distillation.teacher is not None,
            "train.distillation.teacher",
            train.distillation.teacher,
            "no teacher",
        ),
        (
            is_extension(config.optimizer.name) or config.optimizer.name == "adamw_8bit",
            "optimizer.name",
            config.optimizer.name,
            "optimizer.name=adamw or muon",
        ),
        (runtime.compile, "runtime.compile", True, "runtime.compile=false"),
        (
            runtime.determinism == "bitwise-any-world",
            "runtime.determinism",
            runtime.determinism,
            "runtime.determinism=bitwise",
        ),
    )
