"""``vorox parity`` on a small run: a table, a verdict, numbers as JSON; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiny_runs import configuration
from vorox.cli import main

pytestmark = [pytest.mark.torch, pytest.mark.jax]


def test_parity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configuration(tmp_path)
    words = ["parity", str(tmp_path / "tiny.yaml"), "--steps", "3", "runtime.num_threads=null"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "LOSS torch" in said
    assert "Equal over 3 steps; largest differences: logits" in said
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["equal"]
    assert [step["step"] for step in report["steps"]] == [0, 1, 2]
    assert all(step["differences"]["loss"] <= report["tolerances"]["loss"] for step in report["steps"])


def test_parity_sets_dropout_to_zero_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configuration(tmp_path)
    words = ["parity", str(tmp_path / "tiny.yaml"), "--steps", "2", "runtime.num_threads=null", "--json"]
    assert main([*words, "model.dropout_fraction=0.5"]) == 0
    with_dropout = capsys.readouterr()
    assert "Dropout 0.5 is set to 0" in with_dropout.err
    assert main(words) == 0
    without = capsys.readouterr()
    assert "Dropout" not in without.err
    assert json.loads(with_dropout.out) == json.loads(without.out)


def test_parity_in_lower_precision_is_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configuration(tmp_path)
    words = [str(tmp_path / "tiny.yaml"), "--steps", "2", "runtime.num_threads=null", "precision.dtype=bf16"]
    assert main(["parity", *words]) == 7
    assert "Engines diverge at step 1" in capsys.readouterr().err


def test_parity_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "optimizer.lr=1e-3"]) == 2
    assert "No configuration is named" in capsys.readouterr().err
