"""Checks of a configuration with ``optimizer.in_backward``."""

from __future__ import annotations

from collections.abc import Iterator

from vorox.core.config.tree import Problem
from vorox.core.schema import RunConfig

KEY = "optimizer.in_backward"


def in_backward_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the settings that need all gradients at a time, or several backward passes."""
    if not config.optimizer.in_backward:
        return
    parallel, train = config.parallel, config.train
    needed: tuple[tuple[str, bool, str], ...] = (
        ("optimizer.name", config.optimizer.name in ("adamw", "muon"), "adamw or muon"),
        ("optimizer.clip_norm", config.optimizer.clip_norm is None, "null: the norm is known after the updates"),
        (
            "train.micro_batch_sequences", train.global_batch_sequences <= train.micro_batch_rows,
            f"{train.global_batch_sequences}: one micro-batch per step",
        ),
        (
            "train.max_nonfinite_steps", train.max_nonfinite_steps == 0,
            "0: a step with a gradient that is not finite is not skipped as a whole, so the run stops after it",
        ),
        ("train.spike_policy", train.spike_policy == "off", "off"),
        ("train.keep_zeros", not train.keep_zeros, "false"),
        ("train.forward_backward", train.forward_backward is None, "null"),
        ("precision.dtype", config.precision.dtype != "fp16", "fp32 or bf16"),
        ("adapter.kind", config.adapter.kind == "none", "none: the gradients of an adapter are small"),
        ("parallel.kind", parallel.kind == "native", "native"),
        ("parallel.data_parallel_size", parallel.data_parallel_size in ("auto", 1), "1: one device"),
        ("parallel.fsdp_size", parallel.fsdp_size == 1, "1: one device"),
        ("parallel.tensor_parallel_size", parallel.tensor_parallel_size == 1, "1: one device"),
        ("parallel.pipeline_parallel_size", parallel.pipeline_parallel_size == 1, "1: one device"),
        ("parallel.context_parallel_size", parallel.context_parallel_size == 1, "1: one device"),
        ("parallel.expert_parallel_size", parallel.expert_parallel_size == 1, "1: one device"),
        ("runtime.recompute_every_steps", config.runtime.recompute_every_steps is None, "null"),
        ("runtime.determinism", config.runtime.determinism != "bitwise-any-world", "bitwise"),
    )  # fmt: skip
    for key, holds, wanted in needed:
        if not holds:
            yield Problem(f"{KEY}=true needs {key}={wanted}", keys=(KEY, key))
