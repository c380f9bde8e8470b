"""What an attempt read that a resume from an earlier checkpoint, with another mixture or larger sources, abandoned."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import xxhash

import tiny_runs
from numpy_engine import NumpyEngine
from vorox.cli import main
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.data.order.plan import DataPlan
from vorox.data.provenance.queries import when, when_text
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.experiments.metadata import MetadataCache
from vorox.training.reports.document_search import finding_of
from vorox.training.reports.metadata_database import refresh_database

END_OF_TEXT = 256
KEPT, LAST = 4, 12
"""The checkpoint that every second attempt resumes from, and the last step of the first."""


class Piece(NamedTuple):
    """A row as an engine got it: tokens, without padding."""

    step: int
    slot: int
    tokens: bytes


def configured(directory: Path, weights: tuple[int, int], *overrides: str) -> RunConfig:
    sources: list[dict[str, Any]] = []
    for seed, name in enumerate(("prose", "notes")):
        if not (directory / name).exists():
            tiny_runs.write_text(directory / name, documents=40, seed=seed + 1)
        if weights[seed]:
            paths = [str(directory / name)]
            sources.append({"name": name, "format": "jsonl", "paths": paths, "weight": weights[seed]})
    return tiny_runs.configuration(
        directory, [f"data.sources={json.dumps(sources)}", "data.validation.held_out_fraction=0",
                    "eval.every_steps=null", "checkpoint.keep_last=9", *overrides]
    )  # fmt: skip


@pytest.fixture(name="read")
def _read(monkeypatch: pytest.MonkeyPatch) -> list[Piece]:
    """What the engine got, in order of the executions."""
    tiny_runs.use_numpy_engine(monkeypatch)
    read: list[Piece] = []
    original = NumpyEngine.train_step

    def train_step(self: NumpyEngine, batch: Any, **arguments: Any) -> Any:
        rows = batch.tokens_ABT.reshape(-1, batch.tokens_ABT.shape[-1]).tolist()
        for slot, row in enumerate(rows):
            read.append(Piece(batch.step + 1, slot, bytes(token % 256 for token in row)))
        return original(self, batch, **arguments)

    monkeypatch.setattr(NumpyEngine, "train_step", train_step)
    return read


def documents(directory: Path) -> Iterator[tuple[str, int, str]]:
    """The file, number and text of each document."""
    for name in ("prose", "notes"):
        for file in sorted((directory / name).iterdir()):
            for ordinal, line in enumerate(file.read_text().splitlines()):
                yield str(file), ordinal, json.loads(line)["text"]


Found = Counter[tuple[str, int, int, int]]
"""Documents, by file and number, in the slots of steps."""


def found_by_record(run_directory: Path, directory: Path, state: str) -> Found:
    with RunDataIndex.open(run_directory) as run_data:
        return Counter(
            (uri, ordinal, one.step, one.slot)
            for uri, ordinal, _ in documents(directory) for one in when(run_data, uri, ordinal=ordinal)
            if one.state == state
        )  # fmt: skip


def abandon(directory: Path, second: RunConfig, **arguments: Any) -> tuple[Path, Found]:
    """Train, and resume from an earlier checkpoint; the run, and what its twin says that it read after that step."""
    first = tiny_runs.run(configured(directory, (1, 1))).run_directory
    before = found_by_record(first, directory, "kept")
    tiny_runs.run(second, resume_from=RunLayout(first).checkpoint(KEPT), **arguments)
    return first, Counter({place: count for place, count in before.items() if place[2] > KEPT})


CHANGES = {"removed": (1, 0), "weights": (1, 5)}


@pytest.mark.parametrize("change", CHANGES)
def test_the_steps_of_an_abandoned_attempt_are_those_that_it_read(
    tmp_path: Path, read: list[Piece], change: str
) -> None:
    run_directory, expected = abandon(tmp_path, configured(tmp_path, CHANGES[change]))
    num_first = LAST * 4
    first, second = read[:num_first], read[num_first:]
    assert [piece.step for piece in second] == [step for step in range(KEPT + 1, LAST + 1) for _ in range(4)]
    changed = {(a.step, a.slot) for a, b in zip(first[KEPT * 4 :], second, strict=True) if a.tokens != b.tokens}
    assert changed
    assert found_by_record(run_directory, tmp_path, "rolled_back") == expected
    with RunDataIndex.open(run_directory) as run_data:
        for uri, ordinal, text in documents(tmp_path):
            for one in when(run_data, uri, ordinal=ordinal):
                if one.step <= LAST:
                    got = (first if one.attempt == 1 else [*first[: KEPT * 4], *second])[(one.step - 1) * 4 + one.slot]
                    row = got.tokens.partition(b"\0\0")[0]
                    assert any(part and part.decode() in text for part in row.split(b"\0"))


@pytest.mark.parametrize("killed", [False, True])
def test_whole_files_and_texts_and_samples_tell_the_same(tmp_path: Path, read: list[Piece], killed: bool) -> None:
    first = tiny_runs.run(configured(tmp_path, (1, 1))).run_directory
    if killed:  # nobody noted how many events it had at the end
        record = json.loads((first / "run.json").read_text())
        notes = record["attempts"][0]["notes"]
        for name in ("last_step", "saved_step"):
            del notes["steps"][name]
        plan = DataPlan.open(first / "plan.jsonl")
        notes["plan"] = {"events": 2, "digest": plan.digest_at(2)}
        assert plan.num_events > 2
        (first / "run.json").write_text(json.dumps(record))
    expected = Counter({place: n for place, n in found_by_record(first, tmp_path, "kept").items() if place[2] > KEPT})
    tiny_runs.run(configured(tmp_path, (1, 0)), resume_from=RunLayout(first).checkpoint(KEPT))
    assert found_by_record(first, tmp_path, "rolled_back") == expected
    with RunDataIndex.open(first) as run_data:
        for name in ("prose", "notes"):
            found = {(one.step, one.slot) for one in when(run_data, f"{name}/text.jsonl") if one.state == "rolled_back"}
            assert found == {(step, slot) for uri, _, step, slot in expected if f"/{name}/" in uri}
        texts = {text: (uri, ordinal) for uri, ordinal, text in documents(tmp_path)}
        for text in [*texts][::7]:
            found = {
                (one.uri, one.step, one.slot)
                for one in when_text(run_data, [xxhash.xxh3_64_intdigest(text.encode())])
                if one.state == "rolled_back" and one.uri == texts[text][0]
            }
            uri, ordinal = texts[text]
            assert found == {(uri, step, slot) for other, n, step, slot in expected if (other, n) == (uri, ordinal)}
    refresh_database(first, sample_steps=(1, LAST))
    rows = MetadataCache.query(
        first / "metadata.sqlite", "SELECT uri, ordinal, step, slot, attempt FROM samples WHERE outcome = 'rolled_back'"
    ).rows
    assert {(uri, ordinal, step, slot) for uri, ordinal, step, slot, _ in rows} == set(expected)
    assert {attempt for *_, attempt in rows} == {1}
    kept = MetadataCache.query(
        first / "metadata.sqlite", "SELECT DISTINCT source FROM samples WHERE step > 4 AND outcome = 'kept'"
    ).rows
    assert kept == [("prose",)]


def test_only_the_checkpoints_of_the_attempt_that_read_it_saw_it(
    tmp_path: Path, read: list[Piece], capsys: pytest.CaptureFixture[str]
) -> None:
    run_directory, expected = abandon(tmp_path, configured(tmp_path, (1, 0)))
    places = {(uri, ordinal): step for uri, ordinal, step, _ in sorted(expected, key=lambda one: -one[2])}
    with RunDataIndex.open(run_directory) as run_data:
        kept = {
            place for place in places if any(one.state == "kept" for one in when(run_data, place[0], ordinal=place[1]))
        }
        late = next(place for place in places if "/notes/" in place[0] and place not in kept and places[place] > 8)
        found = finding_of(run_directory, when(run_data, late[0], ordinal=late[1]))
    assert (found.first_step, found.checkpoints) == (places[late], ("step-00000012.replaced-1",))
    words = ["--source", late[0], "--record", str(late[1])]
    capsys.readouterr()
    assert main(["data", "when", str(run_directory), *words]) == 0
    printed = capsys.readouterr().out
    assert "rolled back" in printed
    assert "Checkpoints that saw it: step-00000012.replaced-1." in printed
    assert main(["data", "when", "--all-runs", "--root", str(tmp_path / "runs"), *words]) == 0
    assert "step-00000012.replaced-1" in capsys.readouterr().out


def test_without_its_record_the_rows_of_an_abandoned_attempt_are_refused(
    tmp_path: Path, read: list[Piece], capsys: pytest.CaptureFixture[str]
) -> None:
    run_directory, _ = abandon(tmp_path, configured(tmp_path, (1, 0)))
    record = json.loads((run_directory / "run.json").read_text())
    del record["attempts"][0]["notes"]["plan"]
    (run_directory / "run.json").write_text(json.dumps(record))
    capsys.readouterr()
    assert main(["data", "when", str(run_directory), "--source", "notes/text.jsonl"]) == 4
    assert "The rows of attempt 1 are not known" in " ".join(capsys.readouterr().err.split())
