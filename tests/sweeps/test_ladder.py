"""vorox ladder through the command line, with the numpy engine: its runs, its choice, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
from vorox.cli import main
from vorox.core.config import load_config
from vorox.core.run_context import recorded_config
from vorox.experiments.artifacts import eval_losses


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_runs.use_numpy_engine(monkeypatch)
    tiny_runs.configuration(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def climb(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["ladder", "tiny.yaml", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_per_width_and_rate_and_the_best_rate(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--widths", "32,16", "--lr", "1e-3,3e-2", "model.intermediate_size=24", "--target", "64"]
    found = climb(capsys, *words)
    assert (found["base"], found["target"]) == (16, 64)
    assert [(run["hidden_size"], run["lr"]) for run in found["runs"]] == [
        (16, 0.001), (16, 0.03), (32, 0.001), (32, 0.03)
    ]  # fmt: skip
    for run in found["runs"]:
        config = recorded_config(Path(run["run"]))
        width = run["hidden_size"]
        assert (config.model.hidden_size, config.model.num_heads) == (width, width // 8), "heads of 8"
        assert config.model.intermediate_size == width * 24 // 16
        assert (config.model.mup_base_hidden_size, config.model.tie_embeddings) == (16, False)
        assert config.optimizer.lr == run["lr"]
        assert eval_losses(Path(run["run"]))[12] == run["loss"]
    records = {path: path.read_bytes() for path in (place / "runs").glob("*/chain.jsonl")}
    assert len(records) == 4

    capsys.readouterr()
    assert main(["ladder", "tiny.yaml", *words]) == 0
    assert {path: path.read_bytes() for path in records} == records, "nothing is trained twice"
    said = capsys.readouterr().out
    best = min((run for run in found["runs"] if run["hidden_size"] == 32), key=lambda run: run["loss"])
    assert f"Best at hidden_size 32: lr {best['lr']:g}, validation loss {best['loss']:.4f}" in said
    assert "rate of the ladder: extend --lr" in said
    command = re.search(r"train +(vorox train .*)", " ".join(said.split()))
    assert command is not None
    program, verb, file, *overrides = shlex.split(command[1])
    assert (program, verb, file) == ("vorox", "train", "tiny.yaml")
    wide = load_config("tiny.yaml", overrides)
    assert (wide.model.hidden_size, wide.model.num_heads, wide.model.intermediate_size) == (64, 8, 96)
    assert (wide.model.mup_base_hidden_size, wide.optimizer.lr) == (16, best["lr"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--widths", "20", "--lr", "1e-3"], "no whole number of heads"),
        (["--widths", "16,32", "--lr", "1e-3", "--target", "60"], "no whole number of heads"),
        (["--widths", "16", "--lr", "fast"], "not a list of numbers"),
        (["--widths", "16", "--lr", "1e-3", "eval.at_end=false"], "validation loss at their end"),
        (["--widths", "16", "--lr", "1e-3", "optimizer.name=muon"], "optimizer.name=adamw"),
        (["--widths", "16", "--lr", "0"], "above zero"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    words: list[str], message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ladder", "tiny.yaml", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (place / "runs").exists()


def test_a_diverged_run_is_the_worst(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vorox.core.errors import NumericalError
    from vorox.sweeps import ladder

    train = ladder.train

    def diverges(config: Any, **named: Any) -> Any:
        if config.optimizer.lr > 0.01:
            raise NumericalError("not finite", where="step 3")
        return train(config, **named)

    monkeypatch.setattr(ladder, "train", diverges)
    assert main(["ladder", "tiny.yaml", "--widths", "16", "--lr", "1e-3,1"]) == 0
    said = capsys.readouterr().out
    assert "lr 1: validation loss inf" in said
    assert "Best at hidden_size 16: lr 0.001" in said
