"""The chunk file: it round-trips, has the documented layout, and every changed byte is detected."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import lz4.block
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from vorox.core.errors import DataError
from vorox.data.cache.files.chunk import Chunk
from vorox.data.cache.files.format import (
    CODECS,
    DOCUMENT,
    ChunkContent,
    ChunkOrigin,
    ChunkRecord,
    default_block_rows,
    encode_chunk,
)

ORIGIN = ChunkOrigin(part=1, num_parts=3, recipe=bytes(range(32)), source_set=bytes(range(32, 64)))


def make_content(num_rows: int = 5, row_tokens: int = 33, dtype: str = "uint16", seed: int = 1) -> ChunkContent:
    """Rows of one to four segments, each followed by some padding."""
    generator = np.random.default_rng(seed)
    tokens_RC = np.sort(generator.integers(0, 9, (num_rows, row_tokens))).astype(dtype)  # sorted: it compresses
    row_ptr, segments = [0], []
    for _ in range(num_rows):
        lengths = generator.integers(1, max(2, row_tokens // 4), int(generator.integers(1, 5)))
        lengths = lengths[np.cumsum(lengths) <= row_tokens]
        segments += [(int(generator.integers(0, 7)), int(generator.integers(0, 100)), int(n)) for n in lengths]
        row_ptr.append(len(segments))
    documents = [(d, d, 10 * d, 10, 3, 9, d << 40) for d in range(7)]
    return ChunkContent(
        tokens_RC, np.array(row_ptr, np.uint32), np.array(segments, np.uint32), np.array(documents, DOCUMENT)
    )


def write(path: Path, content: ChunkContent, origin: ChunkOrigin = ORIGIN, **options) -> ChunkRecord:
    data, record = encode_chunk(content, origin, **options)
    path.write_bytes(data)
    return record


def assert_equal(found: ChunkContent, expected: ChunkContent) -> None:
    for name in ("tokens_RC", "row_ptr", "segments_S3", "documents_D"):
        left, right = getattr(found, name), getattr(expected, name)
        assert left.dtype == right.dtype
        assert np.array_equal(left, right), name


@given(
    num_rows=st.integers(1, 20),
    row_tokens=st.integers(4, 70),
    dtype=st.sampled_from(["uint16", "uint32"]),
    codec=st.sampled_from(sorted(CODECS)),
    block_rows=st.one_of(st.none(), st.integers(1, 25)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=120, deadline=None)
def test_chunks_round_trip(tmp_path_factory, num_rows, row_tokens, dtype, codec, block_rows, seed):
    path = tmp_path_factory.mktemp("chunk") / "a.psc"
    content = make_content(num_rows, row_tokens, dtype, seed)
    record = write(path, content, codec=codec, block_rows=block_rows)
    chunk = Chunk.open(path)
    assert_equal(chunk.verify(), content)
    assert chunk.record(record.unit) == record
    assert chunk.origin == ORIGIN
    for row in range(num_rows):
        assert bytes(chunk.row(row)) == content.tokens_RC[row].tobytes()
        expected = content.segments_S3[content.row_ptr[row] : content.row_ptr[row + 1]]
        assert bytes(chunk.segments(row)) == expected.tobytes()


def test_layout_is_the_documented_one(tmp_path):
    content = make_content(num_rows=6, row_tokens=33)
    record = write(tmp_path / "a.psc", content, codec="lz4", block_rows=4)
    raw = (tmp_path / "a.psc").read_bytes()
    assert raw[:8] == b"\x89PSC\r\n\x1a\n"
    assert struct.unpack_from("<HHI", raw, 8) == (2, 256, 0)
    assert struct.unpack_from("<4B", raw, 16) == (2, 1, 0, 0)
    assert struct.unpack_from("<IIIQII", raw, 20) == (33, 6, 4, 0, 1, 7)
    payload, payload_bytes, index, index_bytes, segments, segments_bytes, documents, documents_bytes = (
        struct.unpack_from("<8Q", raw, 48)
    )
    assert (raw[112:144], raw[144:176]) == (ORIGIN.recipe, ORIGIN.source_set)
    real = int(content.segments_S3[:, 2].sum())
    assert struct.unpack_from("<QQ", raw, 176) == (real, 6 * 33 - real)
    sections = [
        raw[offset : offset + size]
        for offset, size in ((index, index_bytes), (segments, segments_bytes), (documents, documents_bytes))
    ]
    assert struct.unpack_from("<3Q", raw, 192) == tuple(xxhash.xxh3_64_intdigest(section) for section in sections)
    assert raw[216:248].hex() == record.content
    assert struct.unpack_from("<II", raw, 248) == (3, zlib.crc32(raw[:252]))
    assert payload == 256
    assert all(offset % 8 == 0 for offset in (payload, index, segments, documents))
    # Blocks of four rows and the two that are left.
    sizes_and_hashes = np.frombuffer(sections[0], "<u4").reshape(-1, 2)
    assert int(sizes_and_hashes[:, 0].sum()) == payload_bytes
    rows = b""
    for (size, low_hash), num_rows in zip(sizes_and_hashes.tolist(), (4, 2), strict=True):
        block = raw[payload : payload + size]
        assert xxhash.xxh3_64_intdigest(block) & 0xFFFFFFFF == low_hash
        rows += lz4.block.decompress(block, uncompressed_size=num_rows * 66)
        payload += size
    assert rows == content.tokens_RC.tobytes()
    assert sections[1] == content.row_ptr.tobytes() + content.segments_S3.tobytes()
    file, ordinal, offset, length, tokens, text, digest = struct.unpack_from("<IQQIIIQ", sections[2], 40 * 3)
    assert (file, ordinal, offset, length, tokens, text, digest) == (3, 3, 30, 10, 3, 9, 3 << 40)
    file_bytes, file_hash = struct.unpack_from("<QQ", raw, len(raw) - 32)
    assert (file_bytes, file_hash) == (len(raw), xxhash.xxh3_64_intdigest(raw[:-32]))
    assert raw[-16:-8] == b"PSC-END\n"
    assert struct.unpack_from("<II", raw, len(raw) - 8) == (zlib.crc32(raw[-32:-8]), 0)
    assert record.file_sha256 == hashlib.sha256(raw).hexdigest()


def failure(action: Callable[[], object]) -> DataError | None:
    try:
        action()
    except DataError as error:
        return error
    return None


@pytest.mark.parametrize(("codec", "block_rows"), [("lz4", 1), ("lz4", 3), ("raw", 2)])
def test_every_flipped_byte_is_detected(codec, block_rows):
    path = Path("a.psc")
    raw = encode_chunk(make_content(), ORIGIN, codec=codec, block_rows=block_rows)[0]
    Chunk(path, memoryview(raw)).verify()
    undetected = []
    for place in range(len(raw)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(raw)
            damaged[place] ^= mask
            error = failure(lambda damaged=damaged: Chunk(path, memoryview(damaged)).verify())
            if error is None:
                undetected.append((place, mask))
            else:
                assert error.where == str(path)
                assert "vorox data build --repair" in error.hint
    assert undetected == []


def test_a_flipped_byte_is_detected_in_a_file(tmp_path):
    path = tmp_path / "a.psc"
    write(path, make_content())
    raw = path.read_bytes()
    for place in range(0, len(raw), 17):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes([raw[place] ^ 0x04]))
        assert failure(lambda: Chunk.open(path).verify()) is not None
        path.write_bytes(raw)
    Chunk.open(path).verify()


def test_damage_is_found_on_use_without_a_full_check():
    """Rows are checked when they are read, documents when they are requested, all else when the file is opened."""
    path = Path("a.psc")
    raw = encode_chunk(make_content(num_rows=6), ORIGIN, codec="lz4", block_rows=1)[0]
    offsets = struct.unpack_from("<8Q", raw, 48)
    payload, documents = range(256, 256 + offsets[1]), range(offsets[6], offsets[6] + offsets[7])
    unnoticed = 0
    for place in range(len(raw)):
        damaged = bytearray(raw)
        damaged[place] ^= 0x10
        view = memoryview(damaged)
        if place in payload:
            row = Chunk(path, view).row
            errors = [failure(lambda row=row, number=number: row(number)) for number in range(6)]
            bad_rows = [number for number, error in enumerate(errors) if error is not None]
            assert len(bad_rows) == 1
            assert f"row {bad_rows[0]} " in str(errors[bad_rows[0]])
        elif place in documents:
            with pytest.raises(DataError):
                Chunk(path, view).documents()
        else:
            unnoticed += failure(lambda view=view: Chunk(path, view)) is None
    # Only what no reader uses may pass an opening: the zeros between sections and the hash of the whole file, which
    # has its own checksum.
    assert unnoticed <= 4 * 7


def test_every_truncation_and_any_addition_is_detected(tmp_path):
    path = tmp_path / "a.psc"
    write(path, make_content())
    raw = path.read_bytes()
    for size in reversed(range(len(raw))):
        os.truncate(path, size)
        with pytest.raises(DataError):
            Chunk.open(path)
    for more in (b"\0", raw[-32:], raw):
        path.write_bytes(raw + more)
        with pytest.raises(DataError):
            Chunk.open(path).verify()
    with pytest.raises(DataError, match="No such file"):
        Chunk.open(tmp_path / "absent.psc")


def test_content_is_the_identity_and_the_codec_is_not():
    content = make_content(num_rows=9)
    records = [
        encode_chunk(content, ORIGIN, codec=codec, block_rows=block_rows)[1]
        for codec in CODECS
        for block_rows in (1, 4)
    ]
    assert len({record.content for record in records}) == 1
    assert len({record.file_sha256 for record in records}) == len(records)
    assert records[0].content == encode_chunk(make_content(num_rows=9), ORIGIN)[1].content


def test_any_change_of_the_content_changes_its_digest():
    def digest(origin: ChunkOrigin = ORIGIN, **changes: np.ndarray) -> str:
        content = make_content()
        arrays = {name: value.copy() for name in content.__slots__ if (value := getattr(content, name)) is not None}
        return encode_chunk(ChunkContent(**{**arrays, **changes}), origin)[1].content

    content = make_content()
    tokens_RC, segments_S3, documents_D = (
        content.tokens_RC.copy(), content.segments_S3.copy(), content.documents_D.copy()
    )  # fmt: skip
    tokens_RC[2, 3] += 1
    segments_S3[1, 1] += 1
    documents_D[4]["byte_offset"] += 1
    digests = [
        digest(),
        digest(tokens_RC=tokens_RC),
        digest(segments_S3=segments_S3),
        digest(documents_D=documents_D),
        digest(ChunkOrigin(2, 3, ORIGIN.recipe, ORIGIN.source_set)),
        digest(tokens_RC=make_content().tokens_RC.astype(np.uint32)),
    ]
    assert len(set(digests)) == len(digests)


def test_incompressible_rows_are_stored_raw(tmp_path):
    content = make_content(num_rows=4, row_tokens=64)
    content.tokens_RC[:] = np.random.default_rng(2).integers(0, 1 << 16, content.tokens_RC.shape)
    record = write(tmp_path / "a.psc", content, codec="lz4", block_rows=1)
    raw = write(tmp_path / "b.psc", content, codec="raw", block_rows=1)
    assert record.size_bytes == raw.size_bytes
    assert_equal(Chunk.open(tmp_path / "a.psc").content(), content)


@pytest.mark.parametrize(("offset", "value"), [(8, 3), (17, 4), (12, 4), (18, 2)])
def test_files_of_a_later_version_are_refused_with_their_version(tmp_path, offset, value):
    path = tmp_path / "a.psc"
    write(path, make_content())
    raw = bytearray(path.read_bytes())
    raw[offset] = value
    raw[252:256] = struct.pack("<I", zlib.crc32(raw[:252]))
    path.write_bytes(raw)
    with pytest.raises(DataError, match="Unsupported chunk"):
        Chunk.open(path)


def test_verify_finds_an_inconsistent_chunk(tmp_path):
    """Its hashes match but its fields are inconsistent, as from a faulty writer."""
    sound = make_content()
    too_long = sound.segments_S3.copy()
    too_long[0, 2] = 34
    empty = sound.segments_S3.copy()
    empty[0, 2] = 0
    no_such_document = sound.segments_S3.copy()
    no_such_document[0, 0] = 7
    for segments_S3 in (too_long, empty, no_such_document):
        write(tmp_path / "a.psc", ChunkContent(sound.tokens_RC, sound.row_ptr, segments_S3, sound.documents_D))
        with pytest.raises(DataError, match="structure"):
            Chunk.open(tmp_path / "a.psc").verify()


@pytest.mark.parametrize("byte", [None, 0, 9, 10, 19, 20, 39, 40, 10**6])
@pytest.mark.parametrize("ordinal", [None, 0, 1, 3, 9])
def test_rows_of_a_record_are_those_with_a_segment_of_it(tmp_path, byte, ordinal):
    """Records are contiguous in their file: byte 10 belongs only to the second."""
    content = make_content(num_rows=12)
    documents_D = content.documents_D.copy()
    documents_D["file"] = [0, 0, 0, 0, 1, 1, 1]
    written = ChunkContent(content.tokens_RC, content.row_ptr, content.segments_S3, documents_D)
    write(tmp_path / "a.psc", written)
    wanted = {
        document
        for document in range(4)
        if (byte is None or 10 * document <= byte < 10 * document + 10) and (ordinal is None or ordinal == document)
    }
    expected = [
        row
        for row in range(12)
        if wanted & set(content.segments_S3[content.row_ptr[row] : content.row_ptr[row + 1], 0].tolist())
    ]
    assert Chunk.open(tmp_path / "a.psc").rows_of(0, byte, ordinal).tolist() == expected


def test_a_chunk_matches_no_other_record(tmp_path):
    record = write(tmp_path / "a.psc", make_content())
    chunk = Chunk.open(tmp_path / "a.psc")
    assert chunk.matches(record)
    for name in ("part", "rows", "tokens", "padding_tokens", "documents", "size_bytes"):
        other = dataclasses.replace(record, **{name: getattr(record, name) + 1})
        assert not chunk.matches(other), name
    assert not chunk.matches(dataclasses.replace(record, content="00" * 32))


def test_blocks_hold_about_a_thousand_tokens():
    assert [default_block_rows(tokens + 1) for tokens in (64, 256, 512, 1024, 2048, 8192)] == [16, 4, 2, 1, 1, 1]
