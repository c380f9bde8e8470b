"""Load a configuration in Python: a preset, a file or a mapping, with overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vorox.core.config.yaml_writer import write_inline
from vorox.core.schema import RunConfig
from vorox.training.checkpoints.weights_source import load_config_with_weights

Configuration = RunConfig | str | Path | Mapping[str, Any]
"""A loaded configuration, or any argument of ``load_config``."""

Overrides = Sequence[str] | Mapping[str, Any]
"""Settings by dotted key: ``["train.num_steps=100"]`` as on the command line, or ``{"train.num_steps": 100}``."""


def load_config(source: str | Path | Mapping[str, Any] | None = None, overrides: Overrides = ()) -> RunConfig:
    """Load and validate a configuration.

    Args:
        source: Name of a preset, path of a YAML or Python file, or a mapping of sections as in such a file; the key
            ``preset`` names the preset that a file or mapping extends. ``None`` starts from the defaults.
        overrides: Settings that replace those of ``source``, by dotted key.

    Returns:
        The frozen configuration. If ``train.from_weights`` is set, it determines the architecture and the tokenizer.

    Raises:
        ConfigError: The configuration is invalid. The message lists every problem, with its key and a correction.
    """
    return load_config_with_weights(source, override_texts(overrides))


def as_config(config: Configuration, overrides: Overrides = ()) -> RunConfig:
    """Load a configuration unless it is loaded already, and apply the overrides."""
    if not isinstance(config, RunConfig):
        return load_config(config, overrides)
    return load_config(config.model_dump(mode="json"), overrides) if overrides else config


def override_texts(overrides: Overrides) -> list[str]:
    """Return overrides as ``key=value`` strings."""
    if isinstance(overrides, Mapping):
        return [f"{key}={write_inline(value)}" for key, value in overrides.items()]
    return list(overrides)
