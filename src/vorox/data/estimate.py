"""How large a dataset is of which only some units are built: what the length and the warm-up of a run are fixed by.

A ratio estimate: the tokens (rows) of the built units over their bytes, times the bytes of all units. The error is
the standard error of that estimate over the units, 0 when everything is built.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.data.cache.reader import CacheReader
from vorox.data.storage.waiting import may_wait

_POLL_SECONDS = 0.1

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DatasetEstimate:
    """One pass over the training text of all sources.

    Attributes:
        tokens: Tokens, none counted twice.
        rows: Packed rows.
        error_fraction: Standard error of both, as a share; ``None`` where a single unit says nothing about it.
        built_bytes: Bytes of the units that were measured.
        all_bytes: Bytes of all units.
    """

    tokens: int
    rows: int
    error_fraction: float | None
    built_bytes: int
    all_bytes: int

    @property
    def is_exact(self) -> bool:
        return self.built_bytes == self.all_bytes

    def __str__(self) -> str:
        if self.is_exact:
            return f"{self.tokens:,} tokens in {self.rows:,} rows"
        error = "unknown error" if self.error_fraction is None else f"standard error {self.error_fraction:.1%}"
        return (
            f"about {self.tokens:,} tokens in {self.rows:,} rows, from {self.built_bytes:,} of {self.all_bytes:,} "
            f"bytes that are built ({error})"
        )


def with_first_units(cache: CacheReader, num_units: int = 1) -> CacheReader:
    """A reader of a cache that sees its first units, after waiting for them if need be.

    Raises:
        DataError: They cannot be built.
    """
    with may_wait(str(cache.directory)) as wait:
        while True:
            planned = cache.manifest.planned_units
            if planned and not len(cache.missing_units(0, min(num_units, planned))):
                return cache
            wait.because("its first units are not built yet", failed=False)
            time.sleep(_POLL_SECONDS)
            cache = cache.refreshed(awaited_units=num_units)


def estimate(caches: Sequence[CacheReader]) -> DatasetEstimate:
    """Measure the caches of all sources.

    Raises:
        DataError: A source has no unit built yet.
    """
    tokens = rows = built = whole = 0
    variance: float | None = 0.0
    for cache in caches:
        found = _one(cache)
        tokens, rows, built, whole = tokens + found[0], rows + found[1], built + found[2], whole + found[3]
        variance = None if variance is None or found[4] is None else variance + found[4]
    error = None if variance is None else math.sqrt(variance) / max(tokens, 1)
    return DatasetEstimate(tokens, rows, error, built, whole)


def _one(cache: CacheReader) -> tuple[int, int, int, int, float | None]:
    """Tokens, rows, built bytes, all bytes and the variance of the tokens of one source."""
    manifest = cache.manifest
    units = manifest.units["unit"].astype(np.int64)
    if not len(units):
        raise DataError("no unit of the cache is built yet", where=str(cache.directory), hint="wait for the first")
    tokens = manifest.units["tokens"].astype(np.int64)
    if len(units) == manifest.planned_units:
        size = _unit_bytes(cache)
        return int(tokens.sum()), manifest.num_rows, int(size.sum()), int(size.sum()), 0.0
    size = _unit_bytes(cache)
    built, whole, number = size[units], int(size.sum()), len(units)
    ratio = whole / int(built.sum())
    variance: float | None = None
    if number > 1:
        residuals: Float64Array = tokens - tokens.sum() / built.sum() * built
        spread = float((residuals**2).sum()) / (number - 1)
        variance = manifest.planned_units**2 * (1 - number / manifest.planned_units) * spread / number
    return round(int(tokens.sum()) * ratio), round(manifest.num_rows * ratio), int(built.sum()), whole, variance


def _unit_bytes(cache: CacheReader) -> npt.NDArray[np.int64]:
    return np.array([sum(span.end_byte - span.start_byte for span in unit.spans) for unit in cache.units], np.int64)
