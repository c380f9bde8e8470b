"""Checks of settings that change what a step computes: precision, fine-tuning, distillation, DPO."""

from __future__ import annotations

from collections.abc import Iterator

from vorox.core.config.checks.sources import keyed_sources
from vorox.core.config.layers.tree import Problem
from vorox.core.schema import DistillationConfig, RunConfig

FLOAT8 = "precision.float8"
_IN_BACKWARD = "optimizer.in_backward"
_DISTILLATION = "train.distillation"


def training_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what 8-bit floats, updates in the backward pass, pruned weights and distillation need of other settings."""
    if config.precision.float8 is not None and config.model.kind == "decoder" and config.model.hidden_size % 16:
        yield Problem(
            f"{FLOAT8} needs a model.hidden_size that is a multiple of 16", keys=(FLOAT8, "model.hidden_size")
        )
    if config.optimizer.in_backward:
        yield from _in_backward(config)
    pretrained = config.model.kind == "huggingface" and config.model.pretrained
    if config.train.keep_zeros and config.train.from_weights is None and not pretrained:
        yield Problem(
            "train.keep_zeros=true needs pruned initial weights; set train.from_weights or model.name_or_path",
            keys=("train.keep_zeros", "train.from_weights"),
        )
    yield from _distillation(config)


def _in_backward(config: RunConfig) -> Iterator[Problem]:
    train = config.train
    most_rows = max(stage.global_batch_sequences for stage in (train, *train.batch_stages))
    needs = (
        ("optimizer.clip_norm", config.optimizer.clip_norm is None, "null: the norm is known after the updates"),
        (
            "train.micro_batch_sequences", most_rows <= train.micro_batch_rows,
            f"{most_rows}: one micro-batch per step",
        ),
        (
            "train.max_nonfinite_steps", train.max_nonfinite_steps == 0,
            "0: a step with a gradient that is not finite is not skipped as a whole, so the run stops after it",
        ),
    )  # fmt: skip
    for key, holds, wanted in needs:
        if not holds:
            yield Problem(f"{_IN_BACKWARD}=true needs {key}={wanted}", keys=(_IN_BACKWARD, key))


def _distillation(config: RunConfig) -> Iterator[Problem]:
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


def preference_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the contradictions between loss and data, and what DPO does not support."""
    is_dpo = config.loss.name == "dpo"
    for key, source in keyed_sources(config):
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
    if is_dpo and config.model.kind == "huggingface" and not config.model.pretrained:
        yield Problem(
            "loss.name=dpo needs trained weights to start from, which are its reference; set model.pretrained=true",
            keys=("loss.name", "model.pretrained"),
        )
