"""The cache of fetched ranges: the bytes are right, none is fetched twice while it is cached, and memory is bounded."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from vorox.data.storage import StoredFile
from vorox.data.storage.reading import RangeCache

SIZE = 200
FILE = StoredFile("s3://bucket/a", SIZE, "signature", 0)


@dataclass
class FakeFetch:
    start_byte: int
    end_byte: int
    has_failed: bool = False
    num_holders: int = 1

    def hold(self) -> None:
        assert self.num_holders > 0, "a fetch that was cancelled is not handed out"
        self.num_holders += 1

    def release(self) -> None:
        self.num_holders -= 1


@dataclass
class Fetches:
    started: list[FakeFetch] = field(default_factory=list)

    def __call__(self, start_byte: int, end_byte: int) -> FakeFetch:
        self.started.append(FakeFetch(start_byte, end_byte))
        return self.started[-1]

    def times(self) -> list[int]:
        """Return how often each byte was fetched."""
        return [sum(fetch.start_byte <= byte < fetch.end_byte for fetch in self.started) for byte in range(SIZE)]


def read(cache: RangeCache, fetches: Fetches, start: int, end: int, before: int = 0) -> list[FakeFetch]:
    """Read ``[start, end)`` as a reader does, fetching ``before`` bytes ahead of each position as well."""
    found: list[FakeFetch] = []
    while start < end:
        fetch = cache.get(FILE, start, max(0, start - before), end, fetches)
        assert fetch.start_byte <= start < fetch.end_byte
        start = fetch.end_byte
        found.append(fetch)
        fetch.release()
    return found


ranges = st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE), st.integers(0, 30))


@settings(deadline=None)
@given(st.lists(ranges, max_size=30))
def test_no_byte_is_fetched_twice(wanted: list[tuple[int, int, int]]) -> None:
    cache, fetches = RangeCache(SIZE, 0), Fetches()
    with cache.register([FILE]):
        for start, length, before in wanted:
            read(cache, fetches, start, min(start + length, SIZE), before)
        assert max(fetches.times(), default=0) <= 1
        assert all(fetch.num_holders == 1 for fetch in fetches.started), "those of the cache"
    assert not any(fetch.num_holders for fetch in fetches.started)


@settings(deadline=None)
@given(st.lists(ranges, max_size=30), st.integers(20, 100))
def test_the_cache_is_bounded(wanted: list[tuple[int, int, int]], limit: int) -> None:
    cache, fetches = RangeCache(limit, 0), Fetches()
    with cache.register([FILE]):
        for start, length, before in wanted:
            last = read(cache, fetches, start, min(start + length, SIZE), before)[-1]
            held = sum(entry.end_byte - entry.start_byte for entry in cache._ranges.values())
            assert held <= max(limit, last.end_byte - last.start_byte)


def test_the_least_recently_used_range_is_evicted_first() -> None:
    cache, fetches = RangeCache(100, 0), Fetches()
    with cache.register([FILE]):
        for start in (0, 50, 0, 100, 0, 50):
            read(cache, fetches, start, start + 50)
        assert [fetch.start_byte for fetch in fetches.started] == [0, 50, 100, 50]
        assert [fetch.num_holders for fetch in fetches.started] == [1, 0, 0, 1]


def test_a_failed_range_is_fetched_again() -> None:
    cache, fetches = RangeCache(SIZE, 0), Fetches()
    with cache.register([FILE]):
        read(cache, fetches, 0, 100)[0].has_failed = True
        assert not read(cache, fetches, 50, 100)[0].has_failed
        assert len(fetches.started) == 2


def test_unregistered_files_share_nothing() -> None:
    cache, fetches = RangeCache(SIZE, 0), Fetches()
    with cache.register([FILE]):
        with cache.register([FILE]):
            read(cache, fetches, 0, 100)
        assert read(cache, fetches, 0, 100) == fetches.started, "the other registration still holds"
    read(cache, fetches, 0, 100)
    assert fetches.times()[0] == 2


def test_a_range_that_is_read_outlives_its_registration() -> None:
    cache, fetches = RangeCache(SIZE, 0), Fetches()
    with cache.register([FILE]):
        held = cache.get(FILE, 0, 0, 100, fetches)
    assert held.num_holders == 1, "the reader's"


def test_a_small_file_is_fetched_whole() -> None:
    cache, fetches = RangeCache(SIZE, SIZE), Fetches()
    with cache.register([FILE]):
        for start in (150, 20, 199):
            read(cache, fetches, start, start + 1)
    assert fetches.started == [FakeFetch(0, SIZE, num_holders=0)]
