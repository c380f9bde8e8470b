"""Checks of a configuration with ``parallel.kind: deepspeed``."""

from __future__ import annotations

from collections.abc import Iterator

from vorox.core.config.tree import Problem
from vorox.core.schema import RunConfig


def deepspeed_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the settings that are not supported with DeepSpeed's ZeRO."""
    if config.parallel.kind != "deepspeed":
        return
    refused: tuple[tuple[bool, str, object, str], ...] = (
        (config.optimizer.name != "adamw", "optimizer.name", config.optimizer.name, "optimizer.name=adamw"),
        (config.precision.dtype == "fp16", "precision.dtype", "fp16", "precision.dtype=bf16 or fp32"),
        (config.train.ema_decay is not None, "train.ema_decay", config.train.ema_decay, "train.ema_decay=null"),
        (config.train.keep_zeros, "train.keep_zeros", "true", "train.keep_zeros=false"),
        (
            config.train.spike_policy != "off",
            "train.spike_policy",
            config.train.spike_policy,
            "train.spike_policy=off",
        ),
        (config.adapter.kind != "none", "adapter.kind", config.adapter.kind, "parallel.kind=native"),
        (
            config.model.num_experts is not None,
            "model.num_experts",
            str(config.model.num_experts),
            "a model without experts, or parallel.kind=native",
        ),
        (config.runtime.compile, "runtime.compile", "true", "runtime.compile=false"),
        (config.runtime.device in {"mps", "tpu"}, "runtime.device", config.runtime.device, "cpu or cuda"),
        (
            config.runtime.determinism == "bitwise-any-world",
            "runtime.determinism",
            "bitwise-any-world",
            "runtime.determinism=bitwise",
        ),
        (
            any(group.frozen for group in config.optimizer.groups),
            "optimizer.groups",
            "frozen",
            "groups that are trained, or parallel.kind=native",
        ),
    )
    for is_refused, key, value, remedy in refused:
        if is_refused:
            yield Problem(
                f"{key}={value} is not supported with parallel.kind=deepspeed; it needs {remedy}",
                keys=(key, "parallel.kind"),
            )
    if config.parallel.zero_offload == "parameters" and config.parallel.zero_stage != 3:
        yield Problem(
            f"parallel.zero_offload=parameters needs parallel.zero_stage=3, not {config.parallel.zero_stage}: earlier "
            "stages keep whole parameters on every device",
            keys=("parallel.zero_offload", "parallel.zero_stage"),
        )
