"""Which models tensor, pipeline, context and expert parallelism can divide among devices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from vorox.core.config.checks.parallel import CONTEXT_SIZE, EXPERT_SIZE, PIPELINE_SIZE, layers_fault
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.huggingface.families import ARCHITECTURES
from vorox.models.huggingface.spec import CONTEXT_MODELS, EXPERT_MODELS, PIPELINE_MODELS, HuggingFaceSpec
from vorox.models.spec import ModelSpec

_TENSOR_SIZE = "parallel.tensor_parallel_size"
_NUM_HEADS = frozenset({"num_attention_heads", "n_head"})
_FIXED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})


def check_divisible(config: RunConfig, spec: ModelSpec) -> None:
    """Check that tensor, pipeline, context and expert parallelism can divide a model.

    Raises:
        ConfigError: A dimension is not divisible, there are too few layers, or a setting is not supported.
    """
    if config.parallel.pipeline_parallel_size > 1:
        if isinstance(spec, HuggingFaceSpec):
            _check_architecture("A pipeline", PIPELINE_SIZE, spec, PIPELINE_MODELS)
        if fault := layers_fault(config, spec.num_layers):
            raise ConfigError(fault, where=PIPELINE_SIZE)
    if config.parallel.context_parallel_size > 1:
        _check_positions(config, spec)
    if config.parallel.expert_parallel_size > 1 and isinstance(spec, HuggingFaceSpec):
        _check_experts(config.parallel.expert_parallel_size, spec)
    size = config.parallel.tensor_parallel_size
    if size == 1:
        return
    if isinstance(spec, HuggingFaceSpec):
        for key, value in _dropout(spec):
            raise ConfigError(
                f"tensor_parallel_size = {size} is not supported with {key} = {value}", where=_TENSOR_SIZE,
                hint="set it to 0, or use data_parallel_size and fsdp_size",
            )  # fmt: skip
        _check_heads(size, spec)
        return
    assert isinstance(spec, DecoderSpec), "core/config/checks/support.py refuses other models"
    for name in ("num_heads", "num_kv_heads", "intermediate_size"):
        value = getattr(spec, name)
        if value % size:
            raise ConfigError(
                f"model.{name} = {value:,} is not divisible by tensor_parallel_size = {size}",
                where=f"{_TENSOR_SIZE}, model.{name}", hint=f"choose a common divisor of num_heads = {spec.num_heads}, "
                f"num_kv_heads = {spec.num_kv_heads} and intermediate_size = {spec.intermediate_size}",
            )  # fmt: skip
    if -(-spec.vocab_size // size) * (size - 1) >= spec.vocab_size:
        raise ConfigError(
            f"A vocabulary of {spec.vocab_size:,} tokens cannot be divided over tensor_parallel_size = {size} ranks",
            where=_TENSOR_SIZE, hint="choose a smaller one",
        )  # fmt: skip


def _check_positions(config: RunConfig, spec: ModelSpec) -> None:
    """Check that the ranks of context parallelism have equal shares of the heads. Key/value heads are replicated."""
    size, remedy = config.parallel.context_parallel_size, ""
    divided, advice = "context_parallel_size", "choose"
    if (tensor := config.parallel.tensor_parallel_size) > 1:  # it divides the heads first
        size *= tensor
        divided, advice = "tensor_parallel_size x context_parallel_size", "choose sizes whose product is"
    if isinstance(spec, HuggingFaceSpec):
        _check_architecture("Context parallelism", CONTEXT_SIZE, spec, CONTEXT_MODELS, _undivided(config, spec))
        heads = next((value for name, value in _settings(spec) if name in _NUM_HEADS), None)
        if not isinstance(heads, int):
            raise ConfigError(
                f"config.json of the {spec.label} model has no num_attention_heads, which {CONTEXT_SIZE} divides",
                where=CONTEXT_SIZE, hint="add num_attention_heads to config.json",
            )  # fmt: skip
        where, num_heads = CONTEXT_SIZE, heads
        name = f"The number of heads of the {spec.label} model"
    elif isinstance(spec, DecoderSpec) and config.parallel.context_parallel_kind == "ulysses":
        name, num_heads = "model.num_heads", spec.num_heads
        where, remedy = f"{CONTEXT_SIZE}, model.num_heads", ", or parallel.context_parallel_kind=ring"
    else:
        return
    if num_heads % size:
        fitting = ", ".join(str(part) for part in range(1, num_heads + 1) if num_heads % part == 0)
        raise ConfigError(
            f"{name} = {num_heads} is not divisible by {divided} = {size}", where=where,
            hint=f"{advice} one of {fitting}{remedy}",
        )  # fmt: skip


def _check_experts(size: int, spec: HuggingFaceSpec) -> None:
    """Check that ranks can divide the experts of a transformers model equally."""
    counts = {row.layout.count for row in spec.parameters if row.is_routed and row.kind == "matrix"}
    if spec.label not in EXPERT_MODELS or not counts:
        raise ConfigError(
            f"Expert parallelism does not support the {spec.label} model", where=EXPERT_SIZE,
            hint=f"it needs experts of {', '.join(sorted(EXPERT_MODELS))}; otherwise use data_parallel_size and "
            "fsdp_size",
        )  # fmt: skip
    if uneven := [count for count in sorted(counts) if count % size]:
        raise ConfigError(
            f"{uneven[0]} experts of the {spec.label} model are not divisible by expert_parallel_size = {size}",
            where=EXPERT_SIZE, hint="choose a divisor, or use data_parallel_size and fsdp_size",
        )  # fmt: skip


def _check_architecture(
    what: str, where: str, spec: HuggingFaceSpec, supported: Collection[str], others: Iterable[tuple[str, object]] = ()
) -> None:
    """Check that a kind of parallelism supports the architecture and settings of a transformers model."""
    refused = "" if spec.label in supported else f"the {spec.label} model"
    if found := next(iter((*_dropout(spec), *others)), None):
        refused = f"{found[0]} = {found[1]}"
    if refused:
        raise ConfigError(
            f"{what} does not support {refused}", where=where,
            hint=f"it needs {', '.join(sorted(supported))}, without dropout in config.json; otherwise use "
            "data_parallel_size and fsdp_size",
        )  # fmt: skip


def _undivided(config: RunConfig, spec: HuggingFaceSpec) -> Iterator[tuple[str, object]]:
    """Yield the entries of a ``config.json`` that context parallelism does not support.

    They are rotary frequencies that depend on the largest position of a forward pass, which ranks do not share,
    statistics and noise of a router, and attention by other code than an attention function.
    """
    for name in ("output_router_logits", "router_jitter_noise"):
        if spec.config.get(name):
            yield f"{name} of config.json", spec.config[name]
    if config.model.attention_kernel == "reference" and spec.config.get("reorder_and_upcast_attn"):
        yield "model.attention_kernel=reference, reorder_and_upcast_attn of config.json", True
    fixed = {"default"} if spec.label == "phi3" else _FIXED_ROPE_TYPES  # Phi-3 has another scaling by these names
    for key in ("rope_scaling", "rope_parameters"):
        for name, value in _values({key: spec.config.get(key) or {}}):
            if name in {"rope_type", "type"} and value not in fixed:
                yield f"{name} of config.json", value


def _dropout(spec: HuggingFaceSpec) -> Iterator[tuple[str, object]]:
    """Yield the entries of a ``config.json`` that switch dropout on."""
    for name, value in _settings(spec):
        is_used = "drop" in name and not name.startswith(("summary", "classifier"))  # those have other heads
        if is_used and isinstance(value, int | float) and value > 0:
            yield f"{name} of config.json", value


def _check_heads(size: int, spec: HuggingFaceSpec) -> None:
    """Check the heads of a transformers model; the engine checks the shapes of its layers."""
    for name, value in _settings(spec):
        if name in {"num_attention_heads", "num_key_value_heads"} and isinstance(value, int) and value % size:
            raise ConfigError(
                f"{name} = {value} of the {spec.label} model is not divisible by tensor_parallel_size = {size}",
                where=_TENSOR_SIZE, hint="choose a divisor, or use data_parallel_size and fsdp_size",
            )  # fmt: skip


def _settings(spec: HuggingFaceSpec) -> Iterator[tuple[str, object]]:
    """Yield the entries of a ``config.json``, then the known transformers defaults of those that it omits."""
    yield from _values(spec.config)
    known = {str(family): architecture.defaults for family, architecture in ARCHITECTURES.items()}
    for name, value in known.get(spec.label, {}).items():
        if name not in spec.config:
            yield name, value


def _values(config: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the entries of a ``config.json``, also of the text part of a larger model."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _values(value)
        else:
            yield name, value
