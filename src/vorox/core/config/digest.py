"""The digest of a configuration: a hash of the settings that decide which run it is, and no others.

A ``RunConfig`` goes in; its values by dotted key, its digest, and its differences from another configuration come out.
What a setting decides is declared with it (``core/schema/setting.py``). Left out are names and paths, prefetching,
checkpoints, validation and logging, and presets and families, which fill in keys that are in the digest themselves.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import cast

from vorox.core.config.schema_fields import facts_at
from vorox.core.config.yaml.reader import Json, KeyPath
from vorox.core.config.yaml.writer import write_inline
from vorox.core.files.atomic import canonical_json
from vorox.core.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose value differs between two configurations; ``None`` also means a missing list entry."""

    key: str
    before: Json
    after: Json

    def __str__(self) -> str:
        return f"{self.key}: {write_inline(self.before)} -> {write_inline(self.after)}"


def config_values(config: RunConfig) -> dict[str, Json]:
    """Return the configuration as plain JSON values, with all keys."""
    return cast("dict[str, Json]", config.model_dump(mode="json"))


def flat_values(config: RunConfig) -> dict[str, Json]:
    """Return all leaves by dotted key (``data.sources.0.name``); lists of texts are leaves."""
    return flatten(config_values(config))


def flatten(values: Json) -> dict[str, Json]:
    """Return all leaves of plain values by dotted key."""
    flat: dict[str, Json] = {}

    def visit(value: Json, path: KeyPath) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                visit(item, (*path, key))
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                visit(item, (*path, index))
        else:
            flat[".".join(str(part) for part in path)] = value

    visit(values, ())
    return flat


def identifies_run(key: str) -> bool:
    """Whether another value of a key makes another run."""
    return facts_at(key).digest == "identity"


def decides_bits(key: str) -> bool:
    """Whether a key decides bits of a run: its identity, or what is decided when it is created."""
    return facts_at(key).digest != "none"


def config_digest(config: RunConfig) -> str:
    """Return the SHA-256, in hex, of all settings that decide which run it is."""
    return hashlib.sha256(canonical_json(digest_values(config))).hexdigest()


def digest_values(config: RunConfig) -> dict[str, Json]:
    """Return the keys that decide which run it is, with their values."""
    return {key: value for key, value in flat_values(config).items() if identifies_run(key)}


def differences(before: RunConfig, after: RunConfig) -> list[Difference]:
    """Return all keys whose values differ, in schema order."""
    old, new = flat_values(before), flat_values(after)
    keys = list(dict.fromkeys([*old, *new]))
    return [Difference(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]
