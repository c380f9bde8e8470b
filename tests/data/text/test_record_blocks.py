"""Blocks of every format, compressed or not, yield the records that other libraries read from the whole file."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vorox.core.schema.data import SourceConfig
from vorox.data.documents import Document, Record, TokenDocument, UnitSpan
from vorox.data.storage import StoredFile, list_files
from vorox.data.text.formats import count_records, read_record, read_records, split_blocks

TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=30) | st.text('a",\r\n\0é;', max_size=30), max_size=25)
PIECES = st.integers(1, 120)
PROFILE = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def gzip_members(data: bytes) -> bytes:
    """Two members and padding."""
    middle = len(data) // 2
    return gzip.compress(data[:middle]) + gzip.compress(data[middle:]) + b"\0" * 5


def zstd_frames(data: bytes) -> bytes:
    """Frames with and without size and checksum, and one to be skipped."""
    middle = len(data) // 2
    first = zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compress(data[:middle])
    return first + b"\x5a\x2a\x4d\x18\x03\0\0\0any" + zstandard.ZstdCompressor(level=19).compress(data[middle:])


ENDINGS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip_members, ".zst": zstd_frames}


def config(form: str, **options: Any) -> SourceConfig:
    return SourceConfig.model_validate({"name": "s", "format": form, "paths": ["x"], **options})


def stored(folder: Path, name: str, content: bytes) -> StoredFile:
    path = folder / name
    path.write_bytes(content)
    return list_files(str(path), ())[0]


def in_pieces(source: SourceConfig, file: StoredFile, block_bytes: int) -> list[Record]:
    """All records, read piece by piece; the pieces are checked on the way."""
    pieces = list(split_blocks(source, file, 0, None, block_bytes))
    assert all(a.end_byte == b.start_byte for a, b in itertools.pairwise(pieces))
    records: list[Record] = []
    for piece, after in itertools.zip_longest(pieces, pieces[1:]):
        if after is not None:
            counted = count_records(source, file, piece.start_byte, piece.end_byte)
            assert piece.first_ordinal + counted == after.first_ordinal
        span = UnitSpan(3, piece.start_byte, piece.end_byte, piece.first_ordinal)
        records += read_records(source, file, span, lambda _: True)
    return records


def texts_of(records: list[Record]) -> list[str]:
    assert all(isinstance(record, Document) for record in records), records
    return [record.text for record in records if isinstance(record, Document)]


@PROFILE
@given(texts=TEXTS, block_bytes=PIECES, ending=st.sampled_from(list(ENDINGS)))
def test_json_lines(tmp_path: Path, texts: list[str], block_bytes: int, ending: str) -> None:
    lines = [json.dumps({"id": n, "text": text}).encode() + b"\n" for n, text in enumerate(texts)]
    content = b"".join(lines)
    file = stored(tmp_path, f"a.jsonl{ending}", ENDINGS[ending](content))
    records = in_pieces(config("jsonl"), file, block_bytes)
    assert texts_of(records) == texts
    assert [content[r.byte_offset : r.byte_offset + r.byte_length] for r in records] == lines
    assert [record.ordinal for record in records] == list(range(len(texts)))


@PROFILE
@given(texts=TEXTS, block_bytes=PIECES)
def test_compressed_lines_are_cut_as_plain_ones(tmp_path: Path, texts: list[str], block_bytes: int) -> None:
    content = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)[:-1]
    source = config("jsonl")
    pieces = [
        list(split_blocks(source, stored(tmp_path, f"a.jsonl{ending}", compress(content)), 0, None, block_bytes))
        for ending, compress in ENDINGS.items()
    ]
    assert pieces[0] == pieces[1] == pieces[2]


@PROFILE
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\ufeff"), max_size=60), max_size=9),
    block_bytes=PIECES, ending=st.sampled_from(list(ENDINGS)),
)  # fmt: skip
def test_text(tmp_path: Path, texts: list[str], block_bytes: int, ending: str) -> None:
    content = "\n".join(texts).encode()
    file = stored(tmp_path, f"a.txt{ending}", ENDINGS[ending](content))
    plain = stored(tmp_path, "b.txt", content)
    records = in_pieces(config("txt"), file, block_bytes)
    assert "".join(texts_of(records)).encode() == content
    assert records == in_pieces(config("txt"), plain, block_bytes)


def written_csv(rows: list[tuple[str, str]], delimiter: str, quoting: int, line_end: str) -> bytes:
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, delimiter=delimiter, quoting=quoting, lineterminator=line_end)  # type: ignore[arg-type]
    writer.writerows([("id", "text"), *rows])
    return buffer.getvalue().encode()


@PROFILE
@given(
    texts=TEXTS, block_bytes=PIECES, ending=st.sampled_from(list(ENDINGS)), delimiter=st.sampled_from(",;\t|"),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]), line_end=st.sampled_from(["\n", "\r\n"]),
)  # fmt: skip
def test_csv(
    tmp_path: Path, texts: list[str], block_bytes: int, ending: str, delimiter: str, quoting: int, line_end: str
) -> None:
    if any("\r" in text for text in texts):
        quoting = csv.QUOTE_ALL  # unquoted, it is indistinguishable from a line end
    content = written_csv([(str(n), text) for n, text in enumerate(texts)], delimiter, quoting, line_end)
    file = stored(tmp_path, f"a.csv{ending}", ENDINGS[ending](content))
    source = config("csv", delimiter=delimiter, metadata_fields=["id"])
    records = in_pieces(source, file, block_bytes)
    assert texts_of(records) == texts
    assert [r.metadata for r in records if isinstance(r, Document)] == [{"id": str(n)} for n in range(len(texts))]
    body = b"".join(content[r.byte_offset : r.byte_offset + r.byte_length] for r in records)
    assert body == content[content.index(b"\n") + 1 :]
    for record in records:
        place = (record.file_index, record.ordinal, record.byte_offset, record.byte_length)
        assert read_record(source, file, *place) == record


@PROFILE
@given(rows=st.lists(st.tuples(*[st.text('a",\n x', max_size=12)] * 3), max_size=12), block_bytes=PIECES)
def test_csv_as_arrow_reads_it(tmp_path: Path, rows: list[tuple[str, str, str]], block_bytes: int) -> None:
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows([("a", "b", "text"), *rows])
    file = stored(tmp_path, "a.csv", buffer.getvalue().encode())
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
    convert = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(("a", "b", "text"), pa.string()))
    expected = pyarrow.csv.read_csv(file.uri, parse_options=parse, convert_options=convert).column("text").to_pylist()
    assert texts_of(in_pieces(config("csv"), file, block_bytes)) == expected == [row[2] for row in rows]


@PROFILE
@given(
    texts=TEXTS, block_bytes=st.integers(1, 2000), group_rows=st.integers(1, 8),
    compression=st.sampled_from(["zstd", "none"]),
    nested=st.booleans(),
)  # fmt: skip
def test_parquet(
    tmp_path: Path, texts: list[str], block_bytes: int, group_rows: int, compression: str, nested: bool
) -> None:
    column: Any = pa.array([{"text": t, "n": 1} for t in texts]) if nested and texts else pa.array(texts, pa.string())
    table = pa.table({"id": pa.array(range(len(texts)), pa.int64()), "body": column})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=group_rows, compression=compression)
    content = (tmp_path / "a.parquet").read_bytes()
    source = config("parquet", text_field="body.text" if nested and texts else "body", metadata_fields=["id"])
    expected: list[Record] | None = None
    for ending, compress in ENDINGS.items():
        file = stored(tmp_path, f"b.parquet{ending}", compress(content))
        records = in_pieces(source, file, block_bytes)
        assert texts_of(records) == texts
        assert [r.metadata for r in records if isinstance(r, Document)] == [{"id": str(n)} for n in range(len(texts))]
        assert expected is None or records == expected
        expected = records
        footer = pq.read_metadata(tmp_path / "a.parquet")
        for record in records:
            group = footer.row_group(record.ordinal // group_rows)
            assert record.byte_offset == min(
                offset for c in range(group.num_columns) for offset in
                (group.column(c).data_page_offset, group.column(c).dictionary_page_offset) if offset is not None
            )  # fmt: skip
            place = (record.file_index, record.ordinal, record.byte_offset, record.byte_length)
            assert read_record(source, file, *place) == record


@PROFILE
@given(
    documents=st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=20), block_bytes=PIECES,
    wide=st.booleans(), in_front=st.booleans(), short=st.booleans(),
)  # fmt: skip
def test_token_shards(
    tmp_path: Path, documents: list[list[int]], block_bytes: int, wide: bool, in_front: bool, short: bool
) -> None:
    """Written by hand as llm.c's scripts do: 256 int32, or three, then the ids."""
    tokens = [id for d in documents for id in ([10, *d] if in_front else [*d, 10])]
    dtype, magic, version = ("<u4", 20240801, 7) if wide else ("<u2", 20240520, 1)
    header = np.zeros(3 if short else 256, "<i4")
    header[:3] = (magic, version, len(tokens))
    file = stored(tmp_path, "a.bin", header.tobytes() + np.array(tokens, dtype).tobytes())
    records = in_pieces(config("bin", end_of_text_id=10), file, block_bytes)
    assert [r.tokens.tolist() for r in records if isinstance(r, TokenDocument)] == [d for d in documents if d]
    content = Path(file.uri).read_bytes()
    for record in records:
        assert isinstance(record, TokenDocument)
        raw = np.frombuffer(content[record.byte_offset : record.byte_offset + record.byte_length], dtype).tolist()
        assert raw in ([*record.tokens.tolist(), 10], record.tokens.tolist())


@pytest.mark.parametrize("ending", list(ENDINGS))
def test_pieces_are_as_large_as_asked(tmp_path: Path, ending: str) -> None:
    rows = [(str(n), "x" * (n * 7919 % 97)) for n in range(4000)]
    content = written_csv(rows, ",", csv.QUOTE_MINIMAL, "\n")
    file = stored(tmp_path, f"a.csv{ending}", ENDINGS[ending](content))
    pieces = list(split_blocks(config("csv"), file, 0, None, 5_000))
    assert all(4_800 < piece.text_bytes <= 5_000 for piece in pieces[:-1])
    assert sum(piece.text_bytes for piece in pieces) == len(content) - len(b"id,text\n")


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.csv", "a.csv.gz"])
def test_the_first_piece_is_there_before_the_rest_is_read(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(str(n), f"{n * n}" * 30) for n in range(40_000)]
    form, _, ending = name.removeprefix("a.").partition(".")
    text = "".join(json.dumps({"text": text}) + "\n" for _, text in rows).encode()
    content = text if form == "jsonl" else written_csv(rows, ",", csv.QUOTE_ALL, "\n")
    file = stored(tmp_path, name, ENDINGS[f".{ending}" if ending else ""](content))
    read_bytes = 0
    plain_read = io.BufferedReader.read

    class Counting(io.BufferedReader):
        def read(self, size: int | None = -1, /) -> bytes:
            nonlocal read_bytes
            piece = plain_read(self, size)
            read_bytes += len(piece)
            return piece

    for module in ("vorox.data.text.file_content.io", "vorox.data.storage.local.io"):
        monkeypatch.setattr(f"{module}.BufferedReader", Counting)
    first = next(split_blocks(config(form), file, 0, None, 100_000))
    assert first.text_bytes > 90_000
    assert 0 < read_bytes < len(content) * 0.8
