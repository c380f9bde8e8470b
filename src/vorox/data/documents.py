"""The nouns of the data room: what a file, a unit of work and a document are.

A *source* is a named, sorted list of files. *Units* cut it into pieces of work before any work is done, so that a
build can stop, resume, run backwards or in parallel and still give the same rows. A *document* knows where its bytes
came from; that is what provenance answers with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

BAD_RECORDS_IN_A_ROW = 100
"""So many, and reading a unit is given up: it is not what the configuration says that it is."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source at one immutable version.

    Attributes:
        uri: Where it is: an absolute path or a URL; ``stdlib:json/decoder.py`` for the standard library.
        size_bytes: Its length.
        version: What pins its content: the SHA-256 for local files.
    """

    uri: str
    size_bytes: int
    version: str


@dataclass(frozen=True, slots=True)
class UnitSpan:
    """A byte range ``[start_byte, end_byte)`` of one file, cut at record boundaries.

    The bytes are those of the content: of the decompressed stream where a file is compressed, of the file itself
    where it is Parquet (a run of row groups). An empty range says that the rest of the file, from there on, cannot be
    read and is put aside.

    Attributes:
        file_index: Index into the source's file list.
        first_ordinal: Ordinal, within the file, of the first record in the span.
    """

    file_index: int
    start_byte: int
    end_byte: int
    first_ordinal: int


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of work: a run of spans in source order. ``unit_id`` is dense from 0 in that order."""

    unit_id: int
    spans: tuple[UnitSpan, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of text that it spans."""
        return sum(span.end_byte - span.start_byte for span in self.spans)

    @property
    def place(self) -> str:
        return f"unit {self.unit_id}"


@dataclass(frozen=True, slots=True)
class Document:
    """One text and the bytes that it was read from.

    Attributes:
        file_index: Index into the source's file list.
        ordinal: Number of the record within its file; bad records keep theirs.
        byte_offset: First byte of the record in the (decompressed) file; in Parquet, whose records have no bytes of
            their own, the first of its row group: there the ordinal tells the records apart.
        byte_length: Bytes of the record, or of its row group.
        text: The text, decoded; after a transform, what the transform made of it.
        metadata: The other columns or fields that the source asks for; ``None`` unless it asks for some.
        original: The text of the record where a transform changed it, else ``None``.
        copy: Number of this text among those that transforms made of the record.
    """

    file_index: int
    ordinal: int
    byte_offset: int
    byte_length: int
    text: str
    metadata: Mapping[str, str] | None = None
    original: str | None = None
    copy: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TokenDocument:
    """One text that was tokenised elsewhere, and the bytes that it was read from.

    Attributes:
        file_index: Index into the source's file list.
        ordinal: Number of the record within its file; bad records keep theirs.
        byte_offset: First byte of the record in the file.
        byte_length: Bytes of the record, with those of the end-of-text id behind it.
        tokens: Its token ids, uint16 or uint32, without the end-of-text id.
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
    """A record that could not be read. It is put aside with its place, never dropped in silence.

    Attributes:
        reason: What is wrong, for a person: ``invalid UTF-8 at byte 17``.
        line: Line in the file, from 1, where the format has lines.
        is_rest_of_file: It stands for everything from there on, in a damaged file.
    """

    file_index: int
    ordinal: int
    byte_offset: int
    byte_length: int
    line: int | None
    reason: str
    is_rest_of_file: bool = False


Record = Document | TokenDocument | BadRecord
"""What a span of a file holds."""


class DocumentSpan(NamedTuple):
    """Where the tokens of one segment come from.

    Attributes:
        uri: The file.
        byte_offset: First byte of the document's record in it.
        byte_length: Bytes of the record.
        document_token_offset: First token of the segment within the document.
        length: Tokens of the segment.
        file_index: The file, by its place in the cache's list.
        ordinal: Number of the record within its file.
        document_tokens: Tokens of the whole document, its end of text included.
        text_xxh3: xxh3-64 of the document's text: whether what a source gives today is what was read.
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
