"""Checks of ``parallel.context_parallel_size`` above 1 and of ``parallel.sequence_parallel``."""

from __future__ import annotations

from collections.abc import Iterator

from vorox.core.config.parallel_refusals import unsupported
from vorox.core.config.tree import Problem
from vorox.core.schema import RunConfig

SIZE = "parallel.context_parallel_size"
KIND = "parallel.context_parallel_kind"
_REFUSED = (
    "model.kind", "model.block", "model.num_experts", "model.layer_pattern", "parallel.tensor_parallel_size",
    "parallel.pipeline_parallel_size", "adapter.kind", "loss.name", "train.distillation.teacher",
    "train.distillation.logits", "train.forward_backward", "runtime.compile", "runtime.determinism",
)  # fmt: skip


def context_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the settings that context parallelism does not support, and rows that it cannot divide."""
    size = config.parallel.context_parallel_size
    if size == 1:
        return
    is_ring = config.parallel.context_parallel_kind == "ring"
    yield from unsupported(config, SIZE, _REFUSED)
    if is_ring:
        yield from _ring_problems(config)
    divisor, context = (
        (2 * size, f"2 x {SIZE}={2 * size}, which {KIND}=ring needs") if is_ring else (size, f"{SIZE}={size}")
    )
    for key, length in _row_lengths(config):
        if length % divisor:
            yield Problem(
                f"{key}={length:,} is not divisible by {context}; set {key}={length // divisor * divisor or divisor}",
                keys=(key, SIZE),
            )


def _ring_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what ring attention does not support and Ulysses does."""
    model = config.model
    for is_refused, key, value, remedy in (
        (model.kind == "huggingface", "model.kind", model.kind, "model.kind=decoder"),
        (model.dropout_fraction > 0, "model.dropout_fraction", model.dropout_fraction, "model.dropout_fraction=0"),
        (
            model.attention_kernel != "auto",
            "model.attention_kernel",
            model.attention_kernel,
            "model.attention_kernel=auto",
        ),
    ):
        if is_refused:
            yield Problem(
                f"{key}={value} is not supported with {KIND}=ring; set {remedy}, or {KIND}=ulysses", keys=(key, KIND)
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


def _row_lengths(config: RunConfig) -> Iterator[tuple[str, int]]:
    yield "data.sequence_length_tokens", config.data.sequence_length_tokens
    for index, stage in enumerate(config.data.stages):
        if stage.sequence_length_tokens is not None:
            yield f"data.stages.{index}.sequence_length_tokens", stage.sequence_length_tokens
