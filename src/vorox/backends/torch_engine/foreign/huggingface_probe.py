"""A small copy of a transformers model, on which ``separation_probe.py`` measures.

What a model computes may change at a length: a sliding window, a chunk, a scale of positions, the original length of
longrope. The copy has those that are shorter than the rows of the run within the range of the measurement; longer ones
are never reached. Large models are measured with fewer layers and narrower ones: how positions and documents are
handled depends on neither. The copy is fp32, whatever the precision, adapter or layout of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, cast

import torch
from torch import nn

from vorox.backends.torch_engine.foreign import huggingface_model
from vorox.backends.torch_engine.foreign.separation_probe import PROBE_TOKENS, randomise, threshold
from vorox.core.errors import VoroxError
from vorox.models.huggingface.spec import EXPERT_COUNTS, EXPERTS_PER_TOKEN, HuggingFaceSpec

_THRESHOLDS = frozenset({"sliding_window", "attention_chunk_size", "floor_scale", "index_topk", "local_attention"})
_ORIGINAL = "original_max_position_embeddings"
_LARGE_ELEMENTS = 20_000_000
_MOST_ELEMENTS = 500_000_000
"""Larger copies are built only if no smaller one can be."""
_LAYERS = 4
_TINY = {
    "intermediate_size": 64, "moe_intermediate_size": 32, "intermediate_size_mlp": 64,
    "shared_expert_intermediate_size": 32, "vocab_size": 128, "vocab_size_per_layer_input": 128,
}  # fmt: skip
_FEW_EXPERTS = 4
_log = logging.getLogger("vorox.torch_engine")


def small_copy(
    spec: HuggingFaceSpec, *, attention: str | None, length: int, device: torch.device
) -> tuple[Any, int] | None:
    """Return a copy with random weights on a device, and the positions of a row to measure it with.

    ``None`` if no copy that fits into memory can be built.

    Args:
        spec: The model.
        attention: Attention implementation; ``None`` for the choice of transformers.
        length: Positions of a row of the run.
        device: Device of the copy.
    """
    measured = min(length, PROBE_TOKENS)
    for values in _candidates(spec, length, measured):
        try:
            if _num_elements(huggingface_model.build(values)) > _MOST_ELEMENTS:
                continue
            module = huggingface_model.build_random(values, attention=attention)
            copy = module.to(device).eval()
            randomise(copy)
            with torch.no_grad():
                copy(input_ids=torch.zeros((1, 2), dtype=torch.long, device=device), use_cache=False)
        except (VoroxError, RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
            _log.debug("A smaller %s model cannot be built: %s", spec.label, error)
            continue
        return copy, measured
    if sum(prod(row.shape) for row in spec.rows) > _MOST_ELEMENTS:
        return None
    module = huggingface_model.build_random(spec.config, attention=attention)
    copy = cast("nn.Module", module).to(device).eval()
    randomise(copy)
    return copy, min(length, max([PROBE_TOKENS, *(2 * one for one in _lengths(spec.config) if one < length)]))


def _num_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _candidates(spec: HuggingFaceSpec, length: int, measured: int) -> Iterator[dict[str, Any]]:
    """Yield configurations with all lengths within the measured row, smallest first."""
    near = _with_near_lengths(spec.config, length, threshold(measured))
    if sum(prod(row.shape) for row in spec.rows) > _LARGE_ELEMENTS:
        few = _with_few_layers(near)
        yield _with_small_widths(few)
        yield _with(few, {"vocab_size": 128})
        yield few
    yield near


def _lengths(values: Mapping[str, Any]) -> Iterator[int]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _lengths(cast("Mapping[str, Any]", value))
        elif _is_length(key, values) and isinstance(value, int) and not isinstance(value, bool):
            yield value


def _is_length(key: str, values: Mapping[str, Any]) -> bool:
    """Whether a key is a length at which the model changes."""
    is_long = "longrope" in (values.get("rope_type"), values.get("type")) or "long_factor" in str(values)
    return key in _THRESHOLDS or (key == _ORIGINAL and is_long)


def _with_near_lengths(values: Mapping[str, Any], length: int, near: int) -> dict[str, Any]:
    """Return values whose lengths between ``near`` and that of a row are ``near``."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found[key] = _with_near_lengths(cast("Mapping[str, Any]", value), length, near)
        elif _is_length(key, values) and isinstance(value, int) and near < value < length:
            found[key] = near
        else:
            found[key] = value
    return found


def _with(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with those changes whose key they have, in the part that describes the language model."""
    nested = values.get("text_config")
    if isinstance(nested, Mapping):
        return {**values, "text_config": _with(cast("Mapping[str, Any]", nested), changes)}
    found = {key: value for key, value in changes.items() if values.get(key) is not None}
    ids = {key: None for key in ("pad_token_id",) if "vocab_size" in found and values.get(key) is not None}
    return {**values, **found, **ids}


def _with_few_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with the first layers, and as many as it takes for every kind of layer."""
    nested = values.get("text_config")
    if isinstance(nested, Mapping):
        return {**values, "text_config": _with_few_layers(cast("Mapping[str, Any]", nested))}
    name = next((key for key in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(values.get(key), int)), "")
    count = values.get(name)
    if not isinstance(count, int):
        return dict(values)
    kinds = [value for value in values.values() if isinstance(value, list | tuple) and len(value) == count]
    needed = [max(list(map(str, value)).index(one) + 1 for one in set(map(str, value))) for value in kinds]
    kept = min(count, max(_LAYERS, *needed, 0))
    shortened: dict[str, Any] = {
        key: value[:kept] for key, value in values.items() if isinstance(value, list | tuple) and len(value) == count
    }
    each = values.get("per_layer_config")
    if isinstance(each, Mapping):
        layers = cast("Mapping[str, Any]", each).items()
        shortened["per_layer_config"] = {key: value for key, value in layers if int(key) < kept}
    return {**values, **shortened, name: kept}


def _with_small_widths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with a few heads of the same width, and narrow layers."""
    nested = values.get("text_config")
    if isinstance(nested, Mapping):
        return {**values, "text_config": _with_small_widths(cast("Mapping[str, Any]", nested))}
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    changes: dict[str, Any] = dict(_TINY)
    if isinstance(heads, int) and isinstance(width, int) and width % heads == 0 and heads > 2:
        groups = values.get("num_key_value_heads")
        head_dim = values.get("head_dim") or width // heads
        changes |= {"num_attention_heads": 2, "hidden_size": 2 * head_dim, "head_dim": head_dim}
        changes["num_key_value_heads"] = 2 if groups == heads else 1
    experts = [key for key in EXPERT_COUNTS if isinstance(values.get(key), int)]
    if experts and min(values[key] for key in experts) > _FEW_EXPERTS:
        changes |= dict.fromkeys(experts, _FEW_EXPERTS) | {"n_group": 1, "topk_group": 1}
        changes |= {key: 2 for key in EXPERTS_PER_TOKEN if isinstance(values.get(key), int) and values[key] > 1}
    return _with(values, changes)
