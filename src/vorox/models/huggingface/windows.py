"""Sliding windows in ``config.json``, in both directions.

Mistral and Phi-3 have one key, ``sliding_window``, for all layers. Qwen also has a switch, and a list of layer types or
the index of the first layer with a window. Gemma 3 has the list, or the distance between layers without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from vorox.models.decoder.spec import DecoderSpec
from vorox.models.huggingface.families import Windows
from vorox.models.huggingface.rope import refuse

_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_windows(config: Mapping[str, Any], windows: Windows, num_layers: Any) -> dict[str, Any]:
    """Return the keys of the section ``model`` for sliding windows.

    Args:
        config: A ``config.json``, with the defaults of its architecture.
        windows: Which layers of the architecture may have a window.
        num_layers: Number of layers, not yet checked.

    Raises:
        ConfigError: A key has an invalid value.
    """
    if windows == "none":
        return {}
    window = config.get("sliding_window", 4096)
    if windows == "by_layer" and not config.get("use_sliding_window", False):
        window = None
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        refuse("sliding_window", window, "it must be a positive integer")
    if window is None and windows == "every_sixth_full":
        refuse("sliding_window", None, "sliding_attention needs it")
    if windows == "all_layers" or not isinstance(num_layers, int):
        return {"sliding_window_tokens": window}
    if windows == "every_sixth_full" and config.get("layer_types") is None:
        pattern = config.get("sliding_window_pattern", 6)
        if not isinstance(pattern, int) or pattern < 1:
            refuse("sliding_window_pattern", pattern, "it must be a positive integer")
        types = tuple(_SLIDING if (layer + 1) % pattern else _FULL for layer in range(min(num_layers, 1 << 16)))
    else:
        types = _layer_types(config, window, num_layers)
    if _SLIDING not in types:
        return {"sliding_window_tokens": None}
    if window is None:
        refuse("layer_types", list(types), "sliding_attention needs use_sliding_window and sliding_window")
    return {"sliding_window_tokens": window, "layer_types": types}


def _layer_types(config: Mapping[str, Any], window: int | None, num_layers: int) -> tuple[str, ...]:
    given = config.get("layer_types")
    if given is None:
        first = config.get("max_window_layers", 28)
        if window is None:
            return (_FULL,)
        if not isinstance(first, int):
            refuse("max_window_layers", first, "it must be an integer")
        return tuple(_SLIDING if layer >= first else _FULL for layer in range(min(num_layers, 1 << 16)))
    types = tuple(cast("list[Any]", given)) if isinstance(given, list) else ()
    if len(types) != num_layers or any(layer_type not in (_SLIDING, _FULL) for layer_type in types):
        refuse("layer_types", given, f"it must have {_FULL} or {_SLIDING} for each of {num_layers} layers")
    return types


def write_windows(spec: DecoderSpec, windows: Windows) -> dict[str, Any]:
    """Return the keys of a ``config.json`` for sliding windows."""
    if windows == "none" or (windows == "by_layer" and spec.sliding_window_tokens is None):
        return {}
    if windows == "all_layers":
        return {"sliding_window": spec.sliding_window_tokens}
    if windows == "every_sixth_full" and spec.sliding_window_tokens is None:
        return {"layer_types": [_FULL] * spec.num_layers}
    types = [_FULL if window is None else _SLIDING for window in spec.layer_windows]
    if windows == "every_sixth_full":
        return {"sliding_window": spec.sliding_window_tokens, "layer_types": types}
    return {
        "use_sliding_window": True,
        "sliding_window": spec.sliding_window_tokens,
        "max_window_layers": types.index(_SLIDING),  # for readers without layer_types
        "layer_types": types,
    }
