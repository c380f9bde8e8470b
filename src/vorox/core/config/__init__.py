"""Configuration: YAML, presets and overrides to one frozen ``RunConfig``; public names."""

from vorox.core.config.digest import (
    Difference,
    config_digest,
    config_values,
    decides_bits,
    differences,
    digest_values,
    flat_values,
    flatten,
    identifies_run,
)
from vorox.core.config.explain import json_schema
from vorox.core.config.resolve import (
    ConfigSource,
    GivenConfig,
    ResolvedConfig,
    check_recordable,
    config_from_record,
    dump_yaml,
    load_config,
    locate_config,
    model_label,
    resolve_config,
    slug,
)

__all__ = [
    "ConfigSource",
    "Difference",
    "GivenConfig",
    "ResolvedConfig",
    "check_recordable",
    "config_digest",
    "config_from_record",
    "config_values",
    "decides_bits",
    "differences",
    "digest_values",
    "dump_yaml",
    "flat_values",
    "flatten",
    "identifies_run",
    "json_schema",
    "load_config",
    "locate_config",
    "model_label",
    "resolve_config",
    "slug",
]
