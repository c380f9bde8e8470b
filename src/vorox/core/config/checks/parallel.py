"""Checks of the section ``parallel``: sizes that do not divide, and what a kind of parallelism needs besides."""

from __future__ import annotations

from collections.abc import Iterator

from vorox.core.config.layers.tree import Problem
from vorox.core.pluralize import pluralize
from vorox.core.schema import RunConfig

CONTEXT_SIZE = "parallel.context_parallel_size"
EXPERT_SIZE = "parallel.expert_parallel_size"
PIPELINE_SIZE = "parallel.pipeline_parallel_size"


def parallel_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield sizes that do not divide, and what a kind of parallelism needs besides."""
    yield from _rows(config)
    yield from _experts(config)
    yield from _stages(config)
    parallel = config.parallel
    if parallel.kind == "deepspeed" and parallel.zero_offload == "parameters" and parallel.zero_stage != 3:
        yield Problem(
            f"parallel.zero_offload=parameters needs parallel.zero_stage=3, not {parallel.zero_stage}: earlier "
            "stages keep whole parameters on every device",
            keys=("parallel.zero_offload", "parallel.zero_stage"),
        )


def _rows(config: RunConfig) -> Iterator[Problem]:
    """Yield rows that context and sequence parallelism cannot divide."""
    parallel = config.parallel
    positions, tensor = parallel.context_parallel_size, parallel.tensor_parallel_size
    name = "parallel.sequence_parallel"
    divided = {CONTEXT_SIZE: (positions, f"{CONTEXT_SIZE}={positions}")}
    if (chunks := parallel.position_chunks_per_device) > 1 and positions > 1:
        divided[CONTEXT_SIZE] = (
            chunks * positions,
            f"{chunks} x {CONTEXT_SIZE}={chunks * positions}, which "
            f"parallel.context_parallel_kind={parallel.context_parallel_kind} needs",
        )
    if parallel.sequence_parallel and tensor > 1:
        over = f"parallel.tensor_parallel_size={tensor}" + (f" x {CONTEXT_SIZE}={positions}" if positions > 1 else "")
        divided[name] = (tensor * positions, f"{over}, which {name}=true needs")
    for setting, (divisor, what) in divided.items():
        for key, length in _row_lengths(config):
            if length % divisor:
                fitting = length // divisor * divisor or divisor
                yield Problem(f"{key}={length:,} is not divisible by {what}; set {key}={fitting}", keys=(key, setting))


def _row_lengths(config: RunConfig) -> Iterator[tuple[str, int]]:
    yield "data.sequence_length_tokens", config.data.sequence_length_tokens
    for index, stage in enumerate(config.data.stages):
        if stage.sequence_length_tokens is not None:
            yield f"data.stages.{index}.sequence_length_tokens", stage.sequence_length_tokens


def _experts(config: RunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    size, num_experts, replicas = parallel.expert_parallel_size, config.model.num_experts, parallel.data_parallel_size
    keys = ("model.num_experts", EXPERT_SIZE)
    if size == 1:
        return
    if config.model.kind == "decoder" and num_experts is None:
        yield Problem(f"{EXPERT_SIZE}={size} needs a mixture of experts; set model.num_experts", keys=keys)
    if num_experts is not None and num_experts % size:
        yield Problem(f"model.num_experts={num_experts} is not divisible by {EXPERT_SIZE}={size}", keys=keys)
    if replicas != "auto" and replicas % size:
        yield Problem(
            f"parallel.data_parallel_size={replicas} is not divisible by {EXPERT_SIZE}={size}, which divides the "
            f"experts among replicas; set it to auto or to a multiple of {size}",
            keys=("parallel.data_parallel_size", EXPERT_SIZE),
        )


def _stages(config: RunConfig) -> Iterator[Problem]:
    """Yield layers and micro-batches that do not fill a pipeline."""
    if config.parallel.pipeline_parallel_size == 1:
        return
    fault = layers_fault(config, config.model.num_layers) if config.model.kind == "decoder" else ""
    if fault:
        yield Problem(fault, keys=("model.num_layers", PIPELINE_SIZE))
    fault = micro_batches_fault(config, config.parallel.num_row_parts)
    if fault:
        keys = ("train.micro_batch_sequences", "train.global_batch_sequences", PIPELINE_SIZE)
        yield Problem(fault, keys=keys)


def layers_fault(config: RunConfig, num_layers: int) -> str:
    """Return why the blocks of a model do not divide into the stages of the pipeline; empty if they do."""
    size, per_device = config.parallel.pipeline_parallel_size, config.parallel.pipeline_needs.stages_per_device
    if num_layers >= size * per_device:
        return ""
    advice = (
        f"set {PIPELINE_SIZE}={num_layers // per_device} or less"
        if num_layers >= 2 * per_device
        else f"set {PIPELINE_SIZE}=1"
    )
    if per_device > 1 and num_layers >= size:
        advice += ", or parallel.pipeline_schedule=1f1b"
    stages = f"{size} x {per_device} stages" if per_device > 1 else f"{size} stages"
    return f"{pluralize(num_layers, 'layer')} cannot be divided into {stages} ({PIPELINE_SIZE}={size}); {advice}"


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
    needed = f"a multiple of {size}" if parallel.pipeline_needs.needs_rounds else f"at least {size}"
    parts = [part for part in range(1, share + 1) if share % part == 0 and parallel.fills_pipeline(share // part)]
    if parts:
        advice = f"set train.micro_batch_sequences={max(parts)}"
    else:
        advice = f"set train.global_batch_sequences={size * num_row_parts * micro}"
    per_replica = " for each replica" if num_row_parts > 1 else ""
    return (
        f"A step has {pluralize(count, 'micro-batch', 'micro-batches')} of {pluralize(micro, 'row')}{per_replica}, but "
        f"{PIPELINE_SIZE}={size} with pipeline_schedule={parallel.pipeline_schedule} needs {needed}; {advice}"
    )
