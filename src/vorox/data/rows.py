"""Packed rows: reader protocols, blocks read from caches, and their assembly into batches.

A *row* is ``row_tokens`` stored token ids (sequence length plus one): its segments in order, then padding. A *segment*
is a fragment of one document. ``assemble`` turns a block into a ``Batch`` of contiguous ``int32`` arrays, freshly
allocated, so that an engine may keep or change them. It is vectorised over the block: no Python per row except for the
hash. Invariant: a row of a batch depends on the stored row alone, never on its neighbours in the block.

Shape legend: N rows of the block, C stored tokens of a row, T = C - 1 positions, S segments of all rows, A
micro-batches of B rows.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import xxhash

from vorox.core.batch import IGNORED_LABEL, AnyImages, Batch, DataCursor, Int32Array
from vorox.core.errors import DataError
from vorox.data.images.decoding import BlankImage, ImageInput, PatchInput
from vorox.data.images.tokens import FIRST_IMAGE_ID, find_images
from vorox.data.recipe import Recipe

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows in the order of the request.

    Row ``i`` consists of the segments ``row_ptr[i]:row_ptr[i + 1]`` of the flat segment arrays, in order and without
    gaps; the rest of the row is padding.

    Attributes:
        tokens_NC: Stored token ids, uint16 or uint32, ``[N, row_tokens]``.
        row_ptr: Index of each row's first segment, int64 ``[N + 1]``.
        segment_lengths: Tokens per segment, int32, at least 1.
        segment_document_offsets: Token offset of each segment in its document, int32; 0 where a document starts.
        loss_mask_NC: Whether each token is trained on, ``[N, row_tokens]``; ``None``: all are.
        images: The encoded bytes of the images in the rows, by their hash; blank ones in masked documents.
        masked_NC: Whether each token is of a masked document, ``[N, row_tokens]``: a filler and no target, although the
            number of targets is that of the stored row; ``None``: none are.
        stored_digests_N: Digest of each row before documents were masked; ``None``: none are.
        erased_NC: Whether each token is of a document that was erased from its cache, ``[N, row_tokens]``; ``None``:
            none are.
        segment_start_tokens: Leading tokens of each segment that are no targets although the mask may say so, int32:
            those that a tokenizer adds before a document; ``None``: none are.
    """

    tokens_NC: TokenArray
    row_ptr: npt.NDArray[np.int64]
    segment_lengths: npt.NDArray[np.int32]
    segment_document_offsets: npt.NDArray[np.int32]
    loss_mask_NC: npt.NDArray[np.bool_] | None = None
    images: Mapping[int, bytes | BlankImage] = field(default_factory=dict[int, bytes | BlankImage])
    segment_start_tokens: npt.NDArray[np.int32] | None = None
    masked_NC: npt.NDArray[np.bool_] | None = None
    erased_NC: npt.NDArray[np.bool_] | None = None
    stored_digests_N: npt.NDArray[np.uint64] | None = None

    @property
    def num_rows(self) -> int:
        return int(self.tokens_NC.shape[0])

    @property
    def row_tokens(self) -> int:
        return int(self.tokens_NC.shape[1])


class RowReader(Protocol):
    """An open cache as the plan and the loader use it. Thread-safe."""

    @property
    def recipe(self) -> Recipe:
        """The recipe of the cache."""
        ...

    @property
    def unit_row_starts(self) -> npt.NDArray[np.int64]:
        """First row of each unit, then the total number of rows; rows are numbered in unit order."""
        ...

    @property
    def num_rows(self) -> int: ...

    @property
    def row_tokens(self) -> int: ...

    def rows_in(self, unit_start: int, unit_end: int, /) -> int:
        """Return the number of rows in the units ``[unit_start, unit_end)``."""
        ...

    def content_digest(self, unit_start: int, unit_end: int, /) -> str:
        """Return the digest of the content of these units, in unit order."""
        ...

    def read_rows(self, rows: npt.NDArray[np.int64], /) -> RowBlock:
        """Read rows in the order given, and verify them.

        Raises:
            DataError: A row does not match its hash.
        """
        ...


class GrowingReader(RowReader, Protocol):
    """A cache that may still be growing. A reader is a snapshot of the commits at the time it was opened."""

    @property
    def is_building(self) -> bool:
        """Whether this process builds the missing units."""
        ...

    @property
    def units_final(self) -> bool:
        """Whether the list of units is complete; otherwise more units follow on demand."""
        ...

    def missing_units(self, unit_start: int, unit_end: int, /) -> npt.NDArray[np.int64]:
        """Return the units in ``[unit_start, unit_end)`` that are planned but not built."""
        ...

    def refreshed(self, *, awaited_units: int = 0) -> GrowingReader:
        """Return a reader of the current commits.

        Args:
            awaited_units: The caller waits for all units below this one; caches that are built on demand start them.
        """
        ...


def assemble(
    block: RowBlock,
    *,
    document_mask: bool,
    step: int,
    cursor_after: DataCursor,
    num_micro_batches: int = 1,
    padding_rows: int = 0,
    row_pieces: int = 1,
    image_input: ImageInput | PatchInput | None = None,
) -> Batch:
    """Build the batch of a block of rows.

    Args:
        block: Rows in slot order.
        document_mask: Whether attention is confined to a document: labels do not cross segment borders, and segment and
            position ids are computed. Otherwise a row is one text.
        step: Step that trains on the batch.
        cursor_after: Data cursor after the batch.
        num_micro_batches: Number of micro-batches; it must divide the number of rows.
        padding_rows: Rows to append that carry no loss: token 0, ignored labels, segment 0, digest 0.
        row_pieces: Number of equal pieces that each row is split into. The label at a split is the next token, so every
            token is still predicted once; segments are renumbered from 1 and positions restart in each piece. A
            piece's digest is the hash of its row's digest and its index.
        image_input: How the model reads images; ``None`` if it reads text only.
    """
    num_positions = block.row_tokens - 1
    # One allocation: with several of this size, malloc returns the memory and faults it in again for each batch.
    shape = (4 if document_mask else 2, block.num_rows + padding_rows, num_positions)
    arrays = np.empty(shape, np.int32)
    num_target_tokens, masked_targets_NT = _write_rows(block, arrays[:, : block.num_rows], document_mask=document_mask)
    if padding_rows:
        arrays[:, block.num_rows :] = 0
        arrays[1, block.num_rows :] = IGNORED_LABEL
    if image_input is not None:
        ids = arrays[:2, : block.num_rows]
        ids[ids >= FIRST_IMAGE_ID] = image_input.token_id

    def digests_AB(digests_N: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        padding = np.zeros((padding_rows, row_pieces), np.uint64)
        return np.concatenate([_piece_digests(digests_N, row_pieces), padding]).reshape(num_micro_batches, -1)

    if row_pieces > 1:
        arrays = _split_rows(arrays, row_pieces)
    arrays_kABT = arrays.reshape(len(arrays), num_micro_batches, -1, arrays.shape[-1])
    return Batch(
        step=step,
        tokens_ABT=arrays_kABT[0],
        labels_ABT=arrays_kABT[1],
        segment_ids_ABT=arrays_kABT[2] if document_mask else None,
        position_ids_ABT=arrays_kABT[3] if document_mask else None,
        row_digests_AB=digests_AB(row_digests(block)),
        num_target_tokens=num_target_tokens,
        cursor_after=cursor_after,
        images_A=None if image_input is None else _images(block, image_input, num_micro_batches, padding_rows),
        masked_targets_ABT=None
        if masked_targets_NT is None
        else np.pad(masked_targets_NT, ((0, padding_rows), (0, 0))).reshape(arrays_kABT.shape[1:]),
        stored_digests_AB=None if block.stored_digests_N is None else digests_AB(block.stored_digests_N),
    )


def _images(
    block: RowBlock, image_input: ImageInput | PatchInput, num_micro_batches: int, padding_rows: int
) -> tuple[AnyImages, ...]:
    """Decode the images of each micro-batch."""
    rows_I, digests = find_images(block.tokens_NC)
    batch_rows = (block.num_rows + padding_rows) // num_micro_batches
    parts = [np.flatnonzero(rows_I // batch_rows == number) for number in range(num_micro_batches)]
    contents = [[block.images[digests[index]] for index in part] for part in parts]
    return tuple(
        image_input.read(found, rows_I[part] % batch_rows) for found, part in zip(contents, parts, strict=True)
    )


def _write_rows(
    block: RowBlock, arrays: Int32Array, *, document_mask: bool
) -> tuple[int, npt.NDArray[np.bool_] | None]:
    """Fill tokens, labels and, with a document mask, segment and position ids.

    Returns:
        The number of targets, masked ones included, and which are masked, ``[N, T]``; ``None`` if none are.
    """
    num_positions = block.row_tokens - 1
    arrays[0], arrays[1] = block.tokens_NC[:, :-1], block.tokens_NC[:, 1:]
    labels_NT = arrays[1]
    real_N = real_tokens(block)
    if document_mask:
        # Every token of a segment except the first is a target.
        num_target_tokens = int(block.segment_lengths.sum()) - block.segment_lengths.size
        ends_S, row_S = _segment_ends(block)
        crossing = ends_S <= num_positions
        labels_NT[row_S[crossing], ends_S[crossing] - 1] = IGNORED_LABEL
        _write_ids(block, ends_S, row_S, real_N, arrays[2], arrays[3])
    else:
        num_target_tokens = int(np.maximum(real_N - 1, 0).sum())
    for row in np.flatnonzero(real_N < block.row_tokens).tolist():  # few rows have padding
        labels_NT[row, max(int(real_N[row]) - 1, 0) :] = IGNORED_LABEL
    if block.loss_mask_NC is not None:
        labels_NT[~block.loss_mask_NC[:, 1:]] = IGNORED_LABEL
    if block.segment_start_tokens is not None:
        _ignore_starts(block, labels_NT)
    if block.loss_mask_NC is not None or block.segment_start_tokens is not None:
        num_target_tokens = int(np.count_nonzero(labels_NT != IGNORED_LABEL))
    if block.masked_NC is None:
        return num_target_tokens, None
    # After counting: the share of every other document in the loss stays.
    masked_targets_NT = block.masked_NC[:, 1:] & (labels_NT != IGNORED_LABEL)
    labels_NT[masked_targets_NT] = IGNORED_LABEL
    return num_target_tokens, masked_targets_NT


def _ignore_starts(block: RowBlock, labels_NT: npt.NDArray[np.int32]) -> None:
    """Ignore the labels that are the first tokens of documents, which no text determines."""
    assert block.segment_start_tokens is not None
    ends_S, row_S = _segment_ends(block)
    starts_S = ends_S - block.segment_lengths
    counts_S = np.minimum(block.segment_start_tokens, block.segment_lengths)
    for index in range(int(counts_S.max(initial=0))):
        # Token i of a row is the label of position i - 1.
        chosen = (counts_S > index) & (starts_S + index > 0)
        labels_NT[row_S[chosen], starts_S[chosen] + index - 1] = IGNORED_LABEL


def _split_rows(arrays: Int32Array, pieces: int) -> Int32Array:
    """Reshape rows of ``T`` positions into rows of ``T / pieces``; segment and position ids restart in each piece."""
    num_arrays, num_rows, num_positions = arrays.shape
    if num_positions % pieces:
        raise ValueError(f"Rows of {num_positions} positions cannot be split into {pieces} equal pieces")
    arrays = arrays.reshape(num_arrays, num_rows * pieces, num_positions // pieces)
    if num_arrays == 4:
        ids, positions = arrays[2], arrays[3]
        first = ids[:, :1].copy()
        positions[:] = np.where(ids == first, positions - positions[:, :1], positions)
        ids[:] = np.where(ids > 0, ids - first + 1, 0)
    return arrays


def _piece_digests(digests: npt.NDArray[np.uint64], pieces: int) -> npt.NDArray[np.uint64]:
    """Return the digest of each piece of each row, ``[N, pieces]``; an unsplit row keeps its digest."""
    if pieces == 1:
        return digests[:, None]
    piece_digests = np.empty((len(digests), pieces), np.uint64)
    for piece in range(pieces):
        for row, digest in enumerate(digests.tolist()):
            piece_digests[row, piece] = xxhash.xxh3_64_intdigest(struct.pack("<QII", digest, piece, pieces))
    return piece_digests


def row_digests(block: RowBlock) -> npt.NDArray[np.uint64]:
    """Return the digest of each row: xxh3-64 of its stored token bytes, its segment lengths as int32, its loss mask.

    A row without a masked token has the digest of a row without a mask.
    """
    tokens = np.ascontiguousarray(block.tokens_NC).reshape(-1).data.cast("B")
    lengths = np.ascontiguousarray(block.segment_lengths, np.int32).data.cast("B")
    row_bytes = block.row_tokens * block.tokens_NC.dtype.itemsize
    bounds = (block.row_ptr * 4).tolist()
    digests = np.empty(block.num_rows, np.uint64)
    for row in range(block.num_rows):
        digest = xxhash.xxh3_64(tokens[row * row_bytes : (row + 1) * row_bytes])
        digest.update(lengths[bounds[row] : bounds[row + 1]])
        if block.loss_mask_NC is not None and not block.loss_mask_NC[row].all():
            digest.update(np.packbits(block.loss_mask_NC[row]).tobytes())
        digests[row] = digest.intdigest()
    return digests


def read_rows(readers: Sequence[RowReader | None], source_index: npt.NDArray[np.integer], rows: Int64Array) -> RowBlock:
    """Read rows of several sources into one block, in the order given.

    Args:
        readers: The caches, by source; ``None`` for a source that was removed.
        source_index: Source of each row.
        rows: Row number in the source's cache.

    Raises:
        DataError: A row is damaged, or its source has been removed from the configuration.
    """
    if not rows.size:  # a shard may have no row in the last validation batch
        return next(reader for reader in readers if reader is not None).read_rows(rows)
    order = np.argsort(source_index, kind="stable")
    sources = source_index[order]
    if sources[0] == sources[-1]:
        return _present(readers[int(sources[0])]).read_rows(rows)
    cuts = [0, *(np.flatnonzero(sources[1:] != sources[:-1]) + 1).tolist(), len(order)]
    slots = [order[first:last] for first, last in itertools.pairwise(cuts)]
    blocks = [
        _present(readers[int(sources[first])]).read_rows(rows[at]) for first, at in zip(cuts[:-1], slots, strict=True)
    ]
    return interleave(blocks, slots)


def _present(reader: RowReader | None) -> RowReader:
    if reader is None:
        raise DataError(
            "The step needs rows of a source that was removed from the configuration", where="data.sources",
            hint="resume from a checkpoint after the step at which the source was removed",
        )  # fmt: skip
    return reader


def interleave(blocks: Sequence[RowBlock], slots: Sequence[Int64Array]) -> RowBlock:
    """Merge the blocks of several sources into one block in slot order.

    Args:
        blocks: Rows of each source.
        slots: Slot of each row of each block; together they cover every slot once.
    """
    order = np.concatenate(slots)
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    row_segments = np.concatenate([block.row_ptr[1:] - block.row_ptr[:-1] for block in blocks])
    first = (np.cumsum(row_segments) - row_segments)[inverse]
    counts = row_segments[inverse]
    row_ptr = np.zeros(len(order) + 1, np.int64)
    np.cumsum(counts, out=row_ptr[1:])
    segments = np.arange(int(row_ptr[-1])) + np.repeat(first - row_ptr[:-1], counts)
    loss_mask_NC = None
    if any(block.loss_mask_NC is not None for block in blocks):
        masks = [
            np.ones(block.tokens_NC.shape, np.bool_) if block.loss_mask_NC is None else block.loss_mask_NC
            for block in blocks
        ]
        loss_mask_NC = np.concatenate(masks)[inverse]
    erased_NC = None
    if any(block.erased_NC is not None for block in blocks):
        parts = [
            np.zeros(block.tokens_NC.shape, np.bool_) if block.erased_NC is None else block.erased_NC
            for block in blocks
        ]
        erased_NC = np.concatenate(parts)[inverse]
    start_tokens = None
    if any(block.segment_start_tokens is not None for block in blocks):
        counts = [
            np.zeros(block.segment_lengths.size, np.int32)
            if block.segment_start_tokens is None
            else block.segment_start_tokens
            for block in blocks
        ]
        start_tokens = np.concatenate(counts)[segments]
    return RowBlock(
        tokens_NC=cast("TokenArray", np.concatenate([block.tokens_NC for block in blocks])[inverse]),
        row_ptr=row_ptr,
        segment_lengths=np.concatenate([block.segment_lengths for block in blocks])[segments],
        segment_document_offsets=np.concatenate([block.segment_document_offsets for block in blocks])[segments],
        loss_mask_NC=loss_mask_NC,
        images={digest: content for block in blocks for digest, content in block.images.items()},
        segment_start_tokens=start_tokens,
        erased_NC=erased_NC,
    )


def real_tokens(block: RowBlock) -> Int64Array:
    """Return the number of tokens of each row that are not padding."""
    total = np.concatenate([[0], np.cumsum(block.segment_lengths, dtype=np.int64)])
    return total[block.row_ptr[1:]] - total[block.row_ptr[:-1]]


def _segment_ends(block: RowBlock) -> tuple[Int64Array, Int64Array]:
    """Return the end of each segment within its row (exclusive), and the row of each segment."""
    row_S = np.repeat(np.arange(block.num_rows), np.diff(block.row_ptr))
    total = np.concatenate([[0], np.cumsum(block.segment_lengths, dtype=np.int64)])
    return total[1:] - total[block.row_ptr[row_S]], row_S


def _write_ids(
    block: RowBlock, ends_S: Int64Array, row_S: Int64Array, real_N: Int64Array, ids: Int32Array, positions: Int32Array
) -> None:
    """Fill segment ids (1-based within the row; padding is segment 0) and position ids (0-based within the segment)."""
    num_positions = ids.shape[1]
    starts = (ends_S - block.segment_lengths).astype(np.int32)
    lengths = np.minimum(ends_S, num_positions) - starts  # the last token of a full row is a label only
    numbers = (np.arange(1, row_S.size + 1) - block.row_ptr[row_S]).astype(np.int32)
    padding_N = np.maximum(num_positions - real_N, 0)
    if padding_N.any():
        row_ends = block.row_ptr[1:]
        lengths = np.insert(lengths, row_ends, padding_N)
        starts = np.insert(starts, row_ends, real_N)
        numbers = np.insert(numbers, row_ends, 0)
    ids.reshape(-1)[:] = np.repeat(numbers, lengths)
    np.subtract(np.arange(num_positions, dtype=np.int32), np.repeat(starts, lengths).reshape(ids.shape), out=positions)
