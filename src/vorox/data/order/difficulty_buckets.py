"""Difficulty buckets: a cache's chunks whose statistic is in a range, read as a separate cache.

The bounds are measured once, when a run starts, and recorded in its plan. A chunk's bucket depends on its content
alone, so buckets do not change while the cache grows. Each row of a source is in exactly one bucket.

Legend: K chunks of the cache.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vorox.core.errors import ConfigError, DataError
from vorox.core.files.atomic import canonical_json
from vorox.data.cache.files.manifest import Manifest
from vorox.data.cache.reader import CacheReader
from vorox.data.documents import DocumentSpan, SourceFile, Unit
from vorox.data.order.plan_events import Bucket, PlanSource
from vorox.data.recipe import Recipe
from vorox.data.rows import RowBlock

Int64Array = npt.NDArray[np.int64]


class BucketReader:
    """The rows of one bucket of an open cache, numbered in unit order.

    Args:
        base: The cache.
        bucket: The bucket's definition.
    """

    def __init__(self, base: CacheReader, bucket: Bucket) -> None:
        self.base, self.bucket = base, bucket
        self.recipe: Recipe = base.recipe
        chunks = base.manifest.chunks
        self._chunks_K = np.flatnonzero(_within(base.manifest, bucket))
        rows = chunks["rows"][self._chunks_K].astype(np.int64)
        self._base_starts_K = base.manifest.chunk_row_starts[self._chunks_K]
        self._starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        units = np.zeros(base.manifest.planned_units + 1, np.int64)
        np.add.at(units, chunks["unit"][self._chunks_K].astype(np.int64) + 1, rows)
        self.unit_row_starts: Int64Array = np.cumsum(units)

    @property
    def directory(self) -> Path:
        return self.base.directory

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """The files of the source."""
        return self.base.files

    @property
    def units(self) -> tuple[Unit, ...]:
        """The planned units."""
        return self.base.units

    @property
    def num_rows(self) -> int:
        return int(self._starts[-1])

    @property
    def row_tokens(self) -> int:
        return self.base.row_tokens

    def rows_in(self, unit_start: int, unit_end: int, /) -> int:
        """Return the number of the bucket's rows in the units ``[unit_start, unit_end)``.

        Raises:
            DataError: One of the units is missing.
        """
        self.base.rows_in(unit_start, unit_end)
        return int(self.unit_row_starts[unit_end] - self.unit_row_starts[unit_start])

    def content_digest(self, unit_start: int, unit_end: int, /) -> str:
        """Return the SHA-256 of the bucket's definition and of its chunks' content in these units."""
        self.base.rows_in(unit_start, unit_end)
        chunks = self.base.manifest.chunks[self._chunks_K]
        low, high = np.searchsorted(chunks["unit"], [unit_start, unit_end])
        bounds = [None if bound is None else str(bound) for bound in (self.bucket.low, self.bucket.high)]
        definition = canonical_json([self.bucket.statistic, *bounds])
        return hashlib.sha256(definition + chunks["content"][low:high].tobytes()).hexdigest()

    def missing_units(self, unit_start: int, unit_end: int, /) -> Int64Array:
        return self.base.missing_units(unit_start, unit_end)

    @property
    def is_building(self) -> bool:
        return self.base.is_building

    @property
    def units_final(self) -> bool:
        return self.base.units_final

    def refreshed(self, *, awaited_units: int = 0) -> BucketReader:
        """Return a reader of the current commits."""
        base = self.base.refreshed(awaited_units=awaited_units)
        return self if base is self.base else BucketReader(base, self.bucket)

    def read_rows(self, rows: Int64Array, /) -> RowBlock:
        return self.base.read_rows(self.base_rows(rows))

    def documents_of(self, row: int) -> list[DocumentSpan]:
        """Return the origin of each segment of a row."""
        return self.base.documents_of(int(self.base_rows(np.array([row]))[0]))

    def rows_of_document(self, file_index: int, byte: int | None = None, ordinal: int | None = None) -> Int64Array:
        """Return the bucket's rows with tokens of the documents of a file; arguments as for ``CacheReader``."""
        return self._rows_inside(self.base.rows_of_document(file_index, byte, ordinal))

    def rows_of_text(self, text_hashes: Sequence[int]) -> Int64Array:
        """Return the bucket's rows with tokens of documents with some texts; argument as for ``CacheReader``."""
        return self._rows_inside(self.base.rows_of_text(text_hashes))

    def _rows_inside(self, base: Int64Array) -> Int64Array:
        """Return the bucket's numbers of those rows of the cache that are inside it."""
        at = np.searchsorted(self._base_starts_K, base, side="right") - 1
        offset = base - self._base_starts_K[np.maximum(at, 0)]
        here = (at >= 0) & (offset < np.diff(self._starts)[np.maximum(at, 0)])
        return self._starts[at[here]] + offset[here]

    def base_rows(self, rows: Int64Array) -> Int64Array:
        """Convert row numbers of the bucket to row numbers of the cache."""
        if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= self.num_rows):
            raise IndexError(f"Rows {rows.min()} to {rows.max()} are not within [0, {self.num_rows})")
        at = np.searchsorted(self._starts, rows, side="right") - 1
        return self._base_starts_K[at] + rows - self._starts[at]


SourceReader = CacheReader | BucketReader
"""A reader of the rows of one source of a plan."""


def reader_of(source: PlanSource, cache: CacheReader) -> SourceReader:
    """Return a reader of a plan's source in its cache."""
    return cache if source.bucket is None else BucketReader(cache, source.bucket)


def cache_of(reader: SourceReader) -> CacheReader:
    """Return the cache of a reader."""
    return reader.base if isinstance(reader, BucketReader) else reader


def readers_of(sources: Sequence[PlanSource], caches: Mapping[str, CacheReader]) -> list[SourceReader | None]:
    """Return the readers of a plan's sources, in its order; ``None`` where the configuration no longer has the cache.

    Args:
        sources: ``DataPlan.sources``.
        caches: The caches of the configuration's sources, by name.
    """
    found = [(source, caches.get(source.configured_name)) for source in sources]
    return [None if cache is None else reader_of(source, cache) for source, cache in found]


def measure_buckets(
    cache: CacheReader, name: str, statistic: str, quantiles: Sequence[float], *, last_unit: int | None = None
) -> list[tuple[Bucket, Fraction]]:
    """Return the buckets of a source by ascending statistic, each with its share of the rows.

    Args:
        cache: The source's cache.
        name: The source's name.
        statistic: ``tokens_per_document`` or ``bytes_per_token``.
        quantiles: Borders of the buckets, as shares of the rows.
        last_unit: Measure only the units before this one.

    Raises:
        ConfigError: A bucket is empty, because too many chunks have the same statistic.
        DataError: No chunk is built yet.
    """
    manifest = cache.manifest
    measured = np.ones(len(manifest.chunks), np.bool_) if last_unit is None else manifest.chunks["unit"] < last_unit
    numerator, denominator = (values[measured] for values in _statistic(manifest, statistic))
    rows = manifest.chunks["rows"][measured].astype(np.int64)
    if not rows.size:
        raise DataError(f"Source {name!r} has no chunk to measure {statistic} on", where=str(cache.directory))
    order = np.argsort(numerator / denominator, kind="stable")
    ends = np.cumsum(rows[order])
    bounds: list[Fraction] = []
    for quantile in quantiles:
        at = order[int(np.searchsorted(ends, math.ceil(Fraction(str(quantile)) * int(ends[-1])), side="right"))]
        bounds.append(Fraction(int(numerator[at]), int(denominator[at])))
    buckets = [Bucket(name, statistic, low, high) for low, high in zip([None, *bounds], [*bounds, None], strict=True)]
    inside = [_between(numerator, denominator, bucket) for bucket in buckets]
    shares = [Fraction(int(rows[chosen].sum()), int(ends[-1])) for chosen in inside]
    if 0 in shares:
        raise ConfigError(
            f"{statistic} does not split source {name!r} at {', '.join(f'{q:g}' for q in quantiles)}: "
            f"of its {len(rows):,} chunks, none is in one of the buckets",
            where=f"data.sources: {name}.split_quantiles",
            hint="decrease data.cache.unit_bytes or chunk_rows, choose other quantiles, or do not split the source",
        )
    return list(zip(buckets, shares, strict=True))


def _statistic(manifest: Manifest, statistic: str) -> tuple[Int64Array, Int64Array]:
    """Return numerator and denominator of a statistic for every chunk."""
    chunks = manifest.chunks
    if statistic == "tokens_per_document":
        return chunks["tokens"].astype(np.int64), np.maximum(chunks["documents"].astype(np.int64), 1)
    if statistic == "bytes_per_token":
        units = manifest.units[np.searchsorted(manifest.units["unit"], chunks["unit"])]
        return units["text_bytes"].astype(np.int64), np.maximum(units["tokens"].astype(np.int64), 1)
    raise DataError(f"The data plan splits a source by {statistic!r}, which this version does not know")


def _within(manifest: Manifest, bucket: Bucket) -> npt.NDArray[np.bool_]:
    return _between(*_statistic(manifest, bucket.statistic), bucket)


def _between(numerator: Int64Array, denominator: Int64Array, bucket: Bucket) -> npt.NDArray[np.bool_]:
    inside = np.ones(numerator.shape, np.bool_)
    if bucket.low is not None:
        inside &= numerator * bucket.low.denominator >= bucket.low.numerator * denominator
    if bucket.high is not None:
        inside &= numerator * bucket.high.denominator < bucket.high.numerator * denominator
    return inside
