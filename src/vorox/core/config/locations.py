"""Locations of model and tokenizer: settings that name a place whose content the run records.

A configuration goes in; the same one with absolute paths, or with the locations of another one, comes out.
Configurations that differ only in locations describe the same run if the content is the same; a resume compares it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vorox.core.config.schema_fields import keys_where
from vorox.core.schema import RunConfig

MODEL_LOCATIONS = keys_where(lambda facts: facts.location == "model")
TOKENIZER_LOCATIONS = keys_where(lambda facts: facts.location == "tokenizer")
LOCATIONS = (*MODEL_LOCATIONS, *TOKENIZER_LOCATIONS)


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return a configuration whose local model and tokenizer are named by absolute paths.

    The run then does not depend on the working directory, and a missing directory is not mistaken for a repository
    on the Hub. Names of runs, repositories and stores are unchanged.
    """
    values = {key: _value(config, key) for key in ("train.from_weights", "model.name_or_path", "tokenizer.path")}
    local = {key: Path(value).expanduser() for key, value in values.items() if value is not None}
    return _replace(config, {key: str(path.absolute()) for key, path in local.items() if path.exists()})


def with_locations_of(config: RunConfig, other: RunConfig) -> RunConfig:
    """Return a configuration with the locations of another one, where both name one."""
    found: dict[str, Any] = {}
    for name, revision in (("model.name_or_path", "model.revision"), ("tokenizer.path", "tokenizer.revision")):
        if _value(config, name) is not None and _value(other, name) is not None:
            found |= {name: _value(other, name), revision: _value(other, revision)}
    if config.train.from_weights is not None and other.train.from_weights is not None:
        found["train.from_weights"] = other.train.from_weights
    return _replace(config, found)


def _value(config: RunConfig, key: str) -> str | None:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _replace(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    for key, value in values.items():
        section, _, name = key.partition(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
    return config
