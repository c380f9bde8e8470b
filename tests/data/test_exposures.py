"""Exposures against a search with sets over the files: documents across rows, streams, skipped and lost steps."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

import tiny_runs
from vorox.data.provenance.contamination import MOSTLY_FRACTION, EvaluationRecord
from vorox.data.provenance.exposures import find_exposures
from vorox.data.provenance.queries import where
from vorox.data.provenance.run_data_index import RunDataIndex

pytestmark = pytest.mark.slow
LENGTH, NUM_STEPS, SPIKE, KILLED_IN = 9, 24, 12, 17
CASES: dict[str, list[str]] = {
    "across rows": ["data.packing=concat"],
    "short rows": ["data.sequence_length_tokens=16"],
    "streaming": ["data.mode=streaming", "data.growth.mode=strict"],
    "growing": ["data.growth.mode=elastic", "data.growth.horizon_steps=2"],
    "batch sizes": ['train.batch_stages=[{"start_step":9,"global_batch_sequences":12}]'],
}
Reading = tuple[str, int, int, tuple[int, ...]]
"""File, record and epoch of a document that was read, and the steps."""


def trained(directory: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str]) -> Path:
    """A run with a skipped step, that is killed and goes back to its last save."""
    settings = [
        "data.sequence_length_tokens=32", f"train.num_steps={NUM_STEPS}", "train.global_batch_sequences=8",
        "data.validation.held_out_fraction=0",
        "eval.every_steps=null", "checkpoint.every_steps=6", "train.spike_policy=skip", "train.spike_window_steps=4",
        *overrides,
    ]  # fmt: skip
    config = tiny_runs.configuration(directory, settings)
    tiny_runs.use_numpy_engine(monkeypatch)
    tiny_runs.scale_steps(monkeypatch, {SPIKE: 3})
    with monkeypatch.context() as killing:
        tiny_runs.at_step(killing, KILLED_IN, tiny_runs.kill)
        with pytest.raises(tiny_runs.Killed):
            tiny_runs.run(config)
    return tiny_runs.run(config).run_directory


def questions(directory: Path) -> list[str]:
    """Documents, parts of them with other words around, and text that is nowhere; without copies."""
    lines = (directory / "text" / "text.jsonl").read_text(encoding="utf-8").splitlines()
    texts, chooser, found = [json.loads(line)["text"] for line in lines], random.Random(), list[str]()
    for text in [*texts, *texts]:
        start, length = chooser.randrange(len(text)), chooser.randint(8, 50)
        part = text[start : start + length]
        found.append(chooser.choice([part, f"Q: {part} ?", f"{part} and not a word more of it"]))
    return [*found, "nothing like it was ever read ~~~", "short", ""]


def covered(text: bytes, ngrams: set[bytes]) -> int:
    tokens: set[int] = set()
    for start in range(len(text) - LENGTH + 1):
        if text[start : start + LENGTH] in ngrams:
            tokens.update(range(start, start + LENGTH))
    return len(tokens)


@pytest.mark.parametrize("case", CASES)
def test_equals_a_search_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    run = trained(tmp_path, monkeypatch, CASES[case])
    texts, last_step = questions(tmp_path), random.choice([8, SPIKE, NUM_STEPS])
    records = [
        EvaluationRecord("questions", number, np.frombuffer(text.encode(), np.uint8).astype(np.int64))
        for number, text in enumerate(texts)
    ]
    read: dict[tuple[str, int, int], list[tuple[int, set[bytes]]]] = defaultdict(list)
    with RunDataIndex.open(run) as run_data:
        assert SPIKE in run_data.skipped_steps()
        for step in sorted({*range(1, last_step + 1)} - {SPIKE}):
            for row in where(run_data, step):
                for document in row.documents:
                    with Path(document.uri).open("rb") as file:
                        file.seek(document.byte_offset)
                        text = json.loads(file.read(document.byte_length))["text"].encode()
                    part = text[document.first_token : document.first_token + document.num_tokens]
                    ngrams = {part[start : start + LENGTH] for start in range(len(part) - LENGTH + 1)}
                    read[document.uri, document.ordinal, row.epoch].append((step, ngrams))
        found = find_exposures(run_data, records, last_step=last_step, ngram_tokens=LENGTH)
    assert found.num_steps == last_step - (last_step >= SPIKE)
    everything = set[bytes]().union(*(ngrams for parts in read.values() for _, ngrams in parts))
    num_seen = 0
    for text, record in zip(texts, found.records, strict=True):
        own = text.encode()
        assert record.is_short == (len(own) < LENGTH)
        assert record.matched_tokens == covered(own, everything)
        expected: set[Reading] = set()
        for key, parts in read.items():
            if covered(own, set[bytes]().union(*(ngrams for _, ngrams in parts))) >= MOSTLY_FRACTION * len(own) > 0:
                steps = {step for step, ngrams in parts if covered(own, ngrams)}
                if steps:
                    expected.add((*key, tuple(sorted(steps))))
        assert {(one.uri, one.ordinal, one.epoch, one.steps) for one in record.exposures} == expected, text
        assert len(record.exposures) == len(expected)
        assert [one.steps for one in record.exposures] == sorted(one.steps for one in record.exposures)
        num_seen += bool(expected)
    assert 0 < num_seen < len(texts) - 3
