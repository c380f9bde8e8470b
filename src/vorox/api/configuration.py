"""Load a configuration in Python: a preset, a file or a mapping, with overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vorox.api.arguments import check_overrides, check_source
from vorox.core.config.yaml.writer import write_inline
from vorox.core.schema import RunConfig
from vorox.core.user_code import trusted_code
from vorox.training.origin import configuration

Configuration = RunConfig | str | Path | Mapping[str, Any]
"""A loaded configuration, or any argument of ``load_config``."""

Overrides = Sequence[str] | Mapping[str, Any]
"""Settings by dotted key: ``["train.num_steps=100"]`` as on the command line, or ``{"train.num_steps": 100}``."""


def load_config(source: Configuration | None = None, overrides: Overrides = ()) -> RunConfig:
    """Load and validate a configuration.

    Args:
        source: Name of a preset, path of a YAML or Python file, or a mapping of sections as in such a file; the key
            ``preset`` names the preset that a file or mapping extends; or a configuration. ``None`` starts from the
            defaults.
        overrides: Settings that replace those of ``source``, by dotted key.

    Returns:
        The frozen configuration. If ``train.from_weights`` is set, it determines the architecture and the tokenizer.

    Raises:
        ConfigError: The configuration is invalid. The message lists every problem, with its key and a correction.
    """
    check_source("vorox.load_config", source)
    if isinstance(source, RunConfig):
        return as_config(source, overrides)
    return configuration.load_config(source, override_texts(overrides))


def as_config(config: Configuration, overrides: Overrides = ()) -> RunConfig:
    """Load a configuration unless it is loaded already, and apply the overrides."""
    if not isinstance(config, RunConfig):
        return load_config(config, overrides)
    if overrides:
        return load_config(config.model_dump(mode="json"), overrides)
    trusted_code.state(config.model_dump(mode="json"), but_recorded=True)
    return config


def override_texts(overrides: Overrides) -> list[str]:
    """Return overrides as ``key=value`` strings."""
    check_overrides("overrides", overrides)
    if isinstance(overrides, Mapping):
        return [f"{key}={write_inline(value)}" for key, value in overrides.items()]
    return list(overrides)
