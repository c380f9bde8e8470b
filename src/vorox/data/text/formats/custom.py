"""User-defined formats: a function that yields the texts in the bytes of a file.

The content of a stored file goes in; documents and bad records come out. A file is read whole and is one block. As in
a row group, records have no byte range of their own; the ordinal identifies them. Invariant: the function must yield
the same texts for the same bytes; its identity is part of the recipe of the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from vorox.core.errors import DataError, VoroxError
from vorox.core.schema.data import SourceConfig
from vorox.core.user_code.extensions import load_function
from vorox.data.documents import BadRecord, Document, Record, UnitSpan
from vorox.data.storage import StoredFile
from vorox.data.text.file_content import length_bytes, limits_of, open_content
from vorox.data.text.formats.record_blocks import RecordBlock, too_large


def suffixes(source: SourceConfig) -> tuple[str, ...]:
    """Return the file suffixes to search folders for: the function's ``suffixes``, by default every file."""
    return tuple(getattr(_function(source), "suffixes", ("",)))


def split_blocks(
    source: SourceConfig, file: StoredFile, start: int, end: int | None, block_bytes: int, first_ordinal: int
) -> Iterator[RecordBlock]:
    """Yield the file as one block, if the range covers it."""
    del block_bytes
    size = length_bytes(file, limits_of(source))
    if start == 0 and size and (end is None or end >= size):
        yield RecordBlock(0, size, first_ordinal, size)


def count(source: SourceConfig, file: StoredFile, start: int, end: int) -> int:
    """Count the records of the file."""
    return sum(1 for _ in _texts(source, file)) if end > start else 0


def read_records(
    source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Callable[[int], bool]
) -> Iterator[Record]:
    """Yield the records of a file for whose ordinal ``accept`` is true.

    Raises:
        DataError: The file cannot be read, or the function fails.
    """
    size = span.end_byte - span.start_byte
    for ordinal, text in enumerate(_texts(source, file)):
        if not accept(ordinal):
            continue
        reason = _problem(text, source.max_record_bytes)
        if reason:
            yield BadRecord(span.file_index, ordinal, span.start_byte, size, None, reason)
        else:
            yield Document(span.file_index, ordinal, span.start_byte, size, text)


def _problem(text: Any, max_record_bytes: int) -> str:
    if not isinstance(text, str):
        return f"the format returned a {type(text).__name__}, not a text"
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        return "the format returned a text with half of a character"
    return too_large(num_bytes, max_record_bytes) if num_bytes > max_record_bytes else ""


def _texts(source: SourceConfig, file: StoredFile) -> Iterator[Any]:
    with open_content(file, 0, None, limits_of(source)) as reader:
        content = reader.read()
    try:
        yield from _function(source)(content)
    except (VoroxError, GeneratorExit):
        raise
    except Exception as error:
        raise DataError(
            f"Format {source.format} cannot read the file: {type(error).__name__}: {error}", where=file.uri,
            hint="the function must accept the decompressed bytes of a file and yield texts",
        ) from error  # fmt: skip


def _function(source: SourceConfig) -> Callable[..., Any]:
    return load_function(source.format, kind="format", where="data.sources.*.format")
