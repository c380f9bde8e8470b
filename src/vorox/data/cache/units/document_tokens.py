"""The documents of a unit as tokens, with loss mask, and the refusal of those that must fit a row.

Nothing is written here. Invariant: the result is a function of the records, the recipe and the tokenizer alone.

Texts get what their tokenizer adds before and after them (``Recipe.start_ids``, ``document_end_ids``); conversations
have the tokens that their template writes, and nothing else. A preference pair is one document: the chosen conversation
and the rejected one. Packing keeps it whole (``packing.split_pairs``).

Legend: D documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import xxhash

from vorox.core.errors import DataError
from vorox.data.cache.files.format import DOCUMENT, ChunkContent
from vorox.data.cache.files.manifest import UnitStatistics
from vorox.data.documents import AnyDocument, BadRecord, Document, Ranges, SourceFile, TokenDocument, Unit, place_of
from vorox.data.images.layout import ImageLayout
from vorox.data.recipe import Recipe
from vorox.data.rows import TokenArray
from vorox.data.text.unit_reader import DocumentBatch
from vorox.data.transforms.apply import Counts

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


@dataclass(frozen=True, slots=True)
class TokenizedDocuments:
    """Documents of one unit in stored form: those of a batch, or, after ``gather``, all of them.

    Attributes:
        unit: The unit.
        tokens: The concatenated documents, each with the tokens before and after it.
        documents_D: ``DOCUMENT`` records.
        loss_mask: Whether each token is trained on; ``None``: all are.
        rejected_starts_D: First token of the rejected conversation of each document; ``None`` if they are no pairs.
        bad_records: Unreadable records.
        records_read: Records read, including bad and removed ones.
        is_last: Whether these are the unit's last documents.
        aborted: Reading stopped after too many consecutive bad records.
        counts: Counts of each transform.
    """

    unit: Unit
    tokens: TokenArray
    documents_D: npt.NDArray[np.void]
    loss_mask: npt.NDArray[np.bool_] | None
    rejected_starts_D: npt.NDArray[np.int64] | None
    bad_records: tuple[BadRecord, ...]
    records_read: int
    is_last: bool
    aborted: bool
    counts: Counts

    @property
    def size_bytes(self) -> int:
        return self.tokens.nbytes + self.documents_D.nbytes

    @property
    def place(self) -> str:
        return self.unit.place


def unit_statistics(
    unit: int, documents_D: npt.NDArray[np.void], quarantined: int, contents: Iterable[ChunkContent]
) -> UnitStatistics:
    """Return the counts of a unit, from its documents and its chunks."""
    return UnitStatistics(
        unit=unit,
        documents=len(documents_D),
        text_bytes=int(documents_D["text_bytes"].sum(dtype=np.int64)),
        tokens=int(documents_D["num_tokens"].sum(dtype=np.int64)),
        quarantined=quarantined,
        targets=sum(content.num_targets for content in contents),
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
    """Return the documents and their token ids, without those before and after a document (``framed``).

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
            document, ids = _with_images(document, own, images)
        elif document.answers:
            start_ids: tuple[int, ...] = getattr(encoder, "start_ids", ()) if document.is_started else ()
            document, ids = _with_targets(document, marked, start_ids)
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
        ids.append(part)
        if number < len(images):
            ids.append(layout.ids(images[number].digest, images[number].num_tokens))
        first_token = sum(map(len, ids))
    return replace(document, target_tokens=tuple(targets)), np.concatenate([part.astype(np.uint32) for part in ids])


def _with_targets(
    document: Document,
    encoded: Iterator[tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]],
    start_ids: tuple[int, ...],
) -> tuple[Document, npt.NDArray[np.integer]]:
    """Return a document with its ids and the tokens of its answers; each of its texts follows ``start_ids``."""
    parts: list[npt.NDArray[np.integer]] = []
    targets: list[tuple[int, int]] = []
    first_character = first_token = rejected_token = 0
    for text in _conversations(document):
        ids, ranges_N2 = next(encoded)
        rejected_token = first_token
        parts += [np.array(start_ids, ids.dtype), ids]
        first_token += len(start_ids)
        found = _tokens_of(document.answers, ranges_N2 + first_character)
        targets += [(first_token + start, first_token + end) for start, end in found]
        first_character += len(text)
        first_token += len(ids)
    return replace(document, target_tokens=tuple(targets), rejected_token=rejected_token), np.concatenate(parts)


def framed(ids: npt.NDArray[Any], recipe: Recipe) -> npt.NDArray[Any]:
    """Return the ids of a document with the tokens before and after it."""
    return np.concatenate([np.array(recipe.start_ids, ids.dtype), ids, np.array(recipe.document_end_ids, ids.dtype)])


def _tokens_of(answers: Ranges, ranges_N2: npt.NDArray[np.int64]) -> Ranges:
    """Return the tokens of each range of characters; ``ranges_N2`` has the characters of each token."""
    found: list[tuple[int, int]] = []
    for start, end in answers:
        inside = np.flatnonzero((ranges_N2[:, 0] < end) & (ranges_N2[:, 1] > start))
        if inside.size:
            found.append((int(inside[0]), int(inside[-1]) + 1))
    return tuple(found)


def is_pair(document: AnyDocument) -> bool:
    """Whether a document is a preference pair."""
    return isinstance(document, Document) and document.rejected_start > 0


def _reject_unfit(
    documents: Sequence[AnyDocument], tokens: Sequence[npt.NDArray[Any]], recipe: Recipe
) -> tuple[list[AnyDocument], list[npt.NDArray[Any]], list[BadRecord]]:
    """Return the documents and their tokens without those that cannot be trained on, and these as bad records.

    Pairs and documents with images must fit into a row.
    """
    kept: list[AnyDocument] = []
    kept_tokens: list[npt.NDArray[Any]] = []
    bad: list[BadRecord] = []
    num_added = len(recipe.start_ids) + len(recipe.document_end_ids)
    for document, ids in zip(documents, tokens, strict=True):
        is_text = isinstance(document, Document)
        reason = _fault(document, len(ids) + num_added, recipe.row_tokens) if is_text else ""
        if reason:
            place = (document.file_index, document.ordinal, document.byte_offset, document.byte_length)
            bad.append(BadRecord(*place, None, reason))
        else:
            kept.append(document)
            kept_tokens.append(ids)
    return kept, kept_tokens, bad


def _fault(document: Document, num_tokens: int, row_tokens: int) -> str:
    if document.images and num_tokens > row_tokens:
        return (
            f"the document has {num_tokens:,} tokens with its images, more than the {row_tokens:,} of a row: increase "
            "data.sequence_length_tokens, or reduce the images (model.image_processor.max_pixels, model.vision)"
        )
    if not is_pair(document):
        return ""
    if num_tokens > row_tokens:
        return (
            f"the preference pair has {num_tokens:,} tokens, more than the {row_tokens:,} of a row: increase "
            "data.sequence_length_tokens"
        )
    middle = document.rejected_token
    for name, first, end in (("chosen", 0, middle), ("rejected", middle, num_tokens)):
        if not any(max(start, first + 1) < min(stop, end) for start, stop in document.target_tokens):
            return f"the {name} answer has no token to train on"
    return ""


def finish_documents(
    batch: DocumentBatch,
    documents: Sequence[AnyDocument],
    tokens: Sequence[npt.NDArray[Any]],
    files: Sequence[SourceFile],
    recipe: Recipe,
) -> TokenizedDocuments:
    """Convert the documents of a batch to stored form, which lets their texts be freed.

    A ``DOCUMENT`` record has the size of the tokenised text, but the place
    and the hash of the original one before transforms, so provenance can check whether the source still has it. For
    documents without text the tokens are hashed.

    Args:
        batch: The batch, for its unit, bad records and counts.
        documents: Its documents, after the transforms.
        tokens: Their token ids, without those before and after a document.
        files: The source files.
        recipe: The recipe of the cache.

    Raises:
        DataError: An id is not in the vocabulary, or a document is too long for a cache.
    """
    documents, tokens, unfit = _reject_unfit(documents, tokens, recipe)
    nothing = np.zeros(0, recipe.dtype)
    start, end = np.array(recipe.start_ids, recipe.dtype), np.array(recipe.document_end_ids, recipe.dtype)
    stored = [ids if ids.dtype == nothing.dtype else _convert_ids(document, ids, files, recipe)
              for document, ids in zip(documents, tokens, strict=True)]  # fmt: skip
    flat = cast("TokenArray", np.concatenate([nothing, *(part for ids in stored for part in (start, ids, end))]))
    if flat.size and int(flat.max()) >= recipe.num_ids:
        for document, ids in zip(documents, stored, strict=True):
            _check_vocabulary(document, ids, files, recipe)
    lengths = [len(start) + len(ids) + len(end) for ids in stored]
    numbers = {index: number for number, index in enumerate(batch.unit.file_indexes)}
    rows = [
        (numbers[document.file_index], *_document_row(document, length, files))
        for document, length in zip(documents, lengths, strict=True)
    ]
    return TokenizedDocuments(
        unit=batch.unit,
        tokens=flat,
        documents_D=np.array(rows, DOCUMENT),
        loss_mask=_loss_mask(documents, lengths, recipe),
        rejected_starts_D=_rejected_starts(documents),
        bad_records=(*batch.bad_records, *unfit),
        records_read=batch.records_read,
        is_last=batch.is_last,
        aborted=batch.aborted,
        counts=batch.counts,
    )


def _loss_mask(
    documents: Sequence[AnyDocument], lengths: Sequence[int], recipe: Recipe
) -> npt.NDArray[np.bool_] | None:
    is_partial = any(isinstance(document, Document) and document.answers for document in documents)
    if not is_partial and recipe.images is None:
        return None
    mask = np.zeros(sum(lengths), np.bool_)
    start = 0
    num_before, num_after = len(recipe.start_ids), len(recipe.document_end_ids)
    for document, length in zip(documents, lengths, strict=True):
        targets: Ranges = ((0, length),)
        if isinstance(document, Document) and (document.answers or document.images):
            after = () if document.answers else ((length - num_after, length),)
            targets = (*((num_before + first, num_before + end) for first, end in document.target_tokens), *after)
        for first, end in targets:
            mask[start + first : start + end] = True
        start += length
    return mask


def _document_row(document: AnyDocument, num_tokens: int, files: Sequence[SourceFile]) -> tuple[int, ...]:
    """Return the ``DOCUMENT`` record of a document, without its file."""
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
    place = (document.ordinal, document.byte_offset, document.byte_length)
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


def _rejected_starts(documents: Sequence[AnyDocument]) -> npt.NDArray[np.int64] | None:
    """Return the first token of the rejected conversation of each document; ``None`` if they are no pairs."""
    starts = [document.rejected_token for document in documents if isinstance(document, Document) and is_pair(document)]
    assert len(starts) in {0, len(documents)}, "a source consists of pairs or of none"
    return np.array(starts, np.int64) if starts else None
