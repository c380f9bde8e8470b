"""The dimensions of a transformers model: layer by layer, from its configuration and its modules.

Configurations may differ by layer (Gemma 4); every value is read from the layer's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from vorox.backends.torch_engine.foreign.module_roles import Widths
from vorox.models.decoder.mamba import SCAN_FLOPS
from vorox.models.huggingface.spec import EXPERT_COUNTS, EXPERTS_PER_TOKEN
from vorox.models.module_spec import Row

_WITHOUT_ATTENTION = frozenset({"linear_attention", "conv", "moe", "mlp", "sparse", "dense"})
_CHUNKED = "chunked_attention"


def value_of(config: Any, *names: str) -> Any:
    """Return the first value that a configuration has under some names; ``None`` if it has none."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # differs by layer
            value = None
        if value is not None:
            return value
    return None


def layer_configs(text: Any) -> list[Any]:
    """Return the configuration of every layer."""
    count = int(text.num_hidden_layers)
    if not getattr(text, "is_heterogeneous", False):
        return [text] * count
    return [text.per_layer_config[index] for index in range(count)]


def widths(text: Any) -> Widths:
    """Return the widths of the first layer, which tell how fused projections are stored."""
    layer = layer_configs(text)[0]
    heads, head_dim = _heads(layer), _head_dim(layer)
    keys = value_of(layer, "num_key_value_heads", "num_kv_heads") or heads
    if value_of(layer, "multi_query") and not value_of(layer, "new_decoder_architecture"):  # Falcon, GPT-BigCode
        keys = 1
    return Widths(int(text.hidden_size), heads, int(keys), head_dim)


def attention(text: Any) -> tuple[tuple[int, ...], tuple[int | None, ...], bool]:
    """Return the width and the window of every layer with attention, and whether windows are chunks.

    The width is that of the queries over all heads; where values have another width than keys (DeepSeek), the mean of
    both: a query and a key cost a product of each.
    """
    types = value_of(text, "layer_types")
    found: list[tuple[int, int | None]] = []
    is_chunked = False
    for index, layer in enumerate(layer_configs(text)):
        kind = None if types is None or index >= len(types) else types[index]
        heads = _heads(layer)
        if not heads or kind in _WITHOUT_ATTENTION:
            continue
        window = None
        if kind == _CHUNKED:
            window, is_chunked = value_of(layer, "attention_chunk_size"), True
        elif (kind is None and value_of(layer, "use_sliding_window") is not False) or "sliding" in str(kind):
            window = value_of(layer, "sliding_window")
        found.append((heads * (_head_dim(layer) + _value_dim(layer)) // 2, None if window is None else int(window)))
    return tuple(width for width, _ in found), tuple(window for _, window in found), is_chunked


def active_experts(text: Any, rows: tuple[Row, ...]) -> float:
    """Return the share of the experts that a token is multiplied by."""
    counts = [row.layout.count for row in rows if row.is_routed and row.layout.count > 1]
    nested = value_of(text, "ffn_config")
    total = min(counts) if counts else value_of(text, *EXPERT_COUNTS)
    chosen = value_of(text, *EXPERTS_PER_TOKEN) or value_of(nested, *EXPERTS_PER_TOKEN)
    chosen = chosen[0] if isinstance(chosen, list | tuple) else chosen
    return min(1.0, int(chosen or 1) / int(total)) if total else 1.0


def scan_flops(module: nn.Module) -> float:
    """Return the FLOPs of the recurrences of all Mamba layers for one position, forward and backward."""
    return float(SCAN_FLOPS * sum(_scan_elements(module)))


def _scan_elements(module: nn.Module) -> Iterator[int]:
    for child in module.modules():
        inner, states = getattr(child, "intermediate_size", None), getattr(child, "ssm_state_size", None)
        if hasattr(child, "A_log") and isinstance(inner, int) and isinstance(states, int):
            yield inner * states


def _heads(layer: Any) -> int:
    return int(value_of(layer, "num_attention_heads") or 0)


def _head_dim(layer: Any) -> int:
    """Return the width of a query of one head: with and without rotary positions in latent attention."""
    without, rotated = value_of(layer, "qk_nope_head_dim"), value_of(layer, "qk_rope_head_dim")
    if without is not None and rotated is not None:
        return int(without) + int(rotated)
    heads = _heads(layer)
    return int(value_of(layer, "head_dim") or (int(layer.hidden_size) // heads if heads else 0))


def _value_dim(layer: Any) -> int:
    return int(value_of(layer, "v_head_dim") or _head_dim(layer))
