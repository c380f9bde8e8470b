"""Reading rows by position: located by the plan, read from the caches of all sources.

Positions go in, a block of rows in the same order comes out. The loader and the streaming dataset both read rows
through ``RowSource``. Over caches that are still being built, ``cover`` waits until the plan covers the positions.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.data.growth import PlanGrower
from vorox.data.plan import Plan, Positions, Readers
from vorox.data.rows import RowBlock, RowReader, interleave

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LocatedRows:
    """The rows at some positions, and the caches that hold them.

    Attributes:
        source_index: Source of each row, an index into the plan's sources.
        epoch: Epoch of the source, from 0.
        rows: Row number in the source's cache.
        readers: The caches of the plan's sources.
    """

    source_index: npt.NDArray[np.int32]
    epoch: Int64Array
    rows: Int64Array
    readers: Readers

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> LocatedRows:
        return LocatedRows(self.source_index[part], self.epoch[part], self.rows[part], self.readers)

    def read(self) -> RowBlock:
        """Read the rows in this order, and verify them.

        Raises:
            DataError: A row is damaged, or its source has been removed from the configuration.
        """
        return read_rows(self.readers, self.source_index, self.rows)


class RowSource:
    """The rows of a run or dataset, by position. Thread-safe.

    Args:
        plan: Maps positions to rows.
        readers: Caches of the plan's sources, in its order; ``None`` for a source that is no longer sampled.
        grower: Extends the plan while the caches grow; its readers replace ``readers``.
        stop: Polled while ``cover`` waits; true ends the wait.
    """

    def __init__(
        self,
        plan: Plan,
        readers: Readers,
        *,
        grower: PlanGrower | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self.plan = plan
        self._readers, self._grower, self._stop = readers, grower, stop
        self._closed = threading.Event()

    def cover(self, end_position: int) -> None:
        """Wait until the plan covers all positions below ``end_position``.

        Raises:
            DataNotReady: The rows are not built yet, and ``stop`` or ``close`` ended the wait.
            DataError: A source is exhausted, or a cache cannot be read.
        """
        if self._grower is not None:
            self._grower.cover(end_position, stop=self._is_stopped)

    def locate(self, positions: Positions) -> LocatedRows:
        """Return the rows at positions that the plan covers.

        Raises:
            DataError: A position is not covered.
        """
        readers = self._grower.readers if self._grower is not None else self._readers
        found = self.plan.locate(positions)
        rows = found.row
        for index, reader in enumerate(readers):
            chosen = np.flatnonzero(found.source_index == index)
            if chosen.size and reader is not None:  # reading a row without a reader raises
                rows[chosen] += reader.unit_row_starts[found.unit_start[chosen]]
        return LocatedRows(found.source_index, found.epoch, rows, readers)

    def close(self) -> None:
        """End every wait. Idempotent."""
        self._closed.set()

    def _is_stopped(self) -> bool:
        return self._closed.is_set() or (self._stop is not None and self._stop())


def read_rows(readers: Readers, source_index: npt.NDArray[np.integer], rows: Int64Array) -> RowBlock:
    """Read rows of several sources into one block, in the order given.

    Args:
        readers: The caches, by source.
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
