"""Checks of the section ``model`` (see ``cross_checks.py``)."""

from __future__ import annotations

from collections.abc import Iterator

from vorox.core.config.layers.tree import Problem
from vorox.core.schema import RunConfig
from vorox.core.user_code.extensions import is_extension

_KEEP_TOKENIZER = "remove kind and path from the section tokenizer, so that it is taken from the weights"


def model_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the contradictions of the section ``model`` with itself, the engine, the data and the tokenizer."""
    model = config.model
    yield from _adapter(config)
    if model.kind == "huggingface":
        yield from _huggingface_model(config)
        return
    if is_extension(model.kind):
        return
    if model.head_dim is None and model.hidden_size % model.num_heads:
        yield Problem(
            f"model.hidden_size={model.hidden_size} is not divisible by model.num_heads={model.num_heads}; "
            "change one of them or set model.head_dim",
            keys=("model.hidden_size", "model.num_heads"),
        )
    if model.num_kv_heads is not None and model.num_heads % model.num_kv_heads:
        yield Problem(
            f"model.num_heads={model.num_heads} is not divisible by model.num_kv_heads={model.num_kv_heads}",
            keys=("model.num_kv_heads", "model.num_heads"),
        )
    chosen = model.experts_per_token
    if model.num_experts is not None and chosen is not None and chosen > model.num_experts:
        yield Problem(
            f"model.experts_per_token={chosen} is more than model.num_experts={model.num_experts}",
            keys=("model.experts_per_token", "model.num_experts"),
        )
    longest, length = model.max_positions_tokens, config.data.sequence_length_tokens
    if longest is not None and longest < length:
        yield Problem(
            f"data.sequence_length_tokens={length} is more than model.max_positions_tokens={longest}",
            keys=("data.sequence_length_tokens", "model.max_positions_tokens"),
        )
    yield from _layer_pattern(config)
    needed = {"bpe": config.tokenizer.vocab_size, "byte": 257, "none": config.tokenizer.vocab_size}.get(
        config.tokenizer.kind
    )
    if model.vocab_size is not None and needed is not None and model.vocab_size < needed:
        yield Problem(
            f"model.vocab_size={model.vocab_size} is less than the tokenizer's {needed} tokens; "
            + ("remove it to use exactly those" if config.train.from_weights is None else _KEEP_TOKENIZER),
            keys=("model.vocab_size", "tokenizer.vocab_size", "tokenizer.kind"),
        )


def _layer_pattern(config: RunConfig) -> Iterator[Problem]:
    model, pattern, key = config.model, config.model.layer_pattern, "model.layer_pattern"
    if pattern is None:
        return
    unknown = sorted(set(pattern) - set("M*-"))
    if unknown:
        hint = "; mixtures of experts in a pattern need model.kind=huggingface" if "E" in unknown else ""
        yield Problem(
            f"{key}={pattern} has {', '.join(unknown)}; the layers are M (Mamba-2), * (attention) and - (MLP){hint}",
            keys=(key,),
        )
    if len(pattern) > model.num_layers:
        yield Problem(
            f"{key} has {len(pattern)} layers, more than model.num_layers={model.num_layers}; set "
            f"model.num_layers={len(pattern)}",
            keys=(key, "model.num_layers"),
        )


def _huggingface_model(config: RunConfig) -> Iterator[Problem]:
    if config.model.name_or_path is None:
        yield Problem(
            "model.kind=huggingface needs model.name_or_path: a directory, or OWNER/NAME", keys=("model.name_or_path",)
        )


def _adapter(config: RunConfig) -> Iterator[Problem]:
    kind = config.adapter.kind
    if kind == "none":
        return
    wanted = f"adapter.kind={kind} needs"
    if config.model.kind != "huggingface":
        yield Problem(
            f"{wanted} pretrained weights of transformers; add --from-weights with a run, a directory or "
            "hf://OWNER/NAME, without model.kind",
            keys=("adapter.kind", "model.kind"),
        )
    if not config.model.pretrained:
        yield Problem(
            f"{wanted} a pretrained model: random weights would stay random; set model.pretrained=true",
            keys=("adapter.kind", "model.pretrained"),
        )
    if config.model.vocab_size is not None:
        yield Problem(
            f"{wanted} the vocabulary of the model: the embedding is frozen; remove model.vocab_size",
            keys=("adapter.kind", "model.vocab_size"),
        )
