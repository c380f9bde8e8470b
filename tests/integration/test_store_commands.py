"""The commands over stores: they work, and what cannot be read ends with exit code 4, a place and a remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servers import Fault, Request
from servers.four_stores import FourStores, four_stores
from servers.s3 import SECRET
from vorox.cli import main


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FourStores]:
    with four_stores(tmp_path_factory.mktemp("csv"), documents=60) as opened:
        yield opened


def configuration(directory: Path, sources: list[dict[str, Any]]) -> str:
    settings = {
        "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2},
        "data": {
            "sources": sources, "sequence_length_tokens": 32, "cache": {"directory": str(directory / "cache")},
            "validation": {"held_out_fraction": 0},
        },
        "tokenizer": {"kind": "byte"},
        "eval": {"every_steps": None},
        "train": {"num_steps": 4, "global_batch_sequences": 4, "micro_batch_sequences": 2},
    }  # fmt: skip
    file = directory / "run.yaml"
    file.write_text(json.dumps(settings), encoding="utf-8")
    return str(file)


def test_build_and_verify(stores: FourStores, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = configuration(tmp_path, stores.sources)
    assert main(["data", "build", file]) == 0
    assert main(["data", "verify", file]) == 0
    said = capsys.readouterr().out
    for source in stores.sources:
        assert f"valid  {source['name']} train" in said


EXPIRED = b"<?xml version='1.0'?><Error><Code>ExpiredToken</Code><Message>of " + SECRET.encode() + b"</Message></Error>"
GONE = b"<?xml version='1.0'?><Error><Code>NoSuchVersion</Code></Error>"


def is_read(request: Request) -> bool:
    return request.range is not None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Fault("answer", 400, {"Content-Type": "application/xml"}, EXPIRED), ["ExpiredToken", "AWS_SESSION_TOKEN"]),
        (
            Fault("answer", 404, {"Content-Type": "application/xml"}, GONE),
            ["changed after it was listed", "restore the old"],
        ),
    ],
)
def test_what_stops_a_build_in_its_middle(
    stores: FourStores, tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: Fault, words: list[str]
) -> None:
    file = configuration(tmp_path, stores.sources[:1])
    with stores.behind() as proxies:
        proxies["s3"].only = is_read
        proxies["s3"].script(*[answer] * 9)  # also to those that look at the first records
        assert main(["data", "build", file]) == 4
        said = "".join(capsys.readouterr())
        for word in [*words, "s3://corpora/crawl/0"]:
            assert word in said
        assert SECRET not in said
        proxies["s3"].scripted.clear()
        assert main(["data", "build", file]) == 0, "the same command goes on"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("s3://nowhere/x", ["Bucket 'nowhere' does not exist"]),
        ("gs://nowhere/x", ["Bucket 'nowhere' does not exist"]),
        ("s3://corpora/crawl/*.csv", ["matches no object"]),
        ("hf://acme/nothing/data", ["no repository 'acme/nothing'"]),
    ],
)
def test_what_is_not_there(
    stores: FourStores, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, words: list[str]
) -> None:
    file = configuration(tmp_path, [{"name": "text", "format": "jsonl", "paths": [path]}])
    assert main(["data", "build", file]) == 4
    said = "".join(capsys.readouterr())
    for word in words:
        assert word in said


def test_credentials_in_a_path_are_refused_as_configuration(
    stores: FourStores, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "https://someone:hunter2hunter2@host/x.jsonl"
    file = configuration(tmp_path, [{"name": "text", "format": "jsonl", "paths": [path]}])
    assert main(["data", "build", file]) == 2
    assert "hunter2" not in "".join(capsys.readouterr())
