"""``vorox data where``, ``when`` and ``sql`` on a real run that crashed once: what is printed and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
from numpy_engine import NumpyEngine
from vorox.cli import main

Run = Callable[..., tuple[int, str, str]]


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in step 7 and resumed from its checkpoint of step 4."""
    directory = tmp_path_factory.mktemp("trained")
    original = NumpyEngine.train_step
    with pytest.MonkeyPatch.context() as monkeypatch:
        tiny_runs.use_numpy_engine(monkeypatch)
        config = tiny_runs.configuration(directory)

        def train_step(self: NumpyEngine, batch: Any, **kwargs: float) -> Any:
            if batch.step + 1 == 7:
                raise Killed
            return original(self, batch, **kwargs)

        monkeypatch.setattr(NumpyEngine, "train_step", train_step)
        with pytest.raises(Killed):
            tiny_runs.run(config)
        monkeypatch.setattr(NumpyEngine, "train_step", original)
        tiny_runs.run(config)
    return directory


@pytest.fixture
def house(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(trained / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def vorox(house: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(words))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def as_json(found: tuple[int, str, str]) -> Any:
    code, out, err = found
    assert code == 0, err
    return json.loads(out)


def the_run(house: Path) -> Path:
    (directory,) = (house / "runs").iterdir()
    return directory


def test_where_names_the_documents_and_shows_their_text(vorox: Run, trained: Path) -> None:
    rows = as_json(vorox("data", "where", "latest", "--step", "3", "--text", "--json"))
    assert [row["slot"] for row in rows] == [0, 1, 2, 3]
    raw = (trained / "text" / "text.jsonl").read_bytes()
    for row in rows:
        for document in row["documents"]:
            start, length = document["byte_offset"], document["byte_length"]
            text = json.loads(raw[start : start + length])["text"]
            first, last = document["first_token"], document["first_token"] + document["num_tokens"]
            assert document["text"] == text[first:last]
            assert document["text_origin"] == "source"
            assert len(document["text_xxh3"]) == 16
    code, out, _ = vorox("data", "where", "latest", "--step", "3", "--text")
    assert code == 0
    for row in rows:
        assert f"step 3, slot {row['slot']}: text, epoch 0, row {row['row']}, {row['num_tokens']} tokens" in out
        for document in row["documents"]:
            last = document["byte_offset"] + document["byte_length"]
            assert f"record {document['ordinal']}, bytes {document['byte_offset']:,} to {last:,}: " in out
            assert document["text"].split("\n")[0] in out


def test_where_of_one_slot(vorox: Run) -> None:
    all_rows = as_json(vorox("data", "where", "latest", "--step", "12", "--json"))
    assert as_json(vorox("data", "where", "latest", "--step", "12", "--slot", "2", "--json")) == all_rows[2:3]
    _, out, _ = vorox("data", "where", "latest", "--step", "12", "--slot", "2")
    assert out.count("step 12, slot") == 1


def test_text_of_a_file_that_is_gone_is_decoded_and_said(vorox: Run, trained: Path) -> None:
    file, aside = trained / "text" / "text.jsonl", trained / "text" / "aside"
    expected = as_json(vorox("data", "where", "latest", "--step", "2", "--text", "--json"))
    file.rename(aside)
    try:
        found = as_json(vorox("data", "where", "latest", "--step", "2", "--text", "--json"))
        _, out, _ = vorox("data", "where", "latest", "--step", "2", "--text")
    finally:
        aside.rename(file)
    for one, other in zip(expected, found, strict=True):
        for before, after in zip(one["documents"], other["documents"], strict=True):
            assert after["text"] == before["text"]
            assert (after["text_origin"], before["text_origin"]) == ("cache", "source")
            assert after["text_not_from_source_because"]
    assert "decoded from the cache: " in out


def test_when_finds_what_where_says(vorox: Run) -> None:
    for step in range(1, 13):
        for row in as_json(vorox("data", "where", "latest", "--step", str(step), "--json")):
            for document in row["documents"]:
                byte = str(document["byte_offset"])
                found = as_json(vorox("data", "when", "latest", "--source", "text.jsonl", "--byte", byte, "--json"))
                here = [one for one in found if one["position"] == row["position"]]
                assert {(one["step"], one["slot"], one["row"]) for one in here} == {(step, row["slot"], row["row"])}
                states = {(one["attempt"], one["state"]) for one in here}
                expected = {(1 if step <= 4 else 2, "kept")} | ({(1, "rolled_back")} if step in {5, 6} else set())
                assert states == expected


def test_when_prints_a_table_of_steps(vorox: Run) -> None:
    (row, *_) = as_json(vorox("data", "where", "latest", "--step", "5", "--json"))
    document = row["documents"][0]
    code, out, _ = vorox("data", "when", "latest", "--source", document["uri"], "--record", str(document["ordinal"]))
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == document["uri"]
    assert lines[1].split() == ["STEP", "SLOT", "EPOCH", "SOURCE", "ROW", "STATE", "ATTEMPT"]
    cells = [line.split() for line in lines[2:]]
    assert ["5", str(row["slot"]), "0", "text", str(row["row"]), "rolled", "back", "1"] in cells
    assert ["5", str(row["slot"]), "0", "text", str(row["row"]), "kept", "2"] in cells


def test_when_of_a_whole_file_prints_the_first_of_many(vorox: Run) -> None:
    code, out, _ = vorox("data", "when", "latest", "--source", "text.jsonl")
    assert code == 0
    assert "use --json for all" in out
    assert "after the run's last step" in out
    assert len(as_json(vorox("data", "when", "latest", "--source", "text.jsonl", "--json"))) > 48


def test_when_of_text_after_the_last_step_describes_no_rows(vorox: Run, trained: Path) -> None:
    lines = (trained / "text" / "text.jsonl").read_bytes().splitlines(keepends=True)
    ask = ("data", "when", "latest", "--source", "text.jsonl")
    for record in range(len(lines)):
        found = as_json(vorox(*ask, "--record", str(record), "--json"))
        if found and all(one["state"] == "beyond" for one in found):
            break
    else:
        pytest.fail("every document is trained on")
    out = vorox(*ask, "--byte", str(sum(map(len, lines[:record]))))[1].splitlines()
    assert out[0] == "No step of this run."
    assert [line for line in out[1:] if "after the run's last step" not in line] == []


def test_when_of_nothing_says_so(vorox: Run) -> None:
    code, out, _ = vorox("data", "when", "latest", "--source", "text.jsonl", "--byte", str(10**12))
    assert code == 0
    assert out.startswith("No step: ")
    assert as_json(vorox("data", "when", "latest", "--source", "text.jsonl", "--byte", str(10**12), "--json")) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("where", "latest"), "--step"),
        (("where", "latest", "--step", "0"), "step"),
        (("where", "latest", "--step", "999999"), "Step 999,999 is not in the run's data plan"),
        (("where", "latest", "--step", "1", "--slot", "4"), "Slot 4 does not exist"),
        (("where", "nobody", "--step", "1"), "Run nobody not found"),
        (("when", "latest", "--source", "txet.jsonl"), "id you mean"),
        (("when", "latest"), "--source"),
        (("sql", "latest", "DELETE FROM run"), "must be read-only"),
        (("sql", "latest", "SELECT nobody FROM run"), "no such column"),
        (("sql", "latest", "SELECT 1", "--samples", "5"), "is not a range of steps"),
        (("sql", "latest", "SELECT 1", "--samples", "7:5"), "is not a range of steps"),
        (("sql", "latest", "SELECT 1", "--samples", "1:999999"), "is not in the run's data plan"),
    ],
)
def test_what_makes_no_sense_is_refused_with_2(vorox: Run, words: tuple[str, ...], message: str) -> None:
    code, _, err = vorox("data", *words)
    assert code == 2
    assert message in err


def test_a_cache_that_is_gone_is_a_data_error(vorox: Run, trained: Path) -> None:
    cache, aside = trained / "cache", trained / "aside"
    cache.rename(aside)
    try:
        code, _, err = vorox("data", "where", "latest", "--step", "1")
    finally:
        aside.rename(cache)
    assert code == 4
    assert "cache of source 'text' is missing" in err


def test_sql(vorox: Run) -> None:
    question = "SELECT attempt, first_step, last_step, outcome FROM consumed ORDER BY attempt, first_step"
    assert as_json(vorox("data", "sql", "latest", question, "--json")) == [
        {"attempt": 1, "first_step": 1, "last_step": 4, "outcome": "kept"},
        {"attempt": 1, "first_step": 5, "last_step": 6, "outcome": "rolled_back"},
        {"attempt": 2, "first_step": 5, "last_step": 12, "outcome": "kept"},
    ]
    code, out, _ = vorox("data", "sql", "latest", question)
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["attempt", "first_step", "last_step", "outcome"], ["1", "1", "4", "kept"], ["1", "5", "6", "rolled_back"],
        ["2", "5", "12", "kept"],
    ]  # fmt: skip
    assert vorox("data", "sql", "latest", "SELECT * FROM run WHERE seed = 9")[1] == "No rows\n"


def test_sql_over_samples_files_and_chunks(vorox: Run, house: Path) -> None:
    question = "SELECT uri, COUNT(DISTINCT position) AS n FROM samples WHERE outcome = 'kept' GROUP BY uri"
    assert as_json(vorox("data", "sql", "latest", question, "--json")) == []
    (row,) = as_json(vorox("data", "sql", "latest", question, "--samples", "5:8", "--json"))
    assert row["n"] == 16
    joined = "SELECT COUNT(*) AS n FROM sample JOIN source_file ON source_file.uri = sample.uri"
    (row,) = as_json(vorox("data", "sql", "latest", joined, "--inventory", "--json"))
    assert row["n"] >= 16
    (the_run(house) / "metadata.sqlite").unlink()
    assert vorox("data", "sql", "latest", "SELECT 1")[0] == 2
    assert as_json(vorox("data", "sql", "latest", "SELECT COUNT(*) AS n FROM consumed", "--refresh", "--json")) == [
        {"n": 3}
    ]


def test_a_run_with_its_metadata_can_be_removed(vorox: Run, house: Path) -> None:
    directory = the_run(house)
    (directory / "metadata.sqlite-journal").write_bytes(b"")
    assert {"attempts.bin", "metadata.sqlite"} <= {path.name for path in directory.iterdir()}
    code, _, err = vorox("runs", "remove", "latest", "--yes")
    assert (code, err) == (0, "")
    assert not directory.exists()


def test_asking_needs_no_engine_and_no_database(house: Path, trained: Path) -> None:
    (the_run(house) / "metadata.sqlite").unlink()
    program = (
        "import sys\n"
        "from vorox.cli import main\n"
        "asked = ['where', 'latest', '--step', '2'], ['when', 'latest', '--source', 'text.jsonl']\n"
        "codes = [main(['data', *words]) for words in asked]\n"
        "loaded = {'torch', 'jax', 'transformers', 'sqlite3', 'psycopg', 'pyarrow'} & set(sys.modules)\n"
        "sys.exit(f'{codes} {loaded}' if loaded or any(codes) else 0)\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=house)
    assert finished.returncode == 0, finished.stderr


def test_records_count_from_0_everywhere(vorox: Run, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record's number, as peek, where and when say it, is the line of the file that has its text."""
    lines = (trained / "text" / "text.jsonl").read_text().splitlines()
    peeked = as_json(vorox("data", "peek", str(trained / "tiny.yaml"), "--json"))
    shown = vorox("data", "peek", str(trained / "tiny.yaml"))[1]
    for segment in (segment for row in peeked for segment in row["segments"]):
        number, text = segment["ordinal"], json.loads(lines[segment["ordinal"]])["text"]
        assert segment["text"].removesuffix("<|endoftext|>") in text
        assert f"record {number:,}, bytes {segment['byte_offset']:,} to" in shown
        first = as_json(vorox("data", "when", "latest", "--source", "text.jsonl", "--record", str(number), "--json"))[0]
        rows = as_json(
            vorox("data", "where", "latest", "--step", str(first["step"]), "--slot", str(first["slot"]), "--json")
        )
        places = [(d["ordinal"], d["byte_offset"]) for row in rows for d in row["documents"]]
        assert (number, segment["byte_offset"]) in places
