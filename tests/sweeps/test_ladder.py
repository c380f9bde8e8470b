"""vorox ladder through the command line: its runs, its choice, and what it refuses, with the numpy engine; and with
PyTorch through to the wide model at the recommended rate."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_runs
import vorox
from vorox.cli import main
from vorox.core.config import load_config
from vorox.experiments.artifacts import eval_losses
from vorox.records.run_context import recorded_config


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


@pytest.mark.slow
@pytest.mark.torch
def test_from_narrow_models_to_the_wide_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed losses are those that the models have, the rate is the best one, and the wide model learns at it.

    The first update of AdamW is the learning rate of a parameter: of a matrix ``lr / m``, of a norm ``lr``.
    """
    monkeypatch.chdir(tmp_path)
    tiny_runs.configuration(tmp_path)
    settings = [
        "optimizer.weight_decay=0", "schedule.name=constant", "schedule.warmup_steps=0", "log.matmul_peak=false",
        "checkpoint.every_steps=1", "checkpoint.keep_last=99",
    ]  # fmt: skip
    words = ["ladder", "tiny.yaml", "--widths", "16,32", "--lr", "1e-3,1e-2", "--target", "64", *settings]
    assert main(words) == 0
    said = capsys.readouterr().out
    runs = {
        (int(width), float(lr)): float(loss)
        for width, lr, loss in re.findall(r"hidden_size (\d+), lr (\S+): validation loss (\S+)", said)
    }
    assert sorted(runs) == [(16, 0.001), (16, 0.01), (32, 0.001), (32, 0.01)]
    for (width, lr), printed in runs.items():
        (directory,) = Path("runs").glob(f"tiny-ladder-{width}-{lr:g}-*")
        opened = vorox.open_run(directory)
        loss = vorox.load_model(opened).evaluate(opened.validation_batches()).loss
        assert loss == pytest.approx(printed, abs=1e-4)
    best = min((0.001, 0.01), key=lambda lr: runs[32, lr])
    assert f"Best at hidden_size 32: lr {best:g}, validation loss {runs[32, best]:.4f}" in said
    command = re.search(r"train +(vorox train .*)", " ".join(said.split()))
    assert command is not None
    assert main([*shlex.split(command[1])[1:], "--name", "wide"]) == 0
    (directory,) = Path("runs").glob("wide-*")
    config = recorded_config(directory)
    assert (config.model.hidden_size, config.optimizer.lr) == (64, best)
    after = dict(vorox.load_model(directory, step=1).engine.export_weights())
    for name, before in vorox.create_model(config).engine.export_weights():
        wanted = best / 4 if name.startswith("blocks.") and name.endswith(".weight") and before.ndim == 2 else best
        if name.startswith("head."):
            wanted = best / 4
        assert np.abs(after[name] - before).max() == pytest.approx(wanted, rel=0.02), name
    losses = [values["loss"] for _, values in sorted(vorox.open_run(directory).metrics().items()) if "loss" in values]
    assert losses[-1] < losses[0] - 0.3


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
