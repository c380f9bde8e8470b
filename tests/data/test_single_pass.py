"""Bytes that a build reads from a remote source: each once for both splits, none at a second start."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from servers.web import WebServer, http_server
from vorox.core.schema import RunConfig
from vorox.data.cache.build import BuildOptions
from vorox.data.corpus.cache_opener import CacheOpener
from vorox.data.corpus.corpus import prepare
from vorox.data.corpus.source_listing import list_sources


def write_jsonl(path: Path, size_bytes: int) -> int:
    generator = random.Random(7)
    words = ["".join(generator.choices("abcdefgh", k=6)) for _ in range(500)]
    with path.open("w") as file:
        while file.tell() < size_bytes:
            file.write(json.dumps({"text": " ".join(generator.choices(words, k=300))}) + "\n")
    return path.stat().st_size


def write_parquet(path: Path, rows: int) -> int:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"row {n} says {n**5} and {n**7}" * 5 for n in range(rows)]
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=rows // 8)
    return path.stat().st_size


def configuration(root: Path, location: str, kind: str, unit_bytes: int = 1 << 19, **data: Any) -> RunConfig:
    section = {
        "sources": [{"name": "text", "format": kind, "paths": [location]}],
        "sequence_length_tokens": 256,
        "cache": {"directory": str(root), "unit_bytes": unit_bytes, "chunk_rows": 64},
        "validation": {"split": "document", "held_out_fraction": 0.1},
        **data,
    }
    return RunConfig.model_validate({"data": section, "tokenizer": {"kind": "byte"}, "train": {"num_steps": 1}})


def content_bytes(server: WebServer) -> int:
    return sum(request.sent_bytes for request in server.log.requests if request.method == "GET")


def files_of(root: Path) -> dict[str, bytes]:
    """Everything that a cache consists of, but for locks, and for the units that it shares with others."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in {"LOCK", "USED.json"} and not {"versions", "units"} & set(path.parts)
    }


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_build_with_a_held_out_part_reads_every_byte_once(tmp_path: Path, kind: str) -> None:
    served = tmp_path / "served"
    served.mkdir()
    size = write_jsonl(served / "a.jsonl", 5 << 20) if kind == "jsonl" else write_parquet(served / "a.parquet", 2000)
    with http_server(served) as server:
        config = configuration(tmp_path / "cache", f"{server.url}/a.{kind}", kind)
        prepare(config).close()
        read, requests = content_bytes(server), len(server.log.requests)
        assert size <= read <= 1.02 * size, f"{read / size:.2f} times in {requests} requests"
        server.log.clear()
        prepare(config).close()
        assert content_bytes(server) <= 4, "a second start reads nothing"


def test_a_second_start_chooses_the_held_out_part_without_reading(tmp_path: Path) -> None:
    served = tmp_path / "served"
    served.mkdir()
    write_jsonl(served / "a.jsonl", 3 << 20)
    with http_server(served) as server:
        config = configuration(tmp_path / "cache", f"{server.url}/a.jsonl", "jsonl", validation={"split": "auto"})
        first = prepare(config)
        listing = len([request for request in server.log.requests if request.method == "HEAD"])
        server.log.clear()
        second = prepare(config)
        assert second.held_out == first.held_out
        assert [one.digest for one in second.validation] == [one.digest for one in first.validation]
        assert content_bytes(server) <= 4
        assert len(server.log.requests) <= max(listing, 2)
        for memory in (tmp_path / "cache" / "versions").glob("holdout-*.json"):
            memory.write_bytes(b"{")
        assert prepare(config).held_out == first.held_out


def test_other_settings_choose_again(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 1 << 19)
    shares = {}
    for fraction in (0.05, 0.3):
        config = configuration(
            tmp_path / "cache", str(tmp_path / "a.jsonl"), "jsonl", 1 << 16,
            validation={"split": "auto", "held_out_fraction": fraction},
        )  # fmt: skip
        shares[fraction] = prepare(config).validation[0].num_rows
    assert shares[0.05] < shares[0.3]


@pytest.mark.parametrize(
    "options", [BuildOptions(), BuildOptions(mode="inverse"), BuildOptions(workers=2)], ids=["1", "inverse", "2"]
)
@pytest.mark.parametrize("staged", [True, False])
def test_one_pass_gives_the_files_of_two(tmp_path: Path, options: BuildOptions, staged: bool) -> None:
    text = tmp_path / "text"
    text.mkdir()
    write_jsonl(text / "a.jsonl", 1 << 19)
    with (text / "a.jsonl").open("a") as file:
        file.write("not JSON\n")
    for name in ("together", "apart"):
        config = configuration(
            tmp_path / name, str(text), "jsonl", 1 << 16, pipeline={"staged": staged},
            validation={"split": "document", "held_out_fraction": 0.3},
        )  # fmt: skip
        if name == "together":
            corpus = prepare(config, options=options)
            assert all(report.units_built == report.units for report in corpus.reports.values())
            assert all(report.built_text_bytes == report.text_bytes for report in corpus.reports.values())
            continue
        listed = list_sources(config, (1,), tmp_path / name, lambda *_: None)
        assert listed.tokenizer is not None
        for split in ("train", "validation"):
            opener = CacheOpener(
                config.data, listed.tokenizer, tmp_path / name, lambda *_: None, options, None
            )  # fmt: skip
            opener.open(listed.train[0], split)
    together, apart = files_of(tmp_path / "together"), files_of(tmp_path / "apart")
    if options.workers > 1:  # they commit in any order
        together, apart = ({k: v for k, v in one.items() if "manifest" not in k} for one in (together, apart))
    assert together == apart
