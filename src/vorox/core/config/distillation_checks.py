"""Checks of ``train.distillation``: one source of predictions, and the settings that go with it."""

from __future__ import annotations

from collections.abc import Iterator

from vorox.core.config.tree import Problem
from vorox.core.schema import DistillationConfig, RunConfig

_SECTION = "train.distillation"


def distillation_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield settings of a distillation that exclude each other or have no effect."""
    chosen, default = config.train.distillation, DistillationConfig()
    teacher, logits, top_k = (f"{_SECTION}.{key}" for key in ("teacher", "logits", "top_k"))
    if chosen.teacher is not None and chosen.logits is not None:
        yield Problem(f"{teacher} and {logits} exclude each other; remove one of them", keys=(teacher, logits))
    if chosen.top_k is not None and chosen.teacher is None:
        has_logits = chosen.logits is not None
        remedy = "stored logits have their own; remove it" if has_logits else f"it needs {teacher}"
        yield Problem(f"{top_k}={chosen.top_k} has no effect; {remedy}", keys=(top_k, teacher))
    for name in ("temperature", "weight"):
        value = getattr(chosen, name)
        if value != getattr(default, name) and not chosen.is_active:
            key = f"{_SECTION}.{name}"
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
