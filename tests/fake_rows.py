"""A cache without files: rows whose tokens and segments are a function of (name, row), for any number of rows.

Written against ``data/rows.py``'s ``RowReader``; shares no code with the cache or the loader.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.data.recipe import Recipe
from vorox.data.rows import RowBlock


class FakeRows:
    """
    Args:
        name: Decides the content, with ``content``.
        unit_rows: Rows of each unit.
        max_segments: Segments of a row, at most; 1 gives full rows of one segment, and no padding.
        content: Another value is a cache with other content.
    """

    def __init__(
        self,
        name: str,
        unit_rows: Sequence[int],
        *,
        row_tokens: int = 9,
        vocab_size: int = 500,
        max_segments: int = 3,
        content: int = 0,
        token_bytes: int = 2,
    ) -> None:
        self.name, self.content, self.row_tokens, self._max_segments = name, content, row_tokens, max_segments
        self.recipe = Recipe("fake", vocab_size, 0, row_tokens, {"name": name}, {})
        self.unit_row_starts: npt.NDArray[np.int64] = np.concatenate([[0], np.cumsum(unit_rows)]).astype(np.int64)
        self.num_rows = int(self.unit_row_starts[-1])
        self._dtype = np.uint16 if token_bytes == 2 else np.uint32
        self.reads = 0

    def rows_in(self, unit_start: int, unit_end: int) -> int:
        return int(self.unit_row_starts[unit_end] - self.unit_row_starts[unit_start])

    def content_digest(self, unit_start: int, unit_end: int) -> str:
        rows = np.diff(self.unit_row_starts[unit_start : unit_end + 1])
        return hashlib.sha256(f"{self.name} {self.content} {unit_start}".encode() + rows.tobytes()).hexdigest()

    def tokens(self, row: int) -> list[int]:
        seed = int.from_bytes(hashlib.sha256(f"{self.name} {self.content}".encode()).digest()[:4], "little")
        values = seed + row * 7919 + np.arange(self.row_tokens, dtype=np.int64) ** 2 * 31
        return (values % self.recipe.vocab_size).tolist()

    def segments(self, row: int) -> list[int]:
        """Lengths; what they leave of the row is padding. Every fifth row is padded, every seventh is one segment."""
        if self._max_segments == 1 or row % 7 == 0:
            return [self.row_tokens]
        generator = np.random.Generator(np.random.Philox(key=row + 1))
        real = self.row_tokens - (int(generator.integers(1, self.row_tokens)) if row % 5 == 0 else 0)
        count = int(generator.integers(1, min(self._max_segments, real) + 1))
        cuts = np.sort(generator.choice(np.arange(1, real), count - 1, replace=False)) if count > 1 else []
        return np.diff([0, *cuts, real]).tolist()

    def read_rows(self, rows: npt.NDArray[np.int64]) -> RowBlock:
        self.reads += 1
        assert rows.size == 0 or 0 <= rows.min() <= rows.max() < self.num_rows
        segments = [self.segments(int(row)) for row in rows]
        lengths = np.array([length for row in segments for length in row], np.int32)
        return RowBlock(
            tokens_NC=np.array([self.tokens(int(row)) for row in rows], self._dtype).reshape(-1, self.row_tokens),
            row_ptr=np.cumsum([0, *(len(row) for row in segments)]).astype(np.int64),
            segment_lengths=lengths,
            segment_document_offsets=np.zeros_like(lengths),
        )


class GrowingRows(FakeRows):
    """A partly built cache: rows are numbered over the built units; their content depends on (unit, row in unit).

    Args:
        name: Determines the content.
        unit_rows: Rows of each planned unit; shared, so that more units can be planned.
        built: Built units; shared, and read by ``refreshed``.
        cut: Known units, in a shared list of one; each ``refreshed`` that awaits more adds one. ``None``: all
    """

    def __init__(
        self, name: str, unit_rows: list[int], built: set[int], *, cut: list[int] | None = None, **options: Any
    ) -> None:
        self._plan, self._built, self._cut, self._options = unit_rows, built, cut, options
        known = len(unit_rows) if cut is None else min(cut[0], len(unit_rows))
        self.units_final = known == len(unit_rows)
        self.seen = frozenset(unit for unit in built if unit < known)
        rows = [rows if unit in self.seen else 0 for unit, rows in enumerate(unit_rows[:known])]
        super().__init__(name, rows, **options)

    def missing_units(self, unit_start: int, unit_end: int) -> npt.NDArray[np.int64]:
        return np.array([unit for unit in range(unit_start, unit_end) if unit not in self.seen], np.int64)

    def refreshed(self, *, awaited_units: int = 0) -> GrowingRows:
        if self._cut is not None:
            self._cut[0] += awaited_units > self._cut[0]
        return GrowingRows(self.name, self._plan, self._built, cut=self._cut, **self._options)

    def rows_in(self, unit_start: int, unit_end: int) -> int:
        assert not len(self.missing_units(unit_start, unit_end)), "only built units may be requested"
        return super().rows_in(unit_start, unit_end)

    def content_digest(self, unit_start: int, unit_end: int) -> str:
        assert not len(self.missing_units(unit_start, unit_end)), "only built units may be requested"
        return super().content_digest(unit_start, unit_end)

    def place(self, row: int) -> tuple[int, int]:
        """Unit and row in it."""
        unit = int(np.searchsorted(self.unit_row_starts, row, side="right")) - 1
        return unit, row - int(self.unit_row_starts[unit])

    def tokens(self, row: int) -> list[int]:
        return super().tokens(self._number(row))

    def segments(self, row: int) -> list[int]:
        return super().segments(self._number(row))

    def _number(self, row: int) -> int:
        """The number of a row in the complete cache."""
        unit, offset = self.place(row)
        return sum(self._plan[:unit]) + offset
