"""YAML, presets and overrides to one frozen ``RunConfig``, and what can be asked of it. The door to this room."""

from vorox.core.config.resolve import (
    Difference,
    ResolvedConfig,
    config_digest,
    config_values,
    differences,
    dump_yaml,
    flat_values,
    in_digest,
    json_schema,
    known_key,
    load_config,
    locate_config,
    model_label,
    resolve_config,
    slug,
)

__all__ = [
    "Difference",
    "ResolvedConfig",
    "config_digest",
    "config_values",
    "differences",
    "dump_yaml",
    "flat_values",
    "in_digest",
    "json_schema",
    "known_key",
    "load_config",
    "locate_config",
    "model_label",
    "resolve_config",
    "slug",
]
