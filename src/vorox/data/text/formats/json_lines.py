"""JSON Lines: a line is a record, one of its fields is the text.

Lines go in; documents, and bad records with their line number, come out. Invariants: a blank line is skipped but keeps
its ordinal, and a line larger than the source allows is quarantined without being loaded.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic_core import from_json

from vorox.core.schema.data import SourceConfig
from vorox.data.documents import BadRecord, Document, PlacedImage, UnitSpan, UnreadableRecord
from vorox.data.images import read_images
from vorox.data.storage import StoredFile
from vorox.data.text.conversations import json_type, lone_surrogate, plain_text, read_messages
from vorox.data.text.file_content import limits_of, open_content, reject_binary
from vorox.data.text.formats.record_blocks import (
    BYTE_ORDER_MARK,
    WINDOW_BYTES,
    RecordBlock,
    count_lines,
    line_ends,
    memoize_blocks,
    split_content,
    too_large,
)

_ABSENT = object()


def split_blocks(
    source: SourceConfig, file: StoredFile, start: int, end: int | None, block_bytes: int, first_ordinal: int
) -> Iterator[RecordBlock]:
    """Yield blocks of whole lines, in one pass over the content."""
    limits = limits_of(source)
    if end == start:
        return
    key = ("lines", file, start, end, block_bytes, first_ordinal, limits)
    yield from memoize_blocks(
        key, lambda: split_content(file, start, end, block_bytes, first_ordinal, limits, line_ends)
    )  # fmt: skip


def count(source: SourceConfig, file: StoredFile, start: int, end: int) -> int:
    """Count the lines in a range."""
    return count_lines(file, start, end, limits_of(source))


def read_records(
    source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Callable[[int], bool]
) -> Iterator[Document | BadRecord]:
    """Yield the records of the lines in a span for whose first byte ``accept`` is true."""
    for ordinal, offset, length, line in _read_lines(source, file, span):
        position = (span.file_index, ordinal, offset, length)
        if line is None:
            if accept(offset):
                yield BadRecord(*position, ordinal + 1, too_large(length, source.max_record_bytes))
            continue
        if offset == 0:
            reject_binary(file, line)
            line = line.removeprefix(BYTE_ORDER_MARK)
        if not accept(offset) or not line or line.isspace():
            continue  # a blank line keeps its ordinal
        try:
            if source.chat_fields:
                yield _conversation(line, source, position)
                continue
            text, metadata = parse_record(line, source.text_field, source.metadata_fields)
            images = None if source.images_field is None else _images(_parse_object(line), source.images_field)
        except UnreadableRecord as error:
            yield BadRecord(*position, ordinal + 1, str(error))
        else:
            yield Document(*position, text, metadata, images=images)


def _read_lines(
    source: SourceConfig, file: StoredFile, span: UnitSpan
) -> Iterator[tuple[int, int, int, bytes | None]]:  # fmt: skip
    """Yield (ordinal, byte offset, length, bytes with the line end); the bytes of an oversized line are ``None``."""
    offset, max_bytes = span.start_byte, source.max_record_bytes
    with open_content(file, span.start_byte, span.end_byte, limits_of(source)) as reader:
        ordinal = span.first_ordinal
        while line := reader.readline(max_bytes + 1):
            size = len(line)
            whole: bytes | None = line
            if size > max_bytes:
                whole = None
                while not line.endswith(b"\n") and (line := reader.readline(WINDOW_BYTES)):
                    size += len(line)
            yield ordinal, offset, size, whole
            offset += size
            ordinal += 1


def parse_line(line: bytes, text_field: str) -> str:
    """Return the text of one record.

    Raises:
        UnreadableRecord: The line is not UTF-8, not JSON, not an object, or has no text in that field.
    """
    return parse_record(line, text_field)[0]


def parse_record(
    line: bytes, text_field: str, metadata_fields: Sequence[str] = ()
) -> tuple[str, Mapping[str, str] | None]:
    """Return the text of one record and the requested metadata fields; absent ones are omitted.

    Raises:
        UnreadableRecord: The line is not UTF-8, not JSON, not an object, or has no text in that field.
    """
    if not metadata_fields:
        with contextlib.suppress(ValueError):  # what pydantic rejects, the standard library decides below
            fields = from_json(line, cache_strings="keys")
            if isinstance(fields, dict):
                found = cast("dict[str, object]", fields).get(text_field)
                if isinstance(found, str):
                    return found, None  # pydantic rejects lone surrogates itself
    fields = _parse_object(line)
    text = _field(fields, text_field)
    if text is _ABSENT:
        present = ", ".join(repr(key) for key in list(fields)[:8])
        raise UnreadableRecord(
            f"no field {text_field!r}; the record has {present or 'no fields'}: set the source's text_field"
        )
    if not isinstance(text, str):
        raise UnreadableRecord(f"field {text_field!r} is not a string but {json_type(text)}")
    surrogate = lone_surrogate(text)
    if surrogate is not None:
        raise UnreadableRecord(f"field {text_field!r} has half a surrogate pair at character {surrogate}")
    return text, _metadata(fields, metadata_fields)


def _conversation(line: bytes, source: SourceConfig, position: tuple[int, int, int, int]) -> Document:
    fields = _parse_object(line)
    found = {name: _field(fields, name) for name in source.chat_fields}
    present = {name: value for name, value in found.items() if value is not _ABSENT}
    messages = read_messages(source, present, tuple(fields))
    images = None if source.images_field is None else _images(fields, source.images_field)
    metadata = _metadata(fields, source.metadata_fields)
    return Document(*position, plain_text(messages), metadata, messages=messages, images=images)


def _images(fields: Mapping[str, object], name: str) -> tuple[PlacedImage, ...]:
    """Return the images of a record; an absent field has none."""
    found = _field(fields, name)
    return read_images(None if found is _ABSENT else found, name)


def _metadata(fields: Mapping[str, object], names: Sequence[str]) -> Mapping[str, str] | None:
    """Return the requested metadata fields; absent ones are omitted."""
    if not names:
        return None
    found = {name: _field(fields, name) for name in names}
    return {name: as_text(value) for name, value in found.items() if value is not _ABSENT and value is not None}


def _parse_object(line: bytes) -> dict[str, object]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UnreadableRecord(f"invalid UTF-8 at byte {error.start} of the line: {error.reason}") from error
    except RecursionError as error:
        raise UnreadableRecord("invalid JSON: nested too deeply") from error
    except json.JSONDecodeError as error:
        raise UnreadableRecord(f"invalid JSON at column {error.colno}: {error.msg}") from error
    except ValueError as error:  # a number with more digits than Python converts
        raise UnreadableRecord(f"invalid JSON: {error}") from error
    if not isinstance(record, dict):
        raise UnreadableRecord(f"the record is not an object but {json_type(record)}")
    return cast("dict[str, object]", record)


def _field(fields: Mapping[str, Any], name: str) -> object:
    """Return the value of a key, or of a dotted path if the key is absent."""
    if name in fields or "." not in name:
        return fields.get(name, _ABSENT)
    head, _, rest = name.partition(".")
    inner = fields.get(head)
    return _field(cast("dict[str, Any]", inner), rest) if isinstance(inner, dict) else _ABSENT


def as_text(value: object) -> str:
    """Return a metadata value as text: strings unchanged, everything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    return text.encode("utf-8", "replace").decode("utf-8")
