"""What protects a cache from garbage collection: pins, and when it was last used.

``pins/NAME.json`` in a cache is a pin: the cache is never removed as a whole, however long it is idle. Pins affect
nothing else: no recipe, digest or reader depends on them. An unreadable pin still counts.

Opening or building a cache writes ``USED.json``: the identity of this boot and the uptime. On the same boot the age of
that file is exact even if the wall clock jumps; after a reboot, or on another machine, file times count. Invariant: a
cache never seems idle for longer than it was by either clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from vorox.core.atomic import canonical_json, disk_time, make_directory, remove_file, write_file
from vorox.core.errors import ConfigError
from vorox.core.file_holder import boot_identity
from vorox.data.cache.manifest import LOG_NAME
from vorox.data.cache.recipe import RECIPE_NAME

PINS_NAME = "pins"
USED_NAME = "USED.json"
_PIN_NAME = re.compile(r"[\w.-]{1,100}")


@dataclass(frozen=True, slots=True)
class Pin:
    """A reason to keep a cache.

    Attributes:
        name: Identifies the pin.
        reason: For people; may be empty.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" if self.reason else self.name


def pin(directory: Path, name: str, reason: str = "") -> None:
    """Pin a cache durably. Pinning again under the same name replaces the reason.

    Raises:
        ConfigError: The name is not a valid file name.
    """
    path = _pin_path(directory, name)
    make_directory(path.parent)
    pinned_at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    write_file(path, canonical_json({"name": name, "reason": reason, "pinned_at": pinned_at}) + b"\n")


def unpin(directory: Path, name: str) -> bool:
    """Remove a pin and return whether it existed.

    Raises:
        ConfigError: The name is not a valid file name.
    """
    path = _pin_path(directory, name)
    existed = path.exists()
    remove_file(path)
    return existed


def read_pins(directory: Path) -> tuple[Pin, ...]:
    """Return the pins of a cache, sorted by name."""
    return tuple(Pin(path.stem, _reason(path)) for path in sorted((directory / PINS_NAME).glob("*.json")))


def _reason(path: Path) -> str:
    try:
        return str(json.loads(path.read_bytes())["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unreadable pin"


def _pin_path(directory: Path, name: str) -> Path:
    if _PIN_NAME.fullmatch(name) is None or name.startswith("."):
        raise ConfigError(
            f"Invalid pin name {name!r}", where="--name",
            hint="use letters, digits, '-', '_' and '.'; the first character must not be '.'",
        )  # fmt: skip
    return directory / PINS_NAME / f"{name}.json"


def mark_used(directory: Path) -> None:
    """Record that a cache is in use; does nothing on a read-only disk."""
    with contextlib.suppress(OSError):
        os.utime(directory / RECIPE_NAME)
        write_file(directory / USED_NAME, canonical_json({"boot": boot_identity(), "uptime_seconds": _uptime()}))


def idle_seconds(directory: Path, now: float) -> float:
    """Return the time since a cache was last opened or built.

    Args:
        directory: The cache.
        now: The time by the clock of its disk, from ``disk_time_or_local``.
    """
    times = [path.stat().st_mtime for path in (directory / RECIPE_NAME, directory / LOG_NAME) if path.exists()]
    idle = max(0.0, now - max(times, default=0.0))
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        used = json.loads((directory / USED_NAME).read_bytes())
        if used["boot"] == boot_identity():
            idle = min(idle, max(0.0, _uptime() - float(used["uptime_seconds"])))
    return idle


def disk_time_or_local(directory: Path) -> float:
    """Return the time by the clock of a directory's disk, or of this machine if the disk is not writable."""
    try:
        return disk_time(directory)
    except OSError:
        return time.time()


def _uptime() -> float:
    """Return the seconds since boot, including sleep where the system counts it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
