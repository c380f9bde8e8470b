"""The formats of sources, one row each: all that is known of a format beside its reader (``data/text/formats``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final, Literal

Compression = Literal["gz", "zst"]
COMPRESSIONS: Final[Mapping[str, Compression]] = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
"""Compressed file extensions and their compression."""

EXPANSION: Final = 3
"""Bytes of text in a byte of a gzip or zstd file, about."""

CODE_ENDINGS: Final = (".py", ".js", ".ts", ".c", ".h", ".cc", ".cpp", ".hpp", ".java", ".go", ".rs", ".rb")
_PROSE_ENDINGS: Final = (".md", ".markdown", ".rst", ".text", ".tex", ".html", ".htm", ".xml", ".org")


@dataclass(frozen=True, slots=True)
class SourceFormat:
    """A format of files with text or token ids.

    Attributes:
        description: What a document is, for the setting's description.
        endings: Extensions, in lower case, for which folders are searched.
        further_endings: Other extensions of such files.
        record: A record in messages; empty where a whole file is one, or is a shard of ids.
        is_text: Text in some encoding, which may be damaged at its end.
        is_compressible: Files may be compressed (.gz, .zst).
        is_stored_plainly: The bytes of a record are those of its text or ids.
        has_fields: Records have named fields.
        has_images: Records may have images.
        has_tokens: Records may be token ids.
        has_row_groups: Records have no byte range of their own, only that of their row group or file.
        index_name: File that lists the shards of a folder.
        names_splits: Writers name shards or their folders by split, often only those for validation.
        magic: First bytes, where these identify it.
        expansion: Bytes of text in a byte of the file, about.
    """

    description: str = ""
    endings: tuple[str, ...] = ()
    further_endings: tuple[str, ...] = ()
    record: str = ""
    is_text: bool = False
    is_compressible: bool = True
    is_stored_plainly: bool = False
    has_fields: bool = False
    has_images: bool = False
    has_tokens: bool = False
    has_row_groups: bool = False
    index_name: str = ""
    names_splits: bool = False
    magic: bytes = b""
    expansion: int = 1


FORMATS: Final[Mapping[str, SourceFormat]] = {
    "python_stdlib": SourceFormat(
        "the source code of Python's standard library, without tests and generated tables", (".py",),
        is_compressible=False,
    ),
    "txt": SourceFormat(
        "one document per file", (".txt",), (*_PROSE_ENDINGS, *CODE_ENDINGS), is_text=True, is_stored_plainly=True
    ),
    "jsonl": SourceFormat(
        "one document per line", (".jsonl", ".ndjson"), record="line", is_text=True, is_stored_plainly=True,
        has_fields=True, has_images=True,
    ),
    "json": SourceFormat(
        "an array, one document per element", (".json",), record="element", is_text=True, is_stored_plainly=True,
        has_fields=True, has_images=True,
    ),
    "csv": SourceFormat(
        "one document per row", (".csv", ".tsv"), record="row", is_text=True, is_stored_plainly=True, has_fields=True
    ),
    "parquet": SourceFormat(
        "one document per row", (".parquet",), record="row", has_fields=True, has_images=True, has_row_groups=True,
        magic=b"PAR1", expansion=2,
    ),
    "arrow": SourceFormat(
        "folders of datasets.save_to_disk, one document per row", (".arrow",), record="row", has_fields=True,
        has_images=True, has_row_groups=True, index_name="state.json", names_splits=True,
    ),
    "mds": SourceFormat(
        "folders of mosaicml-streaming, one document per sample", (".mds",), record="sample", has_fields=True,
        has_tokens=True, index_name="index.json", names_splits=True,
    ),
    "bin": SourceFormat(
        "token shards, documents separated by the end-of-text token", (".bin",), is_compressible=False,
        is_stored_plainly=True, has_tokens=True, names_splits=True,
    ),
}  # fmt: skip

CUSTOM: Final = SourceFormat(has_row_groups=True)
"""The format of a user's function, which has every other name."""


def source_format(name: str) -> SourceFormat:
    return FORMATS.get(name, CUSTOM)


def formats_that(fact: str) -> tuple[str, ...]:
    """Return the names of the formats with a fact, an attribute of ``SourceFormat``."""
    return tuple(name for name, form in FORMATS.items() if getattr(form, fact))


_FORMAT_OF_ENDING: Final = {
    ending: name for name, form in FORMATS.items() if name != "python_stdlib"
    for ending in (*form.endings, *form.further_endings)
}  # fmt: skip


def format_of_path(path: str) -> str | None:
    """Return the format of a file by its extension, ignoring compression; ``None`` for an unknown extension."""
    endings = [ending.lower() for ending in PurePosixPath(path).suffixes]
    while endings and endings[-1] in COMPRESSIONS:
        endings.pop()
    return _FORMAT_OF_ENDING.get(endings[-1]) if endings else None
