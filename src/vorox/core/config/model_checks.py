"""Checks of the section ``model`` (see ``cross_checks.py``)."""

from __future__ import annotations

from collections.abc import Iterator

from vorox.core.config.tree import Problem, unmet_needs
from vorox.core.extensions import is_extension
from vorox.core.schema import RunConfig


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
    if model.num_experts is not None:
        if model.vision.num_layers > 0:
            yield Problem(
                f"model.vision.num_layers={model.vision.num_layers} is not supported with "
                f"model.num_experts={model.num_experts}; remove one of them",
                keys=("model.vision.num_layers", "model.num_experts"),
            )
        for key in ("mlp", "block", "mlp_bias"):
            if value := getattr(model, key):
                yield Problem(
                    f"model.{key}={str(value).lower() if value is True else value} is not supported with "
                    f"model.num_experts={model.num_experts}; remove one of them",
                    keys=(f"model.{key}", "model.num_experts"),
                )
    longest, length = model.max_positions_tokens, config.data.sequence_length_tokens
    if longest is not None and longest < length:
        yield Problem(
            f"data.sequence_length_tokens={length} is more than model.max_positions_tokens={longest}",
            keys=("data.sequence_length_tokens", "model.max_positions_tokens"),
        )
    yield from _width_transfer(config)
    yield from _layer_pattern(config)
    needed = {"bpe": config.tokenizer.vocab_size, "byte": 257, "none": config.tokenizer.vocab_size}.get(
        config.tokenizer.kind
    )
    if model.vocab_size is not None and needed is not None and model.vocab_size < needed:
        yield Problem(
            f"model.vocab_size={model.vocab_size} is less than the tokenizer's {needed} tokens; "
            "remove it to use exactly those",
            keys=("model.vocab_size", "tokenizer.vocab_size", "tokenizer.kind"),
        )


def _width_transfer(config: RunConfig) -> Iterator[Problem]:
    """Yield settings that ``model.mup_base_hidden_size`` has no rule for."""
    model, switch = config.model, "model.mup_base_hidden_size"
    if model.mup_base_hidden_size is None:
        return
    needs = (
        ("model.tie_embeddings", not model.tie_embeddings, "a head of its own; set model.tie_embeddings=false"),
        (
            "model.scale_embeddings", not model.scale_embeddings,
            "embeddings of one scale; set model.scale_embeddings=false",
        ),
        ("model.vision.num_layers", not model.vision.num_layers, "text alone; set model.vision.num_layers=0"),
        ("model.mlp", model.mlp is None, "the built-in MLP; remove model.mlp"),
        ("model.block", model.block is None, "the built-in blocks; remove model.block"),
        ("model.num_experts", model.num_experts is None, "one MLP in each block; remove model.num_experts"),
        (
            "optimizer.name", config.optimizer.name in ("adamw", "adamw_8bit"),
            f"AdamW, whose learning rates it scales, not {config.optimizer.name}; set optimizer.name=adamw",
        ),
    )  # fmt: skip
    yield from unmet_needs(switch, switch, needs)


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
    if config.runtime.compile and "M" in pattern:
        yield Problem(
            f"runtime.compile=true is not supported with {key}={pattern}: the scan of Mamba-2 is not compiled; set "
            "runtime.compile=false",
            keys=("runtime.compile", key),
        )
    others = {
        "norm_placement": model.norm_placement if model.norm_placement != "pre" else None,
        "layer_types": model.layer_types, "mlp": model.mlp, "block": model.block,
        "mup_base_hidden_size": model.mup_base_hidden_size, "num_experts": model.num_experts,
        "vision.num_layers": model.vision.num_layers or None,
    }  # fmt: skip
    for name, value in others.items():
        if value is not None:
            yield Problem(
                f"model.{name}={value} is not supported with {key}; each layer has one norm before one built-in mixer",
                keys=(f"model.{name}", key),
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
            f"{wanted} model.kind=huggingface; export a native model with vorox export --to hf and set "
            "model.name_or_path to the directory",
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
    if config.optimizer.name == "muon":
        yield Problem(
            f"{wanted} another optimizer than muon, which updates whole matrices of blocks; set optimizer.name=adamw",
            keys=("adapter.kind", "optimizer.name"),
        )
    if config.parallel.fsdp_size > 1:
        yield Problem(
            f"{wanted} parallel.fsdp_size=1; data parallelism (parallel.data_parallel_size) is supported",
            keys=("adapter.kind", "parallel.fsdp_size"),
        )
