"""Dataset folders with a shard index: ``index.json`` of MDS, ``state.json`` of ``datasets.save_to_disk``.

A location goes in; the files that its indexes name come out, with the hashes in the index. Other files are left out:
``datasets`` keeps files of its own beside the data. Invariant: an indexed file is in the folder of its index and has
the recorded size, or the source is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from vorox.core.errors import DataError
from vorox.core.files.json_reader import parse_json
from vorox.core.schema.data import SourceConfig
from vorox.core.schema.source_formats import source_format
from vorox.data import storage
from vorox.data.storage import StoredFile

_MAX_INDEX_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file that an index names.

    Attributes:
        name: Path relative to the folder of the index.
        size_bytes: Its length; ``None`` if the index does not record it.
        hashes: Its hashes by algorithm.
        compression: Its compression; empty for none.
    """

    name: str
    size_bytes: int | None = None
    hashes: Mapping[str, str] = field(default_factory=dict[str, str])
    compression: str = ""


def list_indexed_files(config: SourceConfig, location: str, endings: tuple[str, ...]) -> list[StoredFile]:
    """List the files of a location of a source.

    Raises:
        DataError: The location cannot be listed, or an index is corrupt or names a missing file.
    """
    index_name = source_format(config.format).index_name
    if not index_name:
        return storage.list_files(location, endings)
    listed = storage.list_files(location, (*endings, index_name))
    data = {file.uri: file for file in listed if not file.uri.endswith(index_name)}
    indexes = [file for file in listed if _split(file.uri)[1] == index_name]
    chosen: dict[str, StoredFile] = {}
    for index in indexes:
        for alternatives in _entries(config.format, index):
            file = _resolve_entry(index, alternatives, data)
            chosen.setdefault(file.uri, file)
    folders = {_split(index.uri)[0] for index in indexes}
    without = [file for file in data.values() if file.uri not in chosen and _split(file.uri)[0] not in folders]
    is_folder = any(uri.startswith(storage.canonical_uri(location).rstrip("/") + "/") for uri in data)
    if without and is_folder and config.format == "mds":
        raise DataError(
            f"The MDS shard has no {index_name} beside it", where=without[0].uri,
            hint="the folder is incomplete: write or download it again, or list its shards in the source's paths",
        )  # fmt: skip
    chosen |= {file.uri: file for file in without}
    return [chosen[uri] for uri in sorted(chosen)]


def _split(uri: str) -> tuple[str, str]:
    folder, _, name = uri.replace("\\", "/").rpartition("/")
    return folder, name


def _entries(form: str, index: StoredFile) -> Iterator[list[_Entry]]:
    """Yield the shards of an index, each as its alternative files.

    Raises:
        DataError: The index cannot be read, or names a file outside its folder.
    """
    try:
        if index.size_bytes > _MAX_INDEX_BYTES:
            raise ValueError(f"it has {index.size_bytes:,} bytes")
        with storage.open_range(index) as content:
            found = list((_mds_entries if form == "mds" else _arrow_entries)(parse_json(content.read(), index.uri)))
        outside = next((entry.name for entries in found for entry in entries if not _is_inside(entry.name)), None)
        if outside is not None:
            raise ValueError(f"it names {outside!r}, which is not in its folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
        raise DataError(
            f"The index cannot be read: {reason}",
            where=index.uri,
            hint="it is corrupt: download or write the folder again",
        ) from error
    yield from found


def _mds_entries(index: Any) -> Iterator[list[_Entry]]:
    if index["version"] != 2:
        raise ValueError(f"version {index['version']!r} is not supported; only 2 is")
    for shard in index["shards"]:
        if (shard["format"], shard["version"]) != ("mds", 2):
            raise ValueError(f"a shard has the format {shard['format']!r}, version {shard['version']!r}")
        compression = str(shard["compression"] or "").partition(":")[0]
        both = [(shard["raw_data"], ""), (shard["zip_data"], compression)]
        yield [
            _Entry(str(file["basename"]), int(file["bytes"]), dict(file["hashes"]), kind) for file, kind in both if file
        ]


def _arrow_entries(state: Any) -> Iterator[list[_Entry]]:
    for file in state["_data_files"]:
        yield [_Entry(str(file["filename"]))]


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and not set(name) & {"\\", ":", "\0"}


def _resolve_entry(index: StoredFile, alternatives: Sequence[_Entry], data: Mapping[str, StoredFile]) -> StoredFile:
    """Return the first of the alternative files that exists.

    Raises:
        DataError: None exists, its compression is not supported, or its size differs from the index.
    """
    folder = index.uri[: -len(_split(index.uri)[1])]
    for entry in alternatives:
        file = data.get(folder + entry.name)
        if file is None:
            continue
        if entry.size_bytes not in {None, file.size_bytes}:
            raise DataError(
                f"The shard has {file.size_bytes:,} bytes, but its index records {entry.size_bytes:,}", where=file.uri,
                hint="the shard is truncated or the index belongs to another one: download or write the folder again",
            )  # fmt: skip
        return replace(file, hashes=tuple(sorted(entry.hashes.items())))
    unsupported = next((entry for entry in alternatives if entry.compression not in {"", "gz", "zstd"}), None)
    if unsupported is not None:
        raise DataError(
            f"The shards are compressed with {unsupported.compression}, which is not supported", where=index.uri,
            hint="write the folder with compression='zstd', or decompress its shards",
        )  # fmt: skip
    names = " or ".join(entry.name for entry in alternatives)
    raise DataError(
        f"The index names {names or 'a shard without a file'}, which does not exist", where=index.uri,
        hint="the folder is incomplete: download or write it again",
    )  # fmt: skip
