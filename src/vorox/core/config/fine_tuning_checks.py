"""Checks of settings that continue from trained weights (see ``cross_checks.py``)."""

from __future__ import annotations

from collections.abc import Iterator

from vorox.core.config.precision_checks import linear_layer_needs
from vorox.core.config.tree import Problem
from vorox.core.extensions import is_extension
from vorox.core.schema import RunConfig


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
    needed = (
        ("model.kind", not is_extension(config.model.kind), "a decoder or a transformers model"),
        ("loss.name", config.loss.name != "dpo", "another loss: both answers of a pair would get different noise"),
        ("parallel.kind", config.parallel.kind == "native", "parallel.kind=native"),
        ("parallel.tensor_parallel_size", config.parallel.tensor_parallel_size == 1, "parallel.tensor_parallel_size=1"),
    )
    for key, holds, remedy in needed:
        if not holds:
            yield Problem(f"train.embedding_noise needs {remedy}", keys=("train.embedding_noise", key))


def _quantization_problems(config: RunConfig) -> Iterator[Problem]:
    needed = (
        ("loss.name", config.loss.name != "dpo", "another loss: the reference would be rounded as well"),
        *linear_layer_needs(config, other_sizes=("fsdp_size",), supported="replicas are supported"),
    )
    for key, holds, remedy in needed:
        if not holds:
            yield Problem(f"train.quantization_aware needs {remedy}", keys=("train.quantization_aware", key))
