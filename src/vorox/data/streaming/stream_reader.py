"""Reading a stream like any cache: a row whose chunk is not on disk waits until the stream has built it.

Like every ``CacheReader`` it sees what was recorded when it was made, and ``refreshed`` returns one that sees more.
Invariant: the rows are those of a complete cache of the same recipe.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.data.cache.chunk import Chunk
from vorox.data.cache.manifest import Manifest
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.recipe import read_recipe
from vorox.data.records import RowBlock
from vorox.data.streaming.stream import Stream

_MOST_OPEN_CHUNKS = 1024


class StreamReader(CacheReader):
    """The rows of a stream, as far as they are recorded."""

    def __init__(self, stream: Stream, manifest: Manifest | None = None) -> None:
        directory = stream.directory
        super().__init__(directory, read_recipe(directory), manifest or stream.manifest, _MOST_OPEN_CHUNKS)
        self.stream = stream
        self.mend = stream.discard
        stream.register(self)

    @property
    def is_building(self) -> bool:
        return not self.stream.budget.closed

    def refreshed(self, *, awaited_units: int = 0) -> StreamReader:
        """Return a reader of what is recorded by now.

        Args:
            awaited_units: The caller waits until all units below this are recorded.

        Raises:
            DataError: One of them cannot be built.
        """
        manifest = self.stream.refresh(awaited_units=awaited_units)
        return self if manifest is self.manifest else StreamReader(self.stream, manifest)

    def read_rows(self, rows: npt.NDArray[np.int64], /) -> RowBlock:
        units = np.unique(np.searchsorted(self.unit_row_starts, rows, side="right") - 1)
        self.stream.touch(units.tolist())
        return super().read_rows(rows)

    def drop(self, unit: int, /) -> None:
        """Drop the open chunk files of a unit that has been evicted."""
        for index, chunk in list(self._open_chunks.items()):
            if chunk.header.unit == unit:
                self._open_chunks.pop(index, None)

    def _open(self, index: int) -> Chunk:
        unit = int(self.manifest.chunks["unit"][index])
        while True:
            self.stream.ensure(unit)
            try:
                return super()._open(index)
            except DataError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
                self.stream.lost(unit)  # evicted between the two lines above
