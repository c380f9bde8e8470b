"""Provenance of runs whose plan changes: growing caches, stages, buckets, split rows, streams."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_runs
from numpy_engine import NumpyEngine
from vorox.core.schema import RunConfig
from vorox.data.cache.upkeep.disk_budget import resident_units
from vorox.data.provenance.original_text import TextFinder
from vorox.data.provenance.queries import RunDataIndex, rows_at, when, where
from vorox.data.provenance.training_content import training_content
from vorox.experiments.metadata import MetadataCache

END_OF_TEXT = 256
BATCH = 4

CASES: dict[str, list[str]] = {
    "strict": ["data.growth.mode=strict", "data.growth.max_segment_units=4", "train.num_steps=300"],
    "elastic": ["data.growth.mode=elastic", "data.growth.horizon_steps=4", "train.num_steps=300"],
    "streaming": [
        "data.mode=streaming", "data.growth.mode=strict", "data.growth.max_segment_units=2",
        "data.growth.later_passes=segments", "data.streaming.retention_bytes=120000", "train.num_steps=300",
        "eval.every_steps=null", "data.validation.held_out_fraction=0",
    ],
    "stages": [
        "train.num_steps=90",
        "data.stages=" + json.dumps([
            {"start_tokens": 1920, "weights": {"prose": "1/4", "notes": "3/4"}, "sequence_length_tokens": 8},
            {"start_tokens": 3840, "weights": {"prose": "1", "notes": "1"}},
        ]),
    ],
    "parts": ["train.num_steps=90"],
}  # fmt: skip


def configured(directory: Path, case: str) -> RunConfig:
    for name, seed in (("prose", 1), ("notes", 2)):
        for part in range(3):
            tiny_runs.write_text(directory / "corpora" / name / f"part-{part}", documents=60, seed=10 * seed + part)
    sources: list[dict[str, Any]] = [
        {"name": name, "format": "jsonl", "paths": [str(directory / "corpora" / name)], "weight": weight}
        for name, weight in (("prose", "2/3"), ("notes", "1/3"))
    ]
    if case == "parts":
        sources[0] |= {"split_by": "tokens_per_document", "split_quantiles": [0.5]}
    return tiny_runs.configuration(
        directory, [f"data.sources={json.dumps(sources)}", "checkpoint.every_steps=30", *CASES[case]]
    )


SLOW = {"elastic", "streaming", "parts"}
PARAMETERS = [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES]


@pytest.fixture(scope="module", params=PARAMETERS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished run and what its engine got, by step: the tokens of each slot's row."""
    directory = tmp_path_factory.mktemp(request.param)
    seen: dict[int, list[list[int]]] = {}
    original = NumpyEngine.train_step

    def train_step(self: NumpyEngine, batch: Any, **kwargs: float) -> Any:
        tokens = batch.tokens_ABT
        seen[batch.step + 1] = tokens.reshape(BATCH, -1).tolist()
        return original(self, batch, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        tiny_runs.use_numpy_engine(patch)
        patch.setattr(NumpyEngine, "train_step", train_step)
        outcome = tiny_runs.run(configured(directory, request.param))
    return request.param, outcome.run_directory, seen


def ids_of(uri: str, offset: int, length: int) -> list[int]:
    raw = Path(uri).read_bytes()[offset : offset + length]
    return [*json.loads(raw)["text"].encode(), END_OF_TEXT]


def stored(run_data: RunDataIndex, step: int) -> list[list[int]]:
    """The documents' tokens of each slot, from the files."""
    rows: list[list[int]] = []
    for row in where(run_data, step):
        tokens: list[int] = []
        for document in row.documents:
            ids = ids_of(document.uri, document.byte_offset, document.byte_length)
            tokens += ids[document.first_token : document.first_token + document.num_tokens]
        rows.append(tokens)
    return rows


def agree(found: Sequence[int], got: Sequence[int]) -> bool:
    """Whether these are the tokens that the engine got; the last of a row is a label only, padding follows them."""
    return list(got[: len(found)]) == list(found[: len(got)])


def test_the_documents_are_what_the_engine_got(trained: Any) -> None:
    _, run_directory, seen = trained
    with RunDataIndex.open(run_directory) as run_data:
        for step in sorted(seen)[:: max(1, len(seen) // 60)]:
            for found, got in zip(stored(run_data, step), seen[step], strict=True):
                assert agree(found, got), step


def test_both_directions_agree(trained: Any) -> None:
    _, run_directory, seen = trained
    chooser = random.Random(8)
    last = max(seen) * BATCH
    with RunDataIndex.open(run_directory) as run_data:
        positions = [chooser.randrange(last) for _ in range(150)]
        for position, row in zip(positions, rows_at(run_data, np.array(positions)), strict=True):
            document = chooser.choice(row.documents)
            byte = document.byte_offset + chooser.randrange(document.byte_length)
            found = when(run_data, document.uri, byte)
            here = {(one.step, one.slot, one.epoch, one.row, one.source) for one in found if one.position == position}
            assert here == {(row.step, row.slot, row.epoch, row.row, row.source)}
            assert all(one.state == "kept" for one in found if one.step <= max(seen))


def test_when_finds_all_that_a_walk_finds(trained: Any) -> None:
    _, run_directory, seen = trained
    with RunDataIndex.open(run_directory) as run_data:
        uri = next(rows_at(run_data, np.array([max(seen) * BATCH - 1]))).documents[0].uri
        expected: dict[int, set[int]] = defaultdict(set)
        for row in rows_at(run_data, np.arange(max(seen) * BATCH)):
            for document in row.documents:
                if document.uri == uri:
                    expected[document.ordinal].add(row.position)
        assert expected
        for ordinal in sorted(expected)[:12]:
            found = {one.position for one in when(run_data, uri, ordinal=ordinal) if one.state == "kept"}
            assert found == expected[ordinal]


def test_training_content_is_the_sum_of_the_rows(trained: Any) -> None:
    _, run_directory, seen = trained
    with RunDataIndex.open(run_directory) as run_data:
        found = training_content(run_data, np.arange(1, max(seen) + 1))
        tokens: dict[str, int] = defaultdict(int)
        documents: dict[str, set[tuple[str, int]]] = defaultdict(set)
        for row in rows_at(run_data, np.arange(max(seen) * BATCH)):
            name = row.source.partition(".")[0]  # of a bucket: its source
            tokens[name] += row.num_tokens
            documents[name] |= {(document.uri, document.ordinal) for document in row.documents}
    assert {source.name: source.tokens for source in found} == tokens
    assert {source.name: source.documents for source in found} == {name: len(all_) for name, all_ in documents.items()}


def test_the_database_knows_the_plan_and_every_step(trained: Any) -> None:
    case, run_directory, seen = trained
    database = run_directory / "metadata.sqlite"
    consumed = MetadataCache.query(database, "SELECT first_step, last_step, outcome FROM consumed").rows
    assert consumed == [(1, max(seen), "kept")]
    written = [json.loads(line)["body"] for line in (run_directory / "plan.jsonl").read_bytes().splitlines()]
    events = MetadataCache.query(database, "SELECT payload FROM plan_event ORDER BY number").rows
    assert [json.loads(payload) for (payload,) in events] == written
    assert len(written) > (3 if case == "parts" else 4)
    with RunDataIndex.open(run_directory) as run_data:
        planned = sum(segment.num_rows * segment.num_epochs for group in run_data.plan.segments for segment in group)
    assert MetadataCache.query(database, "SELECT SUM(num_rows) AS n FROM epochs").rows == [(planned,)]


def test_texts_come_from_the_files(trained: Any) -> None:
    _, run_directory, seen = trained
    with RunDataIndex.open(run_directory) as run_data:
        finder = TextFinder(run_data)
        for step in (1, max(seen) // 2, max(seen)):
            for row in where(run_data, step):
                for document in row.documents:
                    found = finder.find(row, document)
                    ids = ids_of(document.uri, document.byte_offset, document.byte_length)[:-1]
                    assert found.origin == "source"
                    assert list(found.text.encode()) == ids[document.first_token :][: document.num_tokens]


def test_a_stream_that_forgot_its_chunks_still_tells(trained: Any) -> None:
    case, run_directory, seen = trained
    if case != "streaming":
        return
    with RunDataIndex.open(run_directory) as run_data:
        directories = [reader.directory for reader in run_data.readers]
        units = [len(reader.units) for reader in run_data.readers]
    for directory, count in zip(directories, units, strict=True):
        assert 0 < len(resident_units(directory)) < count, "some chunks were removed after use"
        for paths in resident_units(directory).values():
            for path in paths:
                path.unlink()
    with RunDataIndex.open(run_directory) as run_data:
        for step in (1, max(seen)):
            for found, got in zip(stored(run_data, step), seen[step], strict=True):
                assert agree(found, got)
