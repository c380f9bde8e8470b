"""Command-line overrides: parsing of ``a.b=v`` and ``--a.b=v`` into assignments to paths.

The value is JSON, a YAML list, mapping or quoted text, or a plain YAML 1.2 scalar. A number in the path is a list index
(``data.sources.0.weight=2``). The schema is checked later, on the merged configuration, so that all problems are
reported together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from vorox.core.config.yaml.reader import Json, KeyPath, read_value
from vorox.core.errors import ConfigError

_KEY = re.compile(r"[A-Za-z_]\w*(\.(\w+))*")


@dataclass(frozen=True, slots=True)
class Assignment:
    """A value assigned to a path.

    Attributes:
        path: Keys, and indices of lists.
        value: The new value; mappings are merged.
        origin: For messages: ``my.yaml:12`` or the override itself.
        nested: Origins of the parts of a list value, by full path.
    """

    path: KeyPath
    value: Json
    origin: str
    nested: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])


def is_override(argument: str) -> bool:
    """Whether a command-line argument has the form of an override: ``a.b=v``, with or without dashes."""
    name, equals, _ = argument.removeprefix("--").partition("=")
    return bool(equals) and _KEY.fullmatch(name) is not None


def parse_override(text: str) -> Assignment:
    """Parse an override into path and value.

    Raises:
        ConfigError: The ``=``, the key or the value is missing, or the value is invalid JSON or YAML.
    """
    name, equals, value = text.removeprefix("--").partition("=")
    if not equals:
        raise ConfigError(f"{text} has no value", where=text, hint=f"write {name}=VALUE")
    if not _KEY.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a key", where=text, hint="write section.key=VALUE, such as optimizer.lr=6e-4"
        )
    if not value.strip():
        raise ConfigError(
            f"{name} has an empty value", where=text, hint=f"write {name}=null, or {name}='\"\"' for an empty text"
        )
    path = tuple(int(part) if part.isdecimal() else part for part in name.split("."))
    return Assignment(path, read_value(value, text), f"override {text}")
