"""Checks of ``parallel.context_parallel_size`` above 1 and of ``parallel.sequence_parallel``."""

from __future__ import annotations

from collections.abc import Iterator

from vorox.core.config.tree import Problem
from vorox.core.schema import RunConfig

SIZE = "parallel.context_parallel_size"


def context_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the settings that context parallelism does not support, and rows that it cannot divide."""
    size = config.parallel.context_parallel_size
    if size == 1:
        return
    for is_refused, key, value, remedy in _unsupported(config):
        if is_refused:
            shown = str(value).lower() if isinstance(value, bool) else value
            yield Problem(f"{key}={shown} is not supported with {SIZE} above 1; it needs {remedy}", keys=(key, SIZE))
    for key, length in _row_lengths(config):
        if length % size:
            yield Problem(
                f"{key}={length:,} is not divisible by {SIZE}={size}; set {key}={length // size * size or size}",
                keys=(key, SIZE),
            )


def sequence_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what sequence parallelism does not support."""
    name, size = "parallel.sequence_parallel", config.parallel.tensor_parallel_size
    if not config.parallel.sequence_parallel or size == 1:
        return
    if config.log.activation_statistics:
        key = "log.activation_statistics"
        yield Problem(f"{key}=true is not supported with {name}=true; set {key}=false", keys=(key, name))
    for key, length in _row_lengths(config):
        if length % size:
            yield Problem(
                f"{key}={length:,} is not divisible by parallel.tensor_parallel_size={size}, which {name}=true needs; "
                f"set {key}={length // size * size or size}",
                keys=(key, name),
            )


def _unsupported(config: RunConfig) -> tuple[tuple[bool, str, object, str], ...]:
    model, parallel, runtime, train = config.model, config.parallel, config.runtime, config.train
    whole = "1, or data_parallel_size and fsdp_size"
    return (
        (model.kind != "decoder", "model.kind", model.kind, "model.kind=decoder"),
        (model.block is not None, "model.block", model.block, "the built-in blocks"),
        (model.num_experts is not None, "model.num_experts", model.num_experts, "a model without experts"),
        (
            model.layer_pattern is not None,
            "model.layer_pattern",
            model.layer_pattern,
            "attention and MLP in every block",
        ),
        (
            parallel.tensor_parallel_size > 1,
            "parallel.tensor_parallel_size",
            parallel.tensor_parallel_size,
            f"parallel.tensor_parallel_size={whole}",
        ),
        (
            parallel.pipeline_parallel_size > 1,
            "parallel.pipeline_parallel_size",
            parallel.pipeline_parallel_size,
            f"parallel.pipeline_parallel_size={whole}",
        ),
        (config.adapter.kind != "none", "adapter.kind", config.adapter.kind, "adapter.kind=none"),
        (config.loss.name == "dpo", "loss.name", "dpo", "another loss"),
        (
            train.distillation.teacher is not None,
            "train.distillation.teacher",
            train.distillation.teacher,
            "no teacher",
        ),
        (
            train.forward_backward is not None,
            "train.forward_backward",
            train.forward_backward,
            "train.forward_backward=null",
        ),
        (runtime.compile, "runtime.compile", True, "runtime.compile=false"),
        (
            runtime.determinism == "bitwise-any-world",
            "runtime.determinism",
            runtime.determinism,
            "runtime.determinism=bitwise",
        ),
    )


def _row_lengths(config: RunConfig) -> Iterator[tuple[str, int]]:
    yield "data.sequence_length_tokens", config.data.sequence_length_tokens
    for index, stage in enumerate(config.data.stages):
        if stage.sequence_length_tokens is not None:
            yield f"data.stages.{index}.sequence_length_tokens", stage.sequence_length_tokens
