"""The interface between caches and the loader: blocks of packed rows, and the protocols of their readers.

A *row* is ``row_tokens`` stored token ids (sequence length plus one): its segments one after the other, then padding.
A *segment* is a fragment of one document. Readers return verified blocks; the loader turns them into batches.

Shape legend: N rows of the block, C stored tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vorox.data.cache.recipe import Recipe

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


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
