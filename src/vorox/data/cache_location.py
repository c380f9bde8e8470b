"""Locate the cache directory of a source's split, or an earlier cache that new files can extend.

A listed source and a recipe go in; out come a directory, the source with its files in the directory's order, and the
units planned so far. Invariant: recorded files and units keep their order; a cache is extended only if all files that
it was built from are unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vorox.core.errors import ConfigError, DataError
from vorox.core.schema.data import DataConfig
from vorox.data.cache.initialize import planned_inputs
from vorox.data.cache.manifest import Manifest
from vorox.data.cache.recipe import RECIPE_NAME, Recipe
from vorox.data.documents import Unit
from vorox.data.text.holdout import Split
from vorox.data.text.sources import Source, with_files
from vorox.data.text.unit_splitter import split_into_units


@dataclass(frozen=True, slots=True)
class CacheLocation:
    """The directory of a cache, and its planned content.

    Attributes:
        directory: The cache directory.
        source: The source, its files in the order of the directory.
        units: The planned units of the first ``num_files`` files; ``None`` if none are planned.
        num_files: Number of files that the planned units cover.
    """

    directory: Path
    source: Source
    units: Sequence[Unit] | None
    num_files: int

    @property
    def is_planned(self) -> bool:
        """Whether the units of all files are planned."""
        return self.units is not None and self.num_files == len(self.source.files)


def cache_root(data: DataConfig) -> Path:
    """Return the root of all caches: ``data.cache.directory``, else ``$VOROX_CACHE``, else ``~/.cache/vorox``."""
    return root_of(data.cache.directory)


def root_of(directory: str | None) -> Path:
    """Return the root of all caches for a value of ``data.cache.directory``."""
    return Path(directory or os.environ.get("VOROX_CACHE") or "~/.cache/vorox").expanduser().absolute()


def cache_directory(root: Path, source: Source, split: Split, recipe: Recipe) -> Path:
    """Return the directory of a cache. Its name identifies source, split, recipe and content."""
    return root / f"{_name_prefix(source, split, recipe)}{source.digest[:8]}"


def _name_prefix(source: Source, split: Split, recipe: Recipe) -> str:
    """Return the common name prefix of caches that differ only in their files."""
    return f"{source.config.name}-{split}-{recipe.digest[:12]}-"


def find_location(root: Path, source: Source, split: Split, recipe: Recipe, *, grow: bool) -> CacheLocation:
    """Return the location of the cache of a split of a source, which may not exist yet.

    Args:
        root: Root directory of the caches.
        source: The source as listed now.
        split: The split.
        recipe: The recipe of the cache.
        grow: Whether to extend a cache that was built from fewer files.

    Raises:
        ConfigError: ``grow`` contradicts the source's ``max_bytes``.
        DataError: A file that the earlier cache was built from has changed or is missing.
    """
    directory = cache_directory(root, source, split, recipe)
    if grow:
        if source.config.max_bytes is not None:
            raise ConfigError(
                f"Source {source.config.name!r} has max_bytes, so new files would displace older ones",
                where=f"{source.key}.max_bytes", hint="remove max_bytes, or set data.cache.grow=false",
            )  # fmt: skip
        found = _find_extendable(root, source, split, recipe)
        if found is not None:
            directory, source = found
    if not (directory / RECIPE_NAME).exists():
        return CacheLocation(directory, source, None, 0)
    manifest = Manifest.open(directory)
    files, units = planned_inputs(directory, manifest)
    if not units:
        return CacheLocation(directory, source, None, 0)
    return CacheLocation(directory, source, units, min(len(files), len(source.files)))


def _find_extendable(root: Path, source: Source, split: Split, recipe: Recipe) -> tuple[Path, Source] | None:
    """Return the largest cache that contains only files of the source, and the source in the order of that cache."""
    index_of = {(file.size_bytes, file.version): index for index, file in enumerate(source.files)}
    uris = {file.uri for file in source.files}
    fitting: list[tuple[int, str, Path, list[int]]] = []
    problem: DataError | None = None
    for directory in sorted(root.glob(f"{_name_prefix(source, split, recipe)}*")):
        if not (directory / RECIPE_NAME).exists():
            continue
        files, _ = planned_inputs(directory, Manifest.open(directory))
        indexes = [index_of.get((file.size_bytes, file.version)) for file in files]
        known = [index for index in indexes if index is not None]
        if files and len(known) == len(files):
            fitting.append((len(files), directory.name, directory, known))
        elif any(file.uri in uris for file in files):  # built from files of this source
            lost = files[indexes.index(None)]
            problem = DataError(
                f"The cache cannot be extended: {lost.uri}, from which it was built, "
                f"{'has changed' if lost.uri in uris else 'is missing'}",
                where=str(directory),
                hint="restore the file, or set data.cache.grow=false to build a new cache of the current files",
            )
    if not fitting:
        if problem is not None:
            raise problem
        return None
    _, _, directory, known = max(fitting)
    order = known + [index for index in range(len(source.files)) if index not in set(known)]
    return directory, with_files(source, order)


def all_units(location: CacheLocation, split: Split, data: DataConfig) -> Sequence[Unit]:
    """Return the planned units, followed by the units of new files."""
    unit_bytes, known = data.cache.unit_bytes, list(location.units or ())
    if location.is_planned:
        return known
    new = with_files(location.source, range(location.num_files, len(location.source.files)))
    for unit in split_into_units(new, split, location.source.holdout, unit_bytes):
        spans = tuple(span._replace(file_index=span.file_index + location.num_files) for span in unit.spans)
        known.append(Unit(len(known), spans))
    return known
