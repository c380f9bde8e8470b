"""A corpus of every format: built, inspected and verified back to its records."""

from __future__ import annotations

import base64
import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from vorox.core.config import load_config
from vorox.core.errors import ConfigError, DataError
from vorox.data.corpus.corpus import Corpus, prepare
from vorox.data.provenance import inspection
from vorox.data.text.shard_format import write_shard

END = 256

FROZEN_PARQUET = (
    "UEFSMRUEFaQCFXpMFQgVABIAACi1L/0gkqUBAOgTAAAAcGFycXVldCAwIHdvcmQgw6ksIBwxJTIuMwkAoADAjinDoDCQ2FBGWAqAfVFjjgEVAB"
    "UUFSYsFQgVEBUGFQYcAAAAKLUv/SAKUQAAAgAAAAgBAgPkABUEFbYCFXhMFQgVABIAACi1L/0gm50BAOA3AAAAcGFycXVldCA0IHdvcmQgw6ks"
    "EzUcNiU3CQCgAJBuKMMsxcBmOo2AfV4ZDD5FDBUAFRQVJiwVCBUQFQYVBhwAAAAotS/9IApRAAACAAAACAECA+QAFQQVZBVKTBUCFQASAAAotS"
    "/9IDLlAACwLgAAAHBhcnF1ZXQgOCB3b3JkIMOpLAEAyJQmFQAVEhUkLBUEFRAVBhUGHAAAACi1L/0gCUkAAAIAAAADAQECABUEGSw1ABgGc2No"
    "ZW1hFQIAFQwlAhgHY29udGVudCUATBwAAAAWFBk8GRwmABwVDBk1AAYQGRgHY29udGVudBUMFggW/AIW5AEmoAEmCCksFQQVABUCABUAFRAVAg"
    "A8FoQCGQYZJgAIAAAAFvwCFggmCBbkAQAZHCYAHBUMGTUABhAZGAdjb250ZW50FQwWCBaOAxbiASaCAybsASksFQQVABUCABUAFRAVAgA8FpYC"
    "GQYZJgAIAAAAFo4DFggm7AEW4gEAGRwmABwVDBk1AAYQGRgHY29udGVudBUMFgQWuAEWsAEmtAQmzgMpLBUEFQAVAgAVABUQFQIAPBZcGQYZJg"
    "ICAAAAFrgBFgQmzgMWsAEAKCBwYXJxdWV0LWNwcC1hcnJvdyB2ZXJzaW9uIDI1LjAuMRkcHAAAADsBAABQQVIx"
)
"""Ten rows in three row groups, one of them null; what pyarrow writes differs from version to version."""

FROZEN_DIGESTS = {
    "zst train": "6b3997303331f94fe2f89299d8b6e94e32e0f9d99f69713f0d996ed77873529a",
    "zst validation": "197b22fd1d8f5d194ec889d15055e0b3dc0b697b355a4353709415e231f5e747",
    "csv train": "b504f73537849db6dde1decb23be7b82a0178bdb2c6d67b865f544a19ae1720e",
    "csv validation": "5bd7abddcbd33101b0b8ef5e3d07073de7df003cf666ed09697a755855c99112",
    "parquet train": "596155f88c5de539252422d66e2a96c37899855b20e26fbd8d76afdbf897c1ee",
    "parquet validation": "42e5c4604ec70041b7f7754dddc2f84b0d36e7c812bd262722881622a6b8581b",
    "txt train": "4405df5886dfca0d11db4fd3537e490c00ca6e7755944c2611f875745530e390",
    "txt validation": "814f3004ee53a1d76c5ec81289e737f477275165b070ec471dad1c20dd5739c6",
    "bin train": "4eb7f27a8b14df20b2d6612d8fb99e5a1b9be5cf02e7bd35c1a0ae67c80f286a",
    "bin validation": "0cb854a148f84f0b7d946abb1fb01644c198eb115a5cf5012ab6e3e295721292",
}


def text(form: str, number: int) -> str:
    return f"{form} {number} " + "word é, " * (number % 17 + 1)


def write_everything(folder: Path) -> None:
    lines = [json.dumps({"deep": {"text": text("zst", n)}}) + "\n" for n in range(80)]
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress("".join(lines).encode()))
    with gzip.open(folder / "b.csv.gz", "wt", newline="") as file:
        csv.writer(file, delimiter=";").writerows([("n", "body"), *((n, text("csv", n)) for n in range(80))])
    table = pa.table({"n": range(80), "content": [text("parquet", n) for n in range(80)]})
    pq.write_table(table, folder / "c.parquet", row_group_size=30)
    (folder / "d.txt.gz").write_bytes(gzip.compress("\n".join(text("txt", n) for n in range(80)).encode()))
    ids = [id for n in range(80) for id in [END, *text("bin", n).encode()]]
    write_shard(folder / "e.bin", np.array(ids, np.uint16))


def yaml(folder: Path, tokenizer: str = "byte") -> str:
    path = folder / "run.yaml"
    path.write_text(f"""
preset: quickstart
tokenizer: {{kind: byte}}
data:
  sequence_length_tokens: 64
  cache: {{directory: {folder}/cache, unit_bytes: 2000}}
  validation: {{split: span, held_out_fraction: 0.2}}
  sources:
    - {{name: zst, format: jsonl, paths: [{folder}/a.jsonl.zst], text_field: deep.text}}
    - {{name: csv, format: csv, paths: [{folder}/b.csv.gz], text_field: body, delimiter: ;}}
    - {{name: parquet, format: parquet, paths: [{folder}/c.parquet], text_field: content}}
    - {{name: txt, format: txt, paths: [{folder}/missing], fallback: [{folder}/d.txt.gz]}}
    - {{name: bin, format: bin, paths: [{folder}/e.bin], tokenizer: {tokenizer}}}
""")
    return str(path)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    write_everything(tmp_path)
    return prepare(load_config(yaml(tmp_path)))


def test_digests_are_frozen(tmp_path: Path) -> None:
    """Existing caches can only be extended and repaired while these values stay."""
    write_everything(tmp_path)
    (tmp_path / "c.parquet").write_bytes(base64.b64decode(FROZEN_PARQUET))
    corpus = prepare(load_config(yaml(tmp_path), ["data.sources.2.bad_record_fraction=0.5"]))
    assert {name: report.digest for name, report in corpus.reports.items()} == FROZEN_DIGESTS


def test_every_document_is_in(corpus: Corpus) -> None:
    for source in corpus.sources:
        readers = [reader for reader in (source.train, source.validation) if reader is not None]
        reports = [report for report in (source.train_report, source.validation_report) if report is not None]
        found = [{span.ordinal for row in range(r.num_rows) for span in r.documents_of(row)} for r in readers]
        assert found[0].isdisjoint(found[1])
        if source.name != "txt":  # pieces of a text are as large as units
            first = source.name == "bin"  # in front of the first end of text there is nothing
            assert found[0] | found[1] == set(range(first, 80 + first))
        size = sum(len(text(source.name, n).encode()) for n in range(80))
        size = {"txt": size + 79, "bin": 0}.get(source.name, size)  # line ends are text; tokens have none
        assert sum(report.text_bytes for report in reports) == size, source.name
        assert sum(report.quarantined for report in reports) == 0


def test_peek_shows_text_with_its_place(corpus: Corpus) -> None:
    rows = inspection.peek(corpus, 1)
    assert [row.source for row in rows] == ["zst", "csv", "parquet", "txt", "bin"]
    for row in rows:
        for segment in row.segments:
            shown = segment.text.replace("<|endoftext|>", "").replace("\ufffd", "")
            if row.source != "txt":
                number = segment.ordinal - (row.source == "bin")  # in front of the first end of text there is nothing
                assert shown.strip("\n") in text(row.source, number)
            assert Path(segment.uri).exists()


def test_verify_reads_every_format_again(corpus: Corpus, tmp_path: Path) -> None:
    inspection.verify(corpus)
    with (tmp_path / "a.jsonl.zst").open("ab") as file:
        file.write(zstandard.compress(b'{"deep": {"text": "more"}}\n'))
    with pytest.raises(DataError):
        inspection.verify(corpus)


def test_what_was_not_taken_as_asked_is_told(corpus: Corpus) -> None:
    assert [note.kind for note in corpus.notes] == ["fallback"]


def test_token_shards_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    write_everything(tmp_path)
    with pytest.raises(ConfigError, match="written with tokenizer gpt2, but this run uses byte") as caught:
        prepare(load_config(yaml(tmp_path, "gpt2")))
    assert caught.value.where == "data.sources.4.tokenizer"


def test_ids_beyond_the_vocabulary_are_refused_with_their_place(tmp_path: Path) -> None:
    write_everything(tmp_path)
    write_shard(tmp_path / "e.bin", np.array([5, 6, END, 7, 300, END, *[8] * 5_000, END], np.uint16))
    with pytest.raises(DataError) as caught:
        prepare(load_config(yaml(tmp_path)))
    assert "300" in caught.value.what
    assert f"{tmp_path}/e.bin, record 2 at byte 1030" in caught.value.where
