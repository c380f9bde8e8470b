"""Initialise a cache: record its recipe, files and units before the first build.

Any number of builders may plan concurrently: the cache's lock serialises them, and each finds what the others recorded.
Files and units count once the manifest has planned them; new ones are appended. A source file may move (same content
under another uri, the latest one counts), but not change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from vorox.core.errors import DataError
from vorox.core.files.atomic import make_directory, sweep_temporary
from vorox.core.files.file_holder import FileLock
from vorox.data.cache.building.build_queue import never
from vorox.data.cache.files.manifest import LOCK_NAME, Manifest, planned_entry
from vorox.data.cache.units.first_pass import find_duplicates
from vorox.data.cache.units.unit_builder import UnitBuilder
from vorox.data.cache.upkeep.erasure import inherit_erasures
from vorox.data.cache.upkeep.replacement import REBUILD_PREFIX
from vorox.data.documents import SourceFile, Unit
from vorox.data.recipe import (
    RECIPE_NAME,
    FileLog,
    UnitLog,
    check_recipe,
    read_files,
    read_recipe,
    read_units,
    write_recipe,
)

_SOURCE_CHANGED = "the source changed after the cache was built: restore it, or build into another data.cache.directory"


class InputsDiffer(DataError):
    """The planned files or units of a cache are others than those of this process."""


def prepare_directory(
    directory: Path,
    builder: UnitBuilder,
    units: Sequence[Unit],
    *,
    stop: Callable[[], bool] = never,
    on_compared: Callable[[int], None] | None = None,
) -> Manifest:
    """Plan a cache, remove temporary files of dead builders, and find duplicates if a transform removes them.

    Args:
        directory: The cache; created if it does not exist.
        builder: The unit builder of the cache.
        units: All units.
        stop: Once it returns true, the search for duplicates ends early.
        on_compared: Called with the bytes of text compared so far.

    Raises:
        DataError: The cache has a different recipe or source, or is damaged.
    """
    with planning_lock(directory, builder) as manifest:
        record_inputs(directory, manifest, builder.files, units)
        if manifest.planned_units < len(units) or manifest.planned_files < len(builder.files):
            entry = planned_entry(len(units), builder.recipe.digest, len(builder.files))
            manifest = manifest.append(directory, [entry])
        if directory.name.startswith(REBUILD_PREFIX):
            replaced = directory.with_name(directory.name.removeprefix(REBUILD_PREFIX))
            manifest = inherit_erasures(replaced, directory, manifest)
    find_duplicates(builder.with_directory(directory), units, on_compared=on_compared, stop=stop)
    return manifest


@contextlib.contextmanager
def planning_lock(directory: Path, builder: UnitBuilder) -> Generator[Manifest]:
    """Hold the cache's planning lock. On entry, remove temporary files of dead builders and record the recipe.

    Raises:
        DataError: The cache has a different recipe, or is damaged.
    """
    make_directory(directory)
    chunk_directories = sorted((directory / "chunks").glob("*"))
    lists = (directory / name for name in ("manifest", "quarantine", "leases"))
    for folder in (directory, *lists, *chunk_directories):
        sweep_temporary(folder)
    with FileLock(directory / LOCK_NAME):
        if (directory / RECIPE_NAME).exists():
            check_recipe(directory, read_recipe(directory), builder.recipe)
        else:
            write_recipe(directory, builder.recipe)
        make_directory(directory / "manifest")
        manifest = Manifest.open(directory)
        manifest.check_recipe(directory, builder.recipe.digest)
        yield manifest


def planned_inputs(directory: Path, manifest: Manifest) -> tuple[list[SourceFile], list[Unit]]:
    """Return the planned files and units. Entries beyond them come from a build that died before it planned them."""
    files, units = read_files(directory), read_units(directory)
    num_files = manifest.planned_files or (len(files) if manifest.planned_units else 0)
    return files[:num_files], units[: manifest.planned_units]


def has_planned(directory: Path, manifest: Manifest, files: Sequence[SourceFile], units: Sequence[Unit]) -> bool:
    """Whether exactly these files and units are planned.

    Raises:
        DataError: The planned files or units contradict them.
    """
    known_files, known_units = planned_inputs(directory, manifest)
    _check_files(directory, known_files, files)
    check_units(directory, known_units, units)
    return known_files == list(files) and len(known_units) == len(units)


def record_inputs(directory: Path, manifest: Manifest, files: Sequence[SourceFile], units: Sequence[Unit]) -> None:
    """Bring both lists up to the given files and units, durably. The caller holds the cache's lock.

    Raises:
        DataError: The planned files or units contradict them.
    """
    known_files, known_units = planned_inputs(directory, manifest)
    _check_files(directory, known_files, files)
    check_units(directory, known_units, units)
    file_log, unit_log = FileLog(directory), UnitLog(directory)
    if file_log.files != list(files):
        moved = [index for index, known in enumerate(known_files) if known != files[index]]
        file_log.replace(moved, len(known_files), files)
    if unit_log.units != list(units):
        unit_log.append(len(known_units), units[len(known_units) :])


def _check_files(directory: Path, known: Sequence[SourceFile], files: Sequence[SourceFile]) -> None:
    if len(known) > len(files):
        missing = known[len(files)]
        raise InputsDiffer(
            f"The source has {len(files):,} files, but the cache was built from {len(known):,}; missing: {missing.uri}",
            where=str(directory), hint=_SOURCE_CHANGED,
        )  # fmt: skip
    for recorded, file in zip(known, files, strict=False):
        if (recorded.size_bytes, recorded.version) != (file.size_bytes, file.version):
            raise InputsDiffer(
                f"File {file.uri} ({file.size_bytes:,} bytes, version {file.version}) differs from the one that the "
                f"cache was built from: {recorded.uri} ({recorded.size_bytes:,} bytes, version {recorded.version})",
                where=str(directory), hint=_SOURCE_CHANGED,
            )  # fmt: skip


def check_units(directory: Path, known: Sequence[Unit], units: Sequence[Unit]) -> None:
    """Refuse units that do not start with the known ones.

    Raises:
        DataError: A unit differs; the message has the first.
    """
    if list(known) != list(units[: len(known)]):
        first = next(index for index, unit in enumerate(known) if index >= len(units) or unit != units[index])
        raise InputsDiffer(
            f"Unit {first} has other boundaries than when the cache was built ({len(known):,} units then, "
            f"{len(units):,} now)",
            where=str(directory), hint=_SOURCE_CHANGED,
        )  # fmt: skip
