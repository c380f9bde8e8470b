"""Settings that several kinds of parallelism refuse, each with what it needs instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vorox.core.config.tree import Problem
from vorox.core.extensions import is_extension
from vorox.core.schema import RunConfig


class Refusal(NamedTuple):
    """A setting that a kind of parallelism does not support.

    Attributes:
        is_refused: Whether the configuration has it.
        key: The setting.
        value: Its value.
        remedy: What is needed instead.
    """

    is_refused: bool
    key: str
    value: object
    remedy: str


def unsupported(config: RunConfig, size_key: str, keys: tuple[str, ...], *others: Refusal) -> Iterator[Problem]:
    """Yield the settings that a kind of parallelism does not support.

    Args:
        config: The run.
        size_key: The setting that switches it on.
        keys: Settings of the table below.
        others: Refusals that only this kind has, or in other words.
    """
    table = {refusal.key: refusal for refusal in _common(config)}
    for is_refused, key, value, remedy in (*(table[key] for key in keys), *others):
        if is_refused:
            shown = str(value).lower() if isinstance(value, bool) else value
            yield Problem(
                f"{key}={shown} is not supported with {size_key} above 1; it needs {remedy}", keys=(key, size_key)
            )


def _common(config: RunConfig) -> tuple[Refusal, ...]:
    model, parallel, runtime, train = config.model, config.parallel, config.runtime, config.train
    optimizer, distillation = config.optimizer.name, train.distillation
    is_other_optimizer = is_extension(optimizer) or optimizer == "adamw_8bit"
    sizes = ("fsdp_size", "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    return (
        Refusal(is_extension(model.kind), "model.kind", model.kind, "model.kind=decoder or huggingface"),
        Refusal(model.block is not None, "model.block", model.block, "the built-in blocks"),
        Refusal(model.num_experts is not None, "model.num_experts", model.num_experts, "a model without experts"),
        Refusal(
            model.layer_pattern is not None,
            "model.layer_pattern",
            model.layer_pattern,
            "attention and MLP in every block; with a pattern, use parallel.data_parallel_size or parallel.fsdp_size",
        ),
        Refusal(
            model.dropout_fraction > 0, "model.dropout_fraction", model.dropout_fraction, "model.dropout_fraction=0"
        ),
        *(
            Refusal(
                getattr(parallel, size) > 1,
                f"parallel.{size}",
                getattr(parallel, size),
                f"parallel.{size}=1, or replicas",
            )
            for size in sizes
        ),
        Refusal(parallel.kind != "native", "parallel.kind", parallel.kind, "parallel.kind=native"),
        Refusal(config.adapter.kind != "none", "adapter.kind", config.adapter.kind, "adapter.kind=none"),
        Refusal(config.loss.name == "dpo", "loss.name", "dpo", "another loss"),
        *(
            Refusal(value is not None, f"train.distillation.{key}", value, remedy)
            for key, value, remedy in (
                ("teacher", distillation.teacher, "no teacher"),
                ("logits", distillation.logits, "no logits of a teacher"),
            )
        ),
        Refusal(
            train.forward_backward is not None,
            "train.forward_backward",
            train.forward_backward,
            "train.forward_backward=null",
        ),
        Refusal(is_other_optimizer, "optimizer.name", optimizer, "optimizer.name=adamw or muon"),
        Refusal(runtime.compile, "runtime.compile", True, "runtime.compile=false"),
        Refusal(
            runtime.determinism == "bitwise-any-world",
            "runtime.determinism",
            runtime.determinism,
            "runtime.determinism=bitwise",
        ),
    )
