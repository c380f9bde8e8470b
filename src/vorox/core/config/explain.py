"""What a setting is: type, default, value here and where it came from, what is accepted, and what depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from vorox.core.config.conditions import CONDITIONS
from vorox.core.config.fields import REQUIRED, SchemaField, find_field, schema_fields, wildcard
from vorox.core.config.resolve import ResolvedConfig, flat_values, in_digest, known_key
from vorox.core.config.synonyms import synonyms_of
from vorox.core.config.yaml_reader import Json
from vorox.core.config.yaml_writer import write_inline


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a key in one configuration and where it was said."""

    key: str
    value: Json
    origin: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything there is to say about one key.

    Attributes:
        field: Its row of the schema.
        values: Its value in the given configuration: several for a key of a list, none without a configuration.
        needs: The setting without which it has no effect; empty if it always has one.
        changes_run: Whether another value makes another run (see ``config.NOT_IN_DIGEST``).
        keys: For a section, the keys directly inside it.
        synonyms: Other names that are accepted for it.
    """

    field: SchemaField
    values: tuple[Value, ...]
    needs: str
    changes_run: bool
    keys: tuple[str, ...]
    synonyms: tuple[str, ...]

    @property
    def default(self) -> str:
        """The default on one line; empty for sections and for keys that have none."""
        if self.field.is_section or self.field.default is REQUIRED:
            return ""
        return write_inline(_plain(self.field.default))

    def to_json(self) -> Mapping[str, Any]:
        return {
            "key": self.field.key,
            "type": self.field.type_name,
            "default": None if self.field.is_section or self.field.default is REQUIRED else _plain(self.field.default),
            "required": self.field.default is REQUIRED,
            "accepted": self.field.accepted,
            "choices": list(self.field.choices),
            "description": self.field.description,
            "needs": self.needs,
            "changes_run": self.changes_run,
            "keys": list(self.keys),
            "synonyms": list(self.synonyms),
            "values": [{"key": value.key, "value": value.value, "origin": value.origin} for value in self.values],
        }


def explain(key: str, resolved: ResolvedConfig | None = None) -> Explanation:
    """Explain a dotted key, with or without list indices.

    Args:
        key: ``optimizer.lr``, ``data.sources.0.weight``, ``schedule``.
        resolved: The configuration whose values are to be shown.

    Raises:
        ConfigError: There is no such key; the nearest are named.
    """
    key = known_key(key)
    field = find_field(key)
    assert field is not None
    needs = next((condition.remedy for condition in CONDITIONS if condition.key == field.key), "")
    depth = field.key.count(".") + (2 if field.type_name == "list of sections" else 1)
    inside = tuple(
        name for name in schema_fields() if name.startswith(f"{field.key}.") and name.count(".") == depth
    )  # fmt: skip
    return Explanation(field, _values(key, field, resolved), needs, in_digest(field.key), inside, synonyms_of(key))


def _values(key: str, field: SchemaField, resolved: ResolvedConfig | None) -> tuple[Value, ...]:
    if resolved is None or field.is_section:
        return ()
    exact = any(part.isdecimal() for part in key.split("."))
    return tuple(
        Value(name, value, resolved.origin(name))
        for name, value in flat_values(resolved.config).items()
        if (name == key if exact else wildcard(name) == field.key)
    )


def _plain(value: Any) -> Json:
    return list(cast("tuple[str, ...]", value)) if isinstance(value, tuple) else value
