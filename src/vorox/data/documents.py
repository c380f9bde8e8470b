"""The data types of a source: files, units, documents and bad records.

A *source* is a named, sorted list of files. It is split into *units* before it is built, so that a build can stop,
resume and run in any order or in parallel and still give the same rows. A *document* records the bytes that it was
read from, for provenance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

BAD_RECORDS_IN_A_ROW = 100
"""After this many consecutive bad records, reading a unit fails: its format is not the configured one."""

Ranges = tuple[tuple[int, int], ...]
"""Ranges ``[start, end)``, ascending and disjoint."""


class UnreadableRecord(ValueError):
    """A record without readable text; the message is the reason."""


_NOTHING: Mapping[str, object] = {}


class Message(NamedTuple):
    """One message of a conversation.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool``.
        content: Its text.
        further: The other fields that a chat template may read, such as ``tool_calls``.
        is_trained: Whether an answer is trained on.
    """

    role: str
    content: str
    further: Mapping[str, object] = _NOTHING
    is_trained: bool = True


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """A prompt with a chosen and a rejected answer.

    Attributes:
        prompt: The messages that both conversations start with.
        chosen: The messages of the better answer.
        rejected: The messages of the worse answer.
        is_text: Whether prompt and answers are texts that are joined without a chat template.
    """

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    is_text: bool = False


Conversation = tuple[Message, ...] | PreferencePair
"""The messages of a record."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source at one immutable version.

    Attributes:
        uri: An absolute path or a URL; ``stdlib:json/decoder.py`` for the standard library.
        size_bytes: Size of the file.
        version: Identifier of the content: the SHA-256 for local files.
        path: Its path relative to the location of the source, which the holdout rule may hash.
    """

    uri: str
    size_bytes: int
    version: str
    path: str = ""


class UnitSpan(NamedTuple):
    """A byte range ``[start_byte, end_byte)`` of one file, aligned to records.

    Offsets count bytes of the content: of the decompressed stream for a compressed file, of the file itself for Parquet
    (consecutive row groups). An empty range marks the rest of the file as unreadable; it is quarantined.

    Attributes:
        file_index: Index into the source's file list.
        first_ordinal: Index, within the file, of the first record in the span.
    """

    file_index: int
    start_byte: int
    end_byte: int
    first_ordinal: int


@dataclass(frozen=True, slots=True)
class Unit:
    """A build work item: consecutive spans in source order. ``unit_id`` counts from 0 in that order."""

    unit_id: int
    spans: tuple[UnitSpan, ...]

    @property
    def size_bytes(self) -> int:
        """Number of bytes of text in the unit."""
        return sum(span.end_byte - span.start_byte for span in self.spans)

    @property
    def place(self) -> str:
        return f"unit {self.unit_id}"

    @property
    def file_indexes(self) -> tuple[int, ...]:
        """The files of its spans, each once. Chunks number the files of their unit so, wherever the unit is used."""
        return tuple(dict.fromkeys(span.file_index for span in self.spans))


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image of a document.

    Attributes:
        content: Its encoded bytes, or its path until they are read; empty once the cache has them.
        character: The character of the text before which it belongs.
        digest: The xxh3-64 of its bytes, once they are read.
        num_tokens: Positions of a row that it takes, once they are read.
    """

    content: bytes | str
    character: int = 0
    digest: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Document:
    """A text, and the bytes that it was read from.

    Attributes:
        file_index: Index into the source's file list.
        ordinal: Index of the record in its file; bad records count too.
        byte_offset: First byte of the record in the (decompressed) file; in Parquet, of its row group, where only the
            ordinal distinguishes records.
        byte_length: Bytes of the record, or of its row group.
        text: The decoded text, or the output of a transform.
        metadata: The additional columns or fields that the source requests; ``None`` if it requests none.
        original: The text before a transform changed it, else ``None``.
        copy: Index of this text among the texts that transforms made from the record.
        messages: The conversation, until a chat template renders it (``chat_template.rendered``).
        tools: The tools that the conversation may call, until then.
        answers: The characters of a rendered conversation that are trained on; empty: the whole text is.
        target_tokens: The tokens of the answers, once the text is encoded.
        rejected_start: The first character of the rejected conversation of a preference pair, which follows the chosen
            one; 0 for other documents.
        rejected_token: Its first token, once the text is encoded.
        is_started: Whether each text of a preference pair begins with what the tokenizer adds before a text; what a
            chat template renders has all its tokens.
        images: Its images, in their order in the text; ``None`` if the source has none (``data/images/reading.py``).
    """

    file_index: int
    ordinal: int
    byte_offset: int
    byte_length: int
    text: str
    metadata: Mapping[str, str] | None = None
    original: str | None = None
    copy: int = 0
    messages: Conversation = ()
    tools: tuple[object, ...] = ()
    answers: Ranges = ()
    target_tokens: Ranges = ()
    rejected_start: int = 0
    rejected_token: int = 0
    is_started: bool = False
    images: tuple[PlacedImage, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenDocument:
    """A text that was tokenized elsewhere, and the bytes that it was read from.

    Attributes:
        file_index: Index into the source's file list.
        ordinal: Index of the record in its file; bad records count too.
        byte_offset: First byte of the record in the file.
        byte_length: Bytes of the record, including its end-of-text id.
        tokens: The token ids, uint16 or uint32, without the end-of-text id.
    """

    file_index: int
    ordinal: int
    byte_offset: int
    byte_length: int
    tokens: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
    text: ClassVar[None] = None
    original: ClassVar[None] = None
    copy: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that could not be read. It is quarantined with its location, never dropped silently.

    Attributes:
        reason: What is wrong, for the user: ``invalid UTF-8 at byte 17``.
        line: Line in the file, from 1, if the format has lines.
        is_rest_of_file: Whether it covers the rest of a damaged file.
    """

    file_index: int
    ordinal: int
    byte_offset: int
    byte_length: int
    line: int | None
    reason: str
    is_rest_of_file: bool = False


AnyDocument = Document | TokenDocument

Record = AnyDocument | BadRecord
"""A record of a span."""


def place_of(document: AnyDocument, files: Sequence[SourceFile]) -> str:
    """Return where a document was read, for messages."""
    return f"{files[document.file_index].uri}, record {document.ordinal + 1} at byte {document.byte_offset}"


class DocumentSpan(NamedTuple):
    """The origin of one segment's tokens.

    Attributes:
        uri: The file.
        byte_offset: First byte of the document's record in the file.
        byte_length: Bytes of the record.
        document_token_offset: First token of the segment within the document.
        length: Tokens of the segment.
        file_index: Index into the cache's file list.
        ordinal: Index of the record in its file.
        document_tokens: Tokens of the whole document, including its end-of-text token.
        text_xxh3: xxh3-64 of the record's text, to detect changes of the source.
        copy: Index of the document among those that transforms made of the record.
        is_erased: Whether its tokens were erased from the cache.
    """

    uri: str
    byte_offset: int
    byte_length: int
    document_token_offset: int
    length: int
    file_index: int
    ordinal: int
    document_tokens: int
    text_xxh3: int
    copy: int = 0
    is_erased: bool = False


def units_with(
    records: Collection[tuple[str, int]], files: Sequence[SourceFile], units: Sequence[Unit]
) -> npt.NDArray[np.int64]:
    """Return the units with a span in which one of some records is: the last that starts at or before it.

    Args:
        records: Version of the file, and index of the record in it.
        files: The files of the source.
        units: Its units.
    """
    versions = {version for version, _ in records}
    wanted = {index: file.version for index, file in enumerate(files) if file.version in versions}
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for unit in units:
        for span in unit.spans:
            if span.file_index in wanted:
                spans[span.file_index].append((span.first_ordinal, unit.unit_id))
    found: set[int] = set()
    for index, version in wanted.items():
        for ordinal in (ordinal for name, ordinal in records if name == version):
            first = max((start for start, _ in spans[index] if start <= ordinal), default=None)
            found |= {unit for start, unit in spans[index] if start == first}
    return np.array(sorted(found), np.int64)
