"""Loading a configuration in Python: a preset, a file or a mapping, under overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vorox.core.config.yaml_writer import write_inline
from vorox.core.schema import RunConfig
from vorox.training.weights_source import load_config_with_weights

Configuration = RunConfig | str | Path | Mapping[str, Any]
"""A loaded configuration, or what ``load_config`` takes."""

Overrides = Sequence[str] | Mapping[str, Any]
"""``["train.num_steps=100"]`` as on the command line, or ``{"train.num_steps": 100}``."""


def load_config(source: str | Path | Mapping[str, Any] | None = None, overrides: Overrides = ()) -> RunConfig:
    """Load and validate a configuration.

    Args:
        source: Name of a preset, path of a YAML or Python file, or a mapping of sections as in such a file (its key
            ``preset`` names what it is based on). ``None`` starts from the defaults.
        overrides: Settings that replace those of ``source``, by dotted key.

    Returns:
        The frozen configuration. Architecture and tokenizer come from ``train.from_weights`` where that is set.

    Raises:
        ConfigError: Something is wrong. The message lists every problem, with its key and what to write instead.
    """
    return load_config_with_weights(source, override_texts(overrides))


def as_config(config: Configuration, overrides: Overrides = ()) -> RunConfig:
    """Return a loaded configuration as it is, unless there are overrides; load anything else."""
    if not isinstance(config, RunConfig):
        return load_config(config, overrides)
    return load_config(config.model_dump(mode="json"), overrides) if overrides else config


def override_texts(overrides: Overrides) -> list[str]:
    """Return overrides as ``key=value`` texts."""
    if isinstance(overrides, Mapping):
        return [f"{key}={write_inline(value)}" for key, value in overrides.items()]
    return list(overrides)
