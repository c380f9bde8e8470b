"""The documents of a cache, whole again and in the order of their source.

A reader goes in, documents with all their tokens come out, a unit at a time. Packing had cut and scattered them; the
segments of the rows say where each piece belongs. Invariant: every document of the cache comes out once, with exactly
the tokens it was packed from, its end of text last; anything else is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from vorox.core.errors import DataError
from vorox.data.cache.reader import CacheReader
from vorox.data.documents import DocumentSpan
from vorox.data.rows import TokenArray

_BLOCK_ROWS = 1024


@dataclass(slots=True)
class WholeDocument:
    """A document of a cache.

    Attributes:
        uri: The file that it comes from.
        ordinal: Number of the record within its file.
        tokens: All its tokens, the end of text included.
    """

    uri: str
    ordinal: int
    tokens: TokenArray
    _pieces: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def add(self, span: DocumentSpan, tokens: TokenArray) -> None:
        cast(Any, self.tokens)[span.document_token_offset : span.document_token_offset + span.length] = tokens
        self._pieces.append((span.document_token_offset, span.document_token_offset + span.length))

    def is_whole(self) -> bool:
        reached = 0
        for start, end in sorted(self._pieces):
            if start > reached:
                return False
            reached = max(reached, end)
        return reached == len(self.tokens)


def whole_documents(reader: CacheReader) -> Iterator[WholeDocument]:
    """Every document of a complete cache, in the order of the source.

    Raises:
        DataError: A chunk is missing or damaged, or a document is not whole.
    """
    starts = reader.unit_row_starts
    for unit in range(len(starts) - 1):
        yield from _documents_of_unit(reader, int(starts[unit]), int(starts[unit + 1]))


def _documents_of_unit(reader: CacheReader, first_row: int, end_row: int) -> list[WholeDocument]:
    documents: dict[tuple[int, int], WholeDocument] = {}
    for first in range(first_row, end_row, _BLOCK_ROWS):
        rows = np.arange(first, min(first + _BLOCK_ROWS, end_row), dtype=np.int64)
        block = reader.read_rows(rows)
        for index, row in enumerate(rows.tolist()):
            begin = 0
            for span in reader.documents_of(row):
                key = (span.file_index, span.ordinal)
                if key not in documents:
                    tokens = cast(TokenArray, np.empty(span.document_tokens, block.tokens_NC.dtype))
                    documents[key] = WholeDocument(span.uri, span.ordinal, tokens)
                documents[key].add(span, block.tokens_NC[index, begin : begin + span.length])
                begin += span.length
    ordered = [documents[key] for key in sorted(documents)]
    for document in ordered:
        if not document.is_whole():
            raise DataError(
                f"record {document.ordinal + 1} of {document.uri} is not whole in the cache",
                where=str(reader.directory), hint="run `vorox data verify`, then `vorox data build` with --repair",
            )  # fmt: skip
    return ordered
