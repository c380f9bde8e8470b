"""``--json`` of the verbs of re-execution: standard output is one JSON document and nothing else, or nothing at all.

A strict parser reads all of standard output, also where the verb trains, computes states, or fails.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
from vorox.cli import main
from vorox.core.run_layout import RunLayout
from vorox.data.provenance.queries import where
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.records.run_lookup import run_directories

pytestmark = pytest.mark.slow

EVERY_DOCUMENT = ["data.validation.held_out_fraction=0", "eval.every_steps=null"]


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return tiny_runs.run(tiny_runs.configuration(tmp_path, EVERY_DOCUMENT)).run_directory


class Terminal:
    """Runs commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def json(self, words: Sequence[object], code: int = 0) -> Any:
        """Run a command with ``--json``, and return the one document that it prints."""
        self._capsys.readouterr()
        assert main([*map(str, words), "--json"]) == code
        return json.loads(self._capsys.readouterr().out)

    def refused(self, words: Sequence[object], code: int) -> str:
        """Run a command with ``--json`` that must fail and print nothing; return its error."""
        self._capsys.readouterr()
        assert main([*map(str, words), "--json"]) == code
        printed = self._capsys.readouterr()
        assert printed.out == ""
        return " ".join(printed.err.split())


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


def read_at(run: Path, step: int) -> int:
    """A document that the step reads."""
    with RunDataIndex.open(run) as run_data:
        return where(run_data, step)[0].documents[0].ordinal


def test_a_fork_prints_one_document_after_its_training(terminal: Terminal, parent: Path) -> None:
    planned = terminal.json(["fork", f"{parent}@6", "optimizer.lr=0.001", "--plan"])
    assert (planned["step"], planned["is_kept"]) == (6, False)
    trained = terminal.json(["fork", f"{parent}@6", "optimizer.lr=0.001", "--name", "slower"])
    assert (trained["parent"], trained["step"], trained["is_trained"]) == (parent.name, 6, True)
    assert (Path(trained["directory"]) / "checkpoints" / "step-00000012").is_dir()
    assert "has no step 13" in terminal.refused(["fork", f"{parent}@13"], 2)


def test_unlearn_prints_the_statement(terminal: Terminal, parent: Path) -> None:
    ordinal = read_at(parent, 7)
    command = ["unlearn", parent, "--document", f"text.jsonl:{ordinal}"]
    planned = terminal.json([*command, "--plan"])
    done = terminal.json([*command, "--erase", "--yes"])
    assert {**planned, "num_steps": 0, "seconds": 0, "size_bytes": 0} == {
        **{name: value for name, value in done.items() if name in planned},
        "num_steps": 0, "seconds": 0, "size_bytes": 0,
    }  # fmt: skip
    assert 7 in done["steps"]
    directory = Path(done["directory"])
    assert directory.name == done["unlearned"]
    (path,) = RunLayout(directory).statements.iterdir()
    assert done["statement"] == {"path": str(path), "key_ids": [], "content": json.loads(path.read_text())}
    assert done["statement"]["content"]["predicate"]["acts"] == done["acts"]
    (erased,) = done["erased"]
    assert (erased["num_documents"], erased["num_chunks"] > 0) == (1, True)
    assert "reads no record 600" in terminal.refused(["unlearn", parent, "--document", "text.jsonl:600"], 2)


def test_nothing_to_unlearn_is_an_answer(terminal: Terminal, tmp_path: Path) -> None:
    settings = [*EVERY_DOCUMENT, "train.num_steps=2", "checkpoint.every_steps=2", "train.global_batch_sequences=2"]
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path, settings)).run_directory
    with RunDataIndex.open(parent) as run_data:
        read = {part.ordinal for step in (1, 2) for row in where(run_data, step) for part in row.documents}
    unread = min({*range(60)} - read)
    done = terminal.json(["unlearn", parent, "--document", f"text.jsonl:{unread}"])
    assert [done[name] for name in ("clean_step", "unlearned", "directory", "statement")] == [None] * 4
    assert done["erased"] == []
    assert run_directories(parent.parent) == [parent]


def test_the_other_verbs(terminal: Terminal, parent: Path, tmp_path: Path) -> None:
    states = ["checkpoints", "materialize", parent, "--step", 6]
    assert terminal.json([*states, "--plan"])["num_checkpoints"] == 1
    (written,) = terminal.json([*states, "--to", tmp_path / "states"])
    assert Path(written["path"]).is_dir()
    assert "already there" in terminal.refused([*states, "--to", tmp_path / "states"], 5)
    assert terminal.json(["explain", f"{parent}@7", "--plan"])["num_documents"] > 0
    assert terminal.json(["explain", f"{parent}@7", "--next", 0])["step"] == 7
    assert "has no step 13" in terminal.refused(["explain", f"{parent}@13"], 2)
    segments = ["audit", parent, "--segments", 2]
    terminal.json([*segments, "--plan"])
    assert terminal.json(segments)["verdict"] == "passed"
    assert "is empty" in terminal.refused([*segments, "--challenge", ""], 2)
    assert terminal.json(["runs", "time", parent])["wall_seconds"] > 0
    assert "missing" in terminal.refused(["runs", "time", tmp_path / "missing"], 2)


def test_claims(terminal: Terminal, tmp_path: Path) -> None:
    settings = ["log.every_steps=1", "eval.every_steps=4", "eval.num_sequences=4"]
    tiny_runs.configuration(tmp_path, settings)
    file = tmp_path / "tiny.yaml"
    content = json.loads(file.read_text())
    del content["run"]["name"]
    for name, rate in (("A", 0.01), ("B", 0.0001)):
        content["optimizer"]["lr"] = rate
        (tmp_path / f"{name}.yaml").write_text(json.dumps(content))
    command = ["claim", "A beats B on eval loss", tmp_path / "A.yaml", tmp_path / "B.yaml", "--pairs", 6]
    assert terminal.json([*command, "--plan"])["pairs"] == 6
    claimed = terminal.json(command)
    assert claimed["verdict"]["num_pairs"] == len(claimed["pairs"])
    root = ["--root", tmp_path / "runs"]
    assert [one["claim"] for one in terminal.json(["claims", "list", *root])] == [claimed["claim"]]
    assert terminal.json(["claims", "verify", claimed["claim"][:12], *root])["is_valid"]
    assert terminal.refused(["claims", "verify", "none", *root], 2)
