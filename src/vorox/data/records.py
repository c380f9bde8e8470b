"""The noun that passes from the caches to the loader: a block of packed rows.

A *row* is ``row_tokens`` stored token ids (sequence length plus one): its segments one after the other, then padding.
A *segment* is a fragment of one document. The reader fills blocks, verified; the loader turns them into batches.

Shape legend: N rows of the block, C stored tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows in the order in which they were asked for.

    Row ``i`` has the segments ``row_ptr[i]:row_ptr[i + 1]`` of the flat segment arrays, in row order and without gaps;
    whatever is left of the row after them is padding.

    Attributes:
        tokens_NC: Stored token ids, uint16 or uint32, ``[N, row_tokens]``.
        row_ptr: Where each row's segments start, int64 ``[N + 1]``.
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
