"""Contamination against a search with Python sets over the files that the executed steps name."""

from __future__ import annotations

import json
import random
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import tiny_runs
from vorox.cli import app
from vorox.core.config import load_config
from vorox.core.errors import ConfigError, DataError
from vorox.core.run_layout import RunLayout, step_directories
from vorox.data.provenance import contamination, run_data_index
from vorox.data.provenance.contamination import find_contamination
from vorox.data.provenance.evaluation_records import read_evaluation_records
from vorox.data.provenance.named_documents import named_documents
from vorox.data.provenance.queries import RunDataIndex, rows_at
from vorox.data.tokenizers.loading import load
from vorox.records.attempts import AttemptRecord
from vorox.training.checkpoints.store import verify
from vorox.training.fork import ForkChange, fork

LENGTH = 12
STEPS = 5
Place = tuple[str, int]


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five steps, a part of its text: no row twice."""
    directory = tmp_path_factory.mktemp("contamination")
    with pytest.MonkeyPatch.context() as patch:
        tiny_runs.use_numpy_engine(patch)
        config = tiny_runs.configuration(
            directory, ["data.sequence_length_tokens=48", f"train.num_steps={STEPS}", "eval.every_steps=null"]
        )
        return tiny_runs.run(config).run_directory


@pytest.fixture
def evaluation_file(run_directory: Path, tmp_path: Path) -> Path:
    """Records that are documents, parts of documents with other words around them, other text, and short text."""
    text = run_directory.parent.parent / "text" / "text.jsonl"
    documents = [json.loads(line)["text"] for line in text.read_text(encoding="utf-8").splitlines()]
    chooser = random.Random(5)
    parts = [
        f"Q{number} {document[start : start + 30]} ?"
        for number, document in enumerate(documents)
        for start in [chooser.randrange(len(document))]
    ]
    records = [*documents[:20], *parts, "nothing like it was ever read ~~~", "short"]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": one, "id": "a"}) + "\n" for one in records), encoding="utf-8")
    return path


def trained_ngrams(run_data: RunDataIndex, steps: range) -> dict[bytes, dict[Place, set[int]]]:
    """Bytes of each n-gram to the documents and steps with it, read from the files with nothing of ours."""
    found: dict[bytes, dict[Place, set[int]]] = defaultdict(lambda: defaultdict(set))
    batch = run_data.plan.start.global_batch_sequences
    for row in rows_at(run_data, np.arange((steps.start - 1) * batch, (steps.stop - 1) * batch)):
        for document in (one for one in row.documents if not one.is_masked):
            with Path(document.uri).open("rb") as file:
                file.seek(document.byte_offset)
                text = json.loads(file.read(document.byte_length))["text"].encode()
            part = text[document.first_token : document.first_token + document.num_tokens]
            for start in range(len(part) - LENGTH + 1):
                found[part[start : start + LENGTH]][document.uri, document.ordinal].add(row.step)
    return found


@pytest.fixture(scope="module")
def masked_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of more than two epochs, in which some documents are masked from step 7 on; others were, before."""
    directory = tmp_path_factory.mktemp("masked")
    with pytest.MonkeyPatch.context() as patch:
        tiny_runs.use_numpy_engine(patch)
        settings = ["data.sequence_length_tokens=48", "eval.every_steps=null", "checkpoint.every_steps=6"]
        settings += ["train.global_batch_sequences=32", "train.micro_batch_sequences=32", "train.num_steps=12"]
        parent = tiny_runs.run(tiny_runs.configuration(directory, settings)).run_directory
        with RunDataIndex.open(parent) as run_data:
            trained = {part.ordinal for row in rows_at(run_data, np.arange(12 * 32)) for part in row.documents}
            names = [f"text.jsonl:{ordinal}" for ordinal in random.sample(sorted(trained), 20)]
            change = ForkChange(named_documents(run_data, names, "here"))
        first = {name: documents for name, documents in change.documents.items() if name in names[:10]}
        masked = fork(parent, 0, None, ForkChange(first), "masked")
        tiny_runs.run(load_config(RunLayout(masked).config), resume_from=masked)
        again = fork(masked, 6, verify(step_directories(masked)[6]), change, "again")
        return tiny_runs.run(load_config(RunLayout(again).config), resume_from=again).run_directory


@pytest.mark.slow
def test_a_masked_document_counts_only_where_it_is_not_masked(masked_run: Path, tmp_path: Path) -> None:
    with RunDataIndex.open(masked_run) as run_data:
        parts = [part for row in rows_at(run_data, np.arange(12 * 32)) for part in row.documents]
        hidden = {part.ordinal for part in parts if part.is_masked}
        late = hidden & {part.ordinal for part in parts if not part.is_masked}
        assert hidden > late > set(), "some are masked in all epochs, and some from a later one on"
        text = masked_run.parent.parent / "text" / "text.jsonl"
        lines = text.read_text(encoding="utf-8").splitlines()
        questions = tmp_path / "questions.jsonl"
        questions.write_text("".join(f"{lines[ordinal]}\n" for ordinal in sorted(hidden)), encoding="utf-8")
        records = read_evaluation_records([str(questions)], load(masked_run / "tokenizer"), text_field="text")
        found = find_contamination(run_data, records, ngram_tokens=LENGTH, num_documents=1 << 30)
        trained = trained_ngrams(run_data, range(1, 13))
    read: dict[Place, set[int]] = {}
    for record in found.records:
        for one in record.documents:
            read.setdefault((one.uri, one.ordinal), set()).update(one.steps)
    expected: dict[int, int] = {}
    places: dict[Place, set[int]] = defaultdict(set)
    for number, ordinal in enumerate(sorted(hidden)):
        tokens, covered = json.loads(lines[ordinal])["text"].encode(), set[int]()
        for start in range(len(tokens) - LENGTH + 1):
            for place, steps in trained.get(tokens[start : start + LENGTH], {}).items():
                covered.update(range(start, start + LENGTH))
                places[place] |= steps
        if covered:
            expected[number] = len(covered)
    assert {record.ordinal: record.contaminated_tokens for record in found.records} == expected
    assert {place: steps for place, steps in read.items() if place[1] in hidden} == {
        place: steps for place, steps in places.items() if place[1] in hidden
    }


def test_equals_a_search_of_the_files(
    run_directory: Path, evaluation_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contamination, "_PLACES_PER_NGRAM", 1 << 30)
    monkeypatch.setattr(contamination, "_ROWS_AT_ONCE", 3)
    monkeypatch.setattr(run_data_index, "_POSITIONS_AT_ONCE", 8)
    run_data = RunDataIndex.open(run_directory)
    tokenizer = load(run_directory / "tokenizer")
    records = read_evaluation_records([str(evaluation_file)], tokenizer, text_field="question")
    found = find_contamination(run_data, records, ngram_tokens=LENGTH, num_documents=1 << 30)

    trained = trained_ngrams(run_data, range(1, STEPS + 1))
    lines = evaluation_file.read_text(encoding="utf-8").splitlines()
    expected: dict[int, tuple[int, dict[Place, tuple[int, set[int]]]]] = {}
    for ordinal, line in enumerate(lines):
        text = json.loads(line)["question"].encode()
        covered: set[int] = set()
        ngrams_of: dict[Place, set[bytes]] = defaultdict(set)
        steps_of: dict[Place, set[int]] = defaultdict(set)
        for start in range(len(text) - LENGTH + 1):
            for place, steps in trained.get(text[start : start + LENGTH], {}).items():
                covered.update(range(start, start + LENGTH))
                ngrams_of[place].add(text[start : start + LENGTH])
                steps_of[place] |= steps
        if covered:
            expected[ordinal] = len(covered), {place: (len(ngrams_of[place]), steps_of[place]) for place in ngrams_of}
    assert {
        record.ordinal: (
            record.contaminated_tokens,
            {(one.uri, one.ordinal): (one.num_ngrams, set(one.steps)) for one in record.documents},
        )
        for record in found.records
    } == expected
    assert 20 < len(expected) < len(lines) - 2, "some parts were not trained on"
    fractions = [record.fraction for record in found.records]
    assert fractions == sorted(fractions, reverse=True)
    assert fractions[0] > 0.8
    short = sum(len(json.loads(line)["question"].encode()) < LENGTH for line in lines)
    assert (found.num_records, found.num_short_records, found.num_steps) == (len(lines), short, STEPS)


def test_places_of_frequent_ngrams_are_limited_and_the_share_is_not(
    run_directory: Path, evaluation_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_data = RunDataIndex.open(run_directory)
    records = read_evaluation_records([str(evaluation_file)], load(run_directory / "tokenizer"), text_field="question")
    whole = find_contamination(run_data, records, ngram_tokens=5)
    monkeypatch.setattr(contamination, "_PLACES_PER_NGRAM", 1)
    limited = find_contamination(run_data, records, ngram_tokens=5)
    shares = [(one.ordinal, one.contaminated_tokens) for one in whole.records]
    assert [(one.ordinal, one.contaminated_tokens) for one in limited.records] == shares
    assert limited.records != whole.records


def test_steps_that_were_rolled_back_or_never_run_do_not_count(
    run_directory: Path, evaluation_file: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run_directory, copy)
    tiny_runs.forget_steps(copy)
    records = read_evaluation_records([str(evaluation_file)], load(copy / "tokenizer"), text_field="question")
    with pytest.raises(ConfigError, match="No step of this run"):
        find_contamination(RunDataIndex.open(copy), records)
    with AttemptRecord(copy, 1, 0, 0) as attempt:
        attempt.record_started(2)
        attempt.record_saved(2)
    found = find_contamination(RunDataIndex.open(copy), records, ngram_tokens=LENGTH)
    assert found.num_steps == 2
    assert {step for record in found.records for one in record.documents for step in one.steps} == {1, 2}


def test_the_command_names_records_documents_and_steps(run_directory: Path, evaluation_file: Path) -> None:
    words = ["data", "contamination", str(run_directory), "--against", str(evaluation_file), "--ngram-tokens", "12"]
    shown = CliRunner().invoke(app, [*words, "--field", "question"], catch_exceptions=False)
    assert shown.exit_code == 0
    first = json.loads(CliRunner().invoke(app, [*words, "--field", "question", "--json"]).output)["records"][0]
    document = first["documents"][0]
    line = next(line for line in shown.output.splitlines() if f"questions.jsonl:{first['ordinal']}  " in line)
    assert line.split()[0] == f"{first['fraction']:.0%}"
    assert line.split(maxsplit=4)[3:] == [f"text.jsonl:{document['ordinal']}", ", ".join(map(str, document["steps"]))]


def test_bad_input_is_named(run_directory: Path, evaluation_file: Path, tmp_path: Path) -> None:
    tokenizer = load(run_directory / "tokenizer")
    with pytest.raises(ConfigError, match="does not fit into a row") as refused:
        find_contamination(RunDataIndex.open(run_directory), [], ngram_tokens=64)
    assert refused.value.where == "--ngram-tokens"
    with pytest.raises(ConfigError):
        read_evaluation_records([str(evaluation_file)], tokenizer)  # question or id
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": "a"}\n{"question": \n', encoding="utf-8")
    with pytest.raises(DataError, match="Record 1 is malformed"):
        read_evaluation_records([str(broken)], tokenizer, text_field="question")
    with pytest.raises(DataError):
        read_evaluation_records([str(tmp_path / "missing.jsonl")], tokenizer)
