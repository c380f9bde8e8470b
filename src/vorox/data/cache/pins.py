"""Pins: who wants a cache to stay, ``pins/NAME.json``, a small file per reason beside the chunks.

A pinned cache is never removed as a whole, however long nobody opened it. Pins decide nothing else: no recipe, digest
or reader knows of them. A pin that cannot be read is a pin.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from vorox.core.atomic import canonical_json, make_directory, remove_file, write_file
from vorox.core.errors import ConfigError

DIRECTORY_NAME = "pins"
_NAME = re.compile(r"[\w.-]{1,100}")


@dataclass(frozen=True, slots=True)
class Pin:
    """Why a cache stays.

    Attributes:
        name: What it is removed by.
        reason: For people; empty if none was given.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" if self.reason else self.name


def pin(directory: Path, name: str, reason: str = "") -> None:
    """Keep a cache, durably; again under the same name changes the reason.

    Raises:
        ConfigError: The name cannot be that of a file.
    """
    path = _path(directory, name)
    make_directory(path.parent)
    pinned_at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    write_file(path, canonical_json({"name": name, "reason": reason, "pinned_at": pinned_at}) + b"\n")


def unpin(directory: Path, name: str) -> bool:
    """Take a pin away; whether there was one.

    Raises:
        ConfigError: The name cannot be that of a file.
    """
    path = _path(directory, name)
    was_there = path.exists()
    remove_file(path)
    return was_there


def pins_of(directory: Path) -> tuple[Pin, ...]:
    """The pins of a cache, by name."""
    return tuple(Pin(path.stem, _reason(path)) for path in sorted((directory / DIRECTORY_NAME).glob("*.json")))


def _reason(path: Path) -> str:
    try:
        return str(json.loads(path.read_bytes())["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return "a pin that cannot be read"


def _path(directory: Path, name: str) -> Path:
    if _NAME.fullmatch(name) is None or name.startswith("."):
        raise ConfigError(
            f"{name!r} cannot be the name of a pin", where="--name",
            hint="use letters, digits, '-', '_' and '.', not at the beginning",
        )  # fmt: skip
    return directory / DIRECTORY_NAME / f"{name}.json"
