"""Streams: the rows of a cache under a disk budget, exact or an error; no thread remains after close."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cache_corpus import ByteTokenizer, Corpus, build_corpus, recipe_for, small_corpus
from disk_usage import bytes_at_one_instant
from vorox.core.errors import DataError
from vorox.data.cache.files.manifest import chunk_path
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.units.unit_builder import UnitBuilder
from vorox.data.cache.upkeep.disk_budget import MARKER_NAME, DiskBudget
from vorox.data.streaming.prefetch_scheduler import SegmentRule
from vorox.data.streaming.stream import Stream, StreamReader
from vorox.data.streaming.unit_list import UnitList, open_directory

TOKENIZER = ByteTokenizer()
PAIRS = [(0, 1), (1, 3), (3, 5), (5, 7), (7, 8)]
RULE = SegmentRule(1, 2)


class CorpusSplitter:
    """Gives units that were cut before, and remembers which."""

    def __init__(self, units) -> None:
        self.units, self.given = tuple(units), list[int]()

    def units_after(self, known=()):
        for unit in self.units[len(known) :]:
            self.given.append(unit.unit_id)
            yield unit, unit.unit_id + 1 == len(self.units)

    def estimated_bytes(self, first) -> int:
        return sum(unit.size_bytes for unit in self.units)


def corpus() -> Corpus:
    return small_corpus(num_files=2, lines_per_file=60, lines_per_unit=15)


def work_of(text: Corpus, read_unit=None) -> UnitBuilder:
    return UnitBuilder(text.files, read_unit or text.read_unit, TOKENIZER, recipe_for(TOKENIZER))


class Opened:
    """A stream over a corpus, with its disk budget."""

    def __init__(self, directory: Path, text: Corpus, limit_bytes: int = 1 << 30, rule=RULE, **options) -> None:
        self.work = options.pop("work", None) or work_of(text)
        self.units = UnitList(directory, self.work, options.pop("splitter", None) or CorpusSplitter(text.units))
        open_directory(directory, self.units, rule.first_units)
        self.budget = DiskBudget(limit_bytes)
        self.stream = Stream(directory, self.work, self.units, rule, self.budget, **options)
        self.reader = StreamReader(self.stream)

    def grown_to(self, units: int) -> StreamReader:
        """Poll until the units exist, as a growing plan does. The time limit of tests ends a stream that stalls."""
        while len(self.reader.manifest.missing_units(0, units)) or (
            self.reader.manifest.planned_units < units and not self.reader.units_final
        ):
            self.reader = self.reader.refreshed(awaited_units=units)
            time.sleep(0.005)
        return self.reader

    def close(self) -> None:
        self.budget.close()
        self.stream.stop()
        self.stream.close()

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *arguments: object) -> None:
        self.close()


@pytest.fixture
def cached(tmp_path: Path) -> CacheReader:
    build_corpus(tmp_path / "cached", corpus())
    return CacheReader.open(tmp_path / "cached")


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
    two_segments = max(sum(sizes[one[0] : next_one[1]]) for one, next_one in itertools.pairwise(PAIRS))
    limit = two_segments + max(sizes)
    assert limit < sum(sizes) * 0.75, "the corpus must not fit"
    peak = 0
    watching = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not watching.is_set():
            peak = max(peak, bytes_at_one_instant(tmp_path / "stream", "chunks/**/*"))
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
        stream = opened.stream
    assert 0 < peak <= limit
    assert stream.units_built == 8
    assert stream.units_evicted > 0 < stream.units_rebuilt
    assert (tmp_path / "stream" / MARKER_NAME).exists()


def test_what_was_removed_comes_back_as_it_was_or_not_at_all(tmp_path, cached):
    text = corpus()
    changed = corpus_with_one_letter_changed(text)
    with Opened(tmp_path, text) as opened:
        opened.grown_to(8)
    for path in (tmp_path / "chunks").rglob("*.psc"):
        path.unlink()
    with Opened(tmp_path, text) as opened:
        assert_same_rows(cached, opened.reader, np.arange(cached.num_rows))
        assert (opened.stream.units_built, opened.stream.units_rebuilt) == (0, 8)
    for path in (tmp_path / "chunks").rglob("*.psc"):
        path.unlink()
    with Opened(tmp_path, text, work=work_of(text, changed.read_unit)) as opened:
        good = opened.reader.unit_row_starts[7] - 1
        assert_same_rows(cached, opened.reader, np.array([good]))
        with pytest.raises(DataError, match="Rebuilding unit 7 gives different rows than were committed"):
            opened.reader.read_rows(np.array([good + 1]))


def corpus_with_one_letter_changed(text: Corpus) -> Corpus:
    """The same but for the last unit."""
    last = text.contents[-1]
    place = max(index for index, byte in enumerate(last) if byte != ord("\n"))
    letter = b"z" if last[place : place + 1] != b"z" else b"y"
    contents = (*text.contents[:-1], last[:place] + letter + last[place + 1 :])
    return Corpus(contents, text.files, text.units)


def test_an_interrupted_stream_goes_on_without_reading_what_lies_before(tmp_path, cached):
    read: list[int] = []
    text = corpus()

    def reading(unit):
        read.append(unit.unit_id)
        return text.read_unit(unit)

    with Opened(tmp_path, text, work=work_of(text, reading)) as opened:
        opened.grown_to(5)
    for path in (tmp_path / "chunks").rglob("*.psc"):
        path.unlink()
    read.clear()
    rows = np.arange(cached.unit_row_starts[3], cached.unit_row_starts[4])
    with Opened(tmp_path, text, work=work_of(text, reading), prefetch_segments=0) as opened:
        assert_same_rows(cached, opened.reader, rows)
    assert set(read) <= {3, 4}, "only the units of the segment that is read"


@pytest.mark.parametrize("prefetch_segments", [0, 1])
def test_a_failing_network_delays_a_unit_and_drops_none(tmp_path, cached, prefetch_segments):
    text = corpus()
    failures = {2: 1, 5: 1}

    def reading(unit):
        if failures.get(unit.unit_id, 0):
            failures[unit.unit_id] -= 1
            raise ConnectionResetError(104, "Connection reset by peer")
        return text.read_unit(unit)

    errors = []
    with Opened(tmp_path, text, work=work_of(text, reading), prefetch_segments=prefetch_segments) as opened:
        for units in (3, 3, 8, 8):  # a waiting reader gets the error; a new wait retries
            try:
                opened.grown_to(units)
            except DataError as error:
                errors.append(error.what)
        assert opened.reader.digest == cached.digest
    assert len(errors) == 2 if prefetch_segments == 0 else len(errors) <= 2  # built ahead, it is tried again in time
    assert all(error.startswith("Cannot read unit") for error in errors)
    assert failures == {2: 0, 5: 0}


def test_room_for_less_than_is_read_at_once_is_refused_with_what_it_takes(tmp_path):
    with (
        Opened(tmp_path, corpus(), 500, SegmentRule(8, 8)) as opened,
        pytest.raises(DataError, match="retention_bytes is 500, but the segments") as caught,
    ):
        opened.grown_to(8)
    assert "max_segment_units" in (caught.value.hint or "")


def test_a_cache_that_is_meant_to_stay_is_never_touched(tmp_path):
    text = corpus()
    build_corpus(tmp_path, text)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*.psc"))
    with pytest.raises(DataError, match="chunks of a permanent cache"):
        Opened(tmp_path, text)
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*.psc")) == before
    assert not (tmp_path / MARKER_NAME).exists()


def test_closing_leaves_no_thread_and_ends_those_who_wait(tmp_path):
    before = set(threading.enumerate())
    text, started, go_on = corpus(), threading.Event(), threading.Event()

    def reading(unit):
        started.set()
        assert go_on.wait(10)
        return text.read_unit(unit)

    opened = Opened(tmp_path, text, work=work_of(text, reading))
    failed: list[BaseException] = []

    def waiting() -> None:
        try:
            opened.stream.ensure(0)
        except RuntimeError as error:
            failed.append(error)

    waiter = threading.Thread(target=waiting)
    waiter.start()
    assert started.wait(10)
    opened.budget.close()
    opened.stream.stop()
    waiter.join(10)
    assert not waiter.is_alive()
    assert [str(error) for error in failed] == ["The build was closed while a thread waited for a unit"]
    go_on.set()
    opened.close()
    assert set(threading.enumerate()) <= before


def test_two_streams_of_one_directory_share_the_work(tmp_path, cached):
    """Two processes of a run share a directory: leases separate them, the disk shows what is built."""
    text = corpus()
    with Opened(tmp_path, text) as one, Opened(tmp_path, text) as other:
        for rows in in_strict_order(cached):
            last = int(np.searchsorted(cached.unit_row_starts, rows.max(), side="right"))
            assert_same_rows(cached, one.grown_to(last), rows)
            assert_same_rows(cached, other.grown_to(last), rows)
        built = one.stream.units_built + other.stream.units_built
    assert built == 8
    assert one.stream.units_rebuilt + other.stream.units_rebuilt == 0


def test_a_damaged_chunk_is_built_again(tmp_path, cached):
    with Opened(tmp_path, corpus()) as opened:
        opened.grown_to(8)
    for path in sorted((tmp_path / "chunks").rglob("*.psc"))[::2]:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    with Opened(tmp_path, corpus()) as opened:
        assert_same_rows(cached, opened.reader, np.arange(cached.num_rows))
        assert opened.stream.units_rebuilt > 0


def test_the_source_is_cut_as_it_is_read(tmp_path, cached):
    text = corpus()
    splitter = CorpusSplitter(text.units)
    with Opened(tmp_path, text, splitter=splitter, prefetch_segments=0) as opened:
        assert (splitter.given, opened.reader.manifest.planned_units, opened.reader.units_final) == ([0], 1, False)
        opened.grown_to(1)
        opened.reader.read_rows(np.array([0]))
        opened.grown_to(3)
        assert splitter.given == [0, 1, 2]
        assert opened.reader.content_digest(0, 3) == cached.content_digest(0, 3)
        opened.grown_to(8)
        assert splitter.given == list(range(8)), "each once"
        assert (opened.reader.units_final, opened.reader.num_rows) == (True, cached.num_rows)
        assert opened.reader.digest == cached.digest
        assert opened.reader.units == cached.units
    splitter.given.clear()
    with Opened(tmp_path, text, splitter=splitter) as opened:
        assert opened.reader.units_final
        assert_same_rows(cached, opened.reader, np.arange(cached.num_rows))
    assert splitter.given == [], "nothing is cut again"


def test_units_that_were_listed_by_one_who_died_do_not_count(tmp_path, cached, monkeypatch):
    text = corpus()
    with Opened(tmp_path, text, prefetch_segments=0) as opened:
        opened.grown_to(1)
    units = UnitList(tmp_path, work_of(text), CorpusSplitter(text.units))
    with monkeypatch.context() as patch:
        patch.setattr("vorox.data.streaming.unit_list.planned_entry", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            units.extend(6)
    assert UnitList(tmp_path, work_of(text), CorpusSplitter(text.units)).units == list(text.units[:1])
    with Opened(tmp_path, text) as opened:
        assert opened.grown_to(8).digest == cached.digest


def test_text_that_is_cut_otherwise_than_before_is_refused(tmp_path):
    text = corpus()
    with Opened(tmp_path / "stream", text) as opened:
        opened.grown_to(3)
    shutil.copytree(tmp_path / "stream", tmp_path / "moved")
    shutil.rmtree(tmp_path / "stream")
    stale = UnitList(tmp_path / "stream", work_of(text), CorpusSplitter(corpus_of_other_units().units))
    stale.split(2)
    shutil.copytree(tmp_path / "moved", tmp_path / "stream")
    with pytest.raises(DataError, match="has other boundaries"):
        stale.record()


def corpus_of_other_units() -> Corpus:
    return small_corpus(num_files=2, lines_per_file=60, lines_per_unit=20)


def test_a_network_that_fails_while_the_source_is_cut_is_told_and_tried_again(tmp_path, cached):
    text = corpus()
    failures = [3, 5]

    class Failing(CorpusSplitter):
        def units_after(self, known=()):
            for pair in super().units_after(known):
                if failures and pair[0].unit_id == failures[0]:
                    del failures[0]
                    raise DataError("the store did not answer")
                yield pair

    errors = []
    with Opened(tmp_path, text, splitter=Failing(text.units), prefetch_segments=0) as opened:
        for units in (3, 5, 5, 8, 8):
            try:
                opened.grown_to(units)
            except DataError as error:
                errors.append(error.what)
        assert opened.reader.digest == cached.digest
    assert errors == ["the store did not answer"] * 2


class Shared:
    """An evictable cache of one unit on disk, which a peer reads until it is polled for the third time."""

    def __init__(self, directory: Path, peers: bool) -> None:
        self.directory, self.polls, self.evicted, self._peers = directory, 0, list[int](), peers
        (directory / MARKER_NAME).touch()
        chunk = chunk_path(directory, 1, 0)
        chunk.parent.mkdir(parents=True)
        chunk.write_bytes(bytes(800))

    def poll_peers(self) -> bool:
        self.polls += 1
        return self._peers and self.polls < 3

    def eviction_priority(self, unit: int, /) -> int:
        return 5 if unit == 1 and self._peers and self.polls >= 3 else 0

    def mark_evicted(self, unit: int, /) -> None:
        self.evicted.append(unit)


@pytest.mark.parametrize("peers", [True, False])
def test_room_that_peers_occupy_is_waited_for(tmp_path, monkeypatch, peers):
    monkeypatch.setattr("vorox.data.cache.upkeep.disk_budget._POLL_SECONDS", 0.001)
    cache, budget = Shared(tmp_path, peers), DiskBudget(1000)
    budget.join(cache)
    with contextlib.ExitStack() as stack:
        if not peers:
            stack.enter_context(pytest.raises(DataError, match="need at least 1,200"))
        with budget.room(cache, 0, 400, gives_way=lambda: False) as there_is_room:
            assert there_is_room
    assert (cache.polls, cache.evicted) == ((3, [1]) if peers else (1, []))
