"""Estimate the size of a partly built dataset, for the length and warm-up of a run.

A ratio estimate: the tokens (rows) of the built units divided by their bytes, times the bytes of all units. While the
source is still being split into units, those bytes are estimated too, from the stored size and the ratio of the first
units. The error is the standard error of the token ratio over the units, 0 when everything is built.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.core.pluralize import pluralize
from vorox.data.cache.reader import CacheReader

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DatasetEstimate:
    """The size of one pass over the training text of all sources.

    Attributes:
        tokens: Number of tokens; a token shared by two fragments counts once.
        rows: Number of packed rows.
        error_fraction: Relative standard error of both; ``None`` if only one unit of a source was measured.
        built_bytes: Bytes of the measured units.
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
            return f"{pluralize(self.tokens, 'token')} in {pluralize(self.rows, 'row')}"
        error = (
            "error unknown: one unit measured"
            if self.error_fraction is None
            else f"standard error {self.error_fraction:.1%}"
        )
        return (
            f"about {pluralize(self.tokens, 'token')} in {pluralize(self.rows, 'row')}, "
            f"from {self.built_bytes:,} of {self.all_bytes:,} bytes that are built ({error})"
        )


def estimate(caches: Sequence[CacheReader], first_units: int | None = None) -> DatasetEstimate:
    """Estimate the size of a dataset from its caches.

    Args:
        caches: The cache of each source.
        first_units: Measure only the first units of each, so that the result does not depend on the build's progress.

    Raises:
        DataError: A source has no unit built yet.
    """
    tokens = rows = built = whole = 0
    variance: float | None = 0.0
    for cache in caches:
        found = _estimate_source(cache, first_units)
        tokens, rows, built, whole = tokens + found[0], rows + found[1], built + found[2], whole + found[3]
        variance = None if variance is None or found[4] is None else variance + found[4]
    error = None if variance is None else math.sqrt(variance) / max(tokens, 1)
    return DatasetEstimate(tokens, rows, error, built, whole)


def _estimate_source(cache: CacheReader, first_units: int | None) -> tuple[int, int, int, int, float | None]:
    """Return tokens, rows, measured bytes, all bytes and the variance of the tokens of one source."""
    manifest, size = cache.manifest, _unit_bytes(cache)
    is_estimated = not manifest.units_final or (first_units is not None and manifest.estimated_bytes > 0)
    limit = manifest.planned_units if first_units is None else first_units
    measured = manifest.units[manifest.units["unit"] < limit]
    units, tokens = measured["unit"].astype(np.int64), measured["tokens"].astype(np.int64)
    if not len(units):
        raise DataError("No unit of the cache is built yet", where=str(cache.directory), hint="wait for the first unit")
    rows, built, whole = int(np.diff(manifest.unit_row_starts)[units].sum()), size[units], int(size.sum())
    number, planned = len(units), manifest.planned_units
    if is_estimated:  # use the estimate recorded with the first units, so that the result never changes
        whole = max(manifest.estimated_bytes, int(built.sum()))
        planned = max(number, round(whole * number / max(int(built.sum()), 1)))
    elif number == planned:
        return int(tokens.sum()), rows, whole, whole, 0.0
    ratio = whole / int(built.sum())
    variance: float | None = None
    if number > 1:
        residuals: Float64Array = tokens - tokens.sum() / built.sum() * built
        spread = float((residuals**2).sum()) / (number - 1)
        variance = planned**2 * (1 - number / planned) * spread / number
    return round(int(tokens.sum()) * ratio), round(rows * ratio), int(built.sum()), whole, variance


def _unit_bytes(cache: CacheReader) -> npt.NDArray[np.int64]:
    return np.array([sum(span.end_byte - span.start_byte for span in unit.spans) for unit in cache.units], np.int64)
