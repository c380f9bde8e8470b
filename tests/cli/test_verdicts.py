"""``vorox replay`` and ``vorox parity`` leave their verdict in the run; a run that cannot be written is checked too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
from numpy_engine import NumpyEngine
from vorox.cli import main
from vorox.core.run_layout import RunLayout
from vorox.experiments.verdicts import read_verdicts, record_verdict


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_runs.use_numpy_engine(monkeypatch)
    return tiny_runs.run(tiny_runs.configuration(tmp_path)).run_directory


def test_replays_that_agree_and_differ(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(run), "--from", "8"]) == 0
    original = NumpyEngine.train_step

    def train_step(self: NumpyEngine, *args: Any, **kwargs: Any) -> Any:
        kwargs["lr"] *= 2
        return original(self, *args, **kwargs)

    monkeypatch.setattr(NumpyEngine, "train_step", train_step)
    assert main(["replay", str(run), "--from", "8", "--json"]) == 7
    exact, differs = read_verdicts(run)
    assert (exact.kind, exact.passed) == ("replay", True)
    assert exact.text == "bit-exact, 4 steps; from step 8 to step 12, 1 checkpoint compared"
    assert (differs.kind, differs.passed) == ("replay", False)
    assert re.match(r"differs after 1 bit-exact steps; step 10: loss was [\d.]+ \(\w+\), is", differs.text)
    assert exact.time <= differs.time
    capsys.readouterr()
    assert main(["runs", "show", str(run)]) == 0
    assert "replay: bit-exact, 4 steps; from step 8 to step 12" in capsys.readouterr().out
    assert RunLayout(run).foreign_files() == []
    assert RunLayout(run).verdicts in RunLayout(run).mirrored_files()


def test_a_run_that_cannot_be_written_is_replayed(run: Path) -> None:
    RunLayout(run).verdicts.mkdir()
    assert isinstance(record_verdict(run, "replay", passed=True, text="x"), OSError)
    assert main(["replay", str(run), "--from", "8"]) == 0


def test_damaged_and_unknown_lines_are_passed_over(tmp_path: Path) -> None:
    assert read_verdicts(tmp_path) == []
    record_verdict(tmp_path, "replay", passed=True, text="one")
    with RunLayout(tmp_path).verdicts.open("a", encoding="utf-8") as file:
        file.write('{"kind":"replay"}\n[]\nnot JSON\n{"kind":"replay","passed":1,"text":"x","time":""}\n{"kind":"par')
    record_verdict(tmp_path, "parity", passed=False, text="two\nlines")
    found = [(verdict.kind, verdict.passed, verdict.text) for verdict in read_verdicts(tmp_path)]
    assert found == [("replay", True, "one"), ("parity", False, "two\nlines")]


@pytest.mark.torch
@pytest.mark.jax
def test_parity_of_a_run(tmp_path: Path) -> None:
    run = tiny_runs.run(tiny_runs.configuration(tmp_path, ["runtime.num_threads=null"])).run_directory
    assert main(["parity", str(run), "--steps", "2"]) == 0
    assert main(["parity", str(run), "--steps", "2", "precision.dtype=bf16"]) == 7
    equal, diverged = read_verdicts(run)
    assert (equal.kind, equal.passed) == ("parity", True)
    assert equal.text.startswith("Equal over 2 steps; largest differences: logits ")
    assert not diverged.passed
    assert diverged.text.startswith("Engines diverge at step 1: ")
    assert diverged.text.endswith("; with precision.dtype=bf16")
