"""Bytes read before the first sample, counted at the server: a prefix, independent of the corpus size."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from servers import http_server
from servers.web import WebServer
from vorox.data.dataset.iterable_dataset import RemoteIterableDataset
from vorox.data.text import file_content

UNIT_BYTES = 1 << 18
MEGABYTES = 24
"""Of text: some hundred units."""


def lines(megabytes: int) -> list[str]:
    chooser = random.Random(3)
    words = ["aa", "bcd", "efgh", "ij", "k", "lmnop"]
    found: list[str] = []
    size = 0
    while size < megabytes << 20:
        found.append(f"{len(found)} " + " ".join(chooser.choices(words, k=chooser.randint(100, 400))))
        size += len(found[-1])
    return found


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def csv(texts: list[str]) -> bytes:
    return ("text,n\n" + "".join(f'"{text}\n""quoted""",1\n' for text in texts)).encode()


def txt(texts: list[str]) -> bytes:
    return "\n".join(texts).encode()


FORMS: dict[str, tuple[str, Callable[[list[str]], bytes], Callable[[bytes], bytes]]] = {
    "jsonl": ("jsonl", jsonl, bytes),
    "csv": ("csv", csv, bytes),
    "txt": ("txt", txt, bytes),
    "jsonl.gz": ("jsonl", jsonl, lambda data: gzip.compress(data, 1)),
    "csv.zst": ("csv", csv, zstandard.ZstdCompressor(level=1).compress),
    "txt.gz": ("txt", txt, lambda data: gzip.compress(data, 1)),
}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return lines(MEGABYTES)


def dataset(server: WebServer, name: str, form: str, cache: Path, **changes: Any) -> RemoteIterableDataset:
    settings: dict[str, Any] = {
        "tokenizer": "byte", "sequence_length_tokens": 1024, "cache_directory": cache, "unit_bytes": UNIT_BYTES,
        "shuffle_buffer_rows": 200, "prefetch_samples": 0, "metadata": True,
    }  # fmt: skip
    source = {"s": {"format": form, "paths": [f"{server.url}/{name}"]}}
    return RemoteIterableDataset(source, **{**settings, **changes})


@pytest.mark.parametrize("name", FORMS)
def test_the_first_samples_take_a_prefix(tmp_path: Path, texts: list[str], name: str) -> None:
    """A few units, each read to be cut and to be built, and what is read ahead; bounds do not know the corpus' size."""
    form, encode, compress = FORMS[name]
    file_content._scan.cache_clear()
    data = compress(encode(texts))
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / f"a.{name}").write_bytes(data)
    with http_server(tmp_path / "web") as server:
        samples = iter(dataset(server, f"a.{name}", form, tmp_path / "cache"))
        first = next(samples)
        reads = server.log.reads(f"a.{name}")
        samples.close()  # type: ignore[attr-defined]
    assert first["metadata"]["documents"][0]["end_byte"] < 2 * UNIT_BYTES
    assert max(request.sent[1] for request in reads) <= 8 * UNIT_BYTES < len(data) / 2
    assert sum(request.sent_bytes for request in reads) <= 20 * UNIT_BYTES


@pytest.mark.parametrize("name", ["jsonl", "jsonl.gz"])
def test_a_state_goes_on_where_it_was_made(tmp_path: Path, texts: list[str], name: str) -> None:
    """What lies before is not read again; of a compressed file it is, as far as it has no other place to begin."""
    form, encode, compress = FORMS[name]
    file_content._scan.cache_clear()
    data = compress(encode(texts[: len(texts) // 4]))
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / f"a.{name}").write_bytes(data)
    with http_server(tmp_path / "web") as server:
        first = dataset(server, f"a.{name}", form, tmp_path / "cache")
        samples = iter(first)
        taken = list(itertools.islice(samples, 3200))
        state = first.state_dict()
        after = [next(samples)["input_ids"] for _ in range(3)]
        samples.close()  # type: ignore[attr-defined]
        begin = min(document["start_byte"] for document in taken[-1]["metadata"]["documents"])
        assert begin > 10 * UNIT_BYTES, "in the middle"
        shutil.rmtree(next((tmp_path / "cache" / "streams").glob("*")) / "chunks")
        server.log.clear()
        file_content._scan.cache_clear()
        again = dataset(server, f"a.{name}", form, tmp_path / "cache")
        again.load_state_dict(state)
        samples = iter(again)
        assert all((next(samples)["input_ids"] == one).all() for one in after)
        samples.close()  # type: ignore[attr-defined]
        reads = server.log.reads(f"a.{name}")
    if name == "jsonl":
        assert min(request.sent[0] for request in reads) >= begin - 5 * UNIT_BYTES
        assert sum(request.sent_bytes for request in reads) <= 20 * UNIT_BYTES
    else:
        assert min(request.sent[0] for request in reads) == 0
        assert sum(request.sent_bytes for request in reads) <= 3 * len(data)
