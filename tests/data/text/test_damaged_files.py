"""damaged_files: keep_readable keeps the complete records before the damage and quarantines the rest."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from vorox.core.config import load_config
from vorox.core.errors import ConfigError, DataError
from vorox.core.schema.data import SourceConfig, ValidationConfig
from vorox.data.cache.build import BuildOptions
from vorox.data.corpus.corpus import prepare
from vorox.data.documents import BadRecord, Document, Record
from vorox.data.text import file_content
from vorox.data.text.formats import record_blocks
from vorox.data.text.sources import Source, list_source
from vorox.data.text.unit_reader import UnitReader
from vorox.data.text.unit_splitter import split_into_units

EVERYTHING = ValidationConfig(held_out_fraction=0)
TEXTS = [f"{n} " + "".join(random.Random(n).choices("abcdefghij \u00e9\u2603", k=n * 7 % 190)) for n in range(400)]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    """What another process would not know."""
    file_content._scan.cache_clear()
    record_blocks._memoized.clear()


def written(form: str) -> bytes:
    if form == "jsonl":
        return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS).encode()
    if form == "csv":
        return ("id,text\n" + "".join(f'{n},"{text}"\n' for n, text in enumerate(TEXTS))).encode()
    return "".join(f"{text}\n" for text in TEXTS).encode()


def compressed(kind: str, data: bytes, parts: int) -> list[bytes]:
    bounds = [len(data) * n // parts for n in range(parts + 1)]
    one = gzip.compress if kind == "gz" else zstandard.ZstdCompressor(write_checksum=True).compress
    return [one(data[a:b]) for a, b in itertools.pairwise(bounds)]


def source(path: Path, form: str, policy: str = "keep_readable") -> Source:
    section = {"name": "s", "format": form, "paths": [str(path)], "damaged_files": policy}
    return list_source(SourceConfig.model_validate(section))


def records(path: Path, form: str, unit_bytes: int = 1 << 20, *, backwards: bool = False) -> list[Record]:
    """Each unit as a process that knows nothing would read it."""
    listed = source(path, form)
    units = split_into_units(listed, "train", EVERYTHING, unit_bytes)
    read: dict[int, list[Record]] = {}
    for unit in reversed(units) if backwards else units:
        if backwards:
            forget()
        read[unit.unit_id] = list(UnitReader(listed, "train", EVERYTHING)(unit))
    return [record for unit in units for record in read[unit.unit_id]]


def text_of(record: Record) -> str:
    assert isinstance(record, Document), record
    return record.text


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("form", ["jsonl", "csv", "txt"])
def test_a_file_that_ends_early_gives_the_records_that_lie_whole_before(tmp_path: Path, form: str, kind: str) -> None:
    (whole,) = compressed(kind, written(form), 1)
    chooser = random.Random(form + kind)
    path = tmp_path / f"a.{form}.{kind}"
    most = 0
    for size in [len(whole) - 1, *(chooser.randrange(30, len(whole)) for _ in range(12))]:
        path.write_bytes(whole[:size])
        forget()
        *kept, rest = records(path, form)
        assert isinstance(rest, BadRecord)
        assert rest.is_rest_of_file
        assert "data is truncated" in rest.reason
        assert f"of {size:,})" in rest.reason
        assert "download or write the file again" in rest.reason
        end = 0
        if form == "txt":
            text = "".join(map(text_of, kept))
            assert written(form).startswith(text.encode())
            assert not text or text.endswith("\n")
            end = len(text.encode())
        else:
            assert list(map(text_of, kept)) == TEXTS[: len(kept)]
            end = kept[-1].byte_offset + kept[-1].byte_length if kept else 0
            most = max(most, len(kept))
        assert rest.byte_offset == end or not kept
        assert rest.ordinal == len(kept)
        forget()
        assert "data is truncated" in str(refused(path, form))
    assert form == "txt" or most > 350, "of a file without its last byte, nearly everything is kept"


def refused(path: Path, form: str) -> DataError:
    with pytest.raises(DataError) as caught:
        split_into_units(source(path, form, "stop"), "train", EVERYTHING, 1 << 20)
    assert caught.value.exit_code == 4
    return caught.value


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("form", ["jsonl", "csv", "txt"])
def test_the_records_are_the_same_whoever_reads_them_in_whatever_order(tmp_path: Path, form: str, kind: str) -> None:
    parts = compressed(kind, written(form), 3)
    whole, chooser = b"".join(parts), random.Random(f"{form} {kind}")
    path = tmp_path / f"a.{form}.{kind}"
    for _ in range(12):
        place = chooser.randrange(len(parts[0]), len(whole))
        broken = bytearray(whole)
        broken[place] ^= 1 << chooser.randrange(8)
        path.write_bytes(bytes(broken))
        forget()
        forward = records(path, form, 2_000)
        forget()
        assert records(path, form, 2_000, backwards=True) == forward
        forget()
        if form != "txt":  # there a unit is a document
            assert records(path, form, 1 << 20) == forward
        if not (isinstance(forward[-1], BadRecord) and forward[-1].is_rest_of_file):
            assert kind == "gz", "a flag in the header of a gzip member says nothing of the content"
            continue
        sound = len(written(form)) // 3  # a whole first member
        kept = b"".join(text_of(r).encode() + b"\n" for r in forward[:-1] if isinstance(r, Document))
        if form == "jsonl":
            first = [r for r in forward if isinstance(r, Document) and r.byte_offset + r.byte_length <= sound]
            assert [r.text for r in first] == TEXTS[: len(first)]
            assert len(first) >= sound // 1000
        assert kept


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_of_a_member_whose_checksum_is_wrong_nothing_is_kept(tmp_path: Path, kind: str) -> None:
    first, second = compressed(kind, written("jsonl"), 2)
    broken = bytearray(second)
    broken[-6 if kind == "gz" else -2] ^= 1  # of the checksum itself: all of the member can be read
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(first + bytes(broken))
    *kept, rest = records(path, "jsonl", 3_000)
    assert list(map(text_of, kept)) == TEXTS[: len(kept)]
    half = len(written("jsonl")) // 2
    assert isinstance(rest, BadRecord)
    assert half - 400 < rest.byte_offset <= half
    assert rest.byte_offset + rest.byte_length == half


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("form", ["jsonl", "csv", "txt"])
def test_a_file_of_which_nothing_can_be_read_is_listed_and_not_forgotten(tmp_path: Path, form: str, kind: str) -> None:
    (whole,) = compressed(kind, written(form), 1)
    (tmp_path / f"a.{form}.{kind}").write_bytes(whole[:11])
    (tmp_path / f"b.{form}").write_bytes(written(form))
    (rest, *others) = records(tmp_path, form)
    assert isinstance(rest, BadRecord)
    assert (rest.file_index, rest.ordinal, rest.byte_offset, rest.is_rest_of_file) == (0, 0, 0, True)
    assert all(isinstance(record, Document) for record in others)


def test_what_is_not_damage_stays_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"plain text that claims to be gzip")
    with pytest.raises(DataError, match="The file name declares gzip, but the content begins with"):
        records(tmp_path, "jsonl")
    with pytest.raises(ConfigError, match="damaged_files 'keep_readable' means a format of text") as caught:
        source(tmp_path, "parquet")
    assert caught.value.where == "data.sources.damaged_files"


@pytest.mark.parametrize("max_bytes", [None, 60_000])
def test_the_dataset_is_the_same_whatever_the_workers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, max_bytes: int | None
) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (whole,) = compressed("gz", written("jsonl"), 1)
    (folder / "a.jsonl.gz").write_bytes(whole[: len(whole) * 2 // 3])
    (folder / "b.jsonl.zst").write_bytes(b"".join(compressed("zst", written("jsonl"), 1))[:20])
    (folder / "c.jsonl").write_bytes(written("jsonl"))

    def digests(name: str, options: BuildOptions, **changes: Any) -> list[str]:
        section = {"name": "s", "format": "jsonl", "paths": [str(folder)], "max_bytes": max_bytes, **changes}
        settings = {
            "data": {
                "sources": [section], "sequence_length_tokens": 32,
                "cache": {"directory": str(tmp_path / name), "unit_bytes": 4_000, "chunk_rows": 64},
            },
            "tokenizer": {"kind": "byte"}, "train": {"num_steps": 1},
        }  # fmt: skip
        file = tmp_path / f"{name}.yaml"
        file.write_text(json.dumps(settings), encoding="utf-8")
        forget()
        with contextlib.closing(prepare(load_config(file), options=options)) as corpus:
            readers = [*corpus.train, *corpus.validation]
            return [reader.digest for reader in readers]

    with pytest.raises(DataError, match="data is truncated"):
        digests("stop", BuildOptions())
    keep = {"damaged_files": "keep_readable"}
    one = digests("one", BuildOptions(), **keep)
    told = [message for message in caplog.messages if message.startswith("Damaged file")]
    assert len(told) == 4, "reported for each file and split"
    assert digests("inverse", BuildOptions(mode="inverse"), **keep) == one
    assert digests("workers", BuildOptions(workers=2), **keep) == one
    listed = sorted(tmp_path.glob("one/**/quarantine/*.jsonl"))
    entries = [json.loads(line) for path in listed for line in path.read_text().splitlines()]
    assert {Path(entry["uri"]).name for entry in entries} >= {"a.jsonl.gz"}
    assert all(
        entry["byte_offset"] >= 0 and "the rest of the file is quarantined" in entry["reason"] for entry in entries
    )
