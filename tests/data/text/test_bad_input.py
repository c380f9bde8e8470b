"""Bad input from real folders is rejected or quarantined, with its position and a remedy."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from vorox.core.config import load_config
from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig, ValidationConfig
from vorox.data.corpus.corpus import prepare
from vorox.data.documents import BadRecord, Document, Record
from vorox.data.text.sources import list_source
from vorox.data.text.unit_reader import UnitReader
from vorox.data.text.unit_splitter import split_into_units

EVERYTHING = ValidationConfig(held_out_fraction=0)


def source(paths: Path | list[Path], form: str, **options: Any) -> SourceConfig:
    names = [str(path) for path in ([paths] if isinstance(paths, Path) else paths)]
    return SourceConfig.model_validate({"name": "s", "format": form, "paths": names, **options})


def records(config: SourceConfig, unit_bytes: int = 1 << 20) -> list[Record]:
    listed = list_source(config)
    units = split_into_units(listed, "train", EVERYTHING, unit_bytes)
    return [record for unit in units for record in UnitReader(listed, "train", EVERYTHING)(unit)]


def refusal(config: SourceConfig) -> DataError:
    with pytest.raises(DataError) as caught:
        records(config)
    assert caught.value.hint
    assert caught.value.exit_code == 4
    return caught.value


def parquet(**columns: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, row_group_size=2)
    return buffer.getvalue()


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("form", ["txt", "jsonl", "csv", "parquet"])
def test_a_compressed_file_that_ends_early(tmp_path: Path, form: str, ending: str) -> None:
    text = "text\n" + "".join(f"{n * n % 9973}\n" for n in range(5_000))
    plain = parquet(text=text.split()) if form == "parquet" else text.encode()
    whole = gzip.compress(plain, mtime=0) if ending == ".gz" else zstandard.compress(plain)
    path = tmp_path / f"a.{form}{ending}"
    path.write_bytes(whole[: len(whole) * 2 // 3])
    error = refusal(source(tmp_path, form))
    assert "data is truncated" in error.what
    assert error.where == str(path)


@pytest.mark.parametrize("kept", [0.3, 0.9, 0.999])
def test_a_parquet_file_that_ends_early(tmp_path: Path, kept: float) -> None:
    whole = parquet(text=[f"line {n}" for n in range(500)])
    path = tmp_path / "a.parquet"
    path.write_bytes(whole[: int(len(whole) * kept)])
    error = refusal(source(tmp_path, "parquet"))
    assert "The Parquet file cannot be read" in error.what
    assert error.where == str(path)


def test_parquet_with_a_broken_page(tmp_path: Path) -> None:
    table = pa.table({"text": [f"line {n}" for n in range(500)]})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", write_page_checksum=True)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[60] ^= 0xFF
    (tmp_path / "a.parquet").write_bytes(data)
    assert "The Parquet file cannot be read" in refusal(source(tmp_path, "parquet")).what


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_wrong_column_names_those_there_are(tmp_path: Path, form: str) -> None:
    data = parquet(id=["1"], body=["x"]) if form == "parquet" else b"id,body\n1,x\n"
    (tmp_path / f"a.{form}").write_bytes(data)
    error = refusal(source(tmp_path, form))
    assert "has no column 'text'; it" in error.what
    assert "'id', 'body'" in error.what
    assert "text_field" in error.hint
    assert [r.text for r in records(source(tmp_path, form, text_field="body")) if isinstance(r, Document)] == ["x"]


def test_a_wrong_field_of_json_lines_names_those_there_are(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1, "meta": {"body": "x"}}\n{"id": 2, "meta.body": "y"}\n')
    (first, second) = records(source(tmp_path, "jsonl"))
    assert isinstance(first, BadRecord)
    assert isinstance(second, BadRecord)
    assert first.reason == "no field 'text'; the record has 'id', 'meta': set the source's text_field"
    dotted = records(source(tmp_path, "jsonl", text_field="meta.body", metadata_fields=["id", "meta", "none"]))
    assert [r.text for r in dotted if isinstance(r, Document)] == ["x", "y"]
    assert [r.metadata for r in dotted if isinstance(r, Document)] == [
        {"id": "1", "meta": '{"body": "x"}'}, {"id": "2"},
    ]  # fmt: skip


def test_schemas_that_differ_between_files(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,id\nx,1\n")
    (tmp_path / "b.csv").write_text("id,text\n2,y\n")
    assert [r.text for r in records(source(tmp_path, "csv")) if isinstance(r, Document)] == ["x", "y"]
    (tmp_path / "c.csv").write_text("id,content\n3,z\n")
    assert refusal(source(tmp_path, "csv")).where == str(tmp_path / "c.csv")
    folder = tmp_path / "parquet"
    folder.mkdir()
    (folder / "a.parquet").write_bytes(parquet(text=["x"]))
    (folder / "b.parquet").write_bytes(parquet(text=pa.array(["y"], pa.large_string()), id=[1]))
    (folder / "c.parquet").write_bytes(parquet(text=pa.array(["z", "z"]).dictionary_encode()))
    assert [r.text for r in records(source(folder, "parquet")) if isinstance(r, Document)] == ["x", "y", "z", "z"]
    (folder / "d.parquet").write_bytes(parquet(text=[4]))
    error = refusal(source(folder, "parquet"))
    assert error.where == str(folder / "d.parquet")
    assert "Column 'text' holds int64, not text" in error.what


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"1,x,2\n", "the record has 3 fields, the header has 2"),
        (b"1\n", "the record has 1 fields, the header has 2"),
        (b'1,"a"b\n', "text follows the closing quote at byte 4"),
        (b"1,\xff\n", "invalid UTF-8 at byte 0 of column 'text'"),
        (b"1,\xed\xa0\x80\n", "invalid UTF-8 at byte 0 of column 'text'"),
    ],
)
def test_a_broken_row_of_a_csv_is_put_aside(tmp_path: Path, row: bytes, reason: str) -> None:
    (tmp_path / "a.csv").write_bytes(b"id,text\n0,a\n" + row + b"2,c\n")
    first, bad, last = records(source(tmp_path, "csv"))
    assert isinstance(bad, BadRecord)
    assert reason in bad.reason
    assert (bad.ordinal, bad.byte_offset, bad.byte_length) == (1, 12, len(row))
    assert [r.text for r in (first, last) if isinstance(r, Document)] == ["a", "c"]


def test_a_quote_that_is_never_closed_takes_the_rest_and_says_where_it_opens(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'id,text\n0,a\n1,"b\n2,c\n3,d\n')
    first, bad = records(source(tmp_path, "csv"))
    assert isinstance(first, Document)
    assert isinstance(bad, BadRecord)
    assert bad.reason == "the quote at byte 2 of the record is never closed"
    assert (bad.byte_offset, bad.byte_length) == (12, 13)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text,text\na,b\n", "names column 'text' 2 times"),
        ('"text\na,b\n', "the quote at byte 0 of the record is never closed"),
        ("x" * (1 << 20) + "y", "the first record has more than 1,048,576 bytes"),
    ],
)
def test_a_header_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    assert message in refusal(source(tmp_path, "csv")).what


def test_nulls_and_bad_text_in_parquet_are_put_aside(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffb")]
    )
    (tmp_path / "a.parquet").write_bytes(parquet(text=pa.array(["x", None, "y\0"])))
    (tmp_path / "b.parquet").write_bytes(parquet(text=broken))
    found = records(source(tmp_path, "parquet"))
    assert [(r.file_index, r.ordinal, getattr(r, "text", None) or r.reason) for r in found] == [  # type: ignore[union-attr]
        (0, 0, "x"), (0, 1, "column 'text' is null"), (0, 2, "y\0"), (1, 0, "a"),
        (1, 1, "column 'text' has invalid UTF-8 at byte 0: invalid start byte"),
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["txt", "jsonl", "csv", "parquet"])
def test_empty_files_are_left_out_and_told(tmp_path: Path, form: str) -> None:
    full = {"txt": b"x", "jsonl": b'{"text": "x"}', "csv": b"text\nx", "parquet": parquet(text=["x"])}[form]
    (tmp_path / f"a.{form}").write_bytes(b"")
    (tmp_path / f"b.{form}").write_bytes(full)
    (tmp_path / f"c.{form}.gz").write_bytes(gzip.compress(full, mtime=0))
    if form != "parquet":  # what is no Parquet at all is refused
        (tmp_path / f"d.{form}.gz").write_bytes(gzip.compress(b"", mtime=0))
    config = source(tmp_path, form)
    assert [r.text for r in records(config) if isinstance(r, Document)] == ["x", "x"]
    (note,) = list_source(config).notes
    assert (note.kind, note.text.endswith(f"': {tmp_path}/a.{form}")) == ("empty_files", True)


@pytest.mark.parametrize(
    ("form", "name", "data"),
    [
        ("txt", "a.txt.gz", gzip.compress(b"", mtime=0)), ("jsonl", "a.jsonl.zst", zstandard.compress(b"")),
        ("csv", "a.csv", b"text\n"), ("parquet", "a.parquet", None),
    ],
)  # fmt: skip
def test_a_source_without_a_record_is_refused(tmp_path: Path, form: str, name: str, data: bytes | None) -> None:
    (tmp_path / name).write_bytes(parquet(text=pa.array([], pa.string())) if data is None else data)
    error = refusal(source(tmp_path, form))
    assert "1 file without a record" in error.what
    assert error.where == str(tmp_path / name)


@pytest.mark.parametrize("form", ["txt", "jsonl", "csv"])
@pytest.mark.parametrize(
    ("start", "looks"),
    [
        (gzip.compress(b"x", mtime=0), "gzip data, but its name does not end in .gz"),
        (zstandard.compress(b"x"), "zstd data, but its name does not end in .zst"),
        (b"PAR1\0\0", "Parquet"), (b"PK\x03\x04", "a zip archive"), (b"\x7fELF\2", "a program"),
        (b"\x89PNG\r\n", "a PNG image"), (b"%PDF-1.7", "a PDF document"), (b"\xff\xfea\0", "UTF-16 text"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_refused_by_name(tmp_path: Path, form: str, start: bytes, looks: str) -> None:
    (tmp_path / f"a.{form}").write_bytes(start + b"\nrest\n")
    error = refusal(source(tmp_path, form))
    assert f"not UTF-8 text; it looks like {looks}" in error.what
    assert error.where == str(tmp_path / f"a.{form}")


def tar_of(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def old_tar_of(**members: bytes) -> bytes:
    header, content = tar_of(**members)[:512], tar_of(**members)[512:]
    blank = header[:148] + b" " * 8 + header[156:257] + bytes(255)
    return blank[:148] + f"{sum(blank):06o}".encode() + b"\0 " + blank[156:] + content


def zip_of(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


ARCHIVES = {
    "tar": (tar_of(a=b"some text\n"), "images_field=file_name"), "zip": (zip_of(a=b"some text\n"), "unzip"),
    "warc": (b"WARC/1.0\r\nWARC-Type: warcinfo\r\nContent-Length: 3\r\n\r\nabc\r\n\r\n", "jsonl"),
    "xz": (lzma.compress(b"some text\n"), "xz -dc"), "bz2": (bz2.compress(b"some text\n", 1), "bzip2 -dc"),
    "7z": (b"7z\xbc\xaf\x27\x1c\0\4", "7z x"), "rar": (b"Rar!\x1a\x07\x01\0", "unrar"),
    "sqlite": (b"SQLite format 3\0", "sqlite3"), "arrow": (b"ARROW1\0\0", "jsonl"),
    "lz4": (b"\x04\x22\x4d\x18dd", "lz4 -dc"), "lzip": (b"LZIP\1dd", "lzip -dc"),
    "tar before POSIX": (old_tar_of(a=b"some text\n"), "tar -xf"), "cpio": (b"070701" + b"0" * 104 + b"a\0", "cpio -i"),
    "arc": (b"filedesc://a.arc 0.0.0.0 20000101000000 text/plain 9\n1 0 X\n", "jsonl"),
    "numpy": (b"\x93NUMPY\1\0v\0{'descr': '<u2'}", "numpy.load"),
    "pickle": (pickle.dumps({"text": "some text"}), "module pickle"),
    "an old pickle": (pickle.dumps({"text": "some text"}, protocol=2), "module pickle"),
    "UTF-16 without a mark": ("some text\n".encode("utf-16-le"), "data.sources.0.encoding=utf-16-le"),
    "UTF-16 of the other order": ("some text\n".encode("utf-16-be"), "data.sources.0.encoding=utf-16-be"),
}  # fmt: skip


@pytest.mark.parametrize("form", ["txt", "jsonl", "csv"])
@pytest.mark.parametrize("outside", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ARCHIVES)
def test_an_archive_is_refused_with_the_command_that_unpacks_it(
    tmp_path: Path, kind: str, outside: str, form: str
) -> None:
    content, command = ARCHIVES[kind]
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[outside]
    (tmp_path / f"a.{form}{outside}").write_bytes(compress(content))
    (tmp_path / f"b.{form}").write_bytes(b"text\n")
    error = refusal(source(tmp_path, form))
    assert error.where == str(tmp_path / f"a.{form}{outside}")
    assert command in error.hint


@pytest.mark.parametrize(
    "text",
    [
        "BZh is a prefix.\n",
        "WARC/1.0 is a format.\n",
        "GIF8 my lunch\n",
        "a" * 257 + "ustar",
        "070701 is a number\n",
        "filedesc:// is a scheme\n",
        "a\0b" * 8,
    ],
)
def test_words_of_a_signature_are_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    (document,) = records(source(tmp_path, "txt"))
    assert isinstance(document, Document)
    assert document.text == text


def test_a_web_archive_behind_blank_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\r\n\r\nWARC/1.1\r\nWARC-Type: warcinfo\r\n\r\n")
    assert "jsonl" in refusal(source(tmp_path, "txt")).hint


def test_a_folder_with_no_file_says_so(tmp_path: Path) -> None:
    error = refusal(source(tmp_path, "txt"))
    assert "no file was found" in error.what
    assert "data.sources.paths" in error.hint


def test_nul_is_text_and_half_surrogates_are_not(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\0b")
    (tmp_path / "b.txt").write_bytes(b"a\xed\xa0\x80b")
    good, bad = records(source(tmp_path, "txt"))
    assert isinstance(good, Document)
    assert good.text == "a\0b"
    assert isinstance(bad, BadRecord)
    assert (bad.line, bad.reason) == (1, "invalid UTF-8 at byte 1: invalid continuation byte")
    (tmp_path / "a.jsonl").write_text('{"text": "a\\u0000b"}\n{"text": "a\\ud800b"}\n')
    good, bad = records(source(tmp_path, "jsonl"))
    assert isinstance(good, Document)
    assert good.text == "a\0b"
    assert isinstance(bad, BadRecord)
    assert (bad.line, bad.reason) == (2, "field 'text' has half a surrogate pair at character 1")


def test_a_shard_that_is_there_twice_is_used_once_and_told(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": "x" if name != "c" else "y"}) + "\n")
    listed = list_source(source(tmp_path, "jsonl"))
    assert [Path(file.uri).name for file in listed.files] == ["a.jsonl", "c.jsonl"]
    (note,) = listed.notes
    assert note.kind == "duplicates"
    assert note.text.endswith(f"{tmp_path}/b.jsonl (as {tmp_path}/a.jsonl)")


class TestFallback:
    def test_is_used_and_told_when_the_paths_are_not_there(self, tmp_path: Path) -> None:
        (tmp_path / "b.jsonl").write_text('{"text": "second"}\n')
        config = source(tmp_path / "a.jsonl", "jsonl", fallback=[str(tmp_path / "b.jsonl")])
        listed = list_source(config)
        (note,) = listed.notes
        assert note.kind == "fallback"
        assert f"{tmp_path}/b.jsonl" in note.text
        assert f"{tmp_path}/a.jsonl: No such file" in note.text
        assert [r.text for r in records(config) if isinstance(r, Document)] == ["second"]
        (tmp_path / "a.jsonl").write_text('{"text": "first"}\n')
        again = list_source(config)
        assert again.notes == ()
        assert again.digest != listed.digest, "another cache"
        assert [r.text for r in records(config) if isinstance(r, Document)] == ["first"]

    def test_may_be_a_named_source_with_its_own_format(self, tmp_path: Path) -> None:
        config = source(tmp_path / "missing", "csv", delimiter=";", text_field="body", fallback=["stdlib"])
        listed = list_source(config)
        assert listed.definition == {"format": "python_stdlib", "selection": "2"}
        assert listed.config.name == "s"
        assert any(file.uri == "stdlib:json/decoder.py" for file in listed.files)

    def test_that_is_not_there_either_names_both(self, tmp_path: Path) -> None:
        error = refusal(source(tmp_path / "a", "txt", fallback=[str(tmp_path / "b")]))
        assert error.where == str(tmp_path / "a")
        assert f"fallback {tmp_path / 'b'} is not available either" in error.what

    def test_is_not_used_for_what_is_there_and_broken(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("id\n1\n")
        (tmp_path / "b.csv").write_text("text\nx\n")
        error = refusal(source(tmp_path / "a.csv", "csv", fallback=[str(tmp_path / "b.csv")]))
        assert "has no column 'text'" in error.what


@pytest.mark.parametrize("form", ["jsonl", "csv"])
@pytest.mark.parametrize("ending", ["", ".zst"])
def test_records_that_are_too_large_are_put_aside(tmp_path: Path, form: str, ending: str) -> None:
    def row(text: str) -> str:
        return f'"{text}"\n' if form == "csv" else json.dumps({"text": text}) + "\n"

    text = ("text\n" if form == "csv" else "") + row("a") + row("x" * 5_000) + row("b")
    data = zstandard.compress(text.encode()) if ending else text.encode()
    (tmp_path / f"a.{form}{ending}").write_bytes(data)
    for unit_bytes in (10, 1 << 20):
        first, bad, last = records(source(tmp_path, form, max_record_bytes=5_000), unit_bytes)
        assert [r.text for r in (first, last) if isinstance(r, Document)] == ["a", "b"]
        assert isinstance(bad, BadRecord)
        assert bad.ordinal == 1
        assert bad.reason == f"the record has {bad.byte_length:,} bytes, more than max_record_bytes=5,000"
        assert bad.byte_length > 5_000
    assert len(records(source(tmp_path, form, max_record_bytes=6_000))) == 3
    limited = list_source(source(tmp_path, form, max_record_bytes=6_000))
    assert limited.definition != list_source(source(tmp_path, form)).definition, "it decides records"


def test_a_value_of_parquet_that_is_too_large_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet(text=["a", "x" * 5_001, "b"]))
    _, bad, last = records(source(tmp_path, "parquet", max_record_bytes=5_000))
    assert isinstance(bad, BadRecord)
    assert "5,001 bytes, more than max_record_bytes=5,000" in bad.reason
    assert isinstance(last, Document)


def test_a_parquet_bomb_is_refused_by_its_footer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vorox.data.text.formats.columnar._MIN_SUSPECT_BYTES", 1 << 24)
    table = pa.table({"text": pa.array(["x" * (1 << 20)] * 20)})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    assert "decompression bomb" in refusal(source(tmp_path, "parquet")).what
    assert len(records(source(tmp_path, "parquet", max_decompression_ratio=1e6))) == 20


_PROGRAM = """
import json, resource, sys
import pyarrow.compute, pyarrow.parquet, zstandard
from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig, ValidationConfig
from vorox.data.text.unit_splitter import split_into_units
from vorox.data.text.sources import list_source
from vorox.data.text.unit_reader import UnitReader
config = SourceConfig.model_validate_json(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rule = ValidationConfig(held_out_fraction=0)
kinds, refusal = [], ""
try:
    listed = list_source(config)
    for unit in split_into_units(listed, "train", rule, 64 << 20):
        for record in UnitReader(listed, "train", rule)(unit):
            kinds.append([type(record).__name__, record.byte_length, len(getattr(record, "text", ""))])
except DataError as error:
    refusal = error.what
print(json.dumps([kinds, refusal, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024]))
"""


def measured(config: SourceConfig) -> tuple[list[list[Any]], str, float]:
    """Kinds and sizes of all records, or why not, and the MiB that it took at most, in a process of its own."""
    command = [sys.executable, "-c", _PROGRAM, config.model_dump_json()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    kinds, refused, mebibytes = json.loads(done.stdout)
    return kinds, refused, mebibytes


def large_file(path: Path, head: bytes, size: int, tail: bytes) -> None:
    with path.open("wb") as file:
        file.write(head)
        for _ in range(size >> 20):
            file.write(b"x" * (1 << 20))
        file.write(tail)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "head", "tail"), [("jsonl", b'{"text": "', b'"}\n{"text": "end"}\n'), ("csv", b'text\n"', b'"\nend\n')]
)
def test_a_hundred_megabytes_in_one_record_are_read(tmp_path: Path, form: str, head: bytes, tail: bytes) -> None:
    large_file(tmp_path / f"a.{form}", head, 100 << 20, tail)
    kinds, _, mebibytes = measured(source(tmp_path, form))
    assert [(kind, length) for kind, _, length in kinds] == [("Document", 100 << 20), ("Document", 3)]
    assert mebibytes < 800


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    ("form", "head", "tail"), [("jsonl", b'{"text": "', b'"}\n{"text": "end"}\n'), ("csv", b'text\n"', b'"\nend\n')]
)
def test_a_larger_one_is_put_aside_in_bounded_memory(
    tmp_path: Path, form: str, head: bytes, tail: bytes, ending: str
) -> None:
    path = tmp_path / f"a.{form}"
    large_file(path, head, 600 << 20, tail)
    if ending:
        compressed = tmp_path / f"a.{form}{ending}"
        opener: Any = gzip.open if ending == ".gz" else zstandard.open
        with path.open("rb") as plain, opener(compressed, "wb") as file:
            shutil.copyfileobj(plain, file, 1 << 20)
        path.unlink()
    kinds, _, mebibytes = measured(source(tmp_path, form, max_record_bytes=8 << 20, max_decompression_ratio=1e6))
    assert [kind for kind, _, _ in kinds] == ["BadRecord", "Document"]
    assert kinds[0][1] > 600 << 20
    assert mebibytes < 100


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_bomb_is_refused_in_bounded_memory(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.txt.{kind}"
    opener: Any = gzip.open if kind == "gz" else zstandard.open
    with opener(path, "wb") as file:
        for _ in range(1024):
            file.write(bytes(1 << 20))
    _, refused, mebibytes = measured(source(tmp_path, "txt"))
    assert "decompression bomb" in refused
    assert mebibytes < 60


@pytest.mark.slow
def test_a_large_parquet_file_is_read_in_bounded_memory(tmp_path: Path) -> None:
    """One row group with 400 MB of text and as much in columns that are not requested."""
    generator_rows = [f"{n:08d}" * 500 for n in range(1_000)]
    schema = pa.schema([("text", pa.string()), ("other", pa.string())])
    with pq.ParquetWriter(tmp_path / "a.parquet", schema, compression="zstd", use_dictionary=False) as writer:
        batch = pa.table({"text": generator_rows * 100, "other": generator_rows * 100}, schema=schema)
        writer.write_table(batch, row_group_size=100_000)
    del batch
    kinds, _, mebibytes = measured(source(tmp_path, "parquet", max_decompression_ratio=1e6))
    assert len(kinds) == 100_000
    assert mebibytes < 200


@pytest.mark.parametrize(
    ("ending", "hint"),
    [
        (".py", "name the files by a glob, such as {folder}/**/*.py"),
        (".jsonl", "set data.sources.format=jsonl, or name the files by a glob, such as {folder}/**/*.jsonl"),
        (
            ".xyz",
            "set data.sources.format to what these files are, or name the files by a glob, such as {folder}/**/*.xyz",
        ),
    ],
)
def test_a_folder_of_other_files_names_another_format_only(tmp_path: Path, ending: str, hint: str) -> None:
    """Files of unknown names read as txt where they are named one by one, such as code, need no other format."""
    (tmp_path / f"a{ending}").write_text("text\n")
    assert refusal(source(tmp_path, "txt")).hint == hint.format(folder=tmp_path)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_file_with_another_text_column_beside_others_is_not_a_reason_to_change_the_source(
    kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, column in (("a", "text"), ("b", "text"), ("c", "body")):
        rows = [{column: f"words of {name} {number}"} for number in range(200)]
        path = folder / f"{name}.{kind}"
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif kind == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        else:
            path.write_text("\n".join([column, *(row[column] for row in rows)]) + "\n", encoding="utf-8")
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps({
        "data": {"sources": [{"name": "in", "format": kind, "paths": [str(folder)]}],
                 "cache": {"directory": str(tmp_path / "cache")}},
        "tokenizer": {"kind": "byte"}, "train": {"num_steps": 1},
    }), encoding="utf-8")  # fmt: skip
    with pytest.raises(DataError, match=r"no (column|field) 'text'") as caught:
        prepare(load_config(file))
    assert caught.value.where is not None
    assert f"c.{kind}" in caught.value.where
    assert "rename it in this one, move this one away, or give it a source of its own" in caught.value.hint
