"""Bytes that a cached build requests from a server: none that was read to split units is fetched again."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from servers import http_server
from vorox.core.config import load_config
from vorox.data.corpus.corpus import prepare
from vorox.data.storage import cache_ranges, list_files, open_range
from vorox.data.storage.reading import RANGE_CACHE

PROBED_BYTES = 6 << 20
"""Read of a source of any size to choose its holdout, including read-ahead."""
LINES = [f"line {number} " + "some words " * (number % 40) for number in range(20_000)]
BODIES = {
    "jsonl": "".join(json.dumps({"text": line}) + "\n" for line in LINES).encode(),
    "csv": ("text\n" + "".join(f"{line}\n" for line in LINES)).encode(),
    "txt": "\n".join(LINES).encode(),
}
PROBED_FRACTION = 0.25
"""Of these files of 4 MB: read-ahead of readers that were closed early, and the borders of the tokenizer sample."""


def fetched(tmp_path: Path, form: str, ending: str, **settings: Any) -> tuple[float, int]:
    """Build both splits; return the bytes sent as a multiple of the file, and the number of requests."""
    folder = tmp_path / "text"
    folder.mkdir()
    body = gzip.compress(BODIES[form], 1) if ending else BODIES[form]
    (folder / f"a.{form}{ending}").write_bytes(body)
    with http_server(folder) as web:
        config = {
            "data": {
                "sources": [{"name": "s", "format": form, "paths": [f"{web.url}/a.{form}{ending}"]}],
                "sequence_length_tokens": 256,
                "cache": {"directory": str(tmp_path / "cache"), "unit_bytes": 1 << 20},
                **settings.get("data", {}),
            },
            "tokenizer": settings.get("tokenizer", {"kind": "byte"}),
            "train": {"num_steps": 1},
        }
        file = tmp_path / "config.yaml"
        file.write_text(json.dumps(config), encoding="utf-8")
        with contextlib.closing(prepare(load_config(file))) as corpus:
            assert [reader.num_rows > 0 for reader in (*corpus.train, *corpus.validation)] == [True, True]
        gets = [request for request in web.log.requests if request.method == "GET"]
    return sum(request.sent_bytes for request in gets) / len(body), len(gets)


@pytest.mark.parametrize(("form", "ending"), [("jsonl", ""), ("csv", ""), ("txt", ""), ("jsonl", ".gz")])
def test_a_build_with_a_held_out_part_fetches_each_byte_once(tmp_path: Path, form: str, ending: str) -> None:
    factor, requests = fetched(tmp_path, form, ending)
    assert factor <= 1 + PROBED_FRACTION
    assert requests < 40


def test_a_build_that_trains_its_tokenizer_fetches_each_byte_once(tmp_path: Path) -> None:
    factor, requests = fetched(tmp_path, "jsonl", "", tokenizer={"kind": "bpe", "vocab_size": 300})
    assert factor <= 1 + PROBED_FRACTION
    assert requests < 40


def test_files_beyond_the_cache_are_split_once_and_read_once_per_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RANGE_CACHE, "_limit_bytes", 1 << 20)
    factor, _ = fetched(tmp_path, "jsonl", "")
    assert factor <= 2 + PROBED_BYTES / len(BODIES["jsonl"])


def test_a_reader_continues_at_the_store_where_the_cache_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RANGE_CACHE, "_small_file_bytes", 0)
    content = bytes(range(256)) * 40
    (tmp_path / "a.bin").write_bytes(content)
    with http_server(tmp_path) as web:
        (file,) = list_files(f"{web.url}/a.bin", ())

        def read(start: int, end: int | None) -> bytes:
            with open_range(file, start, end) as reader:
                return reader.read()

        with cache_ranges([file]):
            assert read(100, 2000) == content[100:2000]
            web.log.clear()
            assert read(150, 1900) == content[150:1900]
            assert web.log.requests == []
            assert read(150, None) == content[150:]
            assert sum(request.sent_bytes for request in web.log.requests) == len(content) - 2000
            assert read(0, 5000) == content[:5000]
            assert sum(request.sent_bytes for request in web.log.requests) == len(content) - 2000 + 100
        web.log.clear()
        assert read(0, 5000) == content[:5000]
        assert sum(request.sent_bytes for request in web.log.requests) == 5000, "nothing is cached after the block"
