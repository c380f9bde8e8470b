"""The rows at the positions of a plan: located by arithmetic, read from the caches of all sources.

Positions go in, a block of rows in the order of the positions comes out. The loader and the streaming dataset read
through here. Over caches that are still being built, ``cover`` waits until the plan covers the positions.
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
    """Where the rows of some positions are stored.

    Attributes:
        source_index: Source of each row, in the order of the plan's sources.
        epoch: Pass over the source, from 0.
        rows: Row in the cache of its source.
        readers: The caches, as far as they are needed for these rows.
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
        """Read and verify the rows, in this order.

        Raises:
            DataError: A row is damaged, or its source has been removed from the configuration.
        """
        return read_rows(self.readers, self.source_index, self.rows)


class RowSource:
    """The rows of one run or dataset, by position. Safe to use from any thread.

    Args:
        plan: Maps positions to rows.
        readers: Caches of the plan's sources, in its order; ``None`` for one that is no longer drawn from.
        grower: Extends the plan while the caches grow; its readers replace ``readers``.
        stop: Polled while ``cover`` waits; ends the wait.
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
            DataNotReady: The rows are not built yet, and the wait was ended.
            DataError: A source is used up, or a cache cannot be read.
        """
        if self._grower is not None:
            self._grower.cover(end_position, stop=self._is_stopped)

    def locate(self, positions: Positions) -> LocatedRows:
        """Locate the rows of positions that the plan covers.

        Raises:
            DataError: A position is not covered.
        """
        readers = self._grower.readers if self._grower is not None else self._readers
        found = self.plan.locate(positions)
        rows = found.row
        for index, reader in enumerate(readers):
            chosen = np.flatnonzero(found.source_index == index)
            if chosen.size and reader is not None:  # a row whose reader is None raises when it is read
                rows[chosen] += reader.unit_row_starts[found.unit_start[chosen]]
        return LocatedRows(found.source_index, found.epoch, rows, readers)

    def close(self) -> None:
        """End every wait. Repeatable."""
        self._closed.set()

    def _is_stopped(self) -> bool:
        return self._closed.is_set() or (self._stop is not None and self._stop())


def read_rows(readers: Readers, source_index: npt.NDArray[np.integer], rows: Int64Array) -> RowBlock:
    """Read rows of several sources into one block, in the order given.

    Raises:
        DataError: A row is damaged, or its source has been removed from the configuration.
    """
    if not rows.size:  # the last validation batch may have no row for a shard
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
            "the step needs rows of a source that the configuration no longer has", where="data.sources",
            hint="resume from a checkpoint behind the step at which it was taken out",
        )  # fmt: skip
    return reader
