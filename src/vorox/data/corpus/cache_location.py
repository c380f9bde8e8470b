"""Locate the view that a corpus reads of a split of a source: a directory with its own list of files and units.

A listed source and a recipe go in; out come a directory, the source with its files in the directory's order, and the
units planned so far. Built units are shared between views (``cache/upkeep/unit_store.py``); a list of units belongs to
its views alone, so nothing that another run does can change it.

* A **fixed view** is named by its files: runs over the same files share it, and it never changes.
* A **growing view** (``data.cache.grow``) is named by what the source lists. New files follow the recorded ones in the
  order of their arrival. If a file of the view is gone or was rewritten, new runs begin another view; a run that has
  recorded its view keeps it.

Invariant: recorded files and units keep their order and their grouping.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vorox.core.errors import ConfigError, DataError
from vorox.core.files.atomic import canonical_json
from vorox.core.schema.data import DataConfig, SourceConfig, Split
from vorox.data.cache.building.initialize import planned_inputs
from vorox.data.cache.files.manifest import Manifest
from vorox.data.corpus.view_records import is_restored
from vorox.data.documents import SourceFile, Unit
from vorox.data.recipe import RECIPE_NAME, Recipe
from vorox.data.text.file_content import without_compression
from vorox.data.text.sources import Source, listed_again, unlisted, with_files
from vorox.data.text.unit_splitter import split_into_units

Inputs = tuple[list[SourceFile], list[Unit]]
"""Files and units, in the order of a view."""

_GROWING = re.compile(r"grow-[0-9a-f]{12}-(?P<number>\d+)")


@dataclass(frozen=True, slots=True)
class CacheLocation:
    """The directory of a view, and its planned content.

    Attributes:
        directory: The directory.
        source: The source, its files in the order of the view.
        units: The planned units of the first ``num_files`` files; ``None`` if none are planned. Those of another view
            with the same files count too.
        num_files: Number of files that the planned units cover.
        twin: A view of the same text in other places, if this one does not exist.
    """

    directory: Path
    source: Source
    units: Sequence[Unit] | None
    num_files: int
    twin: Path | None = None

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
    """Return the directory of a fixed view. Its name identifies source, split, recipe and files, with their places."""
    content = [source.digest, [file.uri for file in source.files]]
    return root / f"{_name_prefix(source, split, recipe)}{hashlib.sha256(canonical_json(content)).hexdigest()[:16]}"


def _name_prefix(source: Source, split: Split, recipe: Recipe) -> str:
    """Return the common name prefix of views that differ only in their files."""
    return f"{source.config.name}-{split}-{recipe.digest[:12]}-"


def find_location(
    root: Path, source: Source, split: Split, recipe: Recipe, data: DataConfig, *, grow: bool
) -> CacheLocation:
    """Return the location of the view of a split of a source, which may not exist yet.

    Args:
        root: Root directory of the caches.
        source: The source as listed now.
        split: The split.
        recipe: The recipe of the cache.
        data: The section ``data``.
        grow: Whether to find a growing view.

    Raises:
        ConfigError: ``data.cache.grow`` contradicts the source's ``max_bytes``.
    """
    if not grow:
        directory = cache_directory(root, source, split, recipe)
        files, units = _planned(directory)
        if not units:
            twin, units = _twin(root, source, split, recipe)
            return CacheLocation(directory, source, units, len(source.files) if units else 0, twin)
        return CacheLocation(directory, source, units, min(len(files), len(source.files)))
    check_growth(source)
    generations = _generations(root, source, split, recipe, data)
    present = {(file.size_bytes, file.version) for file in source.files}
    for directory in reversed(generations):
        files, units = _planned(directory)
        # A file that another process has added since is not in this list yet.
        if all((file.size_bytes, file.version) in present or listed_again(file) for file in files):
            return _extended(directory, source, files, units)
    files, units = _beginning(root, source, split, recipe)
    return _extended(_next_generation(root, generations, source, split, recipe, data), source, files, units)


def fresh_location(
    root: Path, source: Source, split: Split, recipe: Recipe, data: DataConfig, *, grow: bool
) -> CacheLocation:
    """Return where to build a view again from its text: a fixed view where it is, a growing one as another view."""
    if not grow:
        return CacheLocation(cache_directory(root, source, split, recipe), source, None, 0)
    generations = _generations(root, source, split, recipe, data)
    return CacheLocation(_next_generation(root, generations, source, split, recipe, data), source, None, 0)


def recorded_location(
    root: Path, directory: Path, source: Source, split: Split, recipe: Recipe, data: DataConfig, *, grow: bool
) -> CacheLocation:
    """Return the location of a run's own view, whatever its folder lists now.

    Args:
        root: Root directory of the caches.
        directory: The view that the run has recorded.
        source: The source, as listed now or as recorded (``text.sources.unlisted``).
        split: The split.
        recipe: The recipe of the view.
        data: The section ``data``.
        grow: Whether new files join the view.

    Raises:
        ConfigError: ``data.cache.grow`` contradicts the source's ``max_bytes``.
    """
    files, units = _planned(directory)
    if not grow or not source.is_listed:
        return CacheLocation(directory, with_recorded(source, files, ()), units or None, len(files) if units else 0)
    check_growth(source)
    location = _extended(directory, source, files, units)
    # A view restored for this run grows in place: no other run looks it up.
    is_growing = is_restored(directory) or _GROWING.fullmatch(_suffix(directory, source, split, recipe)) is not None
    if is_growing or len(location.source.files) == len(files):
        return location
    # Growth begins with a fixed view, which other runs share: go on with a growing view that starts with its units.
    generations = _generations(root, source, split, recipe, data)
    for other in reversed(generations):
        known_files, known_units = _planned(other)
        added = known_files[len(files) :]
        present = {(file.size_bytes, file.version) for file in source.files}
        is_present = all((file.size_bytes, file.version) in present or listed_again(file) for file in added)
        if is_present and known_files[: len(files)] == files and known_units[: len(units)] == units:
            return _extended(other, source, known_files, known_units)
    return replace(location, directory=_next_generation(root, generations, source, split, recipe, data))


def check_growth(source: Source) -> None:
    """Check that a source may grow.

    Raises:
        ConfigError: It has ``max_bytes``.
    """
    if source.config.max_bytes is not None:
        raise ConfigError(
            f"Source {source.config.name!r} has max_bytes, so new files would displace older ones",
            where=f"{source.key}.max_bytes", hint="remove max_bytes, or set data.cache.grow=false",
        )  # fmt: skip


def with_recorded(source: Source, files: Sequence[SourceFile], added: Sequence[int]) -> Source:
    """Return a source with the recorded files, wherever they are now, followed by some of its own."""
    index_of = {(file.size_bytes, file.version): index for index, file in enumerate(source.files)}
    known = [index_of.get((file.size_bytes, file.version)) for file in files]
    stored = [
        (listed_again(file) or unlisted(file)) if index is None else source.stored[index]
        for index, file in zip(known, files, strict=True)
    ]
    ends = [None if index is None else source.end_bytes[index] for index in known]
    return replace(
        source,
        stored=(*stored, *(source.stored[index] for index in added)),
        files=(*files, *(source.files[index] for index in added)),
        relative_paths=(*(file.path for file in files), *(source.relative_paths[index] for index in added)),
        end_bytes=(*ends, *(source.end_bytes[index] for index in added)),
    )


def changed_files(source: Source, files: Sequence[SourceFile]) -> list[str]:
    """Return the recorded files that the source lists with other content."""
    recorded = {file.uri: (file.size_bytes, file.version) for file in files}
    known = set(recorded.values())
    changed = ((file.uri, (file.size_bytes, file.version)) for file in source.files if file.uri in recorded)
    return [uri for uri, content in changed if recorded[uri] != content and content not in known]


def _extended(directory: Path, source: Source, files: list[SourceFile], units: list[Unit]) -> CacheLocation:
    """Return a view with the new files of a source behind its own; a rewritten file is not new."""
    known = {(file.size_bytes, file.version) for file in files}
    uris = {without_compression(file.uri) for file in files}  # a copy of another compression is not new
    added = [
        index
        for index, file in enumerate(source.files)
        if (file.size_bytes, file.version) not in known and without_compression(file.uri) not in uris
    ]
    return CacheLocation(directory, with_recorded(source, files, added), units or None, len(files) if units else 0)


def _planned(directory: Path) -> Inputs:
    if not (directory / RECIPE_NAME).exists():
        return [], []
    return planned_inputs(directory, Manifest.open(directory))


def _views(root: Path, source: Source, split: Split, recipe: Recipe) -> Iterator[Path]:
    """Yield the views of a split of a source with a recipe."""
    prefix = _name_prefix(source, split, recipe)
    if root.is_dir():
        found = (entry.name for entry in os.scandir(root) if entry.name.startswith(prefix))
        yield from (root / name for name in sorted(found) if (root / name / RECIPE_NAME).exists())


def _suffix(directory: Path, source: Source, split: Split, recipe: Recipe) -> str:
    return directory.name.removeprefix(_name_prefix(source, split, recipe))


def _others(root: Path, source: Source, split: Split, recipe: Recipe) -> Iterator[tuple[Path, Inputs]]:
    """Yield the files and units of the views of a split of a source; damaged views are skipped."""
    for directory in _views(root, source, split, recipe):
        with contextlib.suppress(DataError):
            files, units = _planned(directory)
            if units:
                yield directory, (files, units)


def _content(file: SourceFile) -> tuple[int, str, str]:
    return file.size_bytes, file.version, file.path


def _twin(root: Path, source: Source, split: Split, recipe: Recipe) -> tuple[Path | None, list[Unit] | None]:
    """Return a fixed view of the same text in other places, and its units, so that the text is not split again."""
    wanted = list(map(_content, source.files))
    for directory, (files, units) in _others(root, source, split, recipe):
        is_fixed = _GROWING.fullmatch(_suffix(directory, source, split, recipe)) is None
        if is_fixed and list(map(_content, files)) == wanted:
            return directory, units
    return None, None


def _beginning(root: Path, source: Source, split: Split, recipe: Recipe) -> Inputs:
    """Return the files and units that a growing view begins with: those of the largest view of files of the source."""
    present = {_content(file): file for file in source.files}
    found: Inputs = ([], [])
    for _, (files, units) in _others(root, source, split, recipe):
        if len(files) > len(found[0]) and all(_content(file) in present for file in files):
            found = ([present[_content(file)] for file in files], units)
    return found


def _generations(root: Path, source: Source, split: Split, recipe: Recipe, data: DataConfig) -> list[Path]:
    """Return the growing views of what a source lists, oldest first."""
    prefix = f"grow-{_listing_digest(source.config, data)}-"
    found: list[tuple[int, Path]] = []
    for directory in _views(root, source, split, recipe):
        suffix = _suffix(directory, source, split, recipe)
        match = _GROWING.fullmatch(suffix)
        if match is not None and suffix.startswith(prefix):
            found.append((int(match["number"]), directory))
    return [directory for _, directory in sorted(found)]


def _next_generation(
    root: Path, generations: Sequence[Path], source: Source, split: Split, recipe: Recipe, data: DataConfig
) -> Path:
    number = int(generations[-1].name.rpartition("-")[2]) + 1 if generations else 1
    return root / f"{_name_prefix(source, split, recipe)}grow-{_listing_digest(source.config, data)}-{number}"


def _listing_digest(config: SourceConfig, data: DataConfig) -> str:
    """Return what identifies the files that a source may ever list: its paths, without those that only validate."""
    body = [_listing(config), [_listing(source) for source in data.validation.sources]]
    return hashlib.sha256(canonical_json(body)).hexdigest()[:12]


def _listing(config: SourceConfig) -> list[object]:
    paths = [path if ":" in path else os.path.abspath(Path(path).expanduser()) for path in config.paths]  # noqa: PTH100
    return [config.format, paths, config.hf_config, config.hf_split, config.revision, list(config.fallback)]


def all_units(location: CacheLocation, split: Split, data: DataConfig) -> Sequence[Unit]:
    """Return the planned units, followed by the units of new files.

    Raises:
        DataError: A new file cannot be read, or is not in the source's format.
    """
    unit_bytes, known = data.cache.unit_bytes, list(location.units or ())
    if location.is_planned:
        return known
    new = with_files(location.source, range(location.num_files, len(location.source.files)))
    for unit in split_into_units(new, split, location.source.holdout, unit_bytes):
        spans = tuple(span._replace(file_index=span.file_index + location.num_files) for span in unit.spans)
        known.append(Unit(len(known), spans))
    return known
