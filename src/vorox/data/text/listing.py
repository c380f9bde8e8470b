"""Listing the files of a source: paths, hub datasets, user functions and fallbacks.

A ``SourceConfig`` goes in; its files, each with the relative path that the holdout rule hashes, come out sorted by URI.
Invariant: every deviation from the configuration, such as a fallback, produces a note for the user.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from vorox.core.config.layers.presets import source_presets
from vorox.core.errors import DataError, VoroxError
from vorox.core.pluralize import pluralize
from vorox.core.schema.data import SourceConfig
from vorox.core.schema.source_formats import format_of_path, source_format
from vorox.core.user_code.extensions import is_extension, load_function
from vorox.data import storage
from vorox.data.storage import STANDARD_LIBRARY, NoMatchingSuffix, StoredFile, relative_name
from vorox.data.text.file_content import compressed_copies, without_compression
from vorox.data.text.formats import suffixes
from vorox.data.text.holdout import names_hold_out
from vorox.data.text.hub_datasets import cloned_files, dataset_files, is_dataset_name, pin_revision
from vorox.data.text.shard_index import list_indexed_files
from vorox.data.text.split_names import is_validation_name, left_out, other_splits, refuse_several

_TEST_DIRECTORIES = frozenset({"test", "tests", "idle_test"})
_THIRD_PARTY_DIRECTORIES = frozenset({"site-packages", "dist-packages", "__pycache__", "_bundled"})
STDLIB_SELECTION = "2"
"""Version of the file selection below; part of the definition of the source, because it changes the corpus."""
_GENERATED_DIRECTORIES = frozenset({"encodings", "lib2to3", "pydoc_data"})
_GENERATED_FILES = frozenset({
    "html/entities.py", "keyword.py", "locale.py", "stringprep.py", "symbol.py", "token.py", "_opcode_metadata.py",
    "idlelib/help.py", "idlelib/help_about.py",
})  # fmt: skip
"""Generated tables and help texts, which a model of Python should not learn."""
_BUILD_SPECIFIC_FILES = frozenset({"sitecustomize.py", "usercustomize.py", "_distutils_system_mod.py"})
_BUILD_SPECIFIC_PREFIXES = ("_sysconfigdata", "config-")
_FILE_SETTINGS = (
    "format", "paths", "hf_config", "hf_split", "revision", "text_field", "tokens_field", "metadata_fields",
    "encoding", "delimiter", "tokenizer", "end_of_text_id", "ids_dtype",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Note:
    """A message about a source that is not an error.

    Attributes:
        kind: ``fallback``, ``duplicates``, ``empty_files``, ``splits`` and so on.
        text: The message.
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of a source and its path relative to the location it was found under."""

    stored: StoredFile
    relative_path: str


def find_files(config: SourceConfig, key: str) -> tuple[SourceConfig, list[FoundFile], list[Note]]:
    """Find the files of a source, or of its fallback if its paths are unavailable.

    Args:
        config: The source.
        key: Its key in the configuration, for messages.

    Returns:
        The configuration that is read (that of the fallback if it is used), its files sorted by URI, and notes.

    Raises:
        DataError: A location is missing, unreachable or empty, and so is the fallback.
    """
    try:
        return config, *_find(config, key)
    except DataError as error:
        if not config.fallback:
            raise
        instead = fallback_config(config)
        try:
            found, notes = _find(instead, key)
        except DataError as second:
            raise DataError(
                f"{error.what}; the fallback {', '.join(config.fallback)} is not available either: {second.what}",
                where=error.where, hint=error.hint,
            ) from second  # fmt: skip
        what = f"source {config.name!r} is read from its fallback {', '.join(config.fallback)}"
        return instead, found, [Note("fallback", f"{what}, because of {error.where}: {error.what}"), *notes]


def fallback_config(config: SourceConfig) -> SourceConfig:
    """Return the fallback of a source: a named source with all its file settings, or other paths."""
    names = config.fallback
    preset = source_presets().get(names[0]) if len(names) == 1 else None
    if preset is None:
        return config.model_copy(update={"paths": names, "hf_config": None, "hf_split": None, "revision": None})
    values: dict[str, Any] = {key: type(config).model_fields[key].default for key in _FILE_SETTINGS if key != "format"}
    values |= {key: tuple(value) if isinstance(value, list) else value for key, value in preset.items()}
    return config.model_copy(update=values)


def _find(config: SourceConfig, key: str) -> tuple[list[FoundFile], list[Note]]:
    endings = suffixes(config)
    if config.format == "python_stdlib":
        skip = _TEST_DIRECTORIES | _THIRD_PARTY_DIRECTORIES | _GENERATED_DIRECTORIES
        listed = storage.list_files(STANDARD_LIBRARY, endings, skip_directories=skip)
        return [_found_file(file, STANDARD_LIBRARY) for file in listed if _is_library_source(file.uri)], []
    found: dict[str, FoundFile] = {}
    found_under: dict[str, list[str]] = {}
    for path in _expand_paths(config, key):
        if is_dataset_name(path):
            dataset = dataset_files(config, path, endings)
            locations, root = dataset.locations, dataset.root
        else:
            root = pin_revision(path, config.revision)
            locations = tuple(pin_revision(found, config.revision) for found in cloned_files(path))
        for location in locations:
            files = _list_files(config, location, endings, key)
            for file in files:
                found.setdefault(file.uri, _found_file(file, root))
            if locations == (root,):
                refuse_several(root, (file.uri for file in files))
            if not is_dataset_name(path):
                found_under.setdefault(root, []).extend(file.uri for file in files)
    others = other_splits(found_under, folders_are_splits=bool(source_format(config.format).index_name))
    notes = [Note("splits", left_out(config.name, others.values()))] if others else []
    named = {storage.canonical_uri(path) for path in found_under}
    copies = {uri: original for uri, original in compressed_copies(found).items() if uri not in named}
    if copies:
        uri, original = next(iter(copies.items()))
        more = f" and {pluralize(len(copies) - 1, 'other')}" if len(copies) > 1 else ""
        what = f"source {config.name!r} leaves out {uri}{more}: compressed copies of files that it reads ({original})"
        notes.append(Note("duplicates", what))
    notes += _other_endings(config, found)
    kept = [found[uri] for uri in sorted(found) if uri not in others and uri not in copies]
    return _relative_to_common_folder(config, kept), notes


def _other_endings(config: SourceConfig, found: Collection[str]) -> Iterator[Note]:
    """Yield a note on files in folders on disk that are in the format, but whose endings are not searched for."""
    alike = {"jsonl", "json"} if config.format in {"jsonl", "json"} else {config.format}
    for path in config.paths:
        root = storage.canonical_uri(path).rstrip("/")
        if storage.scheme_of(root) is not None or not Path(root).is_dir() or is_extension(path):
            continue
        names = [file.uri for file in storage.list_files(root, ("",)) if file.uri not in found]
        bare = {without_compression(uri) for uri in found}
        endings = Counter(
            PurePath(name).suffix for name in names
            if format_of_path(name) in alike and PurePath(name).stem.lower() not in {"readme", "license"}
            and without_compression(name) not in bare
        )  # fmt: skip
        if endings:
            shown = ", ".join(f"{count:,} {ending}" for ending, count in sorted(endings.items()))
            hint = f"add {root}/**/*{next(iter(sorted(endings)))} to its paths to read them"
            yield Note("other_endings", f"source {config.name!r} leaves out files of {root}: {shown} ({hint})")


def _relative_to_common_folder(config: SourceConfig, files: list[FoundFile]) -> list[FoundFile]:
    """Make paths relative to the common folder where only that shows the split, as in ``train/`` and ``val/``."""
    folder = files[0].stored.uri.rpartition("/")[0] if files else ""
    while folder and not all(file.stored.uri.startswith(f"{folder}/") for file in files):
        folder = folder.rpartition("/")[0]
    candidates = [FoundFile(file.stored, file.stored.uri[len(folder) + 1 :]) for file in files]
    splits_by_folder = not any(is_validation_name(file.relative_path) for file in files) and names_hold_out(
        config.format, (file.relative_path for file in candidates)
    )
    return candidates if folder and splits_by_folder else files


def _expand_paths(config: SourceConfig, key: str) -> Iterator[str]:
    """Yield the paths of a source, expanding user functions into the paths and URLs that they return."""
    for number, path in enumerate(config.paths):
        if not is_extension(path) or Path(path).exists():
            yield path
            continue
        where = f"{key}.paths.{number}"
        try:
            listed = [str(location) for location in load_function(path, kind="source", where=where)()]
        except VoroxError:
            raise
        except Exception as error:
            raise DataError(
                f"Source function {path} failed: {type(error).__name__}: {error}", where=where,
                hint="the function must take no arguments and return paths or URLs",
            ) from error  # fmt: skip
        if not listed:
            raise DataError(
                f"Source function {path} returned no files", where=where, hint="return paths or URLs, such as s3://...",
            )  # fmt: skip
        yield from listed


def _list_files(config: SourceConfig, location: str, suffixes: tuple[str, ...], key: str) -> list[StoredFile]:
    """List the files of a location; if all have other suffixes, the error names their format."""
    try:
        return list_indexed_files(config, location, suffixes)
    except NoMatchingSuffix as error:
        known = {form for ending in error.found if (form := format_of_path(f"name{ending}")) is not None}
        if known == {config.format}:
            raise
        formats = " or ".join(f"{key}.format={form}" for form in sorted(known - {config.format}))
        other = formats or f"{key}.format to what these files are"
        raise DataError(error.what, where=error.where, hint=f"set {other}, or {error.hint}") from error


def _found_file(file: StoredFile, root: str) -> FoundFile:
    relative_path = relative_name(root, file.uri)
    assert relative_path is not None, f"{file.uri} is not under {root}"
    return FoundFile(file, relative_path)


def _is_library_source(uri: str) -> bool:
    """Whether a standard library file is hand-written and the same in every build of this Python version."""
    name = uri.removeprefix(STANDARD_LIBRARY)
    parts = name.split("/")
    return (
        name not in _GENERATED_FILES
        and parts[-1] not in _BUILD_SPECIFIC_FILES
        and not any(part.startswith(_BUILD_SPECIFIC_PREFIXES) for part in parts)
    )
