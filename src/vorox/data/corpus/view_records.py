"""Records of a run's views in its run directory, from which a lost cache is rebuilt.

``views/NAME.json`` has the recipe, the files with their versions in order of arrival, and the units of the view
``NAME``; it is mirrored with the run. View directories go in; they come out below the cache root as lists of files and
units without rows, which are then built as usual.

Invariants: a view is recorded before the plan events that depend on it are durable. The run directory is untrusted:
restored views have names that no other run looks up, and only files that their source lists are read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vorox.core.errors import DataError
from vorox.core.files.atomic import canonical_json, make_directory, write_file
from vorox.core.files.file_holder import FileLock
from vorox.core.files.json_reader import MalformedJson, read_json
from vorox.core.run_layout import RunLayout
from vorox.data.cache.building.initialize import planned_inputs, record_inputs
from vorox.data.cache.files.manifest import LOCK_NAME, Manifest, planned_entry
from vorox.data.cache.upkeep.gc import STREAMS_NAME
from vorox.data.documents import SourceFile, Unit, UnitSpan
from vorox.data.recipe import FORMAT, RECIPE_NAME, Recipe, read_recipe, write_recipe

_MAX_BYTES = 1 << 30
_LARGEST_NUMBER = 1 << 60
_SOURCE_NAME = re.compile(r"[\w.-]{1,150}")
_RESTORED = re.compile(r".+-restored-[0-9a-f]{32}")
_TYPES: Any = {
    "recipe": {},
    "files": [list],
    "units": [list],
    "estimated_bytes": (int, None),
}


@dataclass
class ViewRecorder:
    """Records the views of a run. Not thread-safe.

    Args:
        run_directory: The run.
        views: Directories of its views.
    """

    run_directory: Path
    views: Iterable[Path]
    _recorded: dict[Path, tuple[int, int, bool]] = field(default_factory=dict[Path, tuple[int, int, bool]])

    def record(self) -> None:
        """Record the current files and units of the views durably; unchanged views are not written again."""
        for directory in self.views:
            manifest = Manifest.open(directory)
            content = manifest.planned_files, manifest.planned_units, manifest.units_final
            if not manifest.planned_units or self._recorded.get(directory) == content:
                continue
            files, units = planned_inputs(directory, manifest)
            body = canonical_json({
                "recipe": read_recipe(directory).to_json(),
                "files": [[file.uri, file.size_bytes, file.version, file.path] for file in files],
                "units": [unit.spans for unit in units],
                "estimated_bytes": None if manifest.units_final else manifest.estimated_bytes,
            })  # fmt: skip
            path = RunLayout(self.run_directory).view(directory.name)
            if not path.exists() or path.read_bytes() != body:
                make_directory(path.parent)
                write_file(path, body)
            self._recorded[directory] = content


def is_restored(directory: Path) -> bool:
    """Whether a view was restored from the record of a run, and belongs to it."""
    return _RESTORED.fullmatch(directory.name) is not None


def is_stream(directory: Path) -> bool:
    """Whether a view belongs to a stream, whose chunks are evicted and rebuilt."""
    return directory.parent.name == STREAMS_NAME


def restore_view(path: Path, root: Path, source_name: str, *, create: bool) -> Path | None:
    """Return the directory of a view restored from its record; ``None`` if there is none.

    Args:
        path: The record, ``views/NAME.json`` of a run directory.
        root: Where the caches of its kind are.
        source_name: The source's name.
        create: Create it, with its lists of files and units, if it does not exist.

    Raises:
        DataError: The record is damaged, or of another version.
        OSError: The directory cannot be written.
    """
    body = _read(path)
    try:
        recipe, files, units = _parse(body)
        if not _SOURCE_NAME.fullmatch(source_name):
            raise ValueError(f"no source has the name {source_name!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, str(error)) from error
    digest = hashlib.sha256(canonical_json(body)).hexdigest()[:32]
    directory = root / f"{source_name}-{recipe.split['name']}-restored-{digest}"
    if (directory / RECIPE_NAME).exists():
        return directory
    if not create:
        return None
    make_directory(directory / "manifest")
    with FileLock(directory / LOCK_NAME):
        if not (directory / RECIPE_NAME).exists():  # written last: with it, the lists are complete
            manifest = Manifest.open(directory)
            if not manifest.planned_units:
                record_inputs(directory, manifest, files, units)
                estimate = body.get("estimated_bytes")
                entry = planned_entry(len(units), recipe.digest, len(files), estimated_bytes=estimate)
                manifest.append(directory, [entry])
            write_recipe(directory, recipe)
    return directory


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, _TYPES, max_bytes=_MAX_BYTES)
    except (OSError, MalformedJson) as error:
        raise _damaged(path, str(error)) from error


def _parse(body: Mapping[str, Any]) -> tuple[Recipe, list[SourceFile], list[Unit]]:
    """Return the recipe, files and units of a record.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: They contradict themselves.
    """
    recipe = Recipe.from_json(body["recipe"])
    if canonical_json(recipe.to_json()) != canonical_json(body["recipe"]):
        raise ValueError(f"its recipe is not one of {FORMAT}")
    if recipe.split["name"] not in {"train", "validation"}:
        raise ValueError("it is of no split")
    files = [SourceFile(*entry) for entry in body["files"]]
    for file in files:
        if [type(value) for value in (file.uri, file.size_bytes, file.version, file.path)] != [str, int, str, str]:
            raise ValueError(f"{file.uri!r} is not described as a file")
        if not 0 <= file.size_bytes < _LARGEST_NUMBER:
            raise ValueError(f"{file.uri!r} has {file.size_bytes} bytes")
    units = [Unit(number, tuple(UnitSpan(*span) for span in spans)) for number, spans in enumerate(body["units"])]
    for span in (span for unit in units for span in unit.spans):
        if any(type(number) is not int for number in span):
            raise ValueError(f"{span} is no part of a file")
        if not (0 <= span.file_index < len(files) and 0 <= span.start_byte <= span.end_byte < _LARGEST_NUMBER):
            raise ValueError(f"{span} is no part of its {len(files):,} files")
        if not 0 <= span.first_ordinal < _LARGEST_NUMBER:
            raise ValueError(f"{span} begins with no record")
    if not units or not all(unit.spans for unit in units):
        raise ValueError("it has no unit, or an empty one")
    return recipe, files, units


def _damaged(path: Path, why: str) -> DataError:
    return DataError(
        f"The run's record of its files cannot be used: {why}", where=str(path), saved="nothing was changed",
        hint="restore the file from a copy of the run, such as its mirror, or restore the run's cache",
    )  # fmt: skip
