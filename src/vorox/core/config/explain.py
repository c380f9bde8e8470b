"""Explanations of settings: type, default, value, origin and dependencies; the JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from vorox.core.config.digest import flat_values, identifies_run
from vorox.core.config.layers.preset_rules import WITH_ITS_SOURCES
from vorox.core.config.layers.presets import model_presets, run_presets
from vorox.core.config.layers.setting_dependencies import dependencies
from vorox.core.config.layers.synonyms import key_of, synonyms_of
from vorox.core.config.layers.training_defaults import default_rules
from vorox.core.config.resolve import ResolvedConfig
from vorox.core.config.schema_fields import (
    REQUIRED,
    SchemaField,
    did_you_mean,
    find_field,
    in_yaml_words,
    schema_fields,
    wildcard,
)
from vorox.core.config.yaml.reader import Json
from vorox.core.config.yaml.writer import write_inline
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.core.schema.setting import Resume

_RESUME: Final[Mapping[Resume, str]] = {
    "logged": "may change, and the change is recorded",
    "refused": "may not change",
    "allowed": "may change",
    "recorded": "may not change in a source; sources may be added and removed",
    "mixture": "may change, and the data plan records it",
    "length": "may change, and the data plan records it",
}


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a key in one configuration, and the place that set it."""

    key: str
    value: Json
    origin: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of one key.

    Attributes:
        field: Its row of the schema table.
        values: Its value in the given configuration: several for a key of a list, none without a configuration.
        needs: The setting without which it has no effect; empty if it always has one.
        changes_run: Whether another value makes another run (see ``schema/setting.py``).
        resume: Whether it may change at a resume, in words.
        keys: For a section, the keys directly inside it.
        synonyms: Its synonyms.
        rules: How its default depends on what is trained, one line each.
    """

    field: SchemaField
    values: tuple[Value, ...]
    needs: str
    changes_run: bool
    resume: str
    keys: tuple[str, ...]
    synonyms: tuple[str, ...]
    rules: tuple[str, ...] = ()

    @property
    def default(self) -> str:
        """The default on one line; empty for sections and for keys without a default."""
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
            "resume": self.resume,
            "keys": list(self.keys),
            "synonyms": list(self.synonyms),
            "default_rules": list(self.rules),
            "values": [{"key": value.key, "value": value.value, "origin": value.origin} for value in self.values],
        }


def explain(key: str, resolved: ResolvedConfig | None = None) -> Explanation:
    """Explain a dotted key, with or without list indices.

    Args:
        key: ``optimizer.lr``, ``data.sources.0.weight``, ``schedule``, or a synonym.
        resolved: The configuration whose values are included.

    Raises:
        ConfigError: The key does not exist; the error suggests the nearest ones.
    """
    key = known_key(key)
    field = find_field(key)
    assert field is not None
    needs = next((entry.remedy for entry in dependencies() if entry.key == field.key), "")
    depth = field.key.count(".") + (2 if field.type_name == "list of sections" else 1)
    inside = tuple(
        name for name in schema_fields() if name.startswith(f"{field.key}.") and name.count(".") == depth
    )  # fmt: skip
    values, rules = _values(key, field, resolved), default_rules(field.key)
    resume = _RESUME[field.facts.resume or "logged"]
    return Explanation(field, values, needs, identifies_run(field.key), resume, inside, synonyms_of(key), rules)


def sections() -> dict[str, str]:
    """Return the sections of a configuration with their topic, in the order of the schema."""
    return {name: _topic(name) for name in schema_fields() if "." not in name and name != "preset"}


def _topic(name: str) -> str:
    field = schema_fields()[name]
    if field.description:
        return field.description
    keys = [key.rpartition(".")[2] for key in schema_fields() if key.startswith(f"{name}.") and key.count(".") == 1]
    return ", ".join(keys)


def reference_page() -> str:
    """Return the page of all settings (``docs/settings.md``), as Markdown."""
    lines = [
        "# All settings",
        "",
        "Every key of a configuration, with its type, default and meaning. `vorox config reference` writes this page;",
        "`vorox config explain KEY` shows one key with its value in a configuration. `*` stands for the number of an",
        "entry of a list.",
    ]
    for section in sections():
        fields = [field for key, field in schema_fields().items() if key == section or key.startswith(f"{section}.")]
        lines += ["", f"## {section}", "", "| setting | type | default | meaning |", "|---|---|---|---|"]
        for field in fields:
            if field.is_section:
                continue
            default = "required" if field.default is REQUIRED else f"`{write_inline(_plain(field.default))}`"
            rules = default_rules(field.key)
            default = f"{default}, or by what is trained: {'; '.join(rules)}" if rules else default
            accepted = f", {field.accepted}" if field.accepted else ""
            cells = (f"`{field.key}`", f"{field.type_name}{accepted}", default, field.description)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def known_key(key: str) -> str:
    """Return the key itself, or the key that a synonym means.

    Raises:
        ConfigError: The key does not exist; the error suggests the nearest ones.
    """
    current = key_of(key)
    if find_field(current) is None:
        sections = ", ".join(name for name, field in schema_fields().items() if field.is_section and "." not in name)
        raise ConfigError(
            f"Unknown key {key}",
            hint=did_you_mean(key) or f"`vorox config explain SECTION` lists keys; sections: {sections}",
        )
    return current


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


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of configuration files, for editors; no key is required, because presets fill them in."""
    schema = RunConfig.model_json_schema()
    for definition in [schema, *cast("Mapping[str, dict[str, Any]]", schema.get("$defs", {})).values()]:
        definition.pop("required", None)
        if definition.get("title") == "SourceConfig":
            definition["required"] = ["name"]  # a preset may fill in the format
        for entry in cast("Mapping[str, dict[str, Any]]", definition.get("properties", {})).values():
            entry["description"] = in_yaml_words(str(entry.get("description", "")))
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Vorox run configuration"
    properties = cast("dict[str, Any]", schema["properties"])
    schema["properties"] = {
        "preset": {
            "type": "string",
            "description": f"Base configuration: {', '.join(run_presets())}, or a file.",
        },
        WITH_ITS_SOURCES: {
            "type": "object",
            "description": "Settings that apply only while data.sources are the ones in this file.",
        },
        **properties,
    }
    sizes = sorted(model_presets().sizes)
    model = cast("dict[str, Any]", schema["$defs"]["ModelConfig"]["properties"]["preset"])
    model["examples"] = sizes
    return schema
