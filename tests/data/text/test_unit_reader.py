"""Prefetching apart from decoding: the same units, and no prefetched byte is requested again."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from cache_corpus import ByteTokenizer, recipe_for
from servers import http_server
from transport import received
from vorox.core.schema.data import BuildPipelineConfig, SourceConfig, ValidationConfig
from vorox.data.cache.units.unit_builder import BuiltUnit, UnitBuilder
from vorox.data.storage import PrefetchedRanges, open_range
from vorox.data.text.sources import list_source
from vorox.data.text.unit_reader import FetchedUnit, UnitReader
from vorox.data.text.unit_splitter import split_into_units

RULE = ValidationConfig(held_out_fraction=0)
TOKENIZER = ByteTokenizer()


def write_corpus(root: Path) -> None:
    for index in range(3):
        lines = [json.dumps({"text": f"file {index} line {line} " + "x" * (line % 50)}) for line in range(300)]
        (root / f"{index}.jsonl").write_text("\n".join(lines) + "\n")


def reader_of(location: str, **changes: Any) -> UnitReader:
    config = SourceConfig(**{"name": "s", "format": "jsonl", "paths": (location,), **changes})
    return UnitReader(list_source(config), "train", RULE)


def built(reader: UnitReader, **pipeline: Any) -> tuple[list[BuiltUnit], list[str]]:
    units = split_into_units(reader.source, "train", RULE, 4000)
    work = UnitBuilder(
        reader.source.files, reader, TOKENIZER, recipe_for(TOKENIZER), pipeline=BuildPipelineConfig(**pipeline)
    )  # fmt: skip
    told = []
    found = list(work.run(units, on_statistics=told.append))
    return found, [stage.name for stage in told[-1].stages] if told else []


@pytest.fixture
def web(tmp_path: Path):
    write_corpus(tmp_path)
    with http_server(tmp_path) as server:
        yield server


@pytest.mark.parametrize(("threads", "queue_bytes"), [(1, 1), (3, 5000), (2, 1 << 20)])
def test_remote_text_is_prefetched(web, tmp_path, threads, queue_bytes):
    local, stages = built(reader_of(str(tmp_path)))
    assert stages[0] == "decode"
    reader = reader_of(f"{web.url}/")
    before = len(web.log.requests)
    remote, stages = built(reader, fetch_threads=threads, queue_bytes=queue_bytes)
    assert stages[:2] == ["fetch", "decode"]
    assert len(local) == len(remote) > 6
    for here, there in zip(local, remote, strict=True):
        assert [record.content for _, record in here.chunks] == [record.content for _, record in there.chunks]
    gets = [request for request in web.log.requests[before:] if request.method == "GET"]
    units = split_into_units(reader.source, "train", RULE, 4000)
    assert len(gets) >= len(units)
    assert reader.fetched_bytes(units[0]) == units[0].size_bytes
    serial, stages = built(reader, staged=False)
    assert stages == []
    assert [unit.chunks for unit in serial] == [unit.chunks for unit in remote]


def test_a_prefetched_range_is_not_requested_again(web):
    reader = reader_of(f"{web.url}/")
    units = split_into_units(reader.source, "train", RULE, 4000)
    fetched = reader.fetch(units[1])
    asked = len(web.log.requests)
    work = UnitBuilder(reader.source.files, reader, TOKENIZER, recipe_for(TOKENIZER))
    batches = list(work.decode(iter([FetchedUnit(units[1], fetched)])))
    assert len(web.log.requests) == asked
    assert [document.text for batch in batches for document in batch.documents] == [
        document.text for document in reader(units[1])  # type: ignore[union-attr]
    ]  # fmt: skip
    assert len(web.log.requests) > asked


def test_a_range_outside_the_prefetched_ones_is_read_from_the_store(web):
    reader = reader_of(f"{web.url}/")
    (file, *_) = reader.source.stored
    prefetched = PrefetchedRanges(((file, 10, b"0123456789"),))
    assert prefetched.size_bytes == 10
    inside = prefetched.open(file, 12, 15)
    assert inside is not None
    assert inside.read() == b"234"
    assert prefetched.open(file, 9, 12) is None
    assert prefetched.open(file, 15, 21) is None
    assert prefetched.open(reader.source.stored[1], 12, 15) is None
    with open_range(file, 0, 5) as opened:
        assert opened.read() == b'{"tex'


def test_compressed_text_is_fetched_while_it_is_decoded(tmp_path):
    write_corpus(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        path.unlink()
    with http_server(tmp_path) as web:
        reader = reader_of(f"{web.url}/")
        assert not reader.fetches
        remote, stages = built(reader)
        assert stages[0] == "decode"
    local, _ = built(reader_of(str(tmp_path)))
    assert [unit.statistics for unit in remote] == [unit.statistics for unit in local]


def test_a_reader_can_be_sent_to_another_process(tmp_path):
    write_corpus(tmp_path)
    reader = reader_of(str(tmp_path))
    sent = received(reader)
    assert [unit.chunks for unit in built(sent)[0]] == [unit.chunks for unit in built(reader)[0]]
