"""Which rows hold one byte of a file: those of its record, narrowed to the piece of a long document that has the byte.

In: rows with tokens of the records that have a byte, as the cache finds them. Out: the rows that hold the byte, and how
closely that is known. Invariant: a row that holds the byte is never left out; where the byte cannot be traced to a
token, all rows of the record stay, and the answer says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import xxhash

from vorox.core.errors import DataError
from vorox.data.cache.reader import CacheReader, DocumentSpan
from vorox.data.text.formats import ROW_GROUPS
from vorox.data.tokenizers.loading import load
from vorox.data.tokenizers.tokenizer import Tokenizer

Granularity = Literal["byte", "record", "row group", "file"]
"""What a row is known to hold: the byte; tokens of the record that has it, of Parquet of its row group; of the file."""

Rows = npt.NDArray[np.int64]


class ByteFinder:
    """Finds bytes in the rows of one run's caches.

    Args:
        tokenizer_directory: Where the run keeps its tokenizer, which is read when a document in several rows is met.
    """

    def __init__(self, tokenizer_directory: Path) -> None:
        self._tokenizer_directory = tokenizer_directory
        self._tokenizer: Tokenizer | None = None

    def narrowed(self, cache: CacheReader, rows: Rows, file_index: int, byte: int) -> dict[int, Granularity]:
        """Those of some rows that hold a byte of a file, or may do so, with how closely that is known.

        Args:
            cache: Whose rows they are.
            rows: All rows with tokens of the records that have the byte.
            file_index: The file, by its place in the cache's list.
            byte: Its place in the (decompressed) file.

        Raises:
            DataError: A chunk is missing or damaged.
        """
        if cache.recipe.source.get("format") in ROW_GROUPS:
            return dict.fromkeys(rows.tolist(), "row group")
        pieces: dict[int, list[tuple[int, DocumentSpan]]] = {}
        for row in rows.tolist():
            row_token = 0
            for span in cache.documents_of(row):
                has_byte = span.byte_offset <= byte < span.byte_offset + span.byte_length
                if span.file_index == file_index and has_byte:
                    pieces.setdefault(row, []).append((row_token, span))
                row_token += span.length
        spans = [span for held in pieces.values() for _, span in held]
        if all(span.length == span.document_tokens for span in spans):
            return dict.fromkeys(pieces, "byte")
        token = self._token_with(cache, pieces, byte)
        if token is None:
            return dict.fromkeys(pieces, "record")
        return {
            row: "byte"
            for row, held in pieces.items()
            if any(span.document_token_offset <= token < span.document_token_offset + span.length for _, span in held)
        }

    def _token_with(
        self, cache: CacheReader, pieces: dict[int, list[tuple[int, DocumentSpan]]], byte: int
    ) -> int | None:
        """The token of a document that has a byte of its record; ``None`` where its text is not its record's bytes.

        The tokens of all pieces are put together and believed only if they spell the very text that was packed, and
        that text is as long as the record: so for txt, and not where a record wraps its text, as in jsonl and csv.
        """
        (_, first), *_ = next(iter(pieces.values()))
        ids = np.full(first.document_tokens, -1, np.int64)
        for row, held in pieces.items():
            tokens = cache.read_rows(np.array([row], np.int64)).tokens_NC[0]
            for row_token, span in held:
                if (span.ordinal, span.document_tokens) != (first.ordinal, first.document_tokens):
                    return None
                start = span.document_token_offset
                ids[start : start + span.length] = tokens[row_token : row_token + span.length]
        if ids.min() < 0:
            return None
        try:
            self._tokenizer = self._tokenizer or load(self._tokenizer_directory)
        except DataError:
            return None
        text = self._tokenizer.decode(ids[:-1]).encode("utf-8", "replace")
        is_record = len(text) == first.byte_length and xxhash.xxh3_64_intdigest(text) == first.text_xxh3
        if not self._tokenizer.lossless or not is_record:
            return None
        ends = np.cumsum(self._tokenizer.token_byte_lengths()[ids])
        return int(np.searchsorted(ends, byte - first.byte_offset, side="right"))
