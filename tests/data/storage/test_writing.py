"""Writing to every writable store, against real servers on loopback, with and without faults."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from servers import Fault, FaultProxy, Request
from servers.shelves import WRITABLE, Shelf, shelf
from vorox.core.errors import ConfigError, DataError
from vorox.data.storage import (
    RetryPolicy,
    StoredFile,
    StoreUnreachable,
    WriteConflict,
    cloud,
    list_objects,
    open_range,
    put_bytes,
    put_file,
    remove_object,
    retry_budget,
    waiting_for_data,
)

POLICY = RetryPolicy(retries_per_unit=20, first_backoff_seconds=0.01, longest_backoff_seconds=0.05, stall_seconds=2)
PART_BYTES = 5 << 20
LARGE = hashlib.shake_256(b"a large file").digest(2 * PART_BYTES + 12_345)


@pytest.fixture(params=WRITABLE)
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    monkeypatch.setattr(cloud, "PART_BYTES", PART_BYTES)
    with shelf(request.param, tmp_path) as opened, retry_budget(POLICY):
        yield opened


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large.bin"
    path.write_bytes(LARGE)
    return path


def content(file: StoredFile) -> bytes:
    with open_range(file) as reader:
        return reader.read()


def names(root: str) -> list[str]:
    return [file.uri.removeprefix(root + "/") for file in list_objects(root)]


def test_objects_are_put_listed_read_and_removed(store: Shelf, large: Path) -> None:
    root = f"{store.root}/run"
    assert list_objects(root) == []
    put_bytes(b"first", f"{root}/a/.hidden")
    put_bytes(b"", f"{root}/empty")
    put_bytes(b"second", f"{root}/a/.hidden")
    big = put_file(large, f"{root}/a/large.bin")
    assert names(root) == ["a/.hidden", "a/large.bin", "empty"]
    assert [content(file) for file in list_objects(root)] == [b"second", LARGE, b""]
    assert content(big) == LARGE
    assert big.size_bytes == len(LARGE)
    remove_object(f"{root}/a/large.bin")
    remove_object(f"{root}/a/large.bin")
    remove_object(f"{root}/never/was")
    assert names(root) == ["a/.hidden", "empty"]


def test_one_of_two_conditional_writers_succeeds(store: Shelf) -> None:
    uri = f"{store.root}/OWNER.json"
    first = put_bytes(b"one", uri, mode="create")
    with pytest.raises(WriteConflict):
        put_bytes(b"two", uri, mode="create")
    second = put_bytes(b"three", uri, mode=first)
    with pytest.raises(WriteConflict):
        put_bytes(b"four", uri, mode=first)
    assert content(list_objects(store.root)[0]) == b"three"
    put_bytes(b"five", uri, mode=second)
    assert content(list_objects(store.root)[0]) == b"five"


def test_a_write_with_a_lost_response_is_recognised_as_our_own(store: Shelf) -> None:
    """The first try succeeds and its response is lost: the second finds its own object."""
    uri = f"{store.root}/OWNER.json"
    with store.behind() as (_, proxy):
        proxy.only = lambda request: request.method in {"PUT", "POST"}
        lose_answers(proxy, 1)
        written = put_bytes(b"mine", uri, mode="create")
    assert content(written) == b"mine"
    with pytest.raises(WriteConflict):
        put_bytes(b"yours", uri, mode="create")


def test_an_unreachable_store_is_not_another_writer(store: Shelf) -> None:
    """The response is lost and the object cannot be read: whose it is stays unknown."""
    uri = f"{store.root}/OWNER.json"
    with store.behind() as (_, proxy), retry_budget(replace(POLICY, retries_per_unit=3)):
        proxy.only = lambda request: request.method in {"PUT", "POST"}
        lose_answers(proxy, 1)
        lost = proxy._ask

        def ask(request: Request) -> tuple[int, dict[str, str], bytes, int]:
            if request.method == "GET" and request.range is not None:
                raise ConnectionResetError
            return lost(request)

        proxy._ask = ask  # type: ignore[method-assign]
        with pytest.raises(StoreUnreachable):
            put_bytes(b"mine", uri, mode="create")
    assert content(list_objects(store.root)[0]) == b"mine"


def lose_answers(proxy: FaultProxy, count: int) -> None:
    """Let ``count`` writes reach the store, but close the connection before the response."""
    forward, left = proxy._ask, [count]

    def ask(request: Request) -> tuple[int, dict[str, str], bytes, int]:
        answer = forward(request)
        if proxy.only(request) and left[0] and answer[0] < 300:
            left[0] -= 1
            raise ConnectionResetError
        return answer

    proxy._ask = ask  # type: ignore[method-assign]


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_large_upload_resumes_at_the_part(store: Shelf, large: Path, lost: int) -> None:
    with store.behind(error_503_fraction=0.2, seed=lost) as (root, proxy):
        proxy.only = lambda request: request.method in {"PUT", "POST"}
        lose_answers(proxy, lost)
        put_file(large, f"{root}/large.bin")
        writes = [request for request in proxy.log.requests if request.method in {"PUT", "POST"} and request.body]
    assert content(list_objects(store.root)[0]) == LARGE
    sent = sum(len(request.body) for request in writes if not request.fault)
    assert sent <= len(LARGE) + (lost + 1) * PART_BYTES + 100_000, "only parts whose response was lost were sent twice"


def test_a_corrupt_upload_is_detected_and_repeated(store: Shelf, large: Path) -> None:
    """A bit is flipped on the way to the store, once in a small object and once in a part of a large one."""
    with store.behind() as (root, proxy):
        forward, left = proxy._ask, [1]

        def flip(request: Request) -> tuple[int, dict[str, str], bytes, int]:
            if left[0] and len(request.body) > 4:
                left[0] -= 1
                request.body = request.body[:3] + bytes([request.body[3] ^ 1]) + request.body[4:]
            return forward(request)

        proxy._ask = flip  # type: ignore[method-assign]
        put_bytes(b"a small object", f"{root}/small")
        assert left == [0]
        left[0] = 1
        put_file(large, f"{root}/large.bin")
        assert left == [0]
    assert {content(file) for file in list_objects(store.root)} == {b"a small object", LARGE}


def test_refusals_are_immediate(store: Shelf) -> None:
    bucket = store.root.replace(store.root.split("/")[2], "nowhere")
    with pytest.raises(DataError, match="Bucket 'nowhere' does not exist"):
        put_bytes(b"x", f"{bucket}/x")
    with pytest.raises(DataError, match="Bucket 'nowhere' does not exist"):
        list_objects(bucket)
    with store.behind() as (root, proxy):
        proxy.script(*[Fault("answer", 403)] * 3)
        with pytest.raises(DataError, match="refuses access"):
            put_bytes(b"x", f"{root}/x")
        proxy.scripted.clear()
        proxy.script(*[Fault("answer", 503)] * 100)
        with pytest.raises(DataError, match="Unexpected response from the store in 21 tries"):
            put_bytes(b"x", f"{root}/x")


def test_locations_that_are_not_writable(tmp_path: Path) -> None:
    for place in (str(tmp_path / "x"), "hf://acme/x", "https://host/x"):
        with pytest.raises(ConfigError, match="not writable"):
            put_bytes(b"x", place)


def test_uploads_do_not_count_as_waiting_for_data(store: Shelf) -> None:
    """The budget decides who receives failed tries; an upload does not look like a waiting reader."""
    from vorox.data.storage.stalls import Stall

    told: list[str] = []

    class Told(Stall):
        def report(self, reason: str, *, failed: bool = True) -> None:
            told.append(reason)
            assert waiting_for_data() is None

        def __enter__(self) -> Told:
            return self

        def __exit__(self, *exception: object) -> None:
            pass

    with store.behind() as (root, proxy), retry_budget(tracker=Told):
        proxy.script(Fault("answer", 503), Fault("answer", 500))
        put_bytes(b"x", f"{root}/x")
    assert len(told) == 2
    assert "HTTP 503" in told[0]


def test_the_checksum_comes_from_the_store(store: Shelf) -> None:
    written = put_bytes(b"known", f"{store.root}/known")
    digest = hashlib.md5(b"known").digest()
    told = {"gs": f"md5:{base64.b64encode(digest).decode()}", "az": None}
    expected = told.get(store.kind, f"etag:{json.dumps(digest.hex())}")
    assert written.content == expected
