"""Packing documents into rows, and the rows of a unit as the contents of its chunks.

``pack`` takes document lengths and returns rows of fragments. A row has ``row_tokens`` tokens, one more than the model
sees, so that every position has a target.

``best_fit`` keeps every document that fits into a row whole. A longer document is split into fragments that overlap by
one token: the last token of a fragment is its last target and the first input of the next. Fragments are packed longest
first, each into the fullest row with enough room; finally, rows that contain only ends of long documents are dissolved
to fill the other rows. ``concat`` splits the stream of all documents every ``row_tokens - 1`` tokens, as most trainers
do.

Packing sorts rows by document length. Stored in that order they would form a hidden curriculum for sequential readers,
so ``chunk_contents`` permutes the rows of a unit by a key that depends only on the texts of the unit.

Invariants: nothing is discarded but rows without a target; each token of a document except its first is a target
exactly once; rows are a function of the lengths, and of the hashes of the texts, alone; the segments of a row of
preference pairs alternate between chosen and rejected, so segments 1 and 2 are a pair, 3 and 4 the next.

Legend: R rows, C tokens of a row, F fragments, D documents.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.schema.data import PackingMethod
from vorox.data.cache.files.format import ChunkContent
from vorox.data.permutation import permutation_key, permute
from vorox.data.recipe import Recipe
from vorox.data.rows import TokenArray

_FULL_PERCENT = 98
"""Rows at least this full are not filled further: the pieces would be too short to learn from."""

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Packing:
    """Rows of fragments.

    Row ``i`` consists of the fragments ``row_ptr[i]:row_ptr[i + 1]`` in order, then padding.

    Attributes:
        row_tokens: Capacity of a row.
        row_ptr: Index of each row's first fragment, ``[rows + 1]``.
        documents: Document of each fragment, an index into the lengths.
        token_offsets: First token of each fragment within its document.
        lengths: Tokens of each fragment.
    """

    row_tokens: int
    row_ptr: Int64Array
    documents: Int64Array
    token_offsets: Int64Array
    lengths: Int64Array

    @property
    def num_rows(self) -> int:
        return len(self.row_ptr) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding; a token shared by two fragments counts twice."""
        return int(self.lengths.sum())

    @property
    def padding_tokens(self) -> int:
        return self.num_rows * self.row_tokens - self.num_tokens

    @property
    def utilisation_fraction(self) -> float:
        """Fraction of tokens that are not padding; 1 if there are no rows."""
        return self.num_tokens / (self.num_rows * self.row_tokens) if self.num_rows else 1.0


def pack(
    lengths: Sequence[int] | npt.NDArray[np.integer],
    row_tokens: int,
    method: PackingMethod = "best_fit",
) -> Packing:
    """Pack documents of the given lengths into rows.

    Args:
        lengths: Tokens of each document, including its end-of-text token. Empty documents take no space.
        row_tokens: Tokens of a row, at least 2.
        method: ``best_fit`` or ``concat``.

    Returns:
        The rows, in the order in which they were opened.
    """
    if row_tokens < 2:
        raise ValueError(f"row_tokens is {row_tokens}; the minimum is 2")
    lengths_D = np.asarray(lengths, dtype=np.int64)
    if lengths_D.size and int(lengths_D.min()) < 0:
        raise ValueError("A document has a negative length")
    return _METHODS[method](lengths_D, row_tokens)


def _pack_best_fit(lengths_D: Int64Array, row_tokens: int) -> Packing:
    documents, offsets, lengths_F = split_documents(lengths_D, row_tokens)
    rows = _best_fit(lengths_F.tolist(), row_tokens)
    fragments = np.stack([documents, offsets, lengths_F], axis=1).tolist()
    rows = _fill_open_rows(rows, fragments, lengths_D > row_tokens, row_tokens)
    placed_F3 = np.array([fragments[fragment] for row in rows for fragment in row], dtype=np.int64).reshape(-1, 3)
    row_ptr = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=row_ptr[1:])
    return Packing(row_tokens, row_ptr, *np.ascontiguousarray(placed_F3.T))


def split_documents(lengths_D: Int64Array, row_tokens: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return document, token offset and length of every fragment, in document order.

    Every fragment except a document's last fills a row; neighbours share one token.
    """
    stride = row_tokens - 1
    counts_D = np.maximum((lengths_D - 2) // stride + 1, 1) * (lengths_D > 0)
    documents = np.repeat(np.arange(len(lengths_D), dtype=np.int64), counts_D)
    first_D = np.cumsum(counts_D) - counts_D
    offsets = (np.arange(len(documents), dtype=np.int64) - first_D[documents]) * stride
    return documents, offsets, np.minimum(lengths_D[documents] - offsets, row_tokens)


def _best_fit(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Return the fragments of every row, packed by best-fit decreasing.

    Open rows are indexed by their free space, and bit ``n`` of an integer is set while some row has ``n`` free tokens.
    The lowest set bit at or above a fragment's length is the best fit, found in constant time for any row length.
    """
    rows: list[list[int]] = []
    rows_by_free: list[list[int]] = [[] for _ in range(row_tokens + 1)]
    free_mask = 0
    longest_first: list[int] = np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()
    for fragment in longest_first:
        length = lengths[fragment]
        fitting = free_mask >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            row = rows_by_free[free].pop()
            if not rows_by_free[free]:
                free_mask &= ~(1 << free)
            rows[row].append(fragment)
        else:
            free, row = row_tokens, len(rows)
            rows.append([fragment])
        free -= length
        if free:
            rows_by_free[free].append(row)
            free_mask |= 1 << free
    return rows


def _fill_open_rows(
    rows: list[list[int]], fragments: list[list[int]], is_long_D: npt.NDArray[np.bool_], row_tokens: int
) -> list[list[int]]:
    """Dissolve the emptiest rows that contain only ends of long documents, and fill the other open rows with them.

    Once the short documents are packed, best fit leaves every end longer than half a row alone in its row. Long
    documents are split anyway, so splitting them once more costs less than padding. Filling the rows with the most
    space first keeps the number of pieces small.

    Args:
        rows: Fragments of every row; extended in place.
        fragments: Document, offset and length of each fragment; extended in place.
        is_long_D: Documents that do not fit into a row.

    Returns:
        The remaining rows.
    """
    least_free = max(2, row_tokens - row_tokens * _FULL_PERCENT // 100)
    free = [row_tokens - sum(fragments[fragment][2] for fragment in held) for held in rows]
    roomiest_first = sorted((row for row in range(len(rows)) if free[row] >= least_free), key=lambda row: -free[row])
    receivers = deque(roomiest_first)
    room = sum(free[row] - 1 for row in roomiest_first)  # consecutive pieces share a token
    filled: set[int] = set()
    dissolved: set[int] = set()
    for donor in roomiest_first:
        if donor in filled or not all(is_long_D[fragments[fragment][0]] for fragment in rows[donor]):
            continue
        lost = len(rows[donor]) * least_free  # space that may stay unused at the end of each fragment
        if room - (free[donor] - 1) < row_tokens - free[donor] + lost:
            break
        room -= free[donor] - 1
        dissolved.add(donor)
        for fragment in rows[donor]:
            document, offset, length = fragments[fragment]
            piece = 0
            while piece < length:
                offset, length = (offset + piece - 1, length - piece + 1) if piece else (offset, length)
                while receivers[0] in dissolved:
                    receivers.popleft()
                row = receivers[0]
                piece = min(length, free[row])
                rows[row].append(len(fragments))
                fragments.append([document, offset, piece])
                filled.add(row)
                free[row] -= piece
                room -= piece
                if free[row] < least_free:
                    room -= free[row] - 1
                    receivers.popleft()
    return [held for row, held in enumerate(rows) if row not in dissolved]


def _concatenate(lengths_D: Int64Array, row_tokens: int) -> Packing:
    """Return the rows as windows over the stream of all documents; neighbours share one token, so no target is lost."""
    ends_D = np.cumsum(lengths_D)
    starts_D = ends_D - lengths_D
    total = int(lengths_D.sum())
    stride = row_tokens - 1
    num_rows = max((total - 2) // stride + 1, 1) if total else 0
    row_starts = np.arange(num_rows, dtype=np.int64) * stride
    # A fragment starts at the start of a row, and at the start of a document inside a row. A document that starts with
    # a token shared by two rows starts a fragment in both.
    first_tokens = starts_D[lengths_D > 0]
    last_row = np.minimum(first_tokens // stride, num_rows - 1)
    shared = (first_tokens % stride == 0) & (first_tokens > 0)
    rows = np.concatenate([np.arange(num_rows), last_row, first_tokens[shared] // stride - 1])
    starts = np.concatenate([row_starts, first_tokens, first_tokens[shared]])
    rows, starts = np.divmod(np.unique(rows * (total + 1) + starts), total + 1)
    row_ptr = np.searchsorted(rows, np.arange(num_rows + 1)).astype(np.int64)
    ends = np.roll(starts, -1)
    ends[row_ptr[1:] - 1] = np.minimum(row_starts + row_tokens, total)
    documents = np.searchsorted(ends_D, starts, side="right").astype(np.int64)
    return Packing(row_tokens, row_ptr, documents, starts - starts_D[documents], ends - starts)


_METHODS: Mapping[PackingMethod, Callable[[Int64Array, int], Packing]] = {
    "best_fit": _pack_best_fit, "concat": _concatenate,
}  # fmt: skip


def chunk_contents(
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
    order_R = stored_order(packing, documents_D)
    if loss_mask is not None:
        order_R = order_R[_rows_with_targets(packing, document_starts, loss_mask)[order_R]]
    num_rows = len(order_R)
    if num_rows == 0:
        return []
    row_ptr, documents_F, offsets_F, lengths_F = stored_fragments(packing, order_R)
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


def stored_order(packing: Packing, documents_D: npt.NDArray[np.void]) -> Int64Array:
    """Return the rows of a unit in the order in which they are stored."""
    texts = hashlib.sha256(np.ascontiguousarray(documents_D["text_xxh3"]).tobytes()).hexdigest()
    return permute(np.arange(packing.num_rows), packing.num_rows, permutation_key("rows", texts))


def stored_fragments(packing: Packing, order_R: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Return the fragments of rows in an order: the first of each row, then their number; document, offset, length."""
    counts_R = np.diff(packing.row_ptr)[order_R]
    row_ptr = np.append(np.int64(0), np.cumsum(counts_R))
    # Fragments in the new order of the rows: those of new row i are row_ptr[i]:row_ptr[i + 1].
    fragments_F: Int64Array = np.arange(int(row_ptr[-1])) + np.repeat(packing.row_ptr[order_R] - row_ptr[:-1], counts_R)
    return row_ptr, packing.documents[fragments_F], packing.token_offsets[fragments_F], packing.lengths[fragments_F]


def split_pairs(packing: Packing, rejected_starts_D: Int64Array) -> Packing:
    """Return the rows with two fragments for each pair; no pair is divided between rows."""
    starts_F = rejected_starts_D[packing.documents]
    zeros_F = np.zeros_like(starts_F)
    return Packing(
        packing.row_tokens,
        packing.row_ptr * 2,
        np.repeat(packing.documents, 2),
        np.stack([zeros_F, starts_F], axis=1).reshape(-1),
        np.stack([starts_F, packing.lengths - starts_F], axis=1).reshape(-1),
    )


def _rows_with_targets(
    packing: Packing, document_starts: Int64Array, loss_mask: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Return whether each row trains any token; the first token of a fragment is never a target."""
    before = np.append(np.int64(0), np.cumsum(loss_mask))
    starts_F = document_starts[packing.documents] + packing.token_offsets
    targets_F = before[starts_F + packing.lengths] - before[starts_F + 1]
    return np.add.reduceat(targets_F, packing.row_ptr[:-1]) > 0 if packing.num_rows else np.zeros(0, np.bool_)


def _fill_rows(
    tokens_RC: npt.NDArray[Any],
    tokens: npt.NDArray[Any],
    starts_F: Int64Array,
    lengths_F: Int64Array,
    row_ptr: Int64Array,
) -> None:
    """Copy fragments into the rows, contiguously from the start of each row."""
    before_F = np.cumsum(lengths_F) - lengths_F
    row_F = np.repeat(np.arange(len(row_ptr) - 1), np.diff(row_ptr))
    targets_F = before_F - before_F[row_ptr[:-1]][row_F] + row_F * tokens_RC.shape[1]
    flat = tokens_RC.reshape(-1)
    for start, target, length in zip(starts_F.tolist(), targets_F.tolist(), lengths_F.tolist(), strict=True):
        flat[target : target + length] = tokens[start : start + length]
