"""Packed rows: blocks as caches return them, the protocols of their readers, and the batch of a block.

A *row* is ``row_tokens`` stored token ids (sequence length plus one): its segments in order, then padding. A *segment*
is a fragment of one document. ``assemble`` turns a block into a ``Batch`` of contiguous ``int32`` arrays, freshly
allocated, so that an engine may keep or change them. It is vectorised over the block: no Python per row except for the
hash. Invariant: a row of a batch depends on the stored row alone, never on its neighbours in the block.

Shape legend: N rows of the block, C stored tokens of a row, T = C - 1 positions, S segments of all rows, A
micro-batches of B rows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import xxhash

from vorox.core.batch import IGNORED_LABEL, Batch, DataCursor, Int32Array
from vorox.data.cache.recipe import Recipe

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows in the order in which they were requested.

    Row ``i`` has the segments ``row_ptr[i]:row_ptr[i + 1]`` of the flat segment arrays, in row order and without gaps;
    the rest of the row is padding.

    Attributes:
        tokens_NC: Stored token ids, uint16 or uint32, ``[N, row_tokens]``.
        row_ptr: Index of each row's first segment, int64 ``[N + 1]``.
        segment_lengths: Tokens of each segment, int32, at least 1.
        segment_document_offsets: Token offset of each segment in its document, int32: 0 where a document starts.
    """

    tokens_NC: TokenArray
    row_ptr: npt.NDArray[np.int64]
    segment_lengths: npt.NDArray[np.int32]
    segment_document_offsets: npt.NDArray[np.int32]

    @property
    def num_rows(self) -> int:
        return int(self.tokens_NC.shape[0])

    @property
    def row_tokens(self) -> int:
        return int(self.tokens_NC.shape[1])


class RowReader(Protocol):
    """An open cache, as the plan and the loader see it. Safe to read from several threads."""

    @property
    def recipe(self) -> Recipe:
        """What the rows are a function of."""
        ...

    @property
    def unit_row_starts(self) -> npt.NDArray[np.int64]:
        """First row of each unit, and the number of rows at the end; rows are numbered in unit order."""
        ...

    @property
    def num_rows(self) -> int: ...

    @property
    def row_tokens(self) -> int: ...

    def rows_in(self, unit_start: int, unit_end: int, /) -> int:
        """Rows of the units ``[unit_start, unit_end)``."""
        ...

    def content_digest(self, unit_start: int, unit_end: int, /) -> str:
        """Digest of the content of those units, in unit order."""
        ...

    def read_rows(self, rows: npt.NDArray[np.int64], /) -> RowBlock:
        """Read and verify rows, in the order given.

        Raises:
            DataError: A row does not match its hash.
        """
        ...


class GrowingReader(RowReader, Protocol):
    """A cache that may still be growing. It sees what was committed when it was opened."""

    @property
    def is_building(self) -> bool:
        """Whether this process builds what it lacks."""
        ...

    @property
    def units_final(self) -> bool:
        """Whether the units that it sees are all of the source; else more follow, as they are awaited."""
        ...

    def missing_units(self, unit_start: int, unit_end: int, /) -> npt.NDArray[np.int64]:
        """Those of the units ``[unit_start, unit_end)`` that are planned and not built."""
        ...

    def refreshed(self, *, awaited_units: int = 0) -> GrowingReader:
        """Return a reader of what is committed by now.

        Args:
            awaited_units: The caller waits for all units below this one; for caches that are built on demand.
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
) -> Batch:
    """Build the batch of a block of rows.

    Args:
        block: Rows in slot order.
        document_mask: Whether documents are kept apart: no label crosses from one segment into the next, and segment
            and position ids are computed. If not, a row is one text.
        step: Step that trains on the batch.
        cursor_after: Data state after the batch.
        num_micro_batches: Micro-batches that the rows are divided into; they must divide evenly.
        padding_rows: Rows to append that nothing is trained on: token 0, no label, segment 0, digest 0.
        row_pieces: Pieces of equal length that each row is split into, one after the other. The label at a split is
            the next token, so every token is predicted as often as before; segments are renumbered from 1 and
            positions restart in each piece. The digest of a piece is that of its row and its index.
    """
    num_positions = block.row_tokens - 1
    # One allocation: several of this size at once make malloc return memory and fault it in again for each batch.
    shape = (4 if document_mask else 2, block.num_rows + padding_rows, num_positions)
    arrays = np.empty(shape, np.int32)
    num_target_tokens = _write_rows(block, arrays[:, : block.num_rows], document_mask=document_mask)
    if padding_rows:
        arrays[:, block.num_rows :] = 0
        arrays[1, block.num_rows :] = IGNORED_LABEL
    digests = np.zeros((block.num_rows + padding_rows, row_pieces), np.uint64)
    digests[: block.num_rows] = _piece_digests(row_digests(block), row_pieces)
    if row_pieces > 1:
        arrays = _split_rows(arrays, row_pieces)
    arrays_kABT = arrays.reshape(len(arrays), num_micro_batches, -1, arrays.shape[-1])
    return Batch(
        step=step,
        tokens_ABT=arrays_kABT[0],
        labels_ABT=arrays_kABT[1],
        segment_ids_ABT=arrays_kABT[2] if document_mask else None,
        position_ids_ABT=arrays_kABT[3] if document_mask else None,
        row_digests_AB=digests.reshape(num_micro_batches, -1),
        num_target_tokens=num_target_tokens,
        cursor_after=cursor_after,
    )


def _write_rows(block: RowBlock, arrays: Int32Array, *, document_mask: bool) -> int:
    """Fill tokens, labels and, under a document mask, segment and position ids; return the number of targets."""
    num_positions = block.row_tokens - 1
    arrays[0], arrays[1] = block.tokens_NC[:, :-1], block.tokens_NC[:, 1:]
    labels_NT = arrays[1]
    real_N = _real_tokens(block)
    if document_mask:
        # All tokens of a segment are targets but the first.
        num_target_tokens = int(block.segment_lengths.sum()) - block.segment_lengths.size
        ends_S, row_S = _segment_ends(block)
        crossing = ends_S <= num_positions
        labels_NT[row_S[crossing], ends_S[crossing] - 1] = IGNORED_LABEL
        _write_ids(block, ends_S, row_S, real_N, arrays[2], arrays[3])
    else:
        num_target_tokens = int(np.maximum(real_N - 1, 0).sum())
    for row in np.flatnonzero(real_N < block.row_tokens).tolist():  # rows with padding, which are few
        labels_NT[row, max(int(real_N[row]) - 1, 0) :] = IGNORED_LABEL
    return num_target_tokens


def _split_rows(arrays: Int32Array, pieces: int) -> Int32Array:
    """The same positions as rows of ``T / pieces``, with segment and position ids that restart in each piece."""
    num_arrays, num_rows, num_positions = arrays.shape
    if num_positions % pieces:
        raise ValueError(f"rows of {num_positions} positions cannot be split into {pieces} equal pieces")
    arrays = arrays.reshape(num_arrays, num_rows * pieces, num_positions // pieces)
    if num_arrays == 4:
        ids, positions = arrays[2], arrays[3]
        first = ids[:, :1].copy()
        positions[:] = np.where(ids == first, positions - positions[:, :1], positions)
        ids[:] = np.where(ids > 0, ids - first + 1, 0)
    return arrays


def _piece_digests(digests: npt.NDArray[np.uint64], pieces: int) -> npt.NDArray[np.uint64]:
    """The digest of each piece of each row, ``[N, pieces]``; of a whole row its own."""
    if pieces == 1:
        return digests[:, None]
    of_pieces = np.empty((len(digests), pieces), np.uint64)
    for piece in range(pieces):
        for row, digest in enumerate(digests.tolist()):
            of_pieces[row, piece] = xxhash.xxh3_64_intdigest(struct.pack("<QII", digest, piece, pieces))
    return of_pieces


def row_digests(block: RowBlock) -> npt.NDArray[np.uint64]:
    """The identity of each row: xxh3-64 of its token bytes as stored, then its segment lengths as int32."""
    tokens = np.ascontiguousarray(block.tokens_NC).reshape(-1).data.cast("B")
    lengths = np.ascontiguousarray(block.segment_lengths, np.int32).data.cast("B")
    row_bytes = block.row_tokens * block.tokens_NC.dtype.itemsize
    bounds = (block.row_ptr * 4).tolist()
    digests = np.empty(block.num_rows, np.uint64)
    for row in range(block.num_rows):
        digest = xxhash.xxh3_64(tokens[row * row_bytes : (row + 1) * row_bytes])
        digest.update(lengths[bounds[row] : bounds[row + 1]])
        digests[row] = digest.intdigest()
    return digests


def interleave(blocks: Sequence[RowBlock], slots: Sequence[Int64Array]) -> RowBlock:
    """One block in slot order from the blocks of several sources.

    Args:
        blocks: Rows of each source.
        slots: Where each of their rows goes; together every slot once.
    """
    order = np.concatenate(slots)
    where = np.empty_like(order)
    where[order] = np.arange(len(order))
    in_turn = np.concatenate([block.row_ptr[1:] - block.row_ptr[:-1] for block in blocks])  # segments of each row
    first = (np.cumsum(in_turn) - in_turn)[where]
    counts = in_turn[where]
    row_ptr = np.zeros(len(order) + 1, np.int64)
    np.cumsum(counts, out=row_ptr[1:])
    taken = np.arange(int(row_ptr[-1])) + np.repeat(first - row_ptr[:-1], counts)
    return RowBlock(
        tokens_NC=cast("TokenArray", np.concatenate([block.tokens_NC for block in blocks])[where]),
        row_ptr=row_ptr,
        segment_lengths=np.concatenate([block.segment_lengths for block in blocks])[taken],
        segment_document_offsets=np.concatenate([block.segment_document_offsets for block in blocks])[taken],
    )


def _real_tokens(block: RowBlock) -> Int64Array:
    """Tokens of each row that are not padding."""
    total = np.concatenate([[0], np.cumsum(block.segment_lengths, dtype=np.int64)])
    return total[block.row_ptr[1:]] - total[block.row_ptr[:-1]]


def _segment_ends(block: RowBlock) -> tuple[Int64Array, Int64Array]:
    """Place within its row behind each segment's last token, and the row of each segment."""
    row_S = np.repeat(np.arange(block.num_rows), np.diff(block.row_ptr))
    total = np.concatenate([[0], np.cumsum(block.segment_lengths, dtype=np.int64)])
    return total[1:] - total[block.row_ptr[row_S]], row_S


def _write_ids(
    block: RowBlock, ends_S: Int64Array, row_S: Int64Array, real_N: Int64Array, ids: Int32Array, positions: Int32Array
) -> None:
    """Number of the segment in its row, from 1, and place in the segment, from 0; padding is a segment numbered 0."""
    num_positions = ids.shape[1]
    starts = (ends_S - block.segment_lengths).astype(np.int32)
    lengths = np.minimum(ends_S, num_positions) - starts  # the last token of a full row is a label only
    numbers = (np.arange(1, row_S.size + 1) - block.row_ptr[row_S]).astype(np.int32)
    padding_N = np.maximum(num_positions - real_N, 0)
    if padding_N.any():
        behind = block.row_ptr[1:]
        lengths = np.insert(lengths, behind, padding_N)
        starts = np.insert(starts, behind, real_N)
        numbers = np.insert(numbers, behind, 0)
    ids.reshape(-1)[:] = np.repeat(numbers, lengths)
    np.subtract(np.arange(num_positions, dtype=np.int32), np.repeat(starts, lengths).reshape(ids.shape), out=positions)
