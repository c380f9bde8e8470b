"""Layer patterns of Nemotron-H in ``config.json``, in both directions.

transformers 5 has the list ``layers_block_type``; the published files have the string ``hybrid_override_pattern``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from vorox.models.decoder.spec import DecoderSpec
from vorox.models.huggingface.rope import refuse

_TYPES = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
_CHARACTERS = {name: character for character, name in _TYPES.items()} | {"mamba": "M", "attention": "*", "moe": "E"}
_HINT = "only Mamba-2, attention and MLP are implemented; use model.kind=huggingface"


def read_pattern(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the section ``model`` for the layers.

    Raises:
        ConfigError: There is no pattern, or it has layers that are not implemented.
    """
    types, text = config.get("layers_block_type", config.get("layer_types")), config.get("hybrid_override_pattern")
    if types is not None:
        names = cast("list[Any]", types) if isinstance(types, list) else []
        text = "".join(_CHARACTERS.get(name, "?") if isinstance(name, str) else "?" for name in names)
    key = "hybrid_override_pattern" if types is None else "layers_block_type"
    if not isinstance(text, str) or not text or set(text) - set(_TYPES):
        refuse(key, text if types is None else types, _HINT)
    return {"layer_pattern": text, "num_layers": len(text)}


def write_pattern(spec: DecoderSpec) -> dict[str, Any]:
    """Return the keys of a ``config.json`` for the layers; a model without Mamba-2 has its defaults."""
    assert spec.layer_pattern is not None
    return {
        "layers_block_type": [_TYPES[character] for character in spec.layer_pattern],
        "hybrid_override_pattern": spec.layer_pattern,
        "mamba_hidden_act": "silu",
        **({"mamba_num_heads": 1} if spec.mamba_num_heads is None else {}),
    }
