"""Checks of ``loss.name: dpo`` and of sources with preference pairs (see ``cross_checks.py``)."""

from __future__ import annotations

from collections.abc import Iterator

from vorox.core.config.setting_dependencies import SOURCE_LISTS
from vorox.core.config.tree import Problem
from vorox.core.schema import RunConfig


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
        yield from _unsupported(config)


def _unsupported(config: RunConfig) -> Iterator[Problem]:
    wanted = "loss.name=dpo needs"
    needed = (
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
    for key, holds, remedy in needed:
        if not holds:
            yield Problem(f"{wanted} {remedy}", keys=("loss.name", key))
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
