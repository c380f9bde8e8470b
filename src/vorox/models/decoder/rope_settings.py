"""Resolve the settings of ``model.rope_scaling``."""

from __future__ import annotations

from dataclasses import replace

from vorox.core.errors import ConfigError
from vorox.core.schema.model import RopeScalingConfig
from vorox.models.decoder.rotary import RopeScaling


def resolve_scaling(config: RopeScalingConfig, max_positions: int) -> RopeScaling | None:
    """Return the scaling with the defaults of transformers for its type."""
    if config.rope_type == "default":
        return None
    if config.factor is None:
        raise ConfigError(f"rope_scaling.rope_type = {config.rope_type} needs rope_scaling.factor", where="model")
    scaling = RopeScaling(config.rope_type, config.factor)
    if config.rope_type not in ("llama3", "yarn"):
        return scaling
    original = max_positions if config.original_max_positions_tokens is None else config.original_max_positions_tokens
    if config.rope_type == "llama3":
        low = 1.0 if config.low_freq_factor is None else config.low_freq_factor
        high = 4.0 if config.high_freq_factor is None else config.high_freq_factor
        if high <= low:
            raise ConfigError(
                f"rope_scaling.high_freq_factor = {high} is not above low_freq_factor = {low}", where="model"
            )
        return replace(scaling, original_max_positions_tokens=original, low_freq_factor=low, high_freq_factor=high)
    return replace(
        scaling,
        original_max_positions_tokens=original,
        beta_fast=32.0 if config.beta_fast is None else config.beta_fast,
        beta_slow=1.0 if config.beta_slow is None else config.beta_slow,
        attention_factor=config.attention_factor,
        truncate=True if config.truncate is None else config.truncate,
    )
