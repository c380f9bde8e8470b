"""Compressed content: ranges in any order, decoder reuse, and bounded expansion."""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import random
import tarfile
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vorox.core.errors import DataError
from vorox.data.storage import StoredFile, list_files
from vorox.data.text import decompression, file_content
from vorox.data.text.decompression import BrokenStream, Compression, DecompressedStream, Limits, compression_by_magic
from vorox.data.text.file_content import (
    SequentialReads,
    compression_by_suffix,
    length_bytes,
    open_content,
    open_content_seekable,
)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    file_content._scan.cache_clear()
    yield
    file_content._scan.cache_clear()


def stored(path: Path, data: bytes) -> StoredFile:
    path.write_bytes(data)
    return list_files(str(path), ())[0]


def words(size: int, seed: int = 1) -> bytes:
    generator = random.Random(seed)
    return b" ".join(generator.randbytes(3).hex().encode() for _ in range(size // 7 + 1))[:size]


def compressed(kind: Compression, data: bytes, parts: int) -> bytes:
    bounds = [len(data) * n // parts for n in range(parts + 1)]
    one = gzip.compress if kind == "gz" else zstandard.ZstdCompressor(write_checksum=True).compress
    return b"".join(one(data[a:b]) for a, b in itertools.pairwise(bounds))


def decompress(kind: Compression, data: bytes) -> bytes:
    return b"".join(iter(DecompressedStream(kind, io.BytesIO(data)).read, b""))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(0, 5_000), kind=st.sampled_from(["gz", "zst"]), parts=st.integers(1, 4),
    ranges=st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 5_000)), max_size=8),
)  # fmt: skip
def test_every_range_in_every_order(
    tmp_path: Path, size: int, kind: Compression, parts: int, ranges: list[tuple[int, int]]
) -> None:
    data = words(size)
    file = stored(tmp_path / f"a.{kind}", compressed(kind, data, parts))
    for start, end in ranges:
        low, high = sorted((min(start, size), min(end, size)))
        with open_content(file, low, high) as reader:
            assert reader.read() == data[low:high]
    assert length_bytes(file) == size
    with open_content_seekable(file) as reader:
        for start, end in ranges:
            reader.seek(-min(start, size), io.SEEK_END)
            assert reader.read(end) == data[size - min(start, size) :][:end]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose decoding was begun."""
    begun: list[str] = []
    begin = decompression.DecodedFile.__init__

    def count(self: decompression.DecodedFile, file: StoredFile, *given: Any) -> None:
        begun.append(file.uri)
        begin(self, file, *given)

    monkeypatch.setattr(decompression.DecodedFile, "__init__", count)
    return begun


def ranges_of(file: StoredFile, starts: Sequence[int], size: int) -> Iterator[bytes]:
    for start in starts:
        with open_content(file, start, start + size) as reader:
            yield reader.read()


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_units_in_order_are_decompressed_once(
    tmp_path: Path, kind: Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = words(3_000_000)
    file = stored(tmp_path / f"a.{kind}", compressed(kind, data, 1))
    begun = counted(monkeypatch)
    starts = range(0, len(data), 250_000)
    with contextlib.closing(SequentialReads()) as reads:
        found = list(reads.iterate(ranges_of(file, starts, 250_000)))
    assert found == [data[start : start + 250_000] for start in starts]
    assert begun == [file.uri]
    assert len(list(ranges_of(file, starts, 250_000))) == len(begun) - 1, "without it, each from the start of the file"


def test_going_back_a_little_goes_on_and_going_back_far_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decompression, "_LOOK_BACK_BYTES", 50_000)
    data = words(600_000)
    file, other = (stored(tmp_path / name, compressed("zst", data, 6)) for name in ("a.zst", "b.zst"))
    begun = counted(monkeypatch)
    starts = [300_000, 260_000, 400_000, 100_000]
    with contextlib.closing(SequentialReads()) as reads:
        assert list(reads.iterate(ranges_of(file, starts, 9_000))) == [data[at : at + 9_000] for at in starts]
        assert begun == [file.uri, file.uri]
        assert next(reads.iterate(ranges_of(other, [0], 10))) == data[:10]
        assert begun[2:] == [other.uri]


def test_a_file_that_changes_while_it_is_kept_open_is_refused(tmp_path: Path) -> None:
    file = stored(tmp_path / "a.gz", compressed("gz", words(9_000_000), 1))
    with contextlib.closing(SequentialReads()) as reads:
        assert len(next(reads.iterate(ranges_of(file, [0], 1000)))) == 1000
        (tmp_path / "a.gz").write_bytes(compressed("gz", words(9_000_000, seed=2), 1))
        with pytest.raises(DataError, match="changed"):
            list(reads.iterate(ranges_of(file, [8_000_000], 1000)))


def test_several_threads_read_one_file(tmp_path: Path) -> None:
    data = words(2_000_000)
    file = stored(tmp_path / "a.gz", compressed("gz", data, 3))
    wrong: list[int] = []

    def read(first: int) -> None:
        for start in range(first * 100_000, len(data), 400_000):
            with open_content(file, start, min(start + 100_000, len(data))) as reader:
                if reader.read() != data[start : start + 100_000]:
                    wrong.append(start)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_every_truncation_is_told(kind: Compression) -> None:
    data = compressed(kind, words(2_000), 1)
    for size in range(1, len(data)):
        with pytest.raises(BrokenStream):
            decompress(kind, data[:size])


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_every_flipped_byte_is_told_or_harmless(kind: Compression) -> None:
    """Harmless are fields of the gzip header that say nothing of the content."""
    text = words(500)
    data = compressed(kind, text, 1)
    for place in range(len(data)):
        broken = bytearray(data)
        broken[place] ^= 0x5A
        try:
            got = decompress(kind, bytes(broken))
        except BrokenStream:
            continue
        assert got == text, place
        assert kind == "zst" or place < 10


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.gz", b"plain text", "The file name declares gzip, but the content begins with the bytes 70 6c 61 69"),
        ("a.zst", gzip.compress(b"x", mtime=0), "The file name declares zstd, but the content is gzip"),
        ("a.gz", zstandard.compress(b"x"), "The file name declares gzip, but the content is zstd"),
        ("a.gz", gzip.compress(b"x", mtime=0) + b"rest", "Trailing bytes follow the gzip data"),
        ("a.zst", zstandard.compress(b"x") + b"rest", "Trailing bytes follow the zstd data"),
        ("a.gz", gzip.compress(words(5_000))[:-9], "The gzip data is truncated"),
        ("a.zst", zstandard.compress(words(5_000))[:-9], "The zstd data is truncated"),
        ("a.gz", gzip.compress(b"abc", mtime=0)[:-8] + b"\0" * 8, "The gzip data is corrupt: incorrect data check"),
    ],
)
def test_what_is_not_what_it_says_is_refused(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    file = stored(tmp_path / name, data)
    with pytest.raises(DataError) as caught:
        length_bytes(file)
    assert message in caught.value.what
    assert caught.value.where == file.uri
    assert caught.value.hint


def test_a_window_that_needs_gigabytes_is_refused(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=28, compression_level=1, write_content_size=0)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    file = stored(tmp_path / "a.zst", compressor.compress(b"x" * 1000) + compressor.flush())
    with pytest.raises(DataError, match="window is larger than 128 MiB; compress it without --long=31"):
        length_bytes(file)


def bomb(kind: Compression, size: int) -> bytes:
    """So many zeros, made a MiB at a time."""
    maker = zlib.compressobj(9, wbits=31) if kind == "gz" else zstandard.ZstdCompressor(level=3).compressobj()
    return b"".join([*(maker.compress(bytes(1 << 20)) for _ in range(size >> 20)), maker.flush()])


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_bombs_are_refused_by_ratio_and_by_size(
    tmp_path: Path, kind: Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decompression._ALWAYS_ALLOWED_BYTES == 256 << 20
    monkeypatch.setattr(decompression, "_ALWAYS_ALLOWED_BYTES", 16 << 20)
    file = stored(tmp_path / f"a.{kind}", bomb(kind, 20 << 20))
    with pytest.raises(DataError, match="decompression bomb") as caught:
        length_bytes(file)
    assert "max_decompression_ratio" in caught.value.hint
    with pytest.raises(DataError, match="expand to more than") as caught:
        length_bytes(file, Limits(max_bytes=10 << 20))
    assert "max_decompressed_bytes" in caught.value.hint
    small = stored(tmp_path / f"b.{kind}", bomb(kind, 15 << 20))
    assert length_bytes(small) == 15 << 20, "what is small anyway may be as repetitive as it likes"
    assert length_bytes(stored(tmp_path / f"c.{kind}", bomb(kind, 17 << 20)), Limits(max_ratio=1e6)) == 17 << 20


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("first", [b'{"text": "a"}\n', b'{"text": "b"}\n' * 2000])
def test_a_later_member_that_is_no_text_is_refused_as_the_first_would_be(
    tmp_path: Path, kind: Compression, first: bytes
) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("a.txt"))
    members = [compressed(kind, part, 1) for part in (first, first, archive.getvalue(), first)]
    file = stored(tmp_path / f"a.jsonl.{kind}", b"".join(members))
    with pytest.raises(DataError, match="looks like a tar archive") as caught:
        length_bytes(file, Limits(is_text=True))
    assert caught.value.where == file.uri
    assert length_bytes(file) == 3 * len(first) + len(archive.getvalue()), "of other formats nothing is known"


def test_names_and_first_bytes() -> None:
    assert [compression_by_suffix(name) for name in ("a.jsonl.GZ", "a.zst", "a.txt.zstd", "gz", "a.gzip")] == [
        "gz", "zst", "zst", None, None,
    ]  # fmt: skip
    assert compression_by_magic(b"\x1f\x8b\x08") == "gz"
    assert compression_by_magic(b"\x50\x2a\x4d\x18rest") == "zst"
    assert compression_by_magic(b"text") is None
    assert compression_by_magic(b"") is None
