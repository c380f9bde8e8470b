"""Checks of a configuration with ``parallel.expert_parallel_size`` above 1."""

from __future__ import annotations

from collections.abc import Iterator

from vorox.core.config.parallel_refusals import unsupported
from vorox.core.config.tree import Problem
from vorox.core.schema import RunConfig

SIZE = "parallel.expert_parallel_size"
_REFUSED = (
    "model.kind", "parallel.fsdp_size", "parallel.tensor_parallel_size", "parallel.pipeline_parallel_size",
    "parallel.context_parallel_size", "parallel.kind", "adapter.kind", "loss.name", "train.distillation.teacher",
    "train.distillation.logits", "optimizer.name", "runtime.compile", "runtime.determinism",
)  # fmt: skip


def expert_parallel_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the settings that expert parallelism does not support, and sizes that do not divide."""
    parallel = config.parallel
    size, num_experts, replicas = parallel.expert_parallel_size, config.model.num_experts, parallel.data_parallel_size
    if size == 1:
        return
    yield from unsupported(config, SIZE, _REFUSED)
    if config.model.kind == "decoder" and num_experts is None:
        yield Problem(
            f"{SIZE}={size} needs a mixture of experts; set model.num_experts", keys=("model.num_experts", SIZE)
        )
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
