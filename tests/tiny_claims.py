"""Claims on two tiny configurations, and what a forger does to their register."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
from vorox.cli import main
from vorox.core.files.chained_log import HashChainedLog

CLAIM = "A beats B on eval loss"
REGISTER = Path("runs/claims/register.jsonl")


def write_configurations(folder: Path, **data: Any) -> None:
    tiny_runs.configuration(folder)
    settings = json.loads((folder / "tiny.yaml").read_text(encoding="utf-8"))
    settings["data"] |= data
    settings["run"].pop("directory")
    for name, rate in (("fast", 0.03), ("slow", 0.01)):
        settings["optimizer"]["lr"] = rate
        (folder / f"{name}.yaml").write_text(json.dumps(settings), encoding="utf-8")


def claim(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["claim", *words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def fast_beats_slow(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return claim(capsys, CLAIM, "fast.yaml", "slow.yaml", "--pairs", "9", *words)


def refused(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    capsys.readouterr()
    assert main([*words]) == code
    return " ".join(capsys.readouterr().err.split())


def verified(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """What is wrong with the newest claim."""
    capsys.readouterr()
    code = main(["claims", "verify", *words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["is_valid"] is (not found["findings"]) is (code == 0)
    assert code in (0, 5)
    return [f"{one['where']}: {one['what']}" for one in found["findings"]]


def rewrite(change: Callable[[dict[str, Any]], Any], *, kind: str = "pair") -> None:
    """Change entries of the register as somebody would who writes a new one, with a chain that is intact."""
    bodies, _ = HashChainedLog(REGISTER).read()
    REGISTER.unlink()
    for body in bodies:
        if body["kind"] == kind:
            change(body)
    HashChainedLog(REGISTER).append(bodies)


def a_run_of(found: dict[str, Any], pair: int = 1, side: int = 0) -> Path:
    return Path("runs") / found["pairs"][pair - 1]["runs"][side]["run"]
