"""Which files a source is: its locations searched, its fallback where they are not there, duplicates and places.

A ``SourceConfig`` goes in; its files, each with the name that the held-out split goes by, come out, sorted by uri.
Invariant: what is not taken as it was asked for (a fallback in place of the paths) is told, never silent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vorox.core.config.file_extensions import format_of_path
from vorox.core.config.presets import source_presets
from vorox.core.errors import DataError, VoroxError
from vorox.core.extensions import is_extension, load_function
from vorox.core.schema.data import SourceConfig
from vorox.data import storage
from vorox.data.storage import STANDARD_LIBRARY, NoMatchingSuffix, StoredFile, relative_name
from vorox.data.text.formats import suffixes
from vorox.data.text.holdout import SPLIT_NAMED_FORMATS, is_validation_name
from vorox.data.text.hub_datasets import dataset_files, is_dataset_name, pin_revision
from vorox.data.text.shard_index import list_indexed_files, training_splits

_TEST_DIRECTORIES = frozenset({"test", "tests", "idle_test"})
_FOREIGN_DIRECTORIES = frozenset({"site-packages", "dist-packages", "__pycache__", "_bundled"})
STDLIB_SELECTION = "2"
"""Version of the choice of files below: it is part of what a source is, for another choice is another corpus."""
_GENERATED_DIRECTORIES = frozenset({"encodings", "lib2to3", "pydoc_data"})
_GENERATED_FILES = frozenset({
    "html/entities.py", "keyword.py", "locale.py", "stringprep.py", "symbol.py", "token.py", "_opcode_metadata.py",
    "idlelib/help.py", "idlelib/help_about.py",
})  # fmt: skip
"""Tables that programs wrote, and help texts: they are not what a model of Python should learn."""
_BUILD_SPECIFIC_FILES = frozenset({"sitecustomize.py", "usercustomize.py", "_distutils_system_mod.py"})
_BUILD_SPECIFIC_PREFIXES = ("_sysconfigdata", "config-")
_OF_FILES = (
    "format", "paths", "hf_config", "hf_split", "revision", "text_field", "tokens_field", "metadata_fields",
    "delimiter", "tokenizer", "end_of_text_id", "ids_dtype",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Note:
    """Something about a source that a person should know although nothing is wrong.

    Attributes:
        kind: ``fallback``, ``duplicates``, ``empty_files``, ``splits`` and so on.
        text: A sentence.
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of a source and its name relative to the location it was found under."""

    stored: StoredFile
    place: str


def find_files(config: SourceConfig, key: str) -> tuple[SourceConfig, list[FoundFile], list[Note]]:
    """The files of a source, those of its fallback if the paths are not there.

    Args:
        config: The source.
        key: Its place in the configuration, for messages.

    Returns:
        The source as it is read (with the fallback's keys, if that is used), its files sorted by uri, and what there
        is to tell.

    Raises:
        DataError: A location is missing, unreachable or holds nothing, and so is the fallback.
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
                f"{error.what}; and the fallback {', '.join(config.fallback)} is not there either: {second.what}",
                where=error.where, hint=error.hint,
            ) from second  # fmt: skip
        what = f"source {config.name!r} is read from its fallback {', '.join(config.fallback)}"
        return instead, found, [Note("fallback", f"{what}, because of {error.where}: {error.what}"), *notes]


def fallback_config(config: SourceConfig) -> SourceConfig:
    """The source that stands in: a named one with everything that decides its documents, or other paths."""
    names = config.fallback
    preset = source_presets().get(names[0]) if len(names) == 1 else None
    if preset is None:
        return config.model_copy(update={"paths": names, "hf_config": None, "hf_split": None, "revision": None})
    values: dict[str, Any] = {key: type(config).model_fields[key].default for key in _OF_FILES if key != "format"}
    values |= {key: tuple(value) if isinstance(value, list) else value for key, value in preset.items()}
    return config.model_copy(update=values)


def _find(config: SourceConfig, key: str) -> tuple[list[FoundFile], list[Note]]:
    endings = suffixes(config)
    if config.format == "python_stdlib":
        skip = _TEST_DIRECTORIES | _FOREIGN_DIRECTORIES | _GENERATED_DIRECTORIES
        listed = storage.list_files(STANDARD_LIBRARY, endings, skip_directories=skip)
        return [_placed(file, STANDARD_LIBRARY) for file in listed if _is_chosen(file.uri)], []
    found: dict[str, FoundFile] = {}
    for path in _addresses(config, key):
        if is_dataset_name(path):
            dataset = dataset_files(config, path, endings)
            locations, root = dataset.locations, dataset.root
        else:
            locations = (pin_revision(path, config.revision),)
            root = locations[0]
        for location in locations:
            for file in _list_files(config, location, endings, key):
                found.setdefault(file.uri, _placed(file, root))
    files = _by_split_folders(config, [found[uri] for uri in sorted(found)])
    kept = frozenset(training_splits(config, [file.place for file in files]))
    others = sorted({file.place.partition("/")[0] for file in files if file.place not in kept})
    what = f"of source {config.name!r}, which has a split train, these are left out: {', '.join(others)}"
    return [file for file in files if file.place in kept], [Note("splits", what)] if others else []


def _by_split_folders(config: SourceConfig, files: list[FoundFile]) -> list[FoundFile]:
    """Place token shards relative to their common folder, where that alone tells validation: ``val/s_0.bin``.

    For paths such as ``train/`` and ``val/``, inside of which all names are alike.
    """
    folder = files[0].stored.uri.rpartition("/")[0] if files else ""
    while folder and not all(file.stored.uri.startswith(f"{folder}/") for file in files):
        folder = folder.rpartition("/")[0]
    below = [FoundFile(file.stored, file.stored.uri[len(folder) + 1 :]) for file in files]
    is_apart = (
        not any(is_validation_name(file.place) for file in files)
        and len({is_validation_name(file.place) for file in below}) == 2
    )
    return below if folder and config.format in SPLIT_NAMED_FORMATS and is_apart else files


def _addresses(config: SourceConfig, key: str) -> Iterator[str]:
    """The paths of a source, with those that a function of the user lists in its place."""
    for number, path in enumerate(config.paths):
        if not is_extension(path) or Path(path).exists():
            yield path
            continue
        where = f"{key}.paths.{number}"
        try:
            listed = [str(address) for address in load_function(path, kind="source", where=where)()]
        except VoroxError:
            raise
        except Exception as error:
            raise DataError(
                f"the source {path} cannot be listed: {type(error).__name__}: {error}", where=where,
                hint="it is called without arguments and returns paths and addresses",
            ) from error  # fmt: skip
        if not listed:
            raise DataError(
                f"the source {path} lists no file", where=where, hint="it returns paths and addresses, such as s3://...",
            )  # fmt: skip
        yield from listed


def _list_files(config: SourceConfig, location: str, suffixes: tuple[str, ...], key: str) -> list[StoredFile]:
    """The files of a location; where all have other endings, the error names the format that they have."""
    try:
        return list_indexed_files(config, location, suffixes)
    except NoMatchingSuffix as error:
        known = sorted({form for ending in error.found if (form := format_of_path(f"name{ending}")) is not None})
        formats = " or ".join(f"{key}.format={form}" for form in known) or f"{key}.format to what these files are"
        raise DataError(error.what, where=error.where, hint=f"set {formats}, or {error.hint}") from error


def _placed(file: StoredFile, root: str) -> FoundFile:
    place = relative_name(root, file.uri)
    assert place is not None, f"{file.uri} does not lie under {root}"
    return FoundFile(file, place)


def _is_chosen(uri: str) -> bool:
    """Whether people wrote a file of the standard library, and it is the same wherever the version of Python is."""
    name = uri.removeprefix(STANDARD_LIBRARY)
    parts = name.split("/")
    return (
        name not in _GENERATED_FILES
        and parts[-1] not in _BUILD_SPECIFIC_FILES
        and not any(part.startswith(_BUILD_SPECIFIC_PREFIXES) for part in parts)
    )
