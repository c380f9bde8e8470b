"""Checks of settings that change what a step computes: precision, fine-tuning, distillation, DPO."""

from __future__ import annotations

from collections.abc import Iterator

from vorox.core.config.setting_dependencies import SOURCE_LISTS
from vorox.core.config.tree import Need, Problem, unmet_needs
from vorox.core.extensions import is_extension
from vorox.core.schema import DistillationConfig, RunConfig

FLOAT8 = "precision.float8"
_IN_BACKWARD, _NOISE, _QUANTIZATION = "optimizer.in_backward", "train.embedding_noise", "train.quantization_aware"
_DISTILLATION = "train.distillation"


def float8_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the settings that products in 8-bit floats do not support."""
    if config.precision.float8 is None:
        return
    model = config.model
    needs = (
        ("precision.dtype", config.precision.dtype != "fp16", "precision.dtype=bf16 or fp32"),
        (
            "model.hidden_size", model.kind != "decoder" or model.hidden_size % 16 == 0,
            "a model.hidden_size that is a multiple of 16",
        ),
        (
            "model.image_processor.patch_size_pixels", model.image_processor.patch_size_pixels is None,
            "a model that reads no images",
        ),
        ("train.quantization_aware", config.train.quantization_aware is None, "train.quantization_aware=null"),
        *linear_layer_needs(config, other_sizes=(), supported="replicas and FSDP2 are supported"),
    )  # fmt: skip
    yield from unmet_needs(FLOAT8, FLOAT8, needs)


def linear_layer_needs(config: RunConfig, *, other_sizes: tuple[str, ...], supported: str) -> tuple[Need, ...]:
    """Return what every replacement of the linear layers needs of a model and its layout.

    Args:
        config: The run.
        other_sizes: Sizes of ``parallel`` that must be 1, besides those that divide the computation of a row.
        supported: Which layouts are supported, for the message.
    """
    model, parallel = config.model, config.parallel
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size")
    return (
        ("model.kind", not is_extension(model.kind), "a decoder or a transformers model"),
        *(
            (f"model.{key}", getattr(model, key) is None, f"model.{key}=null")
            for key in ("block", "mlp", "layer_pattern", "num_experts")
        ),
        ("model.vision.num_layers", not model.vision.num_layers, "a model without an image encoder"),
        ("adapter.kind", config.adapter.kind == "none", "adapter.kind=none"),
        ("parallel.kind", parallel.kind == "native", "parallel.kind=native"),
        *(
            (f"parallel.{key}", getattr(parallel, key) == 1, f"parallel.{key}=1; {supported}")
            for key in (*other_sizes, *sizes)
        ),
    )


def in_backward_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the settings that need all gradients at a time, or several backward passes."""
    if not config.optimizer.in_backward:
        return
    parallel, train = config.parallel, config.train
    needs = (
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
    values = ((key, holds, f"{key}={wanted}") for key, holds, wanted in needs)
    yield from unmet_needs(_IN_BACKWARD, f"{_IN_BACKWARD}=true", values)


def fine_tuning_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the contradictions of ``keep_zeros``, ``embedding_noise`` and ``quantization_aware``."""
    if config.train.embedding_noise is not None:
        yield from _embedding_noise_problems(config)
    if config.train.quantization_aware is not None:
        yield from _quantization_problems(config)
    if not config.train.keep_zeros:
        return
    if config.adapter.kind != "none":
        yield Problem(
            f"train.keep_zeros=true has no effect with adapter.kind={config.adapter.kind}, which trains no pruned "
            "weight; remove one of them",
            keys=("train.keep_zeros", "adapter.kind"),
        )
    elif config.train.from_weights is None and not (config.model.kind == "huggingface" and config.model.pretrained):
        yield Problem(
            "train.keep_zeros=true needs pruned initial weights; set train.from_weights or model.name_or_path",
            keys=("train.keep_zeros", "train.from_weights"),
        )


def _embedding_noise_problems(config: RunConfig) -> Iterator[Problem]:
    needs = (
        ("model.kind", not is_extension(config.model.kind), "a decoder or a transformers model"),
        ("loss.name", config.loss.name != "dpo", "another loss: both answers of a pair would get different noise"),
        ("parallel.kind", config.parallel.kind == "native", "parallel.kind=native"),
        ("parallel.tensor_parallel_size", config.parallel.tensor_parallel_size == 1, "parallel.tensor_parallel_size=1"),
    )
    return unmet_needs(_NOISE, _NOISE, needs)


def _quantization_problems(config: RunConfig) -> Iterator[Problem]:
    needs = (
        ("loss.name", config.loss.name != "dpo", "another loss: the reference would be rounded as well"),
        *linear_layer_needs(config, other_sizes=("fsdp_size",), supported="replicas are supported"),
    )
    return unmet_needs(_QUANTIZATION, _QUANTIZATION, needs)


def distillation_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield settings of a distillation that exclude each other or have no effect."""
    chosen, default = config.train.distillation, DistillationConfig()
    teacher, logits, top_k = (f"{_DISTILLATION}.{key}" for key in ("teacher", "logits", "top_k"))
    if chosen.teacher is not None and chosen.logits is not None:
        yield Problem(f"{teacher} and {logits} exclude each other; remove one of them", keys=(teacher, logits))
    if chosen.top_k is not None and chosen.teacher is None:
        has_logits = chosen.logits is not None
        remedy = "stored logits have their own; remove it" if has_logits else f"it needs {teacher}"
        yield Problem(f"{top_k}={chosen.top_k} has no effect; {remedy}", keys=(top_k, teacher))
    for name in ("temperature", "weight"):
        value = getattr(chosen, name)
        if value != getattr(default, name) and not chosen.is_active:
            key = f"{_DISTILLATION}.{name}"
            yield Problem(f"{key}={value:g} has no effect; it needs {teacher} or {logits}", keys=(key, teacher))
    if chosen.logits is None:
        return
    if config.train.forward_backward is not None:
        key = "train.forward_backward"
        yield Problem(
            f"{key} is not supported with {logits}: a user function may change the rows; it needs {teacher}",
            keys=(key, logits),
        )
    for index, stage in enumerate(config.data.stages):
        if stage.sequence_length_tokens is not None:
            key = f"data.stages.{index}.sequence_length_tokens"
            yield Problem(
                f"{key} is not supported with {logits}, which cover whole rows; remove it", keys=(key, logits)
            )


def preference_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the contradictions between loss and data, and what DPO does not support."""
    is_dpo = config.loss.name == "dpo"
    lists = zip(SOURCE_LISTS, (config.data.sources, config.data.validation.sources), strict=True)
    for key, source in ((f"{name}.{index}", source) for name, sources in lists for index, source in enumerate(sources)):
        keys = (f"{key}.preference_pairs", "loss.name")
        if source.preference_pairs and not is_dpo:
            yield Problem(
                f"{key} ({source.name}) has preference pairs, which loss.name={config.loss.name} cannot compare; set "
                "loss.name=dpo",
                keys=keys,
            )
        if is_dpo and not source.preference_pairs:
            yield Problem(
                f"loss.name=dpo trains on preference pairs, but {key} ({source.name}) has none; set "
                f"{key}.preference_pairs=true and {key}.chat_fields=[prompt, chosen, rejected]",
                keys=keys,
            )
        if source.preference_pairs and len(source.chat_fields) == 1:
            yield Problem(
                f"{key}.chat_fields={list(source.chat_fields)} is one column, but a preference pair has two answers; "
                "name [prompt, chosen, rejected] or [chosen, rejected]",
                keys=(f"{key}.chat_fields", f"{key}.preference_pairs"),
            )
    if is_dpo:
        yield from _preference_needs(config)


def _preference_needs(config: RunConfig) -> Iterator[Problem]:
    wanted = "loss.name=dpo needs"
    needs = (
        ("data.packing", config.data.packing == "best_fit", "data.packing=best_fit, which keeps a pair in one row"),
        ("data.document_mask", config.data.document_mask, "data.document_mask=true, which separates the answers"),
        (
            "loss.load_balancing_weight",
            config.model.num_experts is None
            or config.loss.load_balancing_weight == config.loss.router_z_loss_weight == 0,
            "loss.load_balancing_weight=0 and loss.router_z_loss_weight=0: it does not train routers on them",
        ),
        ("train.forward_backward", config.train.forward_backward is None, "train.forward_backward=null"),
        ("parallel.kind", config.parallel.kind == "native", "parallel.kind=native"),
        ("parallel.fsdp_size", config.parallel.fsdp_size == 1, "parallel.fsdp_size=1; replicas are supported"),
        ("parallel.tensor_parallel_size", config.parallel.tensor_parallel_size == 1, "parallel.tensor_parallel_size=1"),
    )
    yield from unmet_needs("loss.name", "loss.name=dpo", needs)
    for index, stage in enumerate(config.data.stages):
        if stage.sequence_length_tokens is not None:
            key = f"data.stages.{index}.sequence_length_tokens"
            yield Problem(f"{wanted} whole rows: shorter ones would cut pairs; remove {key}", keys=("loss.name", key))
    if config.model.kind == "huggingface" and not config.model.pretrained:
        yield Problem(
            f"{wanted} trained weights to start from, which are its reference; set model.pretrained=true",
            keys=("loss.name", "model.pretrained"),
        )
    elif config.model.kind not in {"decoder", "huggingface"}:
        yield Problem(f"{wanted} model.kind=decoder or huggingface", keys=("loss.name", "model.kind"))
