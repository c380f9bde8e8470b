"""vorox claim through the command line: pairs, verdicts, the register, and what it refuses, with the numpy engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
from vorox.cli import main
from vorox.core.config import load_config
from vorox.records.run_context import recorded_config

CLAIM = "A beats B on eval loss"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two configurations; fast.yaml learns more in its 12 steps than slow.yaml."""
    tiny_runs.use_numpy_engine(monkeypatch)
    tiny_runs.configuration(tmp_path)
    monkeypatch.chdir(tmp_path)
    settings = json.loads(Path("tiny.yaml").read_text(encoding="utf-8"))
    for name, rate in (("fast", 0.02), ("slow", 0.01)):
        settings["optimizer"]["lr"] = rate
        Path(f"{name}.yaml").write_text(json.dumps(settings), encoding="utf-8")
    return tmp_path


def claim(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["claim", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_claim_that_holds(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = claim(capsys, CLAIM, "fast.yaml", "slow.yaml", "--pairs", "8")
    print(json.dumps(found, indent=1)[:3000])
    assert main(["claim", CLAIM, "fast.yaml", "slow.yaml", "--pairs", "8"]) == 0
    assert main(["claims", "list"]) == 0
    assert main(["claims", "verify"]) == 0
    print(capsys.readouterr())
    assert 0
