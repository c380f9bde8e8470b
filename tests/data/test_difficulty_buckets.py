"""Difficulty buckets: each row of the cache in exactly one bucket, by content alone, also while the cache grows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from cache_corpus import build_corpus, corpus_of
from vorox.core.errors import ConfigError
from vorox.data.cache.files.manifest import Manifest
from vorox.data.cache.reader import CacheReader
from vorox.data.order.difficulty_buckets import BucketReader, measure_buckets, reader_of, readers_of
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_events import PlanSource, PlanStart


def long_and_short(seed: int = 3) -> list[list[str]]:
    """Files in turn of a few long lines and of many short ones."""
    generator = np.random.Generator(np.random.Philox(seed))

    def line(length: int) -> str:
        return "".join(map(chr, generator.integers(97, 123, length)))

    return [
        [line(int(generator.integers(5, 12))) for _ in range(40)]
        if number % 2
        else [line(int(generator.integers(80, 160))) for _ in range(6)]
        for number in range(8)
    ]


@pytest.fixture
def cache(tmp_path: Path) -> CacheReader:
    build_corpus(tmp_path / "cache", corpus_of(long_and_short(), 50))
    return CacheReader.open(tmp_path / "cache")


def parts_of(cache: CacheReader, *quantiles: float) -> list[BucketReader]:
    return [BucketReader(cache, part) for part, _ in measure_buckets(cache, "web", "tokens_per_document", quantiles)]


def test_parts_hold_every_row_once_and_in_order(cache: CacheReader) -> None:
    parts = parts_of(cache, 0.3, 0.7)
    rows = [part.base_rows(np.arange(part.num_rows)) for part in parts]
    assert sorted(np.concatenate(rows).tolist()) == list(range(cache.num_rows))
    for part, own in zip(parts, rows, strict=True):
        assert own.tolist() == sorted(own.tolist())
        assert part.read_rows(np.arange(part.num_rows)).tokens_NC.tolist() == cache.read_rows(own).tokens_NC.tolist()
        for unit in range(len(cache.units)):
            first, last = cache.unit_row_starts[unit : unit + 2]
            assert part.rows_in(unit, unit + 1) == np.count_nonzero((own >= first) & (own < last))
        for row in range(part.num_rows):
            assert part.documents_of(row) == cache.documents_of(int(own[row]))


def test_the_easy_part_has_the_short_documents(cache: CacheReader) -> None:
    measured = measure_buckets(cache, "web", "tokens_per_document", (0.3,))
    easy, hard = (BucketReader(cache, part) for part, _ in measured)
    assert sum(share for _, share in measured) == 1
    assert [share for _, share in measured] == [Fraction(p.num_rows, cache.num_rows) for p in (easy, hard)]

    def longest(part: BucketReader) -> list[int]:
        return [max(span.byte_length for span in part.documents_of(row)) for row in range(part.num_rows)]

    assert max(longest(easy)) < 100
    assert float(np.mean(longest(hard))) > 80 > float(np.mean(longest(easy)))


def test_which_part_a_chunk_belongs_to_does_not_change_when_the_cache_grows(cache: CacheReader) -> None:
    part = measure_buckets(cache, "web", "tokens_per_document", (0.5,), last_unit=3)[0][0]
    full, units = cache.manifest, [0, 1, 2, 5]
    chosen = [np.isin(records["unit"], units) for records in (full.chunks, full.units)]
    early = Manifest(full.planned_units, full.chunks[chosen[0]], full.units[chosen[1]], full.position)
    before = BucketReader(CacheReader(cache.directory, cache.recipe, early, 16), part)
    after = BucketReader(cache, part)
    assert before.refreshed() is before
    assert before.missing_units(0, 7).tolist() == [3, 4, 6]
    assert len(after.missing_units(0, len(cache.units))) == 0
    assert before.content_digest(0, 3) == after.content_digest(0, 3)
    assert before.content_digest(0, 3) != BucketReader(cache, replace(part, low=Fraction(1))).content_digest(0, 3)
    for unit in units:
        first = [int(reader.unit_row_starts[unit]) for reader in (before, after)]
        count = before.rows_in(unit, unit + 1)
        assert count == after.rows_in(unit, unit + 1)
        rows = [
            reader.read_rows(np.arange(start, start + count)).tokens_NC.tolist()
            for reader, start in zip((before, after), first, strict=True)
        ]
        assert rows[0] == rows[1]


def test_documents_are_found_in_their_part(cache: CacheReader) -> None:
    parts = parts_of(cache, 0.5)
    for file_index in range(len(cache.files)):
        rows = cache.rows_of_document(file_index).tolist()
        found = [part.base_rows(part.rows_of_document(file_index)).tolist() for part in parts]
        assert sorted(found[0] + found[1]) == rows


def test_a_plan_draws_from_the_parts_by_weight(tmp_path: Path, cache: CacheReader) -> None:
    measured = measure_buckets(cache, "web", "tokens_per_document", (0.5,))
    sources = tuple(
        PlanSource(name, weight, cache.recipe.digest, cache.row_tokens, bucket=part)
        for name, weight, (part, _) in zip(("web.easy", "web.hard"), (Fraction(3), Fraction(1)), measured, strict=True)
    )
    readers = readers_of(sources, {"web": cache})
    plan = DataPlan.create(tmp_path / "plan.jsonl", PlanStart(1, True, 4, sources), readers)
    plan.extend_to(40, readers)
    again = DataPlan.open(plan.path)
    assert again.sources == sources
    again.check(readers)
    found = again.locate(np.arange(40))
    assert Counter(found.source_index.tolist()) == {0: 30, 1: 10}
    for index, reader in enumerate(readers):
        assert reader is not None
        for row in range(reader.num_rows):
            expected = np.flatnonzero((found.source_index == index) & (found.row == row))
            assert again.positions_of(index, row, reader)[: len(expected)].tolist() == expected.tolist()
    assert readers_of(sources, {}) == [None, None]
    assert reader_of(replace(sources[0], bucket=None), cache) is cache


def test_bytes_per_token_is_that_of_the_unit(cache: CacheReader) -> None:
    """With a token a byte and one for each end of text, text of short documents has the fewest bytes per token."""
    by_unit = {unit: int(text) / int(tokens) for unit, _, text, tokens, *_ in cache.manifest.units.tolist()}
    low, high = (part for part, _ in measure_buckets(cache, "web", "bytes_per_token", (0.4,)))
    units = [
        {int(unit) for unit in np.flatnonzero(np.diff(BucketReader(cache, p).unit_row_starts))} for p in (low, high)
    ]
    assert not units[0] & units[1]
    assert max(by_unit[unit] for unit in units[0]) < min(by_unit[unit] for unit in units[1])


def test_a_statistic_that_does_not_divide_is_refused(cache: CacheReader) -> None:
    with pytest.raises(ConfigError, match="does not split source 'web'"):
        measure_buckets(cache, "web", "tokens_per_document", (0.0001,))
