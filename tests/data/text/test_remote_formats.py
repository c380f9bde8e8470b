"""Every format from a store with intermittent failures yields the records of the same local files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from servers import FaultProxy, fault_proxy, http_server
from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig, ValidationConfig
from vorox.data.documents import Document, Record, TokenDocument
from vorox.data.text import file_content
from vorox.data.text.shard_format import write_shard
from vorox.data.text.sources import list_source
from vorox.data.text.unit_reader import UnitReader
from vorox.data.text.unit_splitter import split_into_units

EVERYTHING = ValidationConfig(held_out_fraction=0)
FILES = {"jsonl": "a.jsonl.zst", "csv": "b.csv.gz", "parquet": "c.parquet", "txt": "d.txt", "bin": "e.bin"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = [f"text {n} " + "word " * (n % 90) for n in range(3_000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(("text\n" + "".join(f"{text}\n" for text in texts)).encode()))
    pq.write_table(pa.table({"text": texts, "other": texts}), tmp_path / "c.parquet", row_group_size=300)
    (tmp_path / "d.txt").write_text("\n".join(texts))
    write_shard(tmp_path / "e.bin", np.arange(200_000, dtype=np.uint32) % 977)
    return tmp_path


@pytest.fixture
def proxy(folder: Path) -> Iterator[FaultProxy]:
    file_content._scan.cache_clear()
    with http_server(folder) as server, fault_proxy(
        server.url, seed=3, error_503_fraction=0.05, truncated_fraction=0.1
    ) as running:  # fmt: skip
        yield running


def records(form: str, location: str) -> list[Record]:
    options = {"end_of_text_id": 976, "tokenizer": "any"} if form == "bin" else {}
    config = SourceConfig.model_validate({"name": "s", "format": form, "paths": [location], **options})
    listed = list_source(config)
    units = split_into_units(listed, "train", EVERYTHING, 100_000)
    return [record for unit in units for record in UnitReader(listed, "train", EVERYTHING)(unit)]


def seen(records: list[Record]) -> list[tuple[int, int, int, str]]:
    shown = []
    for record in records:
        assert isinstance(record, Document | TokenDocument)
        text = record.text if isinstance(record, Document) else repr(record.tokens.tolist())
        shown.append((record.ordinal, record.byte_offset, record.byte_length, text))
    return shown


@pytest.mark.parametrize("form", list(FILES))
def test_records_are_those_of_the_local_file(folder: Path, proxy: FaultProxy, form: str) -> None:
    there = seen(records(form, f"{proxy.url}/{FILES[form]}"))
    assert there == seen(records(form, str(folder / FILES[form])))
    assert len(there) > 10 or form == "txt"


@pytest.mark.parametrize("form", list(FILES))
def test_an_object_that_changes_under_way_is_an_error(folder: Path, proxy: FaultProxy, form: str) -> None:
    options = {"end_of_text_id": 976, "tokenizer": "any"} if form == "bin" else {}
    location = f"{proxy.url}/{FILES[form]}"
    config = SourceConfig.model_validate({"name": "s", "format": form, "paths": [location], **options})
    listed = list_source(config)
    units = split_into_units(listed, "train", EVERYTHING, 100_000)
    path = folder / FILES[form]
    path.write_bytes(path.read_bytes()[:-3] + b"abc")
    file_content._scan.cache_clear()
    with pytest.raises(DataError, match="changed") as caught:
        [list(UnitReader(listed, "train", EVERYTHING)(unit)) for unit in units]
    assert caught.value.where == location
