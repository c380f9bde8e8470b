"""One unit's text to the contents of its chunks: tokenised, packed, and laid out in a keyed order.

Records go in, chunk contents, statistics and bad records come out; nothing is written here. Invariant: the result is
a function of the records, the recipe and the unit's number alone, so that a unit built twice, elsewhere or later has
the same rows at the same addresses.

Packing leaves rows sorted by the length of their documents. Stored like that they would be a hidden curriculum for
whoever reads in stored order, so the rows of a unit are permuted, by a key that depends on nothing but the unit.

Legend: R rows of the unit, C tokens of a row, F fragments, D documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from vorox.core.errors import DataError
from vorox.data.cache.format import DOCUMENT, ChunkContent
from vorox.data.cache.manifest import UnitStatistics
from vorox.data.cache.recipe import Recipe
from vorox.data.documents import BadRecord, Document, SourceFile
from vorox.data.order import permutation_key, permute
from vorox.data.packing import pack
from vorox.data.records import TokenArray

BAD_RECORDS_IN_A_ROW = 100
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 4096
_LARGEST_UINT32 = (1 << 32) - 1
_LARGEST_INT32 = (1 << 31) - 1


class Encoder(Protocol):
    """What building needs of a tokenizer."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_text_id(self) -> int: ...
    def encode_batch(self, texts: Sequence[str], /) -> Sequence[npt.NDArray[np.integer]]: ...


@dataclass(frozen=True, slots=True)
class UnitText:
    """The documents of a unit as tokens.

    Attributes:
        tokens: All documents one after the other, each with its end-of-text token.
        documents_D: ``DOCUMENT`` records.
        bad_records: What could not be read.
        gave_up: Reading stopped because record after record was bad.
    """

    tokens: TokenArray
    documents_D: npt.NDArray[np.void]
    bad_records: tuple[BadRecord, ...]
    gave_up: bool

    def statistics(self, unit: int) -> UnitStatistics:
        return unit_statistics(unit, self.documents_D, len(self.bad_records))


def unit_statistics(unit: int, documents_D: npt.NDArray[np.void], quarantined: int) -> UnitStatistics:
    return UnitStatistics(
        unit=unit,
        documents=len(documents_D),
        text_bytes=int(documents_D["text_bytes"].sum(dtype=np.int64)),
        tokens=int(documents_D["num_tokens"].sum(dtype=np.int64)),
        quarantined=quarantined,
    )


def read_text(
    records: Iterable[Document | BadRecord],
    files: Sequence[SourceFile],
    encoder: Encoder,
    recipe: Recipe,
    on_documents: Callable[[int, int, int], None],
) -> UnitText:
    """Tokenise a unit.

    Args:
        records: What the unit's spans hold, in order.
        files: The source's files, to name places in messages.
        encoder: The recipe's tokenizer.
        recipe: The recipe.
        on_documents: Told the documents, text bytes and tokens that were added.

    Raises:
        DataError: The tokenizer cannot encode a text or gives an id outside the vocabulary.
    """
    bad_records: list[BadRecord] = []
    tokens: list[TokenArray] = []
    rows: list[tuple[int, ...]] = []
    gave_up = False
    try:
        for batch in _batches(_good_records(records, bad_records)):
            encoded = _encode(batch, files, encoder, recipe)
            added = [_document_row(document, len(ids), files) for document, ids in zip(batch, encoded, strict=True)]
            tokens += encoded
            rows += added
            on_documents(len(added), sum(row[5] for row in added), sum(row[4] for row in added))
    except _GaveUp:
        gave_up = True
    flat = np.concatenate([*tokens, np.zeros(0, recipe.dtype)])
    return UnitText(flat, np.array(rows, DOCUMENT), tuple(bad_records), gave_up)


class _GaveUp(Exception):
    """Too many bad records in a row."""


def _good_records(records: Iterable[Document | BadRecord], bad_records: list[BadRecord]) -> Iterator[Document]:
    """The documents; the others go to ``bad_records``."""
    bad_in_a_row = 0
    for record in records:
        if isinstance(record, Document):
            bad_in_a_row = 0
            yield record
            continue
        bad_records.append(record)
        bad_in_a_row += 1
        if bad_in_a_row == BAD_RECORDS_IN_A_ROW:
            raise _GaveUp


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _place(document: Document, files: Sequence[SourceFile]) -> str:
    return f"{files[document.file_index].uri}, record {document.ordinal + 1} at byte {document.byte_offset}"


def _encode(
    batch: Sequence[Document], files: Sequence[SourceFile], encoder: Encoder, recipe: Recipe
) -> list[TokenArray]:
    try:
        encoded = encoder.encode_batch([document.text for document in batch])
    except DataError as error:
        if len(batch) == 1:
            raise DataError(error.what, where=_place(batch[0], files), hint=error.hint) from error
        # One of them cannot be encoded; one by one the message can name it.
        return [ids for document in batch for ids in _encode([document], files, encoder, recipe)]
    ended: list[TokenArray] = []
    for document, ids in zip(batch, encoded, strict=True):
        if len(ids) and (int(ids.max()) >= recipe.vocab_size or int(ids.min()) < 0):
            wrong = int(ids.max()) if int(ids.max()) >= recipe.vocab_size else int(ids.min())
            raise DataError(
                f"the tokenizer gave id {wrong}, its vocabulary has {recipe.vocab_size} tokens",
                where=_place(document, files), hint="the tokenizer is broken: train or load it again",
            )  # fmt: skip
        row = np.empty(len(ids) + 1, recipe.dtype)
        row[:-1] = ids
        row[-1] = recipe.end_of_text_id
        ended.append(row)
    return ended


def _document_row(document: Document, num_tokens: int, files: Sequence[SourceFile]) -> tuple[int, ...]:
    text = document.text.encode()
    if max(document.byte_length, len(text)) > _LARGEST_UINT32 or num_tokens > _LARGEST_INT32:
        raise DataError(
            f"a document of {document.byte_length:,} bytes and {num_tokens:,} tokens is too long for a cache",
            where=_place(document, files), hint="cut it into several records of less than 2 GiB",
        )  # fmt: skip
    place = (document.file_index, document.ordinal, document.byte_offset, document.byte_length)
    return (*place, num_tokens, len(text), xxhash.xxh3_64_intdigest(text))


def chunk_contents(unit: int, text: UnitText, recipe: Recipe) -> list[ChunkContent]:
    """The rows of a unit, cut into chunks."""
    document_ends = np.cumsum(text.documents_D["num_tokens"].astype(np.int64))
    document_starts = document_ends - text.documents_D["num_tokens"]
    packing = pack(text.documents_D["num_tokens"], recipe.row_tokens, recipe.packing)
    num_rows = packing.num_rows
    if num_rows == 0:
        return []
    order_R = permute(np.arange(num_rows), num_rows, permutation_key("rows", unit))
    counts_R = np.diff(packing.row_ptr)[order_R]
    row_ptr = np.append(np.int64(0), np.cumsum(counts_R))
    # Fragments in the new order of the rows: those of new row i are row_ptr[i]:row_ptr[i + 1].
    fragments_F: npt.NDArray[np.int64] = np.arange(int(row_ptr[-1])) + np.repeat(
        packing.row_ptr[order_R] - row_ptr[:-1], counts_R
    )
    documents_F, offsets_F, lengths_F = (
        array[fragments_F] for array in (packing.documents, packing.token_offsets, packing.lengths)
    )
    tokens_RC = np.full((num_rows, recipe.row_tokens), recipe.end_of_text_id, recipe.dtype)
    _fill(tokens_RC, text.tokens, document_starts[documents_F] + offsets_F, lengths_F, row_ptr)
    contents: list[ChunkContent] = []
    for first in range(0, num_rows, recipe.chunk_rows):
        last = min(first + recipe.chunk_rows, num_rows)
        part = slice(row_ptr[first], row_ptr[last])
        present, index_F = np.unique(documents_F[part], return_inverse=True)
        contents.append(
            ChunkContent(
                tokens_RC=tokens_RC[first:last],
                row_ptr=(row_ptr[first : last + 1] - row_ptr[first]).astype(np.uint32),
                segments_S3=np.stack([index_F, offsets_F[part], lengths_F[part]], axis=1).astype(np.uint32),
                documents_D=text.documents_D[present],
            )
        )
    return contents


def _fill(
    tokens_RC: TokenArray,
    tokens: TokenArray,
    starts_F: npt.NDArray[np.int64],
    lengths_F: npt.NDArray[np.int64],
    row_ptr: npt.NDArray[np.int64],
) -> None:
    """Copy fragments to the rows, those of a row one after the other from its start."""
    before_F = np.cumsum(lengths_F) - lengths_F
    row_F = np.repeat(np.arange(len(row_ptr) - 1), np.diff(row_ptr))
    targets_F = before_F - before_F[row_ptr[:-1]][row_F] + row_F * tokens_RC.shape[1]
    flat = tokens_RC.reshape(-1)
    for start, target, length in zip(starts_F.tolist(), targets_F.tolist(), lengths_F.tolist(), strict=True):
        flat[target : target + length] = tokens[start : start + length]
