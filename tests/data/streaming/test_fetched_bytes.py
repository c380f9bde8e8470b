"""How often a stream fetches each byte of its source, counted at the server."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from servers import http_server
from servers.recorded import Request
from vorox.data.dataset.iterable_dataset import RemoteIterableDataset
from vorox.data.text import file_content

KIBIBYTE = 1 << 10


def texts(size_bytes: int) -> list[str]:
    chooser = random.Random(5)
    found: list[str] = []
    size = 0
    while size < size_bytes:
        found.append(f"{len(found)} " + bytes(chooser.choices(b"abcdefghijklmnop \n", k=2000)).decode())
        size += 2000
    return found


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def parquet(texts: list[str], rows_of_a_group: int = 32) -> bytes:
    arrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    written = io.BytesIO()
    tables.write_table(
        arrow.table({"text": texts}), written, row_group_size=rows_of_a_group, compression="none", use_dictionary=False
    )
    return written.getvalue()


FORMS: dict[str, tuple[str, Callable[[list[str]], bytes]]] = {
    "jsonl": ("jsonl", jsonl),
    "jsonl.gz": ("jsonl", lambda texts: gzip.compress(jsonl(texts), 1)),
    "jsonl.zst": ("jsonl", lambda texts: zstandard.ZstdCompressor(level=1).compress(jsonl(texts))),
    "parquet": ("parquet", parquet),
}


def requests_of_an_epoch(folder: Path, name: str, form: str, data: bytes, **changes: Any) -> list[Request]:
    """Every request for content, with nothing remembered from earlier tests."""
    file_content._scan.cache_clear()
    (folder / "web").mkdir()
    (folder / "web" / f"a.{name}").write_bytes(data)
    settings: dict[str, Any] = {
        "tokenizer": "byte", "sequence_length_tokens": 1024, "cache_directory": folder / "cache", "epochs": 1,
        "unit_bytes": 64 * KIBIBYTE, "shuffle_buffer_rows": 400,
    }  # fmt: skip
    with http_server(folder / "web") as server:
        source = {"s": {"format": form, "paths": [f"{server.url}/a.{name}"]}}
        assert sum(1 for _ in RemoteIterableDataset(source, **{**settings, **changes})) > 100
        return server.log.reads(f"a.{name}")


@pytest.mark.parametrize("name", FORMS)
def test_a_small_file_is_fetched_once(tmp_path: Path, name: str) -> None:
    """For any number of units and row groups: to split, build and rebuild it."""
    form, encode = FORMS[name]
    data = encode(texts(700 * KIBIBYTE))
    reads = requests_of_an_epoch(tmp_path, name, form, data)
    assert sum(request.sent_bytes for request in reads) <= len(data)
    assert len(reads) == 1


@pytest.mark.parametrize("name", FORMS)
def test_a_large_file_is_fetched_at_most_twice(tmp_path: Path, name: str) -> None:
    """Once to cut it into units and once to build them; what is built soon after it was cut is still in memory."""
    form, encode = FORMS[name]
    data = encode(texts(12_000 * KIBIBYTE))
    reads = requests_of_an_epoch(tmp_path, name, form, data, unit_bytes=256 * KIBIBYTE)
    assert sum(request.sent_bytes for request in reads) <= 2 * len(data)
    assert len(reads) <= 64
