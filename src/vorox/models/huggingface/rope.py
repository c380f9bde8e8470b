"""Rotary positions in ``config.json``: under the keys of transformers 4 and 5, in both directions.

transformers 5 reads ``rope_parameters``; older versions read ``rope_theta`` and ``rope_scaling``. Both are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, cast

from pydantic import ValidationError

from vorox.core.errors import ConfigError
from vorox.core.schema.model import RopeScalingConfig
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.huggingface.families import Rules

_KEYS = {
    "rope_type": "rope_type", "factor": "factor", "original_max_position_embeddings": "original_max_positions_tokens",
    "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor", "beta_fast": "beta_fast",
    "beta_slow": "beta_slow", "attention_factor": "attention_factor", "truncate": "truncate",
}  # fmt: skip
"""Their keys to ours."""

_OF_TYPE: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}
"""The keys that a type reads, besides ``rope_theta`` and ``partial_rotary_factor``."""


def refuse(key: str, value: Any, why: str) -> NoReturn:
    raise ConfigError(f"{key} = {value!r} in config.json is not supported: {why}", where="config.json")


def read_rope(config: Mapping[str, Any], rules: Rules, *, default_theta: float) -> dict[str, Any]:
    """Return the rotary keys of the section ``model``.

    Args:
        config: A ``config.json``.
        rules: What its architecture computes.
        default_theta: Base of the frequencies that a file omits.

    Raises:
        ConfigError: A key has an invalid value or is not implemented, or two places contradict each other.
    """
    if "sliding_rope_theta" in rules:
        return _read_by_layer(config, rules)
    stated = _stated(config)
    theta = stated.pop("rope_theta", ("rope_theta", default_theta))[1]
    share_place, share = stated.pop("partial_rotary_factor", ("partial_rotary_factor", 1.0))
    if "rotary_fraction" not in rules and share != 1:
        refuse(share_place, share, "only 1 is implemented")
    type_place, rope_type = stated.pop("rope_type", ("rope_type", "default"))
    if not isinstance(rope_type, str) or rope_type not in _OF_TYPE:
        refuse(type_place, rope_type, f"implemented are {', '.join(_OF_TYPE)}")
    if "rope_scaling" in rules and rope_type != "default":
        refuse(type_place, rope_type, "only default is implemented for this model_type")
    for name, (place, value) in stated.items():
        if name not in _OF_TYPE[rope_type]:
            refuse(place, value, f"rotary positions of type {rope_type} have no such key")
    if "factor" in _OF_TYPE[rope_type] and "factor" not in stated:
        refuse(type_place, rope_type, "it needs a factor")
    scaling = {_KEYS[name]: value for name, (_, value) in stated.items()} | {"rope_type": rope_type}
    try:
        checked = RopeScalingConfig.model_validate(scaling, strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        name = next(theirs for theirs, ours in _KEYS.items() if ours == problem["loc"][0])
        refuse(stated[name][0], problem["input"], problem["msg"])
    return {"rope_theta": theta, "rotary_fraction": share, "rope_scaling": checked}


def _read_by_layer(config: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    """Read the rotary keys of an architecture whose sliding layers have their own base (Gemma 3)."""
    rules = {name: values for name, values in rules.items() if name != "sliding_rope_theta"}
    plain = {key: config.get(key) for key in ("rope_theta", "rope_scaling", "partial_rotary_factor")}
    table, local = config.get("rope_parameters"), config.get("rope_local_base_freq")
    if table is None:
        return read_rope(plain, rules, default_theta=1e6) | {"sliding_rope_theta": 1e4 if local is None else local}
    if not isinstance(table, Mapping) or set(cast("Mapping[str, Any]", table)) - {
        "full_attention",
        "sliding_attention",
    }:
        refuse("rope_parameters", table, "it must have full_attention and sliding_attention")
    by_layer = cast("Mapping[str, Any]", table)
    full = read_rope({**plain, "rope_parameters": by_layer.get("full_attention")}, rules, default_theta=1e6)
    own = {"rope_theta": local, "rope_parameters": by_layer.get("sliding_attention")}
    sliding = read_rope(own, {**rules, "rope_scaling": (None,)}, default_theta=1e4)
    return full | {"sliding_rope_theta": sliding["rope_theta"]}


def _stated(config: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return the rotary keys of all places that are not null, by name: where, and the value."""
    places: list[tuple[str, str, Any]] = [
        (name, name, config.get(name)) for name in ("rope_theta", "partial_rotary_factor")
    ]
    for key in ("rope_scaling", "rope_parameters"):
        table = config.get(key)
        if table is None:
            continue
        if not isinstance(table, Mapping):
            refuse(key, table, "it must be a mapping")
        for name, value in cast("Mapping[str, Any]", table).items():
            places.append(("rope_type" if name == "type" else name, f"{key}.{name}", value))
    stated: dict[str, tuple[str, Any]] = {}
    for name, place, value in places:
        if value is None:
            continue
        earlier_place, earlier = stated.setdefault(name, (place, value))
        if value != earlier:
            refuse(f"{earlier_place} and {place}", (earlier, value), "they contradict each other")
    if stated.get("rope_type", ("", None))[1] in ("llama3", "yarn"):
        outside = config.get("original_max_position_embeddings")  # takes precedence in transformers
        if outside is not None:
            stated["original_max_position_embeddings"] = ("original_max_position_embeddings", outside)
    return stated


def write_rope(spec: DecoderSpec, *, by_layer: bool = False) -> dict[str, Any]:
    """Return the rotary keys of a ``config.json``.

    Args:
        spec: The model.
        by_layer: Whether the architecture has a base for sliding layers.
    """
    if spec.rope_scaling is None:
        table: dict[str, Any] = {"rope_type": "default"}
    else:
        values = {theirs: getattr(spec.rope_scaling, ours) for theirs, ours in _KEYS.items()}
        table = {name: value for name, value in values.items() if value is not None}
    keys: dict[str, Any] = {
        "rope_theta": spec.rope_theta,
        "rope_parameters": {**table, "rope_theta": spec.rope_theta},
    }
    if spec.rotary_fraction != 1:
        keys["partial_rotary_factor"] = keys["rope_parameters"]["partial_rotary_factor"] = spec.rotary_fraction
    if spec.rope_scaling is not None:
        keys["rope_scaling"] = table
    if by_layer:
        local = spec.rope_theta if spec.sliding_rope_theta is None else spec.sliding_rope_theta
        keys["rope_local_base_freq"] = local
        sliding = {"rope_type": "default", "rope_theta": local}
        keys["rope_parameters"] = {"full_attention": keys["rope_parameters"], "sliding_attention": sliding}
    return keys
