"""Provenance queries against real training runs, and against files read with nothing but json."""

from __future__ import annotations

import json
import random
import shutil
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tiny_runs
from numpy_engine import NumpyEngine
from processor_cost import cost
from vorox.core.errors import ConfigError, DataError
from vorox.core.schema import RunConfig
from vorox.data.provenance.original_text import TextFinder
from vorox.data.provenance.queries import DocumentOrigin, Occurrence, RunDataIndex, rows_at, when, where
from vorox.records.attempts import AttemptRecord

END_OF_TEXT = 256
STEPS = 150
BATCH = 4


class Killed(BaseException):
    pass


def two_sources(directory: Path, *overrides: str) -> RunConfig:
    """Two sources of several files each, by weights 2 : 1, several epochs, documents split over rows."""
    for name, seed in (("prose", 1), ("notes", 2)):
        for part in range(3):
            tiny_runs.write_text(directory / "corpora" / name / f"part-{part}", documents=8, seed=10 * seed + part)
    sources = json.dumps(
        [
            {"name": "prose", "format": "jsonl", "paths": [str(directory / "corpora" / "prose")], "weight": "2/3"},
            {"name": "notes", "format": "jsonl", "paths": [str(directory / "corpora" / "notes")], "weight": "1/3"},
        ]
    )
    return tiny_runs.configuration(directory, [f"data.sources={sources}", f"train.num_steps={STEPS}", *overrides])


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    original = NumpyEngine.train_step

    def train_step(self, batch, **kwargs):
        if batch.step + 1 == step:
            raise Killed
        return original(self, batch, **kwargs)

    monkeypatch.setattr(NumpyEngine, "train_step", train_step)


@pytest.fixture(scope="module")
def seen() -> dict[int, np.ndarray]:
    """Tokens of every step as the engine got them, the last time it got them."""
    return {}


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory, seen: dict[int, np.ndarray]) -> Path:
    """A run that was killed in step 7 and in step 107 and then came to its end."""
    directory = tmp_path_factory.mktemp("provenance")
    config = two_sources(directory, "checkpoint.every_steps=50", "eval.every_steps=null")
    original = NumpyEngine.train_step
    with pytest.MonkeyPatch.context() as patch:
        tiny_runs.use_numpy_engine(patch)

        def train_step(self, batch, **kwargs):
            seen[batch.step + 1] = batch.tokens_ABT.reshape(BATCH, -1).copy()
            return original(self, batch, **kwargs)

        patch.setattr(NumpyEngine, "train_step", train_step)
        for step in (7, 107):
            with pytest.MonkeyPatch.context() as killing:
                kill_at(killing, step)
                with pytest.raises(Killed):
                    tiny_runs.run(config)
        return tiny_runs.run(config).run_directory


@pytest.fixture
def run_data(run_directory: Path) -> RunDataIndex:
    return RunDataIndex.open(run_directory)


def text_of(document: DocumentOrigin) -> str:
    """The document, read with nothing of ours."""
    with Path(document.uri).open("rb") as file:
        file.seek(document.byte_offset)
        return json.loads(file.read(document.byte_length))["text"]


def test_the_documents_of_every_step_are_what_the_engine_got(
    run_data: RunDataIndex, seen: dict[int, np.ndarray]
) -> None:
    sources = defaultdict(int)
    for step in range(1, STEPS + 1):
        rows = where(run_data, step)
        assert [row.slot for row in rows] == list(range(BATCH))
        for row in rows:
            expected: list[int] = []
            for document in row.documents:
                ids = [*text_of(document).encode(), END_OF_TEXT]
                assert len(ids) == document.document_tokens
                assert len(expected) == document.row_token
                expected += ids[document.first_token : document.first_token + document.num_tokens]
                lines = Path(document.uri).read_bytes()[: document.byte_offset].count(b"\n")
                assert document.ordinal == lines
                assert f"/corpora/{row.source}/" in document.uri
            got = seen[step][row.slot].tolist()
            assert expected[: len(got)] == got[: len(expected)]
            assert (row.num_tokens, row.padding_tokens) == (len(expected), len(got) + 1 - len(expected))
            sources[row.source] += 1
    assert sources == {"prose": STEPS * BATCH * 2 // 3, "notes": STEPS * BATCH // 3}


def test_one_slot_is_that_slot(run_data: RunDataIndex) -> None:
    for step in (1, 77, STEPS):
        rows = where(run_data, step)
        assert tuple(where(run_data, step, slot)[0] for slot in range(BATCH)) == rows
        assert [row.position for row in rows] == [(step - 1) * BATCH + slot for slot in range(BATCH)]


def test_both_directions_agree_for_a_thousand_random_positions(run_data: RunDataIndex) -> None:
    chooser = random.Random(3)
    positions = [chooser.randrange(run_data.plan.num_positions) for _ in range(1000)]
    known: dict[tuple[str, int], tuple[Occurrence, ...]] = {}
    epochs: set[int] = set()
    for position, row in zip(positions, rows_at(run_data, np.array(positions)), strict=True):
        assert row.position == position
        epochs.add(row.epoch)
        for document in row.documents:
            byte = document.byte_offset + chooser.randrange(document.byte_length)
            key = (document.uri, document.byte_offset)
            found = known[key] if key in known else when(run_data, document.uri, byte)
            assert key in known or found == when(run_data, document.uri, ordinal=document.ordinal)
            known[key] = found
            (here,) = {
                (one.step, one.slot, one.epoch, one.row, one.source) for one in found if one.position == position
            }
            assert here == (row.step, row.slot, row.epoch, row.row, row.source)
    for (uri, offset), found in known.items():
        for row in rows_at(run_data, np.array(sorted({one.position for one in found}))):
            assert (uri, offset) in {(document.uri, document.byte_offset) for document in row.documents}
    assert len(epochs) > 2, "several epochs were looked at"


def test_when_finds_all_that_a_walk_over_the_whole_plan_finds(run_data: RunDataIndex) -> None:
    expected: dict[tuple[str, int], set[int]] = defaultdict(set)
    for row in rows_at(run_data, np.arange(run_data.plan.num_positions)):
        for document in row.documents:
            expected[document.uri, document.ordinal].add(row.position)
    by_file: dict[str, set[int]] = defaultdict(set)
    for (uri, ordinal), positions in expected.items():
        found = when(run_data, uri, ordinal=ordinal)
        assert {one.position for one in found} == positions
        assert [one.position for one in found] == sorted(one.position for one in found)
        by_file[uri] |= positions
    assert max(map(len, expected.values())) > 10, "documents are split over rows"
    for uri, positions in by_file.items():
        assert {one.position for one in when(run_data, uri)} == positions


def test_what_a_crash_rolled_back_is_said(run_data: RunDataIndex) -> None:
    """Attempt 1 did steps 1 to 6 and saved nothing; attempt 2 did 1 to 106 and saved 50 and 100; attempt 3 the rest."""
    executions: dict[int, set[tuple[int | None, str]]] = defaultdict(set)
    for reader in run_data.readers:
        for file in reader.files:
            for one in when(run_data, file.uri):
                executions[one.step].add((one.attempt, one.state))
    for step in range(1, STEPS + 1):
        expected: set[tuple[int | None, str]] = {(2 if step <= 100 else 3, "kept")}
        if step <= 6:
            expected.add((1, "rolled_back"))
        if 100 < step <= 106:
            expected.add((2, "rolled_back"))
        assert executions[step] == expected, step
    assert all(executions[step] == {(None, "beyond")} for step in executions if step > STEPS)


def test_a_run_that_stands_still_says_what_is_open_and_planned(run_directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run_directory, copy)
    tiny_runs.forget_steps(copy)
    with AttemptRecord(copy, 1, 0, 0) as attempt:
        attempt.record_started(9)
        attempt.record_saved(8)
    run_data = RunDataIndex.open(copy)
    states: dict[int, set[str]] = defaultdict(set)
    for reader in run_data.readers:
        for file in reader.files:
            for one in when(run_data, file.uri):
                states[one.step].add(one.state)
    assert all(states[step] == {"kept"} for step in range(1, 9))
    assert states[9] == {"open"}
    assert all(states[step] == {"planned"} for step in range(10, STEPS + 1))


def test_a_file_may_be_named_by_the_end_of_its_name(run_data: RunDataIndex) -> None:
    uri = run_data.readers[0].files[0].uri
    short = "/".join(uri.split("/")[-3:])
    assert short.startswith("prose/")
    assert when(run_data, short) == when(run_data, uri) == when(run_data, f"./{short}") != ()


def test_an_ambiguous_or_unknown_name_is_refused(run_data: RunDataIndex) -> None:
    with pytest.raises(ConfigError, match=r"matches 6 files: .*part-0/text.jsonl") as ambiguous:
        when(run_data, "text.jsonl")
    assert ambiguous.value.exit_code == 2
    for name in ("ext.jsonl", "prose/part-0/texts.jsonl"):
        with pytest.raises(ConfigError, match="No file matches") as unknown:
            when(run_data, name)
        assert "did you mean" in unknown.value.hint
        assert "text.jsonl" in unknown.value.hint
    for name in ("s3://nowhere/at-all", "nofile.txt", "zzz.jsonl"):  # endings are no resemblance
        with pytest.raises(ConfigError) as foreign:
            when(run_data, name)
        assert "vorox data peek" in foreign.value.hint
        assert ".jsonl" not in foreign.value.hint


def test_steps_and_slots_that_are_not_there(run_data: RunDataIndex) -> None:
    for step in (0, -1, run_data.num_steps + 1):
        with pytest.raises(ConfigError, match=r"Step .* is not in the run's data plan"):
            where(run_data, step)
    for slot in (-1, BATCH):
        with pytest.raises(ConfigError, match=r"Slot .* does not exist"):
            where(run_data, 1, slot)


def test_held_out_text_was_never_seen(run_data: RunDataIndex) -> None:
    """Documents of the validation split have no row in the training caches."""
    seen_ordinals = defaultdict(set)
    for row in rows_at(run_data, np.arange(run_data.plan.num_positions)):
        for document in row.documents:
            seen_ordinals[document.uri].add(document.ordinal)
    held_out = [
        (file.uri, ordinal)
        for reader in run_data.readers
        for file in reader.files
        for ordinal in range(8)
        if ordinal not in seen_ordinals[file.uri]
    ]
    assert held_out, "something is held out"
    for uri, ordinal in held_out:
        assert when(run_data, uri, ordinal=ordinal) == ()


# Caches


def test_a_cache_that_is_gone_is_said(run_directory: Path, tmp_path: Path) -> None:
    run_data = RunDataIndex.open(run_directory)
    gone = run_data.readers[1].directory
    aside = gone.with_name("aside")
    gone.rename(aside)
    try:
        with pytest.raises(DataError, match="cache of source 'notes' is missing") as missing:
            RunDataIndex.open(run_directory)
        assert str(gone) in missing.value.where
    finally:
        aside.rename(gone)


def test_caches_that_moved_are_found_by_their_names(run_directory: Path, tmp_path: Path, monkeypatch) -> None:
    """They are found below the configured root if the run's note is missing or outdated; a copy with different content
    is not used."""
    record = json.loads((run_directory / "run.json").read_text())
    copy = tmp_path / "copy"
    shutil.copytree(run_directory, copy)
    for attempt in record["attempts"]:
        attempt["notes"].pop("caches", None)
    (copy / "run.json").write_text(json.dumps(record))
    run_data = RunDataIndex.open(run_directory)
    wrong = run_data.readers[0].directory.with_name(run_data.readers[0].directory.name[:-8] + "00000000")
    shutil.copytree(run_data.readers[1].directory, wrong)
    try:
        found = RunDataIndex.open(copy)
        assert [reader.directory for reader in found.readers] == [reader.directory for reader in run_data.readers]
    finally:
        shutil.rmtree(wrong)


def test_another_content_under_the_same_name_is_refused(run_directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run_directory, copy)
    run_data = RunDataIndex.open(run_directory)
    record = json.loads((copy / "run.json").read_text())
    record["attempts"][-1]["notes"]["caches"]["prose"] = str(run_data.readers[1].directory)
    for attempt in record["attempts"][:-1]:
        attempt["notes"].pop("caches", None)
    (copy / "run.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match="source 'prose'"):
        RunDataIndex.open(copy)


# Text


@pytest.fixture
def own_files(run_directory: Path, tmp_path: Path) -> Iterator[RunDataIndex]:
    """The run, with its files put back afterwards."""
    run_data = RunDataIndex.open(run_directory)
    uris = [file.uri for reader in run_data.readers for file in reader.files]
    content = {uri: Path(uri).read_bytes() for uri in uris}
    yield run_data
    for uri, before in content.items():
        Path(uri).write_bytes(before)


def test_texts_are_read_again_from_the_files(own_files: RunDataIndex) -> None:
    finder = TextFinder(own_files)
    for row in rows_at(own_files, np.arange(0, 400, 3)):
        for document in row.documents:
            found = finder.find(row, document)
            assert (found.origin, found.why) == ("source", "")
            whole = text_of(document).encode()
            assert found.text.encode() == whole[document.first_token : document.first_token + document.num_tokens]


@pytest.mark.parametrize("change", ["another text", "removed", "torn", "shifted"])
def test_a_file_that_changed_is_not_believed(own_files: RunDataIndex, change: str) -> None:
    (row,) = where(own_files, 5, 2)
    document = row.documents[0]
    expected = text_of(document).encode()[document.first_token : document.first_token + document.num_tokens].decode()
    path = Path(document.uri)
    raw = path.read_bytes()
    start, end = document.byte_offset, document.byte_offset + document.byte_length
    if change == "removed":
        path.unlink()
    elif change == "torn":
        path.write_bytes(raw[: start + 9])
    elif change == "shifted":
        path.write_bytes(b'{"text": "more"}\n' + raw)
    else:
        path.write_bytes(raw[:start] + raw[start:end].replace(b"a", b"e") + raw[end:])
    found = TextFinder(own_files).find(row, document)
    assert found.origin == "cache"
    assert found.why
    assert found.text == expected, "the text trained on is shown, not the current file"


# Speed


def test_a_row_takes_about_a_millisecond(run_data: RunDataIndex) -> None:
    where(run_data, 1)
    assert cost(lambda: [where(run_data, step, 1) for step in range(1, 101)]) / 100 < 1
    uri = run_data.readers[0].files[0].uri
    when(run_data, uri, 0)
    assert cost(lambda: when(run_data, uri, 0)) < 100


# One byte of a long document


def test_a_byte_of_a_long_text_is_found_in_the_rows_that_hold_it(tmp_path: Path, monkeypatch) -> None:
    """By a tokenizer of bytes, token i of a text is byte i: what ``where`` says decides, without any decoding."""
    tiny_runs.use_numpy_engine(monkeypatch)
    folder = tmp_path / "corpora"
    folder.mkdir()
    generator = random.Random(4)
    for number in range(6):
        letters = generator.choices("abcdef \u00e9\n", k=generator.randint(5, 300))
        (folder / f"{number}.txt").write_bytes("".join(letters).encode())
    (folder / "mark.txt").write_bytes(b"\xef\xbb\xbf" + "".join(generator.choices("xyz ", k=200)).encode())
    sources = json.dumps([{"name": "long", "format": "txt", "paths": [str(folder)]}])
    overrides = [f"data.sources={sources}", "train.num_steps=30"]
    config = tiny_runs.configuration(tmp_path, [*overrides, "data.validation.held_out_fraction=0"])
    run_data = RunDataIndex.open(tiny_runs.run(config).run_directory)
    rows = [row for step in range(1, run_data.num_steps + 1) for row in where(run_data, step)]
    narrowed = 0
    for path in sorted(folder.iterdir()):
        for byte in generator.sample(range(3, path.stat().st_size), 4):
            expected, of_record = set(), set()
            for row in rows:
                for document in row.documents:
                    if document.uri == str(path):
                        of_record.add((row.step, row.slot))
                        token = byte - document.byte_offset
                        if document.first_token <= token < document.first_token + document.num_tokens:
                            expected.add((row.step, row.slot))
            found = when(run_data, str(path), byte)
            assert {(one.step, one.slot) for one in found if one.step <= run_data.num_steps} == expected
            assert {one.granularity for one in found} == {"byte"}
            narrowed += expected < of_record
    assert narrowed > 10


def test_a_byte_of_a_long_text_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than two bytes of memory per byte of the document; decoding all of it at once took 35 to 100."""
    tiny_runs.use_numpy_engine(monkeypatch)
    long_bytes = 3_000_000
    (tmp_path / "corpora").mkdir()
    letters = "".join(random.Random(5).choices("abcdef \n", k=1_000_000))
    (tmp_path / "corpora" / "long.txt").write_text(letters * (long_bytes // len(letters)))
    (tmp_path / "corpora" / "short.txt").write_text(letters[:9000])
    sources = json.dumps([{"name": "long", "format": "txt", "paths": [str(tmp_path / "corpora")]}])
    overrides = [f"data.sources={sources}", "data.sequence_length_tokens=2048", "data.cache.unit_bytes=67108864"]
    config = tiny_runs.configuration(tmp_path, [*overrides, "data.validation.held_out_fraction=0"])
    run_data = RunDataIndex.open(tiny_runs.run(config).run_directory)
    peaks: list[int] = []
    trained = [document for row in where(run_data, 1) for document in row.documents if "long" in document.uri]
    for name, byte in (("short.txt", 5000), ("long.txt", trained[0].first_token + 5)):
        uri = str(tmp_path / "corpora" / name)
        when(run_data, uri, byte)
        tracemalloc.start()
        found = when(run_data, uri, byte)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert {one.granularity for one in found} == {"byte"}
    assert peaks[1] - peaks[0] < 2 * long_bytes


def test_where_a_record_wraps_its_text_the_answer_is_for_the_record(run_data: RunDataIndex) -> None:
    documents = {document for step in range(1, 40) for row in where(run_data, step) for document in row.documents}
    split = next(document for document in documents if document.num_tokens < document.document_tokens)
    of_record = when(run_data, split.uri, ordinal=split.ordinal)
    found = when(run_data, split.uri, split.byte_offset + split.byte_length // 2)
    assert {one.granularity for one in of_record} == {one.granularity for one in found} == {"record"}
    assert [one.position for one in found] == [one.position for one in of_record]
    assert {one.granularity for one in when(run_data, split.uri)} == {"file"}
