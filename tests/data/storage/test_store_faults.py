"""Every store behind a fault-injecting proxy: no byte is lost or read twice, refusals are immediate."""

from __future__ import annotations

import email.utils
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from eventually import PATIENCE_SECONDS, wait_until
from servers import Fault, FaultProxy, Request
from servers.shelves import KINDS, Shelf, shelf
from vorox.core.errors import DataError
from vorox.data.storage import (
    RetryPolicy,
    StoreUnreachable,
    WaitingForData,
    abandon_late_requests,
    cache_ranges,
    list_files,
    open_range,
    open_seekable,
    retry_budget,
    waiting_for_data,
)

BODY = b"".join(b"%07d\n" % number for number in range(50_000))
PIECE = 1 << 16
POLICY = RetryPolicy(
    retries_per_unit=20, first_backoff_seconds=0.005, longest_backoff_seconds=0.02, stall_seconds=0.4, late_seconds=0.1,
    request_bytes=PIECE,
)  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    with shelf(request.param, tmp_path_factory.mktemp("web")) as opened:
        opened.put("a.txt", BODY)
        yield opened


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    with retry_budget(POLICY):
        yield
    assert waiting_for_data() is None


def is_read(request: Request) -> bool:
    """Return the requests for content: behind the hub's redirect, and without the one-byte requests for a length."""
    return request.range not in {None, (0, 1)} and "/resolve/" not in request.path


def reads(proxy: FaultProxy) -> list[Request]:
    return [request for request in proxy.log.requests if is_read(request)]


def read_all(root: str) -> bytes:
    (file,) = list_files(f"{root}/a.txt", ())
    with open_range(file) as reader:
        return reader.read()


def assert_every_byte_was_sent_once(proxy: FaultProxy) -> None:
    spans = sorted(request.sent for request in reads(proxy) if request.status in {200, 206} and request.sent_bytes)
    assert spans[0][0] == 0
    assert spans[-1][1] == len(BODY)
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert start == end, f"bytes {min(start, end)}-{max(start, end)} were lost or fetched twice"


FAULTS = {
    "503": Fault("answer", 503),
    "429": Fault("answer", 429, {"Retry-After": "0"}),
    "408": Fault("answer", 408),
    "500": Fault("answer", 500, body=b"<html>oops</html>"),
    "reset": Fault("reset"),
    "cut": Fault("truncate", sent_fraction=0.3),
    "truncated at byte 0": Fault("truncate", sent_fraction=0.0),
}


@pytest.mark.parametrize("name", FAULTS)
def test_reading_resumes_at_the_byte(store: Shelf, name: str) -> None:
    with store.behind() as (root, proxy):
        proxy.only = is_read
        proxy.script(FAULTS[name], Fault("none"), FAULTS[name], FAULTS[name])
        assert read_all(root) == BODY
        assert sum(proxy.faults.values()) == 3
        assert_every_byte_was_sent_once(proxy)


@pytest.mark.parametrize("name", ["503", "reset", "cut"])
def test_listing_is_retried_as_well(store: Shelf, name: str) -> None:
    with store.behind() as (root, proxy):
        proxy.script(FAULTS[name], FAULTS[name])
        assert [file.size_bytes for file in list_files(root, (".txt",))] == [len(BODY)]
        assert sum(proxy.faults.values()) >= 1


def test_a_stall_times_out_and_is_visible(store: Shelf) -> None:
    seen: list[WaitingForData] = []
    with store.behind(stall_once_seconds=86_400) as (root, proxy):
        proxy.only = is_read
        result: list[bytes] = []

        def read() -> None:
            with retry_budget(POLICY):
                result.append(read_all(root))

        thread = threading.Thread(target=read)
        thread.start()
        wait_until(lambda: (state := waiting_for_data()) is not None and not seen.append(state))
        thread.join(PATIENCE_SECONDS)
        assert result == [BODY]
        assert proxy.faults == {"stall": 1}
        proxy.stopping.set()
    assert "no response for 0.1 s" in seen[0].reason or "no byte for 0.4 s" in seen[0].reason
    assert seen[0].uri.endswith("a.txt")


def test_retry_after_is_honoured(store: Shelf) -> None:
    if store.kind not in {"hf", "http"}:
        pytest.skip("obstore does not show the headers of a refusal (docs/decisions.md)")
    with store.behind() as (root, proxy):
        (file,) = list_files(f"{root}/a.txt", ())
        proxy.only = is_read
        least = time.time() + 1
        asked = "1"
        if store.kind == "http":
            least = float(int(least + 1))
            asked = email.utils.formatdate(least, usegmt=True)
        proxy.script(Fault("answer", 503, {"Retry-After": asked}))
        with open_range(file, 0, 10) as reader:
            assert reader.read() == BODY[:10]
        assert time.time() >= least


def test_an_exhausted_budget_reports_the_last_failure(store: Shelf) -> None:
    with store.behind() as (root, proxy):
        (file,) = list_files(f"{root}/a.txt", ())
        proxy.log.clear()
        proxy.only = is_read
        proxy.error_503_fraction = 1.0
        with (
            retry_budget(RetryPolicy(retries_per_unit=4, first_backoff_seconds=0.001)),
            pytest.raises(DataError, match=r"in 5 tries; last: HTTP 503") as caught,
            open_range(file, 0, 10) as reader,
        ):
            reader.read()
        assert caught.value.where == file.uri
        assert len(reads(proxy)) == 5


def test_a_permanent_refusal_is_not_retried(store: Shelf) -> None:
    with store.behind() as (root, proxy):
        (file,) = list_files(f"{root}/a.txt", ())
        for status, what in [
            (403, "refuses access"),
            (404, "changed after it was listed: it, or this version of it, was deleted"),
            (400, "HTTP 400"),
        ]:
            proxy.log.clear()
            proxy.only = is_read
            proxy.script(Fault("answer", status))
            with pytest.raises(DataError, match=what) as caught, open_range(file, 0, 10) as reader:
                reader.read()
            assert caught.value.where == file.uri
            assert caught.value.hint
            assert len(reads(proxy)) == 1


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_fetch_ends_with_its_readers(store: Shelf, is_shared: bool) -> None:
    with store.behind() as (root, proxy):
        (file,) = list_files(f"{root}/a.txt", ())
        proxy.log.clear()
        proxy.error_503_fraction = 1.0
        with retry_budget(replace(POLICY, retries_per_unit=10_000)), cache_ranges([file] if is_shared else []):
            with open_range(file):
                wait_until(lambda: proxy.faults["answer"] > 2)
            if is_shared:
                assert waiting_for_data() is not None, "another reader may want the range"
        wait_until(lambda: waiting_for_data() is None, seconds=10)


def test_a_stopped_thread_does_not_wait_for_a_late_store(store: Shelf) -> None:
    with store.behind() as (root, proxy):
        (file,) = list_files(f"{root}/a.txt", ())
        proxy.log.clear()
        proxy.error_503_fraction = 1.0
        with (
            retry_budget(replace(POLICY, retries_per_unit=10_000)),
            abandon_late_requests(lambda: proxy.faults["answer"] > 2),
            pytest.raises(StoreUnreachable, match="Reading was stopped"),
            open_range(file) as reader,
        ):
            reader.read()
        wait_until(lambda: waiting_for_data() is None, seconds=10)


def test_random_access_survives_faults(store: Shelf) -> None:
    with store.behind(error_503_fraction=0.2, truncated_fraction=0.2, seed=3) as (root, _):
        (file,) = list_files(f"{root}/a.txt", ())
        with retry_budget(RetryPolicy(retries_per_unit=200, first_backoff_seconds=0.001, request_bytes=5_000)):
            for _ in range(3):
                with open_seekable(file) as reader:
                    for offset in (399_990, 17, 200_000, 60_000):
                        reader.seek(offset)
                        assert reader.read(9_000) == BODY[offset : offset + 9_000]


def test_many_random_faults_change_nothing(store: Shelf) -> None:
    with store.behind(error_503_fraction=0.1, truncated_fraction=0.2, seed=1) as (root, proxy):
        proxy.only = is_read
        with retry_budget(
            RetryPolicy(
                retries_per_unit=500, first_backoff_seconds=0.001, longest_backoff_seconds=0.01, request_bytes=9_000
            )
        ):
            assert read_all(root) == BODY
        assert proxy.faults["answer"] >= 1
        assert proxy.faults["truncate"] >= 3
        assert_every_byte_was_sent_once(proxy)


def test_a_short_read_of_a_large_object_fetches_little(store: Shelf) -> None:
    store.put("large.bin", bytes(4 << 20))
    for start, end, looked_bytes, most_bytes in [(1 << 20, None, 100, 3 << 18), (5, 1_005, 1_000, 1_000)]:
        with store.behind() as (root, proxy), retry_budget(RetryPolicy()):
            (file,) = list_files(f"{root}/large.bin", ())
            with open_range(file, start, end) as reader:
                assert len(reader.read(looked_bytes)) == looked_bytes
            assert sum(request.sent_bytes for request in reads(proxy)) <= most_bytes
    with store.behind() as (root, proxy), retry_budget(RetryPolicy()):
        (file,) = list_files(f"{root}/large.bin", ())
        with open_range(file) as reader:
            assert sum(len(piece) for piece in iter(lambda: reader.read(1 << 20), b"")) == 4 << 20
        assert len(reads(proxy)) < 17
