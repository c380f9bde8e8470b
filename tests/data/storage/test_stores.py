"""The same tests for every store: listings, patterns, ranges, versions; against real servers on loopback."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from servers.shelves import KINDS, Shelf, shelf
from vorox.core.errors import DataError
from vorox.data.storage import (
    ContentVersions,
    RetryPolicy,
    StoredFile,
    list_files,
    open_range,
    open_seekable,
    relative_name,
    retry_budget,
)

BODY = b"".join(b"line %d of a text\n" % number for number in range(20_000))
NAMES = ["b.txt", "a.txt", "deep/er/c.txt", "deep/d e+f%.TXT", "note.md", ".hidden.txt", ".git/x.txt", "skipped/s.txt"]
POLICY = RetryPolicy(retries_per_unit=3, first_backoff_seconds=0.01, stall_seconds=2, request_bytes=1 << 16)


@pytest.fixture(scope="module", params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    with shelf(request.param, tmp_path_factory.mktemp("web")) as opened, retry_budget(POLICY):
        for name in NAMES:
            opened.put(name, BODY + name.encode())
        opened.put("empty/nothing.txt", b"")
        yield opened


def places(store: Shelf, files: list[StoredFile]) -> list[str]:
    return [str(relative_name(store.root, file.uri)) for file in files]


def test_a_folder_is_searched_recursively_without_hidden_names(store: Shelf) -> None:
    files = list_files(store.root, (".txt",), skip_directories=frozenset({"skipped", "empty"}))
    assert [file.uri for file in files] == sorted(file.uri for file in files)
    assert places(store, files) == ["a.txt", "b.txt", "deep/d e+f%.TXT", "deep/er/c.txt"]
    assert {file.size_bytes for file in files} == {len(BODY) + len(name) for name in NAMES[:4]}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.txt", ["a.txt", "b.txt"]),
        ("[ab].txt", ["a.txt", "b.txt"]),
        ("**/*.txt", ["a.txt", "b.txt", "deep/er/c.txt", "empty/nothing.txt", "skipped/s.txt"]),
        ("deep/**/c.*", ["deep/er/c.txt"]),
        ("deep/*", ["deep/d e+f%.TXT"]),
        ("*.md", ["note.md"]),
        (".*.txt", [".hidden.txt"]),
    ],
)
def test_patterns_match_as_on_disk(store: Shelf, pattern: str, expected: list[str]) -> None:
    if store.kind == "http" and pattern.startswith("."):
        pytest.skip("index pages are searched without their hidden names")
    assert places(store, list_files(f"{store.root}/{pattern}", ())) == expected


def test_a_single_object_ignores_suffixes(store: Shelf) -> None:
    (file,) = list_files(f"{store.root}/note.md", (".txt",))
    assert file.uri == f"{store.root}/note.md"
    assert relative_name(f"{store.root}/note.md", file.uri) == "note.md"


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, None), (100, 100), (65_000, 200_001), (1 << 16, 1 << 17)])
def test_a_range_is_the_slice(store: Shelf, start: int, end: int | None) -> None:
    (file,) = list_files(f"{store.root}/a.txt", ())
    with open_range(file, start, end) as reader:
        assert reader.read() == (BODY + b"a.txt")[start:end]


def test_an_empty_object_and_a_strange_name_can_be_read(store: Shelf) -> None:
    (empty,) = list_files(f"{store.root}/empty/*", ())
    assert empty.size_bytes == 0
    with open_range(empty) as reader:
        assert reader.read() == b""
    with open_seekable(empty) as reader:
        assert reader.read() == b""
    (strange,) = list_files(f"{store.root}/deep/d*", ())
    with open_range(strange, len(BODY)) as reader:
        assert reader.read() == b"deep/d e+f%.TXT"


def test_random_access(store: Shelf) -> None:
    (file,) = list_files(f"{store.root}/b.txt", ())
    content = io.BytesIO(BODY + b"b.txt")
    with open_seekable(file) as reader:
        for offset, whence, count in [(-8, 2, 8), (5, 0, 70_000), (-100, 1, 3), (200_000, 0, 10**6), (0, 0, 1)]:
            assert reader.seek(offset, whence) == content.seek(offset, whence)
            assert reader.read(count) == content.read(count)


def test_parquet_is_read_by_its_columns(store: Shelf) -> None:
    table = pa.table({"text": [f"document {number}" for number in range(5_000)], "other": list(range(5_000))})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=1_000)
    store.put("rows.parquet", sink.getvalue())
    (file,) = list_files(f"{store.root}/rows.parquet", ())
    with open_seekable(file) as reader:
        parquet = pq.ParquetFile(reader)
        assert parquet.num_row_groups == 5
        assert parquet.read_row_group(3, columns=["text"])["text"].to_pylist()[:2] == ["document 3000", "document 3001"]


def test_the_store_pins_the_version_and_nothing_is_hashed(store: Shelf) -> None:
    first, again = (list_files(f"{store.root}/a.txt", ())[0] for _ in range(2))
    assert first == again
    assert first.version is not None
    kinds = {"s3-versioned": "version:", "gs": "generation:", "hf": "blob:"}
    assert first.version.startswith(kinds.get(store.kind, "etag:"))
    assert ContentVersions().version(first) == first.version


@pytest.mark.parametrize("opening", ["range", "seekable"])
def test_a_replaced_object_is_an_error_or_still_the_old_one(store: Shelf, opening: str) -> None:
    name = f"replaced-{opening}.txt"
    store.put(name, b"old " * 1_000)
    (file,) = list_files(f"{store.root}/{name}", ())
    store.put(name, b"new " * 1_000)

    def read() -> bytes:
        if opening == "seekable":
            with open_seekable(file) as reader:
                return reader.read()
        with open_range(file) as reader:
            return reader.read()

    if store.kind in {"s3-versioned", "hf"}:
        assert read() == b"old " * 1_000
    else:
        with pytest.raises(DataError, match="changed after it was listed") as caught:
            read()
        assert caught.value.where == file.uri
        assert "restore the old object" in caught.value.hint
    (now,) = list_files(f"{store.root}/{name}", ())
    assert now.version != file.version
    with open_range(now) as reader:
        assert reader.read(4) == b"new "


def test_copies_are_recognised_without_reading_them(store: Shelf) -> None:
    store.put("copies/one.txt", BODY)
    store.put("copies/two.txt", BODY)
    store.put("copies/other.txt", BODY + b"!")
    one, other, two = sorted(list_files(f"{store.root}/copies", (".txt",)), key=lambda file: file.uri[-7:])
    if store.kind in {"http", "az"}:
        assert one.content is None  # an ETag of a web server or of Azure is not a hash
    else:
        contents = {file.uri.rpartition("/")[2]: file.content for file in (one, two, other)}
        assert contents["one.txt"] == contents["two.txt"] != contents["other.txt"]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("missing.txt", "No object has this name"),
        ("missing/*.txt", "matches no object"),
        ("**/*.csv", "matches no object"),
    ],
)
def test_a_missing_location_is_reported(store: Shelf, name: str, what: str) -> None:
    with pytest.raises(DataError, match=what) as caught:
        list_files(f"{store.root}/{name}", (".txt",))
    assert caught.value.where == f"{store.root}/{name}"
    assert caught.value.hint


def test_a_folder_with_other_suffixes_suggests_a_glob(store: Shelf) -> None:
    with pytest.raises(DataError, match=r"no \.csv file; it contains .*\.txt") as caught:
        list_files(store.root, (".csv",))
    assert f"{store.root}/**/*" in caught.value.hint
