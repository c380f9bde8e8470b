"""Readers over a store with scripted failures: every read returns the bytes of the object."""

from __future__ import annotations

import asyncio
import io
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventually import wait_until
from vorox.core.errors import DataError
from vorox.data.storage import (
    RetryPolicy,
    StoredFile,
    iterate_in_budget,
    reading,
    requests,
    retry_budget,
    waiting_for_data,
)
from vorox.data.storage.listing import list_remote
from vorox.data.storage.reading import open_remote_range, open_remote_seekable
from vorox.data.storage.requests import RetryingClient, TransientError
from vorox.data.storage.store import Receive, UriFilter

CONTENT = random.Random(0).randbytes(50_000)
FILE = StoredFile("s3://bucket/file", len(CONTENT), "signature", 0, "version:1")
POLICY = RetryPolicy(
    retries_per_unit=10_000, first_backoff_seconds=1e-5, longest_backoff_seconds=1e-4, request_bytes=7_000
)  # fmt: skip


@dataclass
class FakeStore:
    """A store with one object, of which every try sends a random part before it fails, and a listing."""

    seed: int = 0
    failing_fraction: float = 0.5
    sent: list[tuple[int, int]] = field(default_factory=list)
    uris: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    async def describe(self, uri: str, client: RetryingClient) -> StoredFile | None:
        return StoredFile(uri, 1, "", 0, "v") if uri in self.uris else None

    async def list_prefix(self, prefix: str, matches: UriFilter, client: RetryingClient) -> list[StoredFile]:
        found = [uri for uri in self.uris if uri.startswith(prefix) and matches(uri)]
        random.Random(self.seed).shuffle(found)
        return [StoredFile(uri, 1, "", 0, "v") for uri in found]

    async def stream_range(
        self, file: StoredFile, start_byte: int, end_byte: int, receive: Receive, policy: RetryPolicy
    ) -> None:
        with self.lock:
            draw = random.Random(f"{self.seed} {start_byte} {end_byte} {len(self.sent)}")
        breaks = draw.random() < self.failing_fraction
        end = draw.randint(start_byte, end_byte) if breaks else end_byte
        for first in range(start_byte, end, 1_000):
            receive(CONTENT[first : min(first + 1_000, end)])
            await asyncio.sleep(0)
        with self.lock:
            self.sent.append((start_byte, end))
        if breaks:
            raise TransientError("it broke")


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(reading, "_FIRST_FETCH_BYTES", 900)
    monkeypatch.setattr(reading, "_MIN_RANDOM_READ_BYTES", 3_000)
    with retry_budget(POLICY):
        yield
    assert waiting_for_data() is None


positions = st.integers(0, len(CONTENT))


@settings(max_examples=60, deadline=None)
@given(positions, st.none() | positions, st.lists(st.integers(1, 20_000), max_size=8), st.integers(0, 99))
def test_a_range_in_reads_of_any_size(start: int, end: int | None, sizes: list[int], seed: int) -> None:
    end = None if end is None else max(start, end)
    store, expected = FakeStore(seed), io.BytesIO(CONTENT[start:end])
    with open_remote_range(store, FILE, start, end) as reader:
        for size in sizes:
            assert reader.read(size) == expected.read(size)
        assert reader.read() == expected.read()
    spans = sorted(span for span in store.sent if span[0] < span[1])
    covered = start
    for first, last in spans:
        assert first == covered, "lost or fetched twice"
        covered = last
    assert covered == (len(CONTENT) if end is None else end)


seeks = st.tuples(st.sampled_from([io.SEEK_SET, io.SEEK_END]), positions, st.integers(0, 15_000))


@pytest.mark.parametrize("start", [0, len(CONTENT) - 1, len(CONTENT)])
def test_a_range_ends_with_the_object(start: int) -> None:
    """As that of a local file does; a server answers a request past the end as if the object had changed."""
    store = FakeStore(failing_fraction=0.0)
    with open_remote_range(store, FILE, start, len(CONTENT) + 9_000) as reader:
        assert reader.read() == CONTENT[start:]
    assert max((end for _, end in store.sent), default=0) <= len(CONTENT)


@settings(max_examples=60, deadline=None)
@given(st.lists(seeks, max_size=10), st.integers(0, 99))
def test_random_access_equals_that_of_a_file(operations: list[tuple[int, int, int]], seed: int) -> None:
    expected = io.BytesIO(CONTENT)
    with open_remote_seekable(FakeStore(seed), FILE) as reader:
        for whence, offset, size in operations:
            offset = -offset if whence == io.SEEK_END else offset
            assert reader.seek(offset, whence) == expected.seek(offset, whence)
            assert reader.read(size) == expected.read(size)
            assert reader.tell() == expected.tell()


def test_concurrent_readers_do_not_mix() -> None:
    store = FakeStore(failing_fraction=0.3)

    def read(number: int) -> bool:
        start = number * 500
        with retry_budget(POLICY), open_remote_range(store, FILE, start, start + 20_000) as reader:
            return reader.read() == CONTENT[start : start + 20_000]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(40)))


def test_units_in_one_thread_have_separate_budgets() -> None:
    store = FakeStore(failing_fraction=1.0)
    policy = RetryPolicy(retries_per_unit=3, first_backoff_seconds=1e-5)

    def unit() -> Iterator[bytes]:
        with open_remote_range(store, FILE, 0, 100_000) as reader:
            yield reader.read(1)
            yield reader.read()

    for _ in range(2):
        with pytest.raises(DataError, match="in 4 tries; last: it broke"):
            list(iterate_in_budget(unit(), policy))


def test_a_store_that_sends_a_wrong_length_is_a_bug() -> None:
    class Wrong(FakeStore):
        async def stream_range(
            self, file: StoredFile, start_byte: int, end_byte: int, receive: Receive, policy: RetryPolicy
        ) -> None:
            receive(b"x")

    with pytest.raises(AssertionError), open_remote_range(Wrong(), FILE, 0, 10) as reader:
        reader.read()


def test_a_closed_reader_stops_fetching() -> None:
    """The store never responds, so no fetch ends without being cancelled."""

    class Mute(FakeStore):
        async def stream_range(
            self, file: StoredFile, start_byte: int, end_byte: int, receive: Receive, policy: RetryPolicy
        ) -> None:
            self.sent.append((start_byte, end_byte))
            await asyncio.Event().wait()

    store = Mute()
    others = asyncio.all_tasks(requests.background().loop)
    with open_remote_range(store, FILE, 0, None):
        wait_until(lambda: store.sent)
        assert asyncio.all_tasks(requests.background().loop) - others
    wait_until(lambda: waiting_for_data() is None)
    wait_until(lambda: asyncio.all_tasks(requests.background().loop) <= others)


NAMES = ["a.txt", "b/a.txt", "b/.h/a.txt", ".a.txt", "b/c/d.md", "b.txt/x.txt"]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 999))
def test_a_listing_is_sorted_in_any_order_of_the_store(seed: int) -> None:
    store = FakeStore(seed, uris=[f"s3://bucket/text/{name}" for name in NAMES] + ["s3://bucket/text2/z.txt"])
    listed = [file.uri for file in list_remote(store, "s3://bucket/text/", (".txt",), frozenset())]
    assert listed == [f"s3://bucket/text/{name}" for name in ("a.txt", "b.txt/x.txt", "b/a.txt")]
    listed = [file.uri for file in list_remote(store, "s3://bucket/text*/**/*.txt", (), frozenset({"b"}))]
    assert listed == [
        f"s3://bucket/{name}" for name in ("text/a.txt", "text/b.txt/x.txt", "text/b/a.txt", "text2/z.txt")
    ]
