"""Tell apart the texts that transforms made of one record.

A ``DOCUMENT`` record has the place and the hash of the record, and the size of the text. Texts of one record that have
the same size are identified by where they were packed: packing (``cache/units/packing.py``) is a pure function of sizes
and hashes, so the layout of a unit is recomputed and compared with the stored one.

Legend: S segments of a unit, V different ``DOCUMENT`` records, U texts of the unit in their order, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from vorox.data.cache.units.packing import pack, stored_fragments, stored_order
from vorox.data.recipe import Recipe
from vorox.data.rows import Int64Array

Segments = tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]
"""The first segment of each row of a chunk, then their number; and document, token offset and length of each."""


def copies_of_segments(
    tables: Sequence[npt.NDArray[np.void]],
    segments: Sequence[Segments],
    recipe: Recipe,
) -> list[Int64Array]:
    """Return which of the texts of its record each segment is of, from 0, for every chunk of a unit.

    Args:
        tables: The ``DOCUMENT`` records of each chunk.
        segments: The segments of each chunk.
        recipe: The recipe of the cache.

    Returns:
        An array for every chunk. Texts of one size have one number if the stored layout is not the computed one.
    """
    known_V, variant_D, variant_S, count_V = _counted(tables, segments)
    offset_S, length_S = (np.concatenate([s[:, column] for _, s in segments]).astype(np.int64) for column in (1, 2))
    size_V = known_V["num_tokens"].astype(np.int64)
    _, record_V = np.unique(known_V[["file", "ordinal"]], return_inverse=True)
    copy_S = _ranks(record_V, count_V)[variant_S]
    is_whole_S = length_S == size_V[variant_S]
    has_twin_S = count_V[variant_S] > 1
    if (has_twin_S & ~is_whole_S).any():
        by_chunk = np.split(variant_D, np.cumsum([len(table) for table in tables])[:-1])
        order_U = _unit_order(by_chunk, record_V, count_V)
        rows_R = np.concatenate([np.diff(starts.astype(np.int64)) for starts, _ in segments])
        found = _by_layout(known_V[order_U], order_U, (rows_R, variant_S, offset_S, length_S), recipe)
        if found is not None:
            copy_S = _ranks(record_V[order_U], np.ones(len(order_U), np.int64))[found]
    elif has_twin_S.any():  # each segment is a text of its own
        for variant in np.flatnonzero(count_V > 1).tolist():
            here = np.flatnonzero(variant_S == variant)
            copy_S[here] += np.arange(len(here))
    return np.split(copy_S, np.cumsum([len(s) for _, s in segments])[:-1])


def documents_of_unit(tables: Sequence[npt.NDArray[np.void]], segments: Sequence[Segments]) -> npt.NDArray[np.void]:
    """Return the ``DOCUMENT`` records of all texts of a unit with tokens in its chunks, by place."""
    known_V, _, _, count_V = _counted(tables, segments)
    return np.repeat(known_V, count_V)


def _counted(
    tables: Sequence[npt.NDArray[np.void]], segments: Sequence[Segments]
) -> tuple[npt.NDArray[np.void], Int64Array, Int64Array, Int64Array]:
    """Return the different records, the index of each record and of each segment, and how many texts have each."""
    known_V, variant_D = np.unique(np.concatenate(tables), return_inverse=True)
    bases = accumulate((len(table) for table in tables[:-1]), initial=0)
    variant_S = np.concatenate([variant_D[base + s[:, 0]] for base, (_, s) in zip(bases, segments, strict=True)])
    length_S = np.concatenate([s[:, 2] for _, s in segments]).astype(np.int64)
    size_V = known_V["num_tokens"].astype(np.int64)
    covered_V = np.bincount(variant_S, length_S - 1, len(known_V)).astype(np.int64)  # neighbours share a token
    by_chunk = np.split(variant_D, np.cumsum([len(table) for table in tables])[:-1])
    entries_V = np.max([np.bincount(part, minlength=len(known_V)) for part in by_chunk], axis=0)
    return known_V, variant_D, variant_S, np.maximum(covered_V // np.maximum(size_V - 1, 1), entries_V)


def _ranks(record_V: Int64Array, count_V: Int64Array) -> Int64Array:
    """Return how many texts of the same record come before each entry; entries of a record are adjacent."""
    before_V = np.cumsum(count_V) - count_V
    first_V = np.flatnonzero(np.diff(record_V, prepend=-1))
    return before_V - before_V[first_V][np.cumsum(np.diff(record_V, prepend=-1) != 0) - 1]


def _unit_order(variants: Sequence[Int64Array], record_V: Int64Array, count_V: Int64Array) -> Int64Array:
    """Return the texts of a unit in their order: that of a chunk which has all of a record, else an arbitrary one."""
    num_texts = np.bincount(record_V, count_V).astype(np.int64)
    orders: dict[int, Int64Array] = {}
    for variant_D in variants:
        record_D = record_V[variant_D]
        starts = np.flatnonzero(np.diff(record_D, prepend=-1))
        for part in np.split(variant_D, starts[1:]):
            record = int(record_V[part[0]])
            if len(part) == num_texts[record]:
                orders[record] = part
    whole = np.repeat(np.arange(len(count_V)), count_V)
    parts = np.split(whole, np.cumsum(num_texts)[:-1])
    return np.concatenate([orders.get(record, part) for record, part in enumerate(parts)])


def _by_layout(
    documents_U: npt.NDArray[np.void],
    variant_U: Int64Array,
    stored: tuple[Int64Array, Int64Array, Int64Array, Int64Array],
    recipe: Recipe,
) -> Int64Array | None:
    """Return the text of each stored segment by the computed layout; ``None`` if that is not the stored one."""
    packing = pack(documents_U["num_tokens"], recipe.row_tokens, recipe.packing)
    row_ptr, documents_S, offset_S, length_S = stored_fragments(packing, stored_order(packing, documents_U))
    computed = (np.diff(row_ptr), variant_U[documents_S], offset_S, length_S)
    is_stored = all(np.array_equal(one, other) for one, other in zip(computed, stored, strict=True))
    return documents_S if is_stored else None
