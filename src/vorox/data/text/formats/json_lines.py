"""jsonl: a line is a record, one of its fields is the text.

Lines go in, documents and bad records with their line come out. Invariants: a blank line is no record but keeps its
ordinal, and a line that is larger than the source allows is put aside without having been loaded.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic_core import from_json

from vorox.core.schema.data import SourceConfig
from vorox.data.documents import BadRecord, Document, UnitSpan
from vorox.data.storage import StoredFile
from vorox.data.text.file_content import Limits
from vorox.data.text.formats.plain_text import BYTE_ORDER_MARK, read_lines_of
from vorox.data.text.formats.record_blocks import too_large
from vorox.data.text.signatures import SIGNATURE_BYTES, reject_binary

_ABSENT = object()


class UnreadableRecord(ValueError):
    """A record that holds no text; the message says why."""


def read_records(
    source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Callable[[int], bool]
) -> Iterator[Document | BadRecord]:
    """The records of the lines in a span whose first byte ``accept`` takes."""
    lines = read_lines_of(
        file, span.start_byte, span.end_byte, span.first_ordinal,
        max_record_bytes=source.max_record_bytes, limits=Limits.from_source(source),
    )  # fmt: skip
    for ordinal, offset, length, line in lines:
        place = (span.file_index, ordinal, offset, length)
        if line is None:
            if accept(offset):
                yield BadRecord(*place, ordinal + 1, too_large(length, source.max_record_bytes))
            continue
        if offset == 0:
            reject_binary(file, line[:SIGNATURE_BYTES])
            line = line.removeprefix(BYTE_ORDER_MARK)
        if not accept(offset) or not line or line.isspace():
            continue  # a blank line is no record, but it keeps its ordinal
        try:
            text, metadata = parse_record(line, source.text_field, source.metadata_fields)
        except UnreadableRecord as error:
            yield BadRecord(*place, ordinal + 1, str(error))
        else:
            yield Document(*place, text, metadata)


def parse_line(line: bytes, text_field: str) -> str:
    """The text of one jsonl record.

    Raises:
        UnreadableRecord: It is not UTF-8, not JSON, not an object, or has no text in that field.
    """
    return parse_record(line, text_field)[0]


def parse_record(
    line: bytes, text_field: str, metadata_fields: Sequence[str] = ()
) -> tuple[str, Mapping[str, str] | None]:
    """The text of one jsonl record and the other fields that are asked for; those that it lacks are left out.

    Raises:
        UnreadableRecord: It is not UTF-8, not JSON, not an object, or has no text in that field.
    """
    if not metadata_fields:
        with contextlib.suppress(ValueError):  # what it takes, it reads as `json` does; of the rest that one decides
            fields = from_json(line, cache_strings="keys")
            if isinstance(fields, dict):
                found = cast("dict[str, object]", fields).get(text_field)
                if isinstance(found, str):
                    return found, None  # the quick way: no half of a surrogate pair comes through it
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UnreadableRecord(f"invalid UTF-8 at byte {error.start} of the line: {error.reason}") from error
    except RecursionError as error:
        raise UnreadableRecord("invalid JSON: nested too deeply") from error
    except json.JSONDecodeError as error:
        raise UnreadableRecord(f"invalid JSON at column {error.colno}: {error.msg}") from error
    except ValueError as error:  # a number of more digits than Python converts
        raise UnreadableRecord(f"invalid JSON: {error}") from error
    if not isinstance(record, dict):
        raise UnreadableRecord(f"the record is not an object but {_kind(record)}")
    fields = cast("dict[str, object]", record)
    text = _field(fields, text_field)
    if text is _ABSENT:
        present = ", ".join(repr(key) for key in list(fields)[:8])
        raise UnreadableRecord(
            f"no field {text_field!r}; the record has {present or 'no fields'}: set the source's text_field"
        )
    if not isinstance(text, str):
        raise UnreadableRecord(f"field {text_field!r} is not a string but {_kind(text)}")
    surrogate = lone_surrogate(text)
    if surrogate is not None:
        raise UnreadableRecord(f"field {text_field!r} has half a surrogate pair at character {surrogate}")
    if not metadata_fields:
        return text, None
    found = {name: _field(fields, name) for name in metadata_fields}
    return text, {name: as_text(value) for name, value in found.items() if value is not _ABSENT and value is not None}


def _field(fields: Mapping[str, Any], name: str) -> object:
    """The value under a name, else under the path that it is with its dots."""
    if name in fields or "." not in name:
        return fields.get(name, _ABSENT)
    head, _, rest = name.partition(".")
    inner = fields.get(head)
    return _field(cast("dict[str, Any]", inner), rest) if isinstance(inner, dict) else _ABSENT


def as_text(value: object) -> str:
    """A metadata value as text: strings as they are, everything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    return text.encode("utf-8", "replace").decode("utf-8")


def _kind(value: object) -> str:
    names = {"dict": "an object", "list": "an array", "bool": "a boolean", "str": "a string", "NoneType": "null"}
    return names.get(type(value).__name__, "a number")


def lone_surrogate(text: str) -> int | None:
    """Index of the first character that no UTF-8 can hold, if there is one."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return None
