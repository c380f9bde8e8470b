"""Checks of the section parallel: settings that each kind of parallelism does not support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vorox.core.config.tree import Problem
from vorox.core.extensions import is_extension
from vorox.core.schema import RunConfig

CONTEXT_SIZE = "parallel.context_parallel_size"
EXPERT_SIZE = "parallel.expert_parallel_size"
_CONTEXT_KIND = "parallel.context_parallel_kind"
_KIND, _OFFLOAD = "parallel.kind", "parallel.fsdp_offload"
_LOSSES = ("adapter.kind", "loss.name", "train.distillation.teacher", "train.distillation.logits")
_BY_CONTEXT = (
    "model.kind", "model.block", "model.num_experts", "model.layer_pattern", *_LOSSES, "train.forward_backward",
    "runtime.compile", "runtime.determinism",
)  # fmt: skip
_BY_EXPERTS = (
    "model.kind", "parallel.fsdp_size", "parallel.tensor_parallel_size", "parallel.pipeline_parallel_size",
    "parallel.context_parallel_size", "parallel.kind", *_LOSSES, "optimizer.name", "runtime.compile",
    "runtime.determinism",
)  # fmt: skip
_BY_DEEPSPEED = ("precision.dtype", "adapter.kind", "model.num_experts", "runtime.compile", "runtime.determinism")
_BY_OFFLOAD = (
    "adapter.kind", "parallel.tensor_parallel_size", "parallel.pipeline_parallel_size",
    "parallel.context_parallel_size", "precision.dtype", "loss.name", "runtime.compile",
)  # fmt: skip


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


def unsupported(
    config: RunConfig, switch: str, context: str, keys: tuple[str, ...], *others: Refusal
) -> Iterator[Problem]:
    """Yield the settings that a kind of parallelism does not support.

    Args:
        config: The run.
        switch: The setting that switches it on.
        context: The setting with its value, for the message.
        keys: Settings of ``_common``.
        others: Refusals that only this kind has.
    """
    table = {refusal.key: refusal for refusal in _common(config)}
    for is_refused, key, value, remedy in (*(table[key] for key in keys), *others):
        if is_refused:
            shown = str(value).lower() if isinstance(value, bool) else value
            yield Problem(f"{key}={shown} is not supported with {context}; it needs {remedy}", keys=(key, switch))


def _common(config: RunConfig) -> tuple[Refusal, ...]:
    """Return what several kinds of parallelism refuse."""
    model, parallel, runtime, train = config.model, config.parallel, config.runtime, config.train
    optimizer, distillation, adapter = config.optimizer.name, train.distillation, config.adapter.kind
    is_other_optimizer = is_extension(optimizer) or optimizer == "adamw_8bit"
    dropout, function, determinism = model.dropout_fraction, train.forward_backward, runtime.determinism
    sizes = ("fsdp_size", "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    return (
        Refusal(is_extension(model.kind), "model.kind", model.kind, "model.kind=decoder or huggingface"),
        Refusal(model.block is not None, "model.block", model.block, "the built-in blocks"),
        Refusal(model.num_experts is not None, "model.num_experts", model.num_experts, "a model without experts"),
        Refusal(
            model.layer_pattern is not None, "model.layer_pattern", model.layer_pattern,
            "attention and MLP in every block; with a pattern, use parallel.data_parallel_size or parallel.fsdp_size",
        ),
        Refusal(dropout > 0, "model.dropout_fraction", dropout, "model.dropout_fraction=0"),
        *(
            Refusal(
                getattr(parallel, size) > 1, f"parallel.{size}", getattr(parallel, size),
                f"parallel.{size}=1, or replicas",
            )
            for size in sizes
        ),
        Refusal(parallel.kind != "native", "parallel.kind", parallel.kind, "parallel.kind=native"),
        Refusal(adapter != "none", "adapter.kind", adapter, "adapter.kind=none"),
        Refusal(config.loss.name == "dpo", "loss.name", "dpo", "another loss"),
        Refusal(distillation.teacher is not None, "train.distillation.teacher", distillation.teacher, "no teacher"),
        Refusal(
            distillation.logits is not None, "train.distillation.logits", distillation.logits,
            "no logits of a teacher",
        ),
        Refusal(function is not None, "train.forward_backward", function, "train.forward_backward=null"),
        Refusal(is_other_optimizer, "optimizer.name", optimizer, "optimizer.name=adamw or muon"),
        Refusal(config.precision.dtype == "fp16", "precision.dtype", "fp16", "precision.dtype=bf16 or fp32"),
        Refusal(runtime.compile, "runtime.compile", True, "runtime.compile=false"),
        Refusal(
            determinism == "bitwise-any-world", "runtime.determinism", determinism, "runtime.determinism=bitwise"
        ),
    )  # fmt: skip


def context_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the settings that context parallelism does not support, and rows that it cannot divide."""
    size, model = config.parallel.context_parallel_size, config.model
    if size == 1:
        return
    stages, name = config.parallel.pipeline_parallel_size, "parallel.pipeline_parallel_size"
    is_divided = model.kind == "huggingface" and stages > 1
    yield from unsupported(
        config, CONTEXT_SIZE, f"{CONTEXT_SIZE} above 1", _BY_CONTEXT,
        Refusal(is_divided, name, stages, f"{name}=1 for transformers models"),
    )  # fmt: skip
    divisor, context = size, f"{CONTEXT_SIZE}={size}"
    if config.parallel.context_parallel_kind == "ring":
        divisor, context = 2 * size, f"2 x {CONTEXT_SIZE}={2 * size}, which {_CONTEXT_KIND}=ring needs"
        dropout, kernel = model.dropout_fraction, model.attention_kernel
        or_ulysses = f"or {_CONTEXT_KIND}=ulysses"
        yield from unsupported(
            config, _CONTEXT_KIND, f"{_CONTEXT_KIND}=ring", (),
            Refusal(model.kind == "huggingface", "model.kind", model.kind, f"model.kind=decoder, {or_ulysses}"),
            Refusal(dropout > 0, "model.dropout_fraction", dropout, f"model.dropout_fraction=0, {or_ulysses}"),
            Refusal(kernel != "auto", "model.attention_kernel", kernel, f"model.attention_kernel=auto, {or_ulysses}"),
        )  # fmt: skip
    for key, length in _row_lengths(config):
        if length % divisor:
            yield Problem(
                f"{key}={length:,} is not divisible by {context}; set {key}={length // divisor * divisor or divisor}",
                keys=(key, CONTEXT_SIZE),
            )


def sequence_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what sequence parallelism does not support."""
    name, size = "parallel.sequence_parallel", config.parallel.tensor_parallel_size
    if not config.parallel.sequence_parallel or size == 1:
        return
    if config.log.activation_statistics:
        key = "log.activation_statistics"
        yield Problem(f"{key}=true is not supported with {name}=true; set {key}=false", keys=(key, name))
    divisor, divided = size, f"parallel.tensor_parallel_size={size}"
    if (positions := config.parallel.context_parallel_size) > 1:
        divisor, divided = size * positions, f"{divided} x {CONTEXT_SIZE}={positions}"
    for key, length in _row_lengths(config):
        if length % divisor:
            yield Problem(
                f"{key}={length:,} is not divisible by {divided}, which {name}=true needs; "
                f"set {key}={length // divisor * divisor or divisor}",
                keys=(key, name),
            )


def _row_lengths(config: RunConfig) -> Iterator[tuple[str, int]]:
    yield "data.sequence_length_tokens", config.data.sequence_length_tokens
    for index, stage in enumerate(config.data.stages):
        if stage.sequence_length_tokens is not None:
            yield f"data.stages.{index}.sequence_length_tokens", stage.sequence_length_tokens


def expert_parallel_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the settings that expert parallelism does not support, and sizes that do not divide."""
    parallel = config.parallel
    size, num_experts, replicas = parallel.expert_parallel_size, config.model.num_experts, parallel.data_parallel_size
    if size == 1:
        return
    keys = ("model.num_experts", EXPERT_SIZE)
    yield from unsupported(config, EXPERT_SIZE, f"{EXPERT_SIZE} above 1", _BY_EXPERTS)
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


def deepspeed_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the settings that are not supported with DeepSpeed's ZeRO."""
    if config.parallel.kind != "deepspeed":
        return
    optimizer, train, device = config.optimizer, config.train, config.runtime.device
    has_frozen = any(group.frozen for group in optimizer.groups)
    yield from unsupported(
        config, _KIND, "parallel.kind=deepspeed", _BY_DEEPSPEED,
        Refusal(optimizer.name != "adamw", "optimizer.name", optimizer.name, "optimizer.name=adamw"),
        Refusal(train.ema_decay is not None, "train.ema_decay", train.ema_decay, "train.ema_decay=null"),
        Refusal(train.keep_zeros, "train.keep_zeros", True, "train.keep_zeros=false"),
        Refusal(train.spike_policy != "off", "train.spike_policy", train.spike_policy, "train.spike_policy=off"),
        Refusal(device in {"mps", "tpu"}, "runtime.device", device, "cpu or cuda"),
        Refusal(has_frozen, "optimizer.groups", "frozen", "groups that are trained, or parallel.kind=native"),
    )  # fmt: skip
    if config.parallel.zero_offload == "parameters" and config.parallel.zero_stage != 3:
        yield Problem(
            f"parallel.zero_offload=parameters needs parallel.zero_stage=3, not {config.parallel.zero_stage}: earlier "
            "stages keep whole parameters on every device",
            keys=("parallel.zero_offload", "parallel.zero_stage"),
        )


def offload_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the settings that the state in host memory does not support."""
    model, optimizer = config.model.kind, config.optimizer.name
    if config.parallel.fsdp_offload:
        yield from unsupported(
            config, _OFFLOAD, _OFFLOAD, _BY_OFFLOAD,
            Refusal(model != "decoder", "model.kind", model, "model.kind=decoder, or DeepSpeed"),
            Refusal(optimizer != "adamw", "optimizer.name", optimizer, "optimizer.name=adamw"),
        )  # fmt: skip
