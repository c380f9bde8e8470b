"""Checks of a configuration with ``parallel.pipeline_parallel_size`` above 1."""

from __future__ import annotations

from collections.abc import Iterator

from vorox.core.config.parallel_checks import unsupported
from vorox.core.config.tree import Problem
from vorox.core.pluralize import pluralize
from vorox.core.schema import RunConfig

SIZE = "parallel.pipeline_parallel_size"
_REFUSED = (
    "model.kind", "model.block", "model.num_experts", "model.layer_pattern", "model.dropout_fraction",
    "adapter.kind", "loss.name", "train.distillation.teacher",
    "train.distillation.logits", "train.forward_backward", "optimizer.name", "runtime.compile", "runtime.determinism",
)  # fmt: skip


def pipeline_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the settings that a pipeline does not support, and sizes that do not fit it."""
    if config.parallel.pipeline_parallel_size == 1:
        return
    yield from unsupported(config, SIZE, f"{SIZE} above 1", _REFUSED)
    fault = layers_fault(config, config.model.num_layers) if config.model.kind == "decoder" else ""
    if fault:
        yield Problem(fault, keys=("model.num_layers", SIZE))
    fault = micro_batches_fault(config, config.parallel.num_row_parts)
    if fault:
        yield Problem(fault, keys=("train.micro_batch_sequences", "train.global_batch_sequences", SIZE))


def layers_fault(config: RunConfig, num_layers: int) -> str:
    """Return why the blocks of a model do not divide into the stages of the pipeline; empty if they do."""
    size, per_device = config.parallel.pipeline_parallel_size, config.parallel.pipeline_stages_per_device
    if num_layers >= size * per_device:
        return ""
    advice = f"set {SIZE}={num_layers // per_device} or less" if num_layers >= 2 * per_device else f"set {SIZE}=1"
    if per_device > 1 and num_layers >= size:
        advice += ", or parallel.pipeline_schedule=1f1b"
    stages = f"{size} x {per_device} stages" if per_device > 1 else f"{size} stages"
    return f"{pluralize(num_layers, 'layer')} cannot be divided into {stages} ({SIZE}={size}); {advice}"


def micro_batches_fault(config: RunConfig, num_row_parts: int) -> str:
    """Return why the micro-batches of a step do not fill the pipeline; empty if they do.

    Args:
        config: The run.
        num_row_parts: Replicas, each of which is a pipeline.
    """
    parallel, train = config.parallel, config.train
    size, limit = parallel.pipeline_parallel_size, train.micro_batch_rows
    micro = parallel.micro_batch_sequences(limit, train.global_batch_sequences, num_row_parts)
    shares = [
        -(-rows // num_row_parts)
        for rows in (train.global_batch_sequences, *(stage.global_batch_sequences for stage in train.batch_stages))
    ]
    unfilled = [share for share in shares if not parallel.fills_pipeline(-(-share // micro))]
    if not unfilled:
        return ""
    share, count = unfilled[0], -(-unfilled[0] // micro)
    needed = f"at least {size}" if parallel.pipeline_schedule == "1f1b" else f"a multiple of {size}"
    parts = [part for part in range(1, share + 1) if share % part == 0 and parallel.fills_pipeline(share // part)]
    if parts:
        advice = f"set train.micro_batch_sequences={max(parts)}"
    else:
        advice = f"set train.global_batch_sequences={size * num_row_parts * micro}"
    per_replica = " for each replica" if num_row_parts > 1 else ""
    return (
        f"A step has {pluralize(count, 'micro-batch', 'micro-batches')} of {pluralize(micro, 'row')}{per_replica}, but "
        f"{SIZE}={size} with pipeline_schedule={parallel.pipeline_schedule} needs {needed}; {advice}"
    )
