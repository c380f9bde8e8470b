"""JSON Lines: a line is a record, one of its fields is the text.

Lines go in; documents, and bad records with their line number, come out. Invariants: a blank line is skipped but keeps
its ordinal, and a line larger than the source allows is quarantined without being loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic_core import from_json

from vorox.core.schema.data import SourceConfig
from vorox.data.chat.column_meaning import ReadColumns
from vorox.data.chat.conversations import json_type, lone_surrogate, plain_text, read_messages
from vorox.data.documents import BadRecord, Document, PlacedImage, UnitSpan, UnreadableRecord
from vorox.data.images.reading import read_images
from vorox.data.storage import StoredFile
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
    columns = ReadColumns.of(source)
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
        found = read_object(line, columns, position, ordinal + 1)
        if found is not None:
            yield found


def read_object(
    line: bytes, columns: ReadColumns, position: tuple[int, int, int, int], number: int | None
) -> Document | BadRecord | None:
    """Return the document of a JSON object; ``None`` if it is left out (``conversations.read_messages``).

    Args:
        line: The object.
        columns: The columns of the source.
        position: Index of the file, ordinal, byte offset and length.
        number: Its line, for a bad record.
    """
    source = columns.source
    try:
        if columns.only_text is None and source.chat_fields:
            return _conversation(line, columns, position)
        text, metadata = _parse_text(line, columns)
        images = None if source.images_field is None else _images(parse_object(line), source.images_field)
    except UnreadableRecord as error:
        return BadRecord(*position, number, str(error))
    return Document(*position, text, metadata, images=images)


def first_rows(
    source: SourceConfig, file: StoredFile, span: UnitSpan
) -> Generator[Mapping[str, object] | BadRecord]:  # fmt: skip
    """Yield the first records with the values of all fields."""
    for ordinal, offset, length, line in _read_lines(source, file, span):
        position = (span.file_index, ordinal, offset, length)
        try:
            if line is None:
                raise UnreadableRecord(too_large(length, source.max_record_bytes))
            if offset == 0:
                reject_binary(file, line)
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line and not line.isspace():
                yield parse_object(line)
        except UnreadableRecord as error:
            yield BadRecord(*position, ordinal + 1, str(error))


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
    return _parse_text(line, ReadColumns.of(SourceConfig(name="line", format="jsonl", text_field=text_field)))[0]


def _parse_text(line: bytes, columns: ReadColumns) -> tuple[str, Mapping[str, str] | None]:
    """Return the text of one record and its metadata fields; absent ones are omitted.

    Raises:
        UnreadableRecord: The line is not UTF-8, not JSON, not an object, or has no text in the text field; or a column
            that no setting reads may change what the record means.
    """
    if columns.only_text is not None:
        try:
            record = from_json(line, cache_strings="keys")
            if isinstance(record, dict):
                fields = cast("dict[str, object]", record)
                found = fields.get(columns.only_text)
                if isinstance(found, str) and columns.guarded.isdisjoint(fields):
                    return found, None  # pydantic rejects lone surrogates itself
        except ValueError:  # what pydantic rejects, the standard library decides below
            pass
    text_field, metadata_fields = columns.source.text_field, columns.source.metadata_fields
    fields = parse_object(line)
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
    columns.check_guarded(fields)
    return text, _metadata(fields, metadata_fields)


def _conversation(line: bytes, columns: ReadColumns, position: tuple[int, int, int, int]) -> Document | None:
    fields, source = parse_object(line), columns.source
    found = {name: _field(fields, name) for name in columns.among(fields)}
    present = {name: value for name, value in found.items() if value is not _ABSENT}
    chat = read_messages(columns, present, tuple(fields))
    if chat is None:
        return None
    images = None if source.images_field is None else _images(fields, source.images_field)
    metadata = _metadata(fields, source.metadata_fields)
    text = plain_text(chat.messages)
    return Document(*position, text, metadata, messages=chat.messages, tools=chat.tools, images=images)


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


def parse_object(line: bytes) -> dict[str, object]:
    """Return the JSON object of a record.

    Raises:
        UnreadableRecord: It is not UTF-8, not JSON, or not an object.
    """
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UnreadableRecord(f"invalid UTF-8 at byte {error.start} of the line: {error.reason}") from error
    except RecursionError as error:
        raise UnreadableRecord("invalid JSON: nested too deeply") from error
    except json.JSONDecodeError as error:
        raise UnreadableRecord(f"invalid JSON at column {error.colno}: {_json_problem(error)}") from error
    except ValueError as error:  # a number with more digits than Python converts
        raise UnreadableRecord(f"invalid JSON: {error}") from error
    if not isinstance(record, dict):
        raise UnreadableRecord(f"the record is not an object but {json_type(record)}")
    return cast("dict[str, object]", record)


def _json_problem(error: json.JSONDecodeError) -> str:
    """Return what is wrong with a JSON text, in the words of its usual causes."""
    before, after = error.doc[: error.pos].rstrip(), error.doc[error.pos :].strip()
    if error.msg == "Extra data" and after == ",":
        return "a comma follows the record; JSON Lines has no commas between records: remove the commas"
    closing = after.lstrip(",").lstrip()[:1]
    if closing in {"}", "]"} and (before.endswith(",") or after.startswith(",")):
        return f"a comma before the closing {closing}: remove it"
    if error.doc.lstrip().startswith("{'"):
        return "a Python dictionary, not JSON: write it with json.dumps"
    return error.msg


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
