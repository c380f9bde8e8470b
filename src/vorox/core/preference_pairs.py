"""Preference pairs in a batch: where the targets of each chosen and each rejected conversation are.

The segments of a row alternate between chosen and rejected (``data/cache/units/packing.py``): 1 and 2 are a pair. A
masked pair keeps its place and counts, so that shapes, divisor and the bits of all other pairs stay; it has no loss.

Shape legend: A micro-batches, B rows, T positions, M = B x T, K targets, P pairs, H = 2 P conversations, L targets of
the longest one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vorox.core.batch import IGNORED_LABEL, Batch, Int32Array


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of a micro-batch; conversation ``2 p`` is chosen, ``2 p + 1`` rejected.

    Attributes:
        position_K: Position of each target among all positions.
        label_K: Its token; 0 where it is masked.
        target_HL: The targets of each conversation, as indices into the ``K``; ``K`` where there are no more, and for
            masked ones.
        masked_P: Whether each pair is masked; ``None``: none is.
    """

    position_K: npt.NDArray[np.int64]
    label_K: npt.NDArray[np.int64]
    target_HL: npt.NDArray[np.int64]
    masked_P: npt.NDArray[np.bool_] | None = None


def find_pairs(batch: Batch, index: int) -> Pairs:
    """Return the pairs of a micro-batch; a pair without targets in both conversations is left out."""
    assert batch.segment_ids_ABT is not None, "pairs need data.document_mask"
    segments_BT, labels_BT = batch.segment_ids_ABT[index], batch.labels_ABT[index]
    is_masked_BT = None if batch.masked_targets_ABT is None else batch.masked_targets_ABT[index]
    position_K = _targets(segments_BT, labels_BT, is_masked_BT)
    key_K, paired_H = _conversations(segments_BT, position_K)
    is_kept_K = np.isin(key_K, paired_H)
    position_K, key_K = position_K[is_kept_K], key_K[is_kept_K]
    start_H = np.searchsorted(key_K, paired_H)
    count_H = np.searchsorted(key_K, paired_H, side="right") - start_H
    offset_L: npt.NDArray[np.int64] = np.arange(int(count_H.max(initial=0)))
    target_HL = np.where(offset_L < count_H[:, None], start_H[:, None] + offset_L, len(key_K)).astype(np.int64)
    label_K, masked_P = labels_BT.reshape(-1)[position_K].astype(np.int64), None
    if is_masked_BT is not None and is_masked_BT.any():
        is_masked_K = is_masked_BT.reshape(-1)[position_K]
        label_K[is_masked_K] = 0
        masked_P = is_masked_K[start_H[::2]]  # a document is a pair
        target_HL[np.repeat(masked_P, 2)] = len(key_K)
    return Pairs(position_K, label_K, target_HL, masked_P)


def count_pairs(batch: Batch) -> int:
    """Return the number of pairs of all micro-batches, masked ones included."""
    assert batch.segment_ids_ABT is not None, "pairs need data.document_mask"
    segments_NT = batch.segment_ids_ABT.reshape(-1, batch.row_tokens)
    labels_NT = batch.labels_ABT.reshape(segments_NT.shape)
    is_masked_NT = None if batch.masked_targets_ABT is None else batch.masked_targets_ABT.reshape(segments_NT.shape)
    return len(_conversations(segments_NT, _targets(segments_NT, labels_NT, is_masked_NT))[1]) // 2


def _targets(
    segments_BT: Int32Array, labels_BT: Int32Array, is_masked_BT: npt.NDArray[np.bool_] | None
) -> npt.NDArray[np.int64]:
    """Return the positions of the targets, masked ones included."""
    is_target_BT = labels_BT != IGNORED_LABEL
    if is_masked_BT is not None:
        is_target_BT |= is_masked_BT
    return np.flatnonzero(is_target_BT & (segments_BT > 0))


def _conversations(
    segments_BT: Int32Array, position_K: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the conversation of each target, and those whose pair has targets in both, in order."""
    per_row = int(segments_BT.max(initial=0)) + 1 & ~1  # even, so that pairs of different rows stay apart
    key_K = position_K // segments_BT.shape[1] * per_row + segments_BT.reshape(-1)[position_K] - 1
    found = np.unique(key_K)
    return key_K, found[np.isin(found ^ 1, found)]
