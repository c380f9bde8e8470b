"""Streams: the rows of a cache out of a bounded ring, exact or loudly impossible, and no thread left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cache_corpus import ByteTokenizer, Corpus, build_corpus, corpus_of, recipe_for, small_corpus
from vorox.core.errors import DataError
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.unit_work import UnitWork
from vorox.data.streaming.reader import StreamReader
from vorox.data.streaming.retention import MARKER_NAME, Ring
from vorox.data.streaming.stream import Stream, open_directory

TOKENIZER = ByteTokenizer()
PAIRS = [(0, 1), (1, 3), (3, 5), (5, 7), (7, 8)]


def corpus() -> Corpus:
    return small_corpus(num_files=2, lines_per_file=60, lines_per_unit=15)


def work_of(text: Corpus, read_unit=None) -> UnitWork:
    return UnitWork(text.files, read_unit or text.read_unit, TOKENIZER, recipe_for(TOKENIZER))


class Opened:
    """A stream over a corpus, with its ring."""

    def __init__(self, directory: Path, text: Corpus, limit_bytes: int = 1 << 30, segments=PAIRS, **options) -> None:
        self.work = options.pop("work", None) or work_of(text)
        open_directory(directory, self.work, text.units)
        self.ring = Ring(limit_bytes)
        self.stream = Stream(directory, self.work, text.units, segments, self.ring, **options)
        self.reader = StreamReader(self.stream)

    def grown_to(self, units: int) -> StreamReader:
        """What the plan's grower does: ask until the units are there."""
        end = time.monotonic() + 10
        while len(self.reader.manifest.missing_units(0, units)):
            assert time.monotonic() < end, "the stream does not grow"
            self.reader = self.reader.refreshed(awaited_units=units)
            time.sleep(0.005)
        return self.reader

    def close(self) -> None:
        self.ring.close()
        self.stream.close()

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *arguments: object) -> None:
        self.close()


@pytest.fixture
def cached(tmp_path: Path) -> CacheReader:
    build_corpus(tmp_path / "cached", corpus())
    return CacheReader.open(tmp_path / "cached")


def chunk_bytes(directory: Path) -> int:
    total = 0
    for path in (directory / "chunks").rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            pass
    return total


def unit_bytes(reader: CacheReader) -> list[int]:
    sizes = [0] * reader.manifest.planned_units
    for chunk in reader.manifest.chunks:
        sizes[int(chunk["unit"])] += int(chunk["size_bytes"])
    return sizes


def in_strict_order(reader: CacheReader, segments=PAIRS, epochs: int = 1) -> Iterator[np.ndarray]:
    """Batches of three rows, shuffled within a segment."""
    generator = np.random.default_rng(3)
    for _ in range(epochs):
        for first, last in segments:
            starts = reader.unit_row_starts
            rows = generator.permutation(np.arange(starts[first], starts[last]))
            yield from (rows[at : at + 3] for at in range(0, len(rows), 3))


def assert_same_rows(one, other, rows: np.ndarray) -> None:
    left, right = one.read_rows(rows), other.read_rows(rows)
    assert np.array_equal(left.tokens_NC, right.tokens_NC)
    assert np.array_equal(left.segment_lengths, right.segment_lengths)
    assert np.array_equal(left.row_ptr, right.row_ptr)


def test_a_stream_gives_the_rows_of_a_cache_whatever_the_room(tmp_path, cached):
    sizes = unit_bytes(cached)
    two_segments = max(sum(sizes[a:b]) for a, b in zip([a for a, _ in PAIRS], [b for _, b in PAIRS[1:]] + [8]))
    limit = two_segments + max(sizes)
    assert limit < sum(sizes) * 0.75, "the corpus must not fit"
    peak = 0
    watching = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not watching.is_set():
            peak = max(peak, chunk_bytes(tmp_path / "stream"))
            time.sleep(0.0005)

    with Opened(tmp_path / "stream", corpus(), limit) as opened:
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for rows in in_strict_order(cached, epochs=2):
                last = int(np.searchsorted(cached.unit_row_starts, rows.max(), side="right"))
                assert_same_rows(cached, opened.grown_to(last), rows)
        finally:
            watching.set()
            watcher.join()
        assert opened.reader.digest == cached.digest
        assert opened.reader.unit_row_starts.tolist() == cached.unit_row_starts.tolist()
        statistics = opened.stream.statistics
    assert 0 < peak <= limit
    assert statistics.units_built == 8
    assert statistics.evicted_units > 0 < statistics.units_rebuilt
    assert (tmp_path / "stream" / MARKER_NAME).exists()
