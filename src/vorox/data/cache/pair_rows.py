"""Preference pairs in rows: which ones fit, and both conversations of a pair as two segments

A pair is one document: the chosen conversation, its end of text, the rejected one, its end of text. Packing keeps it
whole; each of its conversations becomes a segment. Invariant: the segments of a row alternate between chosen and
rejected, so segments 1 and 2 are a pair, 3 and 4 the next.

Legend: D documents, F fragments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.data.documents import BadRecord, Document
from vorox.data.packing import Packing
from vorox.data.transforms.apply import AnyDocument

Int64Array = npt.NDArray[np.int64]


def is_pair(document: AnyDocument) -> bool:
    """Whether a document is a preference pair."""
    return isinstance(document, Document) and document.rejected_start > 0


def reject_unfit(
    documents: Sequence[AnyDocument], tokens: Sequence[npt.NDArray[Any]], row_tokens: int
) -> tuple[list[AnyDocument], list[npt.NDArray[Any]], list[BadRecord]]:
    """Return the documents and their tokens without those that cannot be trained on, and these as bad records.

    Pairs and documents with images must fit into a row.
    """
    kept: list[AnyDocument] = []
    kept_tokens: list[npt.NDArray[Any]] = []
    bad: list[BadRecord] = []
    for document, ids in zip(documents, tokens, strict=True):
        reason = _fault(document, len(ids) + 1, row_tokens) if isinstance(document, Document) else ""
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


def rejected_starts(documents: Sequence[AnyDocument]) -> Int64Array | None:
    """Return the first token of the rejected conversation of each document; ``None`` if they are no pairs."""
    starts = [document.rejected_token for document in documents if isinstance(document, Document) and is_pair(document)]
    assert len(starts) in {0, len(documents)}, "a source consists of pairs or of none"
    return np.array(starts, np.int64) if starts else None


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
