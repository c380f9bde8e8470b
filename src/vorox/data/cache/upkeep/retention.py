"""What protects a cache from garbage collection: pins, and when it was last used.

``pins/NAME.json`` in a cache is a pin: the cache is never removed as a whole, however long it is idle. Pins affect
nothing else: no recipe, digest or reader depends on them. An unreadable pin still counts.

The pin of a run is a hard link to a file in the run directory, so the number of links tells whether the run was moved
or removed, wherever it is on this disk. Invariant: without a link, as on another disk, the pin stays until it is
removed.

Opening or building a cache writes ``USED.json``: the identity of this boot and the uptime. On the same boot the age of
that file is exact even if the wall clock jumps; after a reboot, or on another machine, file times count. Invariant: a
cache never seems idle for longer than it was by either clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from vorox.core.errors import ConfigError
from vorox.core.files.atomic import (
    canonical_json,
    disk_time,
    make_directory,
    remove_file,
    rename,
    temporary_name,
    write_file,
)
from vorox.core.files.file_holder import boot_identity
from vorox.core.files.json_reader import mapping, read_json
from vorox.core.run_layout import RunLayout
from vorox.data.cache.files.manifest import LOG_NAME
from vorox.data.recipe import RECIPE_NAME

Place = Literal["", "moved", "lost", "removed"]

PINS_NAME = "pins"
USED_NAME = "USED.json"
_RUN_PREFIX = "run-"
_READ_BY = "read by run "
_NO_PIN_CHARACTER = re.compile(r"[^\w.-]")
_PIN_NAME = re.compile(r"[\w.-]{1,100}")


@dataclass(frozen=True, slots=True)
class Pin:
    """A reason to keep a cache.

    Attributes:
        name: Identifies the pin.
        reason: For people; may be empty.
        place: Where the run that registered itself is: ``moved`` away from where it was, ``lost`` (moved or removed) or
            ``removed``; empty if it is there, and for the pin of a person.
    """

    name: str
    reason: str
    place: Place = ""

    @property
    def run(self) -> str:
        """The name of the run that registered itself; empty for the pin of a person."""
        return self.reason.rpartition("/")[2] if self.name.startswith(_RUN_PREFIX) else ""

    def __str__(self) -> str:
        note = {"moved": " (moved since)", "lost": " (not there any more)"}.get(self.place, "")
        return f"{self.name}: {self.reason}{note}" if self.reason else self.name


def pin(directory: Path, name: str, reason: str = "") -> None:
    """Pin a cache durably. Pinning again under the same name replaces the reason.

    Raises:
        ConfigError: The name is not a valid file name.
    """
    path = _pin_path(directory, name)
    make_directory(path.parent)
    pinned_at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    write_file(path, canonical_json({"name": name, "reason": reason, "pinned_at": pinned_at}) + b"\n")


def register_run(directory: Path, run_directory: Path) -> None:
    """Record in a cache that a run reads it; does nothing on a read-only disk. Garbage collection keeps the cache.

    The record is a pin that ends with the run, so that a run outside the folder that is searched counts too.
    """
    run = run_directory.absolute()
    link = RunLayout(run).pin_of_view(directory.name)
    with contextlib.suppress(OSError):
        # A run that is at the place of another one, which was moved away, has a pin of its own.
        digest = hashlib.sha256(f"{run}\n{run.stat().st_ino}".encode()).hexdigest()
        name = f"{_RUN_PREFIX}{_NO_PIN_CHARACTER.sub('_', run.name)[:60]}-{digest[:8]}"
        path = _pin_path(directory, name)
        body = {"name": name, "reason": f"{_READ_BY}{run}", "run": str(run)}
        alone, linked = (canonical_json({**body, "linked": is_linked}) + b"\n" for is_linked in (False, True))
        content = path.read_bytes() if path.exists() else b""
        if content == alone or (content == linked and link.exists() and link.samefile(path)):
            return
        make_directory(path.parent)
        try:
            make_directory(link.parent)
            write_file(link, linked)
            temporary = temporary_name(path)
            os.link(link, temporary)
            rename(temporary, path)
        except OSError:  # another disk, a read-only run, or a file system without links
            with contextlib.suppress(OSError):
                remove_file(link)
            write_file(path, alone)


def unregister_run(directory: Path, run_directory: Path) -> None:
    """Remove from a cache the pins of a run that was removed; does nothing on a read-only disk."""
    with contextlib.suppress(OSError):
        for path in (directory / PINS_NAME).glob(f"{_RUN_PREFIX}*.json"):
            if _body(path).get("run") == str(run_directory.absolute()):
                remove_file(path)


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
    """Return the pins of a cache, sorted by name, without those of runs that were removed."""
    return tuple(pin for pin in _all_pins(directory) if pin.place != "removed")


def removed_runs(directory: Path) -> tuple[str, ...]:
    """Return the paths of the runs that read a cache and were removed since, or moved to another disk."""
    return tuple(pin.reason.removeprefix(_READ_BY) for pin in _all_pins(directory) if pin.place == "removed")


def copy_pins(directory: Path, target: Path) -> None:
    """Give a cache the pins of another one, with their links to runs."""
    for pinned in read_pins(directory):
        source, path = _pin_path(directory, pinned.name), _pin_path(target, pinned.name)
        make_directory(path.parent)
        try:
            temporary = temporary_name(path)
            os.link(source, temporary)
            rename(temporary, path)
        except OSError:  # a file system without links, where no pin says that it is one
            write_file(path, source.read_bytes())


def _all_pins(directory: Path) -> list[Pin]:
    paths = sorted((directory / PINS_NAME).glob("*.json"))
    return [Pin(path.stem, str(_body(path).get("reason", "unreadable pin")), _place(path)) for path in paths]


def _place(path: Path) -> Place:
    """Return where the run of a pin is, as far as that is known."""
    body = _body(path)
    run = body.get("run")
    if not path.name.startswith(_RUN_PREFIX) or not isinstance(run, str):
        return ""
    try:
        if RunLayout(Path(run)).record.exists():
            return ""
        if body.get("linked") is not True:
            return "lost"
        return "moved" if path.stat().st_nlink > 1 else "removed"
    except (OSError, ValueError):
        return "lost"


def _body(path: Path) -> Mapping[str, Any]:
    """Return the content of a pin; empty if it is unreadable."""
    try:
        return mapping(read_json(path))
    except (OSError, ValueError):
        return {}


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
        used = read_json(directory / USED_NAME)
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
