"""Sources of every format: splits, limits, training samples and recipes behave as for plain text."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from dataset_folders import arrow_stream, mds_shard
from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig, ValidationConfig
from vorox.data.documents import Document, Record, TokenDocument
from vorox.data.text.shard_format import write_shard
from vorox.data.text.sources import Source, list_source
from vorox.data.text.unit_reader import UnitReader
from vorox.data.text.unit_splitter import split_into_units
from vorox.data.tokenizers.training_sample import training_sample

END = 60_000


def as_csv(texts: list[str]) -> bytes:
    buffer = io.StringIO(newline="")
    csv.writer(buffer).writerows([("id", "text"), *((str(n), text) for n, text in enumerate(texts))])
    return buffer.getvalue().encode()


def as_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def as_parquet(texts: list[str]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), buffer, row_group_size=7)
    return buffer.getvalue()


def as_mds(texts: list[str]) -> bytes:
    return mds_shard([{"text": text} for text in texts], {"text": "str"})[0]


FORMS: dict[str, Callable[[list[str]], bytes]] = {
    "jsonl.gz": lambda texts: gzip.compress(as_lines(texts)),
    "jsonl.zst": lambda texts: zstandard.compress(as_lines(texts)),
    "csv": as_csv,
    "csv.zst": lambda texts: zstandard.compress(as_csv(texts)),
    "parquet": as_parquet,
    "parquet.gz": lambda texts: gzip.compress(as_parquet(texts)),
    "arrow": lambda texts: arrow_stream({"text": texts}, batch_rows=7),
    "arrow.zst": lambda texts: zstandard.compress(arrow_stream({"text": texts}, batch_rows=7)),
    "mds": as_mds,
    "mds.zstd": lambda texts: zstandard.compress(as_mds(texts)),
    "bin": lambda texts: b"",
}


def write(path: Path, texts: list[str]) -> None:
    if path.suffix == ".bin":
        ids = [id for text in texts for id in [*text.encode(), END]]
        write_shard(path, np.array(ids, np.uint16))
    else:
        path.write_bytes(FORMS[path.name.partition(".")[2]](texts))


def text_of(record: Record) -> str:
    if isinstance(record, TokenDocument):
        return bytes(record.tokens.astype(np.uint8)).decode()
    assert isinstance(record, Document), record
    return record.text


def source(folder: Path, form: str, **options: Any) -> SourceConfig:
    own = {"end_of_text_id": END, "tokenizer": "any"} if form == "bin" else {}
    paths = [f"{folder}/*.{form}" if form.startswith("mds") else str(folder)]  # as a folder, MDS has an index
    return SourceConfig.model_validate(
        {"name": "s", "format": form.partition(".")[0], "paths": paths, **own, **options}
    )


def rule(split: str, fraction: float) -> ValidationConfig:
    return ValidationConfig.model_validate({"split": split, "held_out_fraction": fraction})


def records(listed: Source, split: Any, validation: ValidationConfig, unit_bytes: int) -> list[Record]:
    units = split_into_units(listed, split, validation, unit_bytes)
    return [record for unit in units for record in UnitReader(listed, split, validation)(unit)]


@pytest.mark.parametrize("split", ["file", "document", "span"])
@pytest.mark.parametrize("form", list(FORMS))
def test_splits_are_disjoint_complete_and_independent_of_units(tmp_path: Path, form: str, split: str) -> None:
    expected: list[str] = []
    for n in range(12):
        texts = [f'file {n} line {k} é "quoted",\nnext' for k in range(1, n * 4)]
        write(tmp_path / f"{n:02}.{form}", texts)
        expected += texts
    listed = list_source(source(tmp_path, form))
    validation = rule(split, 0.25)
    parts = [records(listed, side, validation, 1 << 20) for side in ("train", "validation")]
    assert parts[1], "nothing is held out"
    assert sorted(text_of(record) for part in parts for record in part) == sorted(expected)
    keys = [(r.file_index, r.ordinal) for part in parts for r in part]
    assert len(set(keys)) == len(keys)
    texts = [[text_of(record) for record in part] for part in parts]
    for unit_bytes in (1, 300):
        again = [records(listed, side, validation, unit_bytes) for side in ("train", "validation")]
        assert [[text_of(record) for record in part] for part in again] == texts
        places = [[(r.file_index, r.ordinal, r.byte_offset) for r in part] for part in again]
        assert places == [[(r.file_index, r.ordinal, r.byte_offset) for r in part] for part in parts]


def test_rows_of_one_row_group_are_held_out_one_by_one(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [str(n) for n in range(2_000)]}), tmp_path / "a.parquet")
    listed = list_source(source(tmp_path, "parquet"))
    held_out = records(listed, "validation", rule("document", 0.1), 1 << 20)
    assert 150 < len(held_out) < 250
    assert len({record.byte_offset for record in held_out}) == 1


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("limit", [1, 400, 1_000, 3_000, 100_000])
def test_max_bytes_takes_whole_records_from_the_start(tmp_path: Path, form: str, limit: int) -> None:
    texts = [[f"file {n} line {k}" for k in range(40)] for n in range(3)]
    for n in range(3):
        write(tmp_path / f"{n}.{form}", texts[n])
    listed = list_source(source(tmp_path, form))
    expected = [text for group in texts for text in group]
    if limit == 1:
        with pytest.raises(DataError, match="no record that ends within max_bytes = 1"):
            list_source(source(tmp_path, form, max_bytes=limit))
        return
    limited = list_source(source(tmp_path, form, max_bytes=limit))
    found = [text_of(record) for record in records(limited, "train", rule("file", 0), 200)]
    assert found == expected[: len(found)]
    held = sum(len(text) for text in found)
    assert limit / 5 < held <= limit or found == expected
    assert (found == expected) == (limited.files == listed.files and limited.end_bytes == listed.end_bytes)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "bin"])
@pytest.mark.parametrize("split", ["file", "document", "span"])
def test_a_tokenizer_sees_all_of_the_training_text_and_nothing_else(tmp_path: Path, form: str, split: str) -> None:
    for n in range(10):
        write(tmp_path / f"{n}.{form}", [f"<{n}.{k}>" for k in range(60)])
    listed, validation = list_source(source(tmp_path, form)), rule(split, 0.3)
    train, held_out = (
        {text_of(record) for record in records(listed, side, validation, 5_000)} for side in ("train", "validation")
    )

    def seen(budget: int) -> list[str]:
        return list(
            training_sample([replace(listed, holdout=validation)], [Fraction(1)], unit_bytes=5_000, budget_bytes=budget)
        )

    assert sorted(seen(1 << 30)) == sorted(train)
    some = seen(600)
    assert set(some) <= train
    assert not set(some) & held_out
    assert len({text.partition(".")[0] for text in some}) >= 2, "all of one file"


def test_recipes_hold_what_decides_documents_and_nothing_else(tmp_path: Path) -> None:
    """Written out: what is here is in the names of caches that exist."""
    for form in ("txt", "jsonl", "csv", "parquet", "bin"):
        write_shard(tmp_path / "a.bin", np.array([1], np.uint16))
        (tmp_path / f"a.{form}").exists() or (tmp_path / f"a.{form}").write_bytes(b"text\n")

    def definition(form: str, **options: Any) -> dict[str, str]:
        return list_source(source(tmp_path, form, **options)).definition

    assert definition("txt") == {"format": "txt"}
    assert definition("jsonl") == {"format": "jsonl", "text_field": "text"}
    assert definition("jsonl", metadata_fields=["id"], max_decompressed_bytes=5) == definition("jsonl")
    assert definition("jsonl", max_record_bytes=5) == {**definition("jsonl"), "max_record_bytes": "5"}
    assert definition("csv", delimiter=";") == {"format": "csv", "text_field": "text", "delimiter": ";"}
    assert definition("parquet", text_field="a.b") == {"format": "parquet", "text_field": "a.b"}
    assert definition("bin") == {"format": "bin", "end_of_text_id": str(END)}


def test_endings_of_a_folder(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.ndjson.gz", "c.JSONL.ZST", "d.json", "e.gz", ".f.jsonl"):
        content = json.dumps({"text": name}).encode()
        kind = name.lower().rpartition(".")[2]
        made = gzip.compress(content) if kind == "gz" else zstandard.compress(content) if kind == "zst" else content
        (tmp_path / name).write_bytes(made)
    listed = list_source(source(tmp_path, "jsonl"))
    assert listed.relative_paths == ("a.jsonl", "b.ndjson.gz", "c.JSONL.ZST")


def test_a_limit_reads_no_more_of_a_compressed_file_than_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.jsonl.zst", [f"line {n} " * 100 for n in range(20_000)])

    def never(*_: object) -> int:
        raise AssertionError("the whole file was read")

    monkeypatch.setattr("vorox.data.text.formats.length_bytes", never)
    listed = list_source(source(tmp_path, "jsonl", max_bytes=1_000_000))
    assert 990_000 < listed.size_bytes <= 1_000_000
