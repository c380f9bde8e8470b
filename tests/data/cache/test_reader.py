"""Reading returns the written rows in the requested order, from any number of threads, or a precise error."""

from __future__ import annotations

import errno
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_corpus import ByteTokenizer, build_corpus, recipe_for, small_corpus
from vorox.core.errors import DataError
from vorox.data.cache import reader as reader_module
from vorox.data.cache.files.chunk import Chunk
from vorox.data.cache.files.manifest import LOG_NAME, chunk_path
from vorox.data.cache.reader import CacheReader


@pytest.fixture(scope="module", params=[("lz4", 1), ("lz4", 3), ("raw", 2)], ids=lambda p: f"{p[0]}-{p[1]}")
def cache(request, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("cache")
    codec, block_rows = request.param
    build_corpus(directory, small_corpus(num_files=3), codec=codec, block_rows=block_rows)
    return directory


@pytest.fixture
def broken(tmp_path) -> Path:
    """A separate cache that the test may damage."""
    build_corpus(tmp_path / "cache", small_corpus())
    return tmp_path / "cache"


def stored_rows(directory: Path) -> list[tuple[bytes, bytes]]:
    """Return tokens and segments of every row, from whole chunks in name order."""
    rows = []
    for path in sorted(directory.glob("chunks/*/*.psc")):
        content = Chunk.open(path).content()
        for row, tokens in enumerate(content.tokens_RC):
            segments_S3 = content.segments_S3[content.row_ptr[row] : content.row_ptr[row + 1]]
            rows.append((tokens.tobytes(), segments_S3.astype(np.int32)[:, 1:].tobytes()))
    return rows


def read(reader: CacheReader, rows: list[int]) -> list[tuple[bytes, bytes]]:
    block = reader.read_rows(np.array(rows, np.int64))
    assert block.row_ptr.dtype == np.int64
    assert block.segment_lengths.dtype == block.segment_document_offsets.dtype == np.int32
    segments = np.stack([block.segment_document_offsets, block.segment_lengths], axis=1)
    return [
        (block.tokens_NC[row].tobytes(), segments[block.row_ptr[row] : block.row_ptr[row + 1]].tobytes())
        for row in range(block.num_rows)
    ]


def test_rows_are_numbered_in_unit_order_and_read_in_the_requested_order(cache):
    reader = CacheReader.open(cache)
    expected = stored_rows(cache)
    assert reader.num_rows == len(expected)
    assert read(reader, list(range(len(expected)))) == expected

    @given(st.lists(st.integers(0, len(expected) - 1), max_size=40))
    @settings(max_examples=50, deadline=None)
    def check(rows: list[int]) -> None:
        assert read(reader, rows) == [expected[row] for row in rows]

    check()


def test_units_and_their_rows(cache):
    reader = CacheReader.open(cache, recipe_for(ByteTokenizer()))
    corpus = small_corpus(num_files=3)
    assert reader.units == corpus.units
    assert reader.files == corpus.files
    assert (reader.row_tokens, reader.recipe.vocab_size, reader.token_bytes) == (33, 257, 2)
    rows = [
        sum(Chunk.open(path).header.num_rows for path in cache.glob(f"chunks/*/u{unit:09d}-*.psc"))
        for unit in range(len(corpus.units))
    ]
    assert reader.unit_row_starts.tolist() == np.cumsum([0, *rows]).tolist()
    assert reader.rows_in(1, 4) == sum(rows[1:4])
    assert reader.rows_in(2, 2) == 0
    assert reader.content_digest(0, 6) == reader.digest != reader.content_digest(0, 5)
    for first, last in ((0, 7), (3, 2), (-1, 2)):
        with pytest.raises(DataError, match="units"):
            reader.rows_in(first, last)


def test_any_number_of_threads_with_few_open_chunks(cache):
    expected = stored_rows(cache)
    reader = CacheReader.open(cache, max_open_chunks=3)
    most_open = 0

    def work(seed: int) -> None:
        nonlocal most_open
        generator = np.random.default_rng(seed)
        for _ in range(60):
            rows = generator.integers(0, len(expected), 9).tolist()
            assert read(reader, rows) == [expected[row] for row in rows]
            most_open = max(most_open, len(reader._open_chunks))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))
    assert 1 <= most_open <= 3


def test_rows_outlive_the_reader(cache):
    reader = CacheReader.open(cache)
    block = reader.read_rows(np.arange(5))
    before = block.tokens_NC.tobytes()
    reader.close()
    del reader
    assert block.tokens_NC.tobytes() == before


def test_the_chunks_used_last_stay_open(cache):
    reader = CacheReader.open(cache, max_open_chunks=4)
    starts = reader.manifest.chunk_row_starts
    for chunk in (0, 1, 2, 3, 0, 1, 3, 4):
        reader.read_rows(starts[chunk : chunk + 1])
    assert sorted(reader._open_chunks) == [0, 1, 3, 4]


def test_a_process_out_of_file_descriptors_closes_some_chunks(cache, monkeypatch):
    reader = CacheReader.open(cache)
    reader.read_rows(reader.manifest.chunk_row_starts[:4])
    real_open, calls = Chunk.open, []

    def refuse_once(path: Path) -> Chunk:
        calls.append(path)
        if len(calls) == 1:
            raise DataError("cannot open") from OSError(errno.EMFILE, "Too many open files")
        return real_open(path)

    monkeypatch.setattr(reader_module.Chunk, "open", refuse_once)
    reader.read_rows(reader.manifest.chunk_row_starts[4:5])
    assert len(calls) == 2
    assert sorted(reader._open_chunks) == [1, 2, 3, 4]


def test_rows_that_do_not_exist_are_refused(cache):
    reader = CacheReader.open(cache)
    for row in (-1, reader.num_rows):
        with pytest.raises(IndexError):
            reader.read_rows(np.array([0, row]))
        with pytest.raises(IndexError):
            reader.documents_of(row)
    assert reader.read_rows(np.zeros(0, np.int64)).num_rows == 0


def test_a_lost_chunk_is_named_with_the_remedy(broken):
    reader = CacheReader.open(broken)
    path = chunk_path(broken, 2, 0)
    path.unlink()
    first = int(reader.unit_row_starts[2])
    for action in (lambda: reader.read_rows(np.array([first])), lambda: reader.documents_of(first), reader.verify):
        with pytest.raises(DataError) as caught:
            action()
        assert str(path) in caught.value.where
        assert "vorox data build --repair" in caught.value.hint
    reader.read_rows(np.array([first - 1]))  # the others are still there


def test_a_damaged_row_is_named_and_the_others_are_read(broken):
    path = chunk_path(broken, 1, 0)
    raw = bytearray(path.read_bytes())
    raw[256] ^= 0x20
    path.write_bytes(raw)
    reader = CacheReader.open(broken)
    first = int(reader.unit_row_starts[1])
    with pytest.raises(DataError, match="block 0, from row 0 of the chunk") as caught:
        reader.read_rows(np.array([0, first]))
    assert caught.value.where == str(path)
    assert caught.value.exit_code == 4
    reader.read_rows(np.array([0, first - 1]))


def test_a_valid_chunk_in_the_wrong_place_is_refused(broken, tmp_path):
    """Its hashes match, but it belongs to another unit, or to the same unit of another cache."""
    other = tmp_path / "other"
    build_corpus(other, small_corpus(seed=77))
    target = chunk_path(broken, 1, 0)
    for source in (chunk_path(broken, 2, 0), chunk_path(other, 1, 0)):
        shutil.copyfile(source, target)
        reader = CacheReader.open(broken)
        with pytest.raises(DataError, match="not the chunk that the manifest names"):
            reader.read_rows(reader.unit_row_starts[1:2])
        with pytest.raises(DataError, match="1 of"):
            reader.verify()


def test_verify_names_everything_that_is_damaged(broken):
    paths = [chunk_path(broken, 0, 0), chunk_path(broken, 3, 0)]
    for path in paths:
        raw = bytearray(path.read_bytes())
        raw[-40] ^= 1  # in the last section
        path.write_bytes(raw)
    seen = []
    with pytest.raises(DataError, match="2 of") as caught:
        CacheReader.open(broken).verify(lambda done, total: seen.append((done, total)))
    assert all(str(path) in caught.value.where for path in paths)
    total = sum(path.stat().st_size for path in broken.glob("chunks/*/*.psc"))
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen}), "the bytes read must not decrease"


def test_verify_reads_the_whole_log(broken):
    reader = CacheReader.open(broken)
    reader.manifest.write_snapshot(broken)
    raw = bytearray((broken / LOG_NAME).read_bytes())
    raw[100] ^= 1
    (broken / LOG_NAME).write_bytes(raw)
    with pytest.raises(DataError, match="damaged or out of sequence"):
        CacheReader.open(broken).verify()


def test_an_incomplete_cache_is_refused_by_default(broken):
    log = broken / LOG_NAME
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-2]))
    with pytest.raises(DataError, match="2 of 4 units are missing"):
        CacheReader.open(broken)
    reader = CacheReader.open(broken, complete=False)
    assert reader.num_rows == reader.rows_in(0, 2) > 0
    reader.read_rows(np.arange(reader.num_rows))
    for action in (reader.rows_in, reader.content_digest):
        with pytest.raises(DataError, match="unit 2 is missing"):
            action(0, 3)
