"""Building a cache anew and letting it take the place of the old one, which stays whole until then.

The new one grows under ``.rebuild-NAME`` beside it, can be interrupted and gone on with, and is renamed when it is
complete. Invariant: at every instant one complete cache is on disk, if there was one before; what a crash between the
two renames leaves is put right by whoever comes next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

from vorox.core.atomic import remove_directory, sync_directory
from vorox.core.errors import ConfigError
from vorox.data.cache.leases import DIRECTORY_NAME, Leases, is_held, read_holder
from vorox.data.cache.retention import disk_time_or_local, pin, read_pins

REBUILD_PREFIX = ".rebuild-"
REPLACED_PREFIX = ".replaced-"
_REBUILD = 999_999_999
"""The lease that a rebuild holds as a whole; no cache has so many units."""


@contextlib.contextmanager
def replacing(directory: Path, *, wanted: bool) -> Generator[Path]:
    """Where to build: the directory itself, or one that takes its place when the block ends without an error.

    Raises:
        ConfigError: Somebody builds the cache that is to be replaced.
    """
    old = directory.with_name(REPLACED_PREFIX + directory.name)
    if old.exists() and not directory.exists():
        old.rename(directory)  # a crash came between the two renames below
        sync_directory(directory.parent)
    if not wanted:
        yield directory
        return
    _refuse_builders(directory)
    fresh = directory.with_name(REBUILD_PREFIX + directory.name)
    with Leases(fresh) as leases:  # garbage collection sees that somebody rebuilds, also between two units
        leases.acquire(_REBUILD)
        yield fresh
    _refuse_builders(directory)
    if old.exists():
        remove_directory(old)
    for kept in read_pins(directory):
        pin(fresh, kept.name, kept.reason)
    if directory.exists():
        directory.rename(old)
    fresh.rename(directory)
    sync_directory(directory.parent)
    if old.exists():
        remove_directory(old)


def _refuse_builders(directory: Path) -> None:
    for path in sorted((directory / DIRECTORY_NAME).glob("u*")):
        if is_held(path, disk_time_or_local(directory)):
            raise ConfigError(
                f"the cache is being built by {read_holder(path) or 'another process'}", where=str(directory),
                hint="wait for it to finish or stop it, then build anew", saved="the cache as it is",
            )  # fmt: skip
