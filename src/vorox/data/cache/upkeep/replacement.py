"""Rebuild a cache next to the old one, then swap them.

The new cache is built in ``.rebuild-NAME``; an interrupted rebuild continues there. It is renamed when it is complete.
Invariant: one complete cache is on disk at any time, if there was one before; the next call finishes a swap that was
interrupted between its two renames.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

from vorox.core.errors import ConfigError
from vorox.core.files.atomic import remove_directory, sync_directory
from vorox.data.cache.files.leases import DIRECTORY_NAME, Leases, is_held, read_holder
from vorox.data.cache.upkeep.retention import copy_pins, disk_time_or_local

REBUILD_PREFIX = ".rebuild-"
REPLACED_PREFIX = ".replaced-"
_REBUILD_UNIT = 999_999_999
"""Pseudo-unit whose lease a rebuild holds for its whole duration; no cache has that many units."""


@contextlib.contextmanager
def replacing(directory: Path, *, wanted: bool) -> Generator[Path]:
    """Yield the directory to build in: the cache itself, or one that replaces it when the block succeeds.

    Args:
        directory: The cache.
        wanted: Rebuild; else yield ``directory``.

    Raises:
        ConfigError: Another process is building the cache.
    """
    old = directory.with_name(REPLACED_PREFIX + directory.name)
    if old.exists() and not directory.exists():
        old.rename(directory)  # a crash between the two renames below
        sync_directory(directory.parent)
    if not wanted:
        yield directory
        return
    refuse_builders(directory)
    rebuilt = directory.with_name(REBUILD_PREFIX + directory.name)
    with Leases(rebuilt) as leases:  # tells garbage collection that a rebuild is in progress, also between units
        leases.acquire(_REBUILD_UNIT)
        yield rebuilt
    refuse_builders(directory)
    if old.exists():
        remove_directory(old)
    copy_pins(directory, rebuilt)
    if directory.exists():
        directory.rename(old)
    rebuilt.rename(directory)
    sync_directory(directory.parent)
    if old.exists():
        remove_directory(old)


def refuse_builders(directory: Path, then: str = "rebuild") -> None:
    """Refuse to go on while another process builds a cache; ``then`` is what to do after it.

    Raises:
        ConfigError: One does.
    """
    for path in sorted((directory / DIRECTORY_NAME).glob("u*")):
        if is_held(path, disk_time_or_local(directory)):
            raise ConfigError(
                f"The cache is being built by {read_holder(path) or 'another process'}", where=str(directory),
                hint=f"let it finish or stop it, then {then}", saved="the existing cache",
            )  # fmt: skip
