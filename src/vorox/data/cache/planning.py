"""Planning a cache: its directory, recipe, files and units recorded before anything is built.

A directory, a ``UnitBuilder`` and the units go in; a manifest that plans them comes out. Any number of builders may
plan at once: the cache's lock serialises them, and each finds what the others recorded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vorox.core.atomic import is_disk_full, make_directory, sweep_temporary
from vorox.core.disk_errors import disk_error, room_text
from vorox.core.errors import DataError
from vorox.core.lock import FileLock
from vorox.data.cache import inventory
from vorox.data.cache.manifest import LOCK_NAME, Manifest, planned_entry
from vorox.data.cache.options import never
from vorox.data.cache.recipe import RECIPE_NAME, check_recipe, read_recipe, write_recipe
from vorox.data.cache.unit_builder import UnitBuilder
from vorox.data.documents import Unit


def prepare_directory(
    directory: Path,
    builder: UnitBuilder,
    units: Sequence[Unit],
    *,
    stop: Callable[[], bool] = never,
    on_compared: Callable[[int], None] | None = None,
) -> Manifest:
    """Sweep what dead builders left, record what is to be built, and find duplicates if a transform removes them.

    Args:
        directory: The cache; created if need be.
        builder: What its units are a function of.
        units: All units.
        stop: Once it returns true, the search for duplicates ends early.
        on_compared: Called with the bytes of text compared so far.

    Raises:
        DataError: The cache has another recipe or source, or is damaged.
    """
    with planning(directory, builder) as manifest:
        inventory.record(directory, manifest, builder.files, units)
        if manifest.planned_units < len(units) or manifest.planned_files < len(builder.files):
            entry = planned_entry(len(units), builder.recipe.digest, len(builder.files))
            manifest = manifest.appended(directory, [entry])
    builder.at(directory).find_duplicates(units, on_compared=on_compared, stop=stop)
    return manifest


@contextlib.contextmanager
def planning(directory: Path, builder: UnitBuilder) -> Generator[Manifest]:
    """Sweep what dead builders left, record the recipe, and hold the cache's lock so that nobody else plans.

    Raises:
        DataError: The cache has another recipe, or is damaged.
    """
    make_directory(directory)
    chunk_directories = sorted((directory / "chunks").glob("*"))
    lists = (directory / name for name in ("manifest", "quarantine", "leases"))
    for place in (directory, *lists, *chunk_directories):
        sweep_temporary(place)
    with FileLock(directory / LOCK_NAME):
        if (directory / RECIPE_NAME).exists():
            check_recipe(directory, read_recipe(directory), builder.recipe)
        else:
            write_recipe(directory, builder.recipe)
        make_directory(directory / "manifest")
        manifest = Manifest.open(directory)
        manifest.check_recipe(directory, builder.recipe.digest)
        yield manifest


def source_bytes(units: Collection[Unit]) -> npt.NDArray[np.int64]:
    """Bytes of the source that each unit is made of."""
    return np.array([unit.size_bytes for unit in units], np.int64)


def write_error(error: OSError, directory: Path, *, saved: str, needed_bytes: int) -> DataError:
    """Return the error for a write to the cache that the system refused."""
    where = str(error.filename or directory)
    if not is_disk_full(error):
        known = disk_error(error, where)
        return DataError(
            f"the cache cannot be written: {os.strerror(error.errno) if error.errno else error}", where=where,
            saved=saved,
            hint=known.hint if known else "give write permission, or set data.cache.directory to a place that has it",
        )  # fmt: skip
    return DataError(
        f"no room for the rest of the cache: {room_text(needed_bytes, directory, error)}",
        where=where, saved=saved,
        hint="make room, or set data.cache.directory to another disk, and run the same command again",
    )  # fmt: skip
