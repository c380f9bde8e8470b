"""The rows of a unit: documents tokenised, packed, permuted and split into chunk contents.

Nothing is written here. Invariant: the result is a function of the records, the recipe and the unit's number alone, so
a unit that is built twice, elsewhere or later, has the same rows at the same addresses.

Packing sorts rows by document length. Stored in that order they would form a hidden curriculum for sequential readers,
so the rows of a unit are permuted by a key that depends only on the unit.

Legend: R rows of the unit, C tokens of a row, F fragments, D documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import xxhash

from vorox.core.errors import DataError
from vorox.data.cache.format import DOCUMENT, ChunkContent
from vorox.data.cache.manifest import UnitStatistics
from vorox.data.cache.pair_rows import Int64Array, is_pair, split_pairs
from vorox.data.cache.recipe import Recipe
from vorox.data.documents import Document, Ranges, SourceFile, TokenDocument
from vorox.data.image_layout import ImageLayout
from vorox.data.packing import Packing, pack
from vorox.data.permutation import permutation_key, permute
from vorox.data.rows import TokenArray
from vorox.data.transforms.apply import AnyDocument, place_of

_LARGEST_UINT32 = (1 << 32) - 1
_LARGEST_INT32 = (1 << 31) - 1


class Encoder(Protocol):
    """The tokenizer interface that a build needs."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_text_id(self) -> int: ...
    def encode_batch(self, texts: Sequence[str], /) -> Sequence[npt.NDArray[np.integer]]: ...


def unit_statistics(unit: int, documents_D: npt.NDArray[np.void], quarantined: int) -> UnitStatistics:
    return UnitStatistics(
        unit=unit,
        documents=len(documents_D),
        text_bytes=int(documents_D["text_bytes"].sum(dtype=np.int64)),
        tokens=int(documents_D["num_tokens"].sum(dtype=np.int64)),
        quarantined=quarantined,
    )


class ConversationEncoder(Encoder, Protocol):
    """An encoder that recognises the special tokens of a rendered conversation."""

    def encode_with_specials(
        self, texts: Sequence[str], /
    ) -> Sequence[tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]]: ...


def encode(
    documents: Sequence[AnyDocument],
    files: Sequence[SourceFile],
    encoder: Encoder,
    *,
    images: ImageLayout | None = None,
) -> tuple[list[AnyDocument], list[npt.NDArray[Any]]]:
    """Return the documents and their token ids, without end-of-text ids; token documents keep theirs.

    A conversation gets the tokens of its answers: from the first to the last one with a character of the answer. The
    text before, between and after images is encoded by itself.

    Raises:
        DataError: The tokenizer cannot encode a text; the message has its place.
    """
    texts = [
        text
        for document in documents
        if isinstance(document, Document) and not document.answers
        for text in _parts(document)
    ]
    chats = [text for document in documents for text in _conversations(document)]
    try:
        encoded = iter(encoder.encode_batch(texts) if texts else [])
        marked = iter(cast("ConversationEncoder", encoder).encode_with_specials(chats) if chats else [])
    except DataError as error:
        if len(documents) == 1:
            raise DataError(error.what, where=place_of(documents[0], files), hint=error.hint) from error
        # Encode one by one, to find the document that fails.
        parts = [encode([document], files, encoder, images=images) for document in documents]
        return [part[0][0] for part in parts], [part[1][0] for part in parts]
    kept: list[AnyDocument] = []
    tokens: list[npt.NDArray[Any]] = []
    for document in documents:
        if isinstance(document, TokenDocument):
            ids = document.tokens
        elif document.images:
            own = marked if document.answers else ((ids, None) for ids in encoded)
            document, ids = _with_images(document, own, encoder.end_of_text_id, images)
        elif document.answers:
            document, ids = _with_targets(document, marked, encoder.end_of_text_id)
        else:
            ids = next(encoded)
        kept.append(document)
        tokens.append(ids)
    return kept, tokens


def _conversations(document: AnyDocument) -> tuple[str, ...]:
    """Return the rendered conversation of a document, or both of a preference pair; nothing for other documents."""
    if not isinstance(document, Document) or not document.answers:
        return ()
    if document.images:
        return _parts(document)
    start = document.rejected_start
    return (document.text[:start], document.text[start:]) if is_pair(document) else (document.text,)


def _parts(document: Document) -> tuple[str, ...]:
    """Return the text between the images of a document."""
    places = [0, *(image.character for image in document.images or ()), len(document.text)]
    return tuple(document.text[start:end] for start, end in pairwise(places))


def _with_images(
    document: Document,
    encoded: Iterator[tuple[npt.NDArray[np.integer], npt.NDArray[np.int64] | None]],
    end_of_text_id: int,
    layout: ImageLayout | None,
) -> tuple[Document, npt.NDArray[np.integer]]:
    """Return a document with its ids, images included, and the tokens to train on: text, or answers."""
    ids: list[npt.NDArray[np.integer]] = []
    targets: list[tuple[int, int]] = []
    first_character = first_token = 0
    images = document.images or ()
    assert layout is not None, "the source has images"
    for number, text in enumerate(_parts(document)):
        part, ranges_N2 = next(encoded)
        if ranges_N2 is None:
            found: Ranges = ((0, len(part)),) if len(part) else ()
        else:
            found = _tokens_of(document.answers, ranges_N2 + first_character)
        targets += [(first_token + start, first_token + end) for start, end in found]
        first_character += len(text)
        is_ended = number == len(images) and len(part) and int(part[-1]) == end_of_text_id
        ids.append(part[:-1] if is_ended and ranges_N2 is not None else part)
        if number < len(images):
            ids.append(layout.ids(images[number].digest, images[number].num_tokens))
        first_token = sum(map(len, ids))
    if not document.answers:
        targets.append((first_token, first_token + 1))  # the end of text
    return replace(document, target_tokens=tuple(targets)), np.concatenate([part.astype(np.uint32) for part in ids])


def _with_targets(
    document: Document, encoded: Iterator[tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]], end_of_text_id: int
) -> tuple[Document, npt.NDArray[np.integer]]:
    """Return a document with the tokens of its answers, and its ids without the last end of text."""
    parts: list[npt.NDArray[np.integer]] = []
    targets: list[tuple[int, int]] = []
    first_character = first_token = 0
    for text in _conversations(document):
        if parts:
            parts.append(np.array([end_of_text_id], parts[0].dtype))
            first_token = sum(map(len, parts))
        ids, ranges_N2 = next(encoded)
        found = _tokens_of(document.answers, ranges_N2 + first_character)
        targets += [(first_token + start, first_token + end) for start, end in found]
        first_character += len(text)
        is_ended = len(ids) and int(ids[-1]) == end_of_text_id  # the template ends with it already
        parts.append(ids[:-1] if is_ended else ids)
    return replace(document, target_tokens=tuple(targets), rejected_token=first_token), np.concatenate(parts)


def _tokens_of(answers: Ranges, ranges_N2: npt.NDArray[np.int64]) -> Ranges:
    """Return the tokens of each range of characters; ``ranges_N2`` has the characters of each token."""
    found: list[tuple[int, int]] = []
    for start, end in answers:
        inside = np.flatnonzero((ranges_N2[:, 0] < end) & (ranges_N2[:, 1] > start))
        if inside.size:
            found.append((int(inside[0]), int(inside[-1]) + 1))
    return tuple(found)


def finish_documents(
    documents: Sequence[AnyDocument],
    tokens: Sequence[npt.NDArray[Any]],
    files: Sequence[SourceFile],
    recipe: Recipe,
) -> tuple[TokenArray, npt.NDArray[np.void], npt.NDArray[np.bool_] | None]:
    """Return all tokens, with an end-of-text token after each document, their ``DOCUMENT`` records, and the loss mask.

    The loss mask is true for the tokens that are trained on; ``None`` if all are.

    A record has the size of the tokenised text, but the place and the hash of the original one before transforms, so
    provenance can check whether the source still has it. For documents without text the tokens are hashed.

    Raises:
        DataError: An id is not in the vocabulary, or a document is too long for a cache.
    """
    end = np.array([recipe.end_of_text_id], recipe.dtype)
    stored = [ids if ids.dtype == end.dtype else _convert_ids(document, ids, files, recipe)
              for document, ids in zip(documents, tokens, strict=True)]  # fmt: skip
    flat = cast("TokenArray", np.concatenate([end[:0], *(part for ids in stored for part in (ids, end))]))
    if flat.size and int(flat.max()) >= recipe.num_ids:
        for document, ids in zip(documents, stored, strict=True):
            _check_vocabulary(document, ids, files, recipe)
    rows = [_document_row(document, len(ids) + 1, files) for document, ids in zip(documents, stored, strict=True)]
    return flat, np.array(rows, DOCUMENT), _loss_mask(documents, [len(ids) + 1 for ids in stored], recipe)


def _loss_mask(
    documents: Sequence[AnyDocument], lengths: Sequence[int], recipe: Recipe
) -> npt.NDArray[np.bool_] | None:
    is_partial = any(isinstance(document, Document) and document.answers for document in documents)
    if not is_partial and recipe.images is None:
        return None
    mask = np.zeros(sum(lengths), np.bool_)
    start = 0
    for document, length in zip(documents, lengths, strict=True):
        targets: Ranges = ((0, length),)
        if isinstance(document, Document) and (document.answers or document.images):
            targets = document.target_tokens
        for first, end in targets:
            mask[start + first : start + end] = True
        start += length
    return mask


def _document_row(document: AnyDocument, num_tokens: int, files: Sequence[SourceFile]) -> tuple[int, ...]:
    """Return the ``DOCUMENT`` record of a document."""
    text = document.text.encode() if document.text is not None else b""
    if max(document.byte_length, len(text)) > _LARGEST_UINT32 or num_tokens > _LARGEST_INT32:
        raise DataError(
            f"A document of {document.byte_length:,} bytes and {num_tokens:,} tokens is too long for a cache",
            where=place_of(document, files), hint="split it into several records of less than 2 GiB",
        )  # fmt: skip
    if isinstance(document, TokenDocument):
        content = np.ascontiguousarray(document.tokens).view(np.uint8).data
    else:
        content = text if document.original is None else document.original.encode()
    place = (document.file_index, document.ordinal, document.byte_offset, document.byte_length)
    return (*place, num_tokens, len(text), xxhash.xxh3_64_intdigest(content))


def _convert_ids(
    document: AnyDocument, ids: npt.NDArray[Any], files: Sequence[SourceFile], recipe: Recipe
) -> npt.NDArray[Any]:  # fmt: skip
    """Convert ids to the stored dtype."""
    _check_vocabulary(document, ids, files, recipe)
    return ids.astype(recipe.dtype)


def _check_vocabulary(
    document: AnyDocument, ids: npt.NDArray[Any], files: Sequence[SourceFile], recipe: Recipe
) -> None:  # fmt: skip
    if not len(ids) or (int(ids.max()) < recipe.num_ids and int(ids.min()) >= 0):
        return
    wrong = int(ids.max()) if int(ids.max()) >= recipe.num_ids else int(ids.min())
    given = isinstance(document, TokenDocument)
    raise DataError(
        f"{'The source contains' if given else 'The tokenizer returned'} id {wrong}, "
        f"but {'the' if given else 'its'} vocabulary has {recipe.vocab_size} tokens",
        where=place_of(document, files),
        hint="the shards were written with another tokenizer" if given else
        "the tokenizer is inconsistent: train or load it again",
    )  # fmt: skip


def chunk_contents(
    unit: int,
    tokens: TokenArray,
    documents_D: npt.NDArray[np.void],
    recipe: Recipe,
    loss_mask: npt.NDArray[np.bool_] | None = None,
    rejected_starts_D: Int64Array | None = None,
) -> list[ChunkContent]:
    """Pack the documents of a unit into rows, and cut the rows into chunks; leave out rows that train nothing.

    ``rejected_starts_D`` has the first token of each rejected conversation, if the documents are preference pairs.
    """
    document_ends = np.cumsum(documents_D["num_tokens"].astype(np.int64))
    document_starts = document_ends - documents_D["num_tokens"]
    packing = pack(documents_D["num_tokens"], recipe.row_tokens, recipe.packing)
    if rejected_starts_D is not None:
        packing = split_pairs(packing, rejected_starts_D)
    order_R = permute(np.arange(packing.num_rows), packing.num_rows, permutation_key("rows", unit))
    if loss_mask is not None:
        order_R = order_R[_rows_with_targets(packing, document_starts, loss_mask)[order_R]]
    num_rows = len(order_R)
    if num_rows == 0:
        return []
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
    starts_F = document_starts[documents_F] + offsets_F
    _fill_rows(tokens_RC, tokens, starts_F, lengths_F, row_ptr)
    loss_mask_RC = None
    if loss_mask is not None:
        loss_mask_RC = np.zeros(tokens_RC.shape, np.bool_)
        _fill_rows(loss_mask_RC, loss_mask, starts_F, lengths_F, row_ptr)
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
                documents_D=documents_D[present],
                loss_mask_RC=None if loss_mask_RC is None else loss_mask_RC[first:last],
            )
        )
    return contents


def _rows_with_targets(
    packing: Packing, document_starts: npt.NDArray[np.int64], loss_mask: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Return whether each row trains any token; the first token of a fragment is never a target."""
    before = np.append(np.int64(0), np.cumsum(loss_mask))
    starts_F = document_starts[packing.documents] + packing.token_offsets
    targets_F = before[starts_F + packing.lengths] - before[starts_F + 1]
    return np.add.reduceat(targets_F, packing.row_ptr[:-1]) > 0 if packing.num_rows else np.zeros(0, np.bool_)


def _fill_rows(
    tokens_RC: npt.NDArray[Any],
    tokens: npt.NDArray[Any],
    starts_F: npt.NDArray[np.int64],
    lengths_F: npt.NDArray[np.int64],
    row_ptr: npt.NDArray[np.int64],
) -> None:
    """Copy fragments into the rows, contiguously from the start of each row."""
    before_F = np.cumsum(lengths_F) - lengths_F
    row_F = np.repeat(np.arange(len(row_ptr) - 1), np.diff(row_ptr))
    targets_F = before_F - before_F[row_ptr[:-1]][row_F] + row_F * tokens_RC.shape[1]
    flat = tokens_RC.reshape(-1)
    for start, target, length in zip(starts_F.tolist(), targets_F.tolist(), lengths_F.tolist(), strict=True):
        flat[target : target + length] = tokens[start : start + length]
