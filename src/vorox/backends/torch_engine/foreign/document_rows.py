"""Regroup the documents of packed rows as rows of their own.

For models whose layers carry state from one document to the next. Documents of similar length share a group, so that
little is padding and a group is no larger than its micro-batch.

Shape legend: B rows and T positions of a micro-batch, G documents of a group, L positions of its longest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vorox.core.batch import IGNORED_LABEL, Int32Array


@dataclass(frozen=True, slots=True)
class DocumentGroup:
    """Some documents, each a row from position 0, padded at its end.

    Attributes:
        tokens_GL: Token ids; 0 where there is padding.
        labels_GL: Token to predict; ``IGNORED_LABEL`` where there is padding.
        is_token_GL: Whether there is a token.
    """

    tokens_GL: Int32Array
    labels_GL: Int32Array
    is_token_GL: npt.NDArray[np.bool_]


def group_documents(
    tokens_BT: Int32Array, labels_BT: Int32Array, segments_BT: Int32Array, *, max_documents: int | None = None
) -> Iterator[DocumentGroup]:
    """Yield the documents of a micro-batch, longest first, in groups of at most ``max_documents``.

    Padding of rows (segment 0) is dropped.
    """
    num_positions = segments_BT.size
    spans = sorted(_spans(segments_BT), key=lambda span: (span[0] - span[1], span))
    while spans:
        longest = spans[0][1] - spans[0][0]
        size = min(num_positions // longest, max_documents or num_positions)
        group, spans = spans[:size], spans[size:]
        tokens_GL = np.zeros((len(group), longest), np.int32)
        labels_GL = np.full((len(group), longest), IGNORED_LABEL, np.int32)
        is_token_GL = np.zeros((len(group), longest), np.bool_)
        for index, (start, end) in enumerate(group):
            tokens_GL[index, : end - start] = tokens_BT.reshape(-1)[start:end]
            labels_GL[index, : end - start] = labels_BT.reshape(-1)[start:end]
            is_token_GL[index, : end - start] = True
        yield DocumentGroup(tokens_GL, labels_GL, is_token_GL)


def _spans(segments_BT: Int32Array) -> Iterator[tuple[int, int]]:
    """Yield start and end of each document in the flattened micro-batch."""
    num_columns = segments_BT.shape[1]
    for row, segments_T in enumerate(segments_BT):
        changes = np.flatnonzero(np.diff(segments_T)) + 1
        edges = [0, *changes.tolist(), num_columns]
        for start, end in itertools.pairwise(edges):
            if segments_T[start]:
                yield row * num_columns + start, row * num_columns + end
