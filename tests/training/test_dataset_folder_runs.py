"""Runs on MDS folders and on folders of ``save_to_disk``: cached and streamed, with provenance down to the record."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from dataset_folders import write_mds, write_saved_dataset
from tiny_runs import configuration, run, use_numpy_engine
from vorox.data.provenance.original_text import TextFinder
from vorox.data.provenance.queries import RunDataIndex, when, where

TEXTS = [f"record {n} " + "of a folder " * (n % 5) for n in range(90)]
STREAMED = ["data.mode=streaming", "data.growth.mode=strict", "data.growth.later_passes=segments"]


def source(root: Path, form: str) -> str:
    options: dict[str, str] = {}
    if form == "arrow":
        write_saved_dataset(root / "folder", {"text": TEXTS})
    elif form == "mds":
        write_mds(root / "folder", [{"text": text} for text in TEXTS], {"text": "str"}, compression="zstd")
    else:
        ids = [{"ids": np.frombuffer(text.encode(), np.uint8).astype(np.uint16)} for text in TEXTS]
        write_mds(root / "folder", ids, {"ids": "ndarray:uint16"})
        options = {"tokens_field": "ids", "tokenizer": "byte"}
    entry = {"name": "folder", "format": form.partition(" ")[0], "paths": [str(root / "folder")], **options}
    return f"data.sources={json.dumps([entry])}"


@pytest.mark.parametrize("mode", ["cached", "streaming"])
@pytest.mark.parametrize("form", ["arrow", "mds", "mds tokens"])
def test_a_folder_trains_and_every_row_leads_back_to_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, mode: str
) -> None:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    words = [source(tmp_path, form), "data.sequence_length_tokens=32", "train.num_steps=8", "eval.every_steps=8"]
    outcome = run(configuration(tmp_path, [*words, *(STREAMED if mode == "streaming" else [])]))
    assert 8 in outcome.eval_losses
    with RunDataIndex.open(outcome.run_directory) as run_data:
        finder = TextFinder(run_data)
        for row in where(run_data, 3):
            for document in row.documents:
                found = finder.find(row, document)
                assert found.origin == "source", found.why
                number = document.ordinal + (45 if document.uri.endswith("00001-of-00002.arrow") else 0)
                number += 50 if "shard.00001" in document.uri else 0
                assert found.text in TEXTS[number]
                again = when(run_data, document.uri, ordinal=document.ordinal)
                assert (row.step, row.slot) in {(one.step, one.slot) for one in again}
