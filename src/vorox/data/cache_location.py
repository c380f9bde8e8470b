"""Where the cache of a split of a source lies, and whether an earlier cache of it can take up files that are new.

A listed source and a recipe go in; a directory comes out, the source with its files in the order that the directory
has them, and the units as far as they are planned. Invariant: what is recorded keeps its place; a directory is only
taken for growing if all that it was built from is still there unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vorox.core.errors import ConfigError, DataError
from vorox.core.schema.data import DataConfig
from vorox.data.cache.manifest import Manifest
from vorox.data.cache.planning import planned_inputs
from vorox.data.cache.recipe import RECIPE_NAME, Recipe
from vorox.data.documents import Unit
from vorox.data.text.holdout import Split
from vorox.data.text.sources import Source, with_files
from vorox.data.text.unit_splitter import split_into_units


@dataclass(frozen=True, slots=True)
class CacheLocation:
    """A cache directory and what is to be in it.

    Attributes:
        directory: It.
        source: The source, its files in the order of the directory.
        units: The planned units, of the first ``num_files`` files; ``None`` while there are none.
        num_files: Files that the planned units are of.
    """

    directory: Path
    source: Source
    units: Sequence[Unit] | None
    num_files: int

    @property
    def is_planned(self) -> bool:
        """Whether the units of all files are."""
        return self.units is not None and self.num_files == len(self.source.files)


def cache_root(data: DataConfig) -> Path:
    """Root of all caches: ``data.cache.directory``, else ``$VOROX_CACHE``, else ``~/.cache/vorox``."""
    return root_of(data.cache.directory)


def root_of(directory: str | None) -> Path:
    """The same for a value of ``data.cache.directory``."""
    return Path(directory or os.environ.get("VOROX_CACHE") or "~/.cache/vorox").expanduser().absolute()


def cache_directory(root: Path, source: Source, split: Split, recipe: Recipe) -> Path:
    """Where a cache lies: named by source, split, recipe and content, so that none of them can change under a run."""
    return root / f"{_family(source, split, recipe)}{source.digest[:8]}"


def _family(source: Source, split: Split, recipe: Recipe) -> str:
    """How the names of all caches begin that differ in their files alone."""
    return f"{source.config.name}-{split}-{recipe.digest[:12]}-"


def find_location(root: Path, source: Source, split: Split, recipe: Recipe, *, grow: bool) -> CacheLocation:
    """Where a split of a source lies or will lie.

    Args:
        root: Root of the caches.
        source: The source as it is listed now.
        split: Which part of it.
        recipe: What its rows are a function of.
        grow: Look for a cache that was begun with fewer files.

    Raises:
        ConfigError: Growing is asked for and ``max_bytes`` would take away what was there.
        DataError: A file that such a cache was built from is gone or changed.
    """
    directory = cache_directory(root, source, split, recipe)
    if grow:
        if source.config.max_bytes is not None:
            raise ConfigError(
                f"source {source.config.name!r} has max_bytes, so that new files would push out older ones",
                where=f"{source.key}.max_bytes", hint="leave max_bytes away, or set data.cache.grow=false",
            )  # fmt: skip
        found = _growing(root, source, split, recipe)
        if found is not None:
            directory, source = found
    if not (directory / RECIPE_NAME).exists():
        return CacheLocation(directory, source, None, 0)
    manifest = Manifest.open(directory)
    files, units = planned_inputs(directory, manifest)
    if not units:
        return CacheLocation(directory, source, None, 0)
    return CacheLocation(directory, source, units, min(len(files), len(source.files)))


def _growing(root: Path, source: Source, split: Split, recipe: Recipe) -> tuple[Path, Source] | None:
    """The furthest grown cache that has nothing but files of the source, and the source in its order."""
    place_of = {(file.size_bytes, file.version): index for index, file in enumerate(source.files)}
    uris = {file.uri for file in source.files}
    fitting: list[tuple[int, str, Path, list[int]]] = []
    problem: DataError | None = None
    for directory in sorted(root.glob(f"{_family(source, split, recipe)}*")):
        if not (directory / RECIPE_NAME).exists():
            continue
        files, _ = planned_inputs(directory, Manifest.open(directory))
        indexes = [place_of.get((file.size_bytes, file.version)) for file in files]
        known = [index for index in indexes if index is not None]
        if files and len(known) == len(files):
            fitting.append((len(files), directory.name, directory, known))
        elif any(file.uri in uris for file in files):  # begun with files of this source
            lost = files[indexes.index(None)]
            problem = DataError(
                f"{lost.uri}, which the cache was built from, is {'changed' if lost.uri in uris else 'gone'}, "
                "so it cannot grow",
                where=str(directory),
                hint="restore the file; or set data.cache.grow=false to build a cache of the files as they are now",
            )
    if not fitting:
        if problem is not None:
            raise problem
        return None
    _, _, directory, known = max(fitting)
    order = known + [index for index in range(len(source.files)) if index not in set(known)]
    return directory, with_files(source, order)


def all_units(place: CacheLocation, split: Split, data: DataConfig) -> Sequence[Unit]:
    """The planned units, and behind them those of the files that are new."""
    unit_bytes, known = data.cache.unit_bytes, list(place.units or ())
    if place.is_planned:
        return known
    new = with_files(place.source, range(place.num_files, len(place.source.files)))
    for unit in split_into_units(new, split, place.source.holdout, unit_bytes):
        spans = tuple(replace(span, file_index=span.file_index + place.num_files) for span in unit.spans)
        known.append(Unit(len(known), spans))
    return known
