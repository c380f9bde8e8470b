"""The harnesses of benchmarks whose figures are published: every contender runs, and every figure is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(sys.platform == "win32", reason="it needs pseudo-terminals")
def test_display_cost(tmp_path: Path) -> None:
    sizes = ["--rounds", "1", "--steps", "23", "--warmup-steps", "2", "--hidden-size", "32"]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "display_cost.py", *sizes, "--results", tmp_path], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    trials = json.loads((tmp_path / "display_cost.json").read_text())["trials"]
    assert list(trials) == ["silent", "plain lines", "live display", "live display and dashboard"]
    for name, (found,) in trials.items():
        assert found["steps"] == 20
        assert found["step_seconds"] > found["record_seconds"] > found["tracker_seconds"] > 0
        if name == "silent":
            assert found["display_calls"] == found["display_seconds"] == 0
        else:
            assert found["display_calls"] >= 2, "steps 10 and 20"
            assert found["record_seconds"] > found["display_seconds"] + found["tracker_seconds"] > 0
            assert found["cpu_seconds"] > 0
            assert found["monitor_seconds"] > found["record_seconds"]
            assert found["display_cpu_seconds"] > 0
            assert found["tracker_cpu_seconds"] > 0
    (shown,) = trials["live display and dashboard"]
    assert shown["events"] >= 1
    assert shown["pages"] >= 1
    assert shown["dashboard_cpu_per_second"] > 0
    assert "| live display and dashboard | " in done.stdout


@pytest.mark.slow
@pytest.mark.torch
def test_false_alarms(tmp_path: Path) -> None:
    sizes = ["--minutes", "0.5", "--timeout", "2", "--results", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "false_alarms.py", *sizes], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "false_alarms.json").read_text())
    assert (found["exit_code"], found["false_alarms"]) == (75, 0)
    assert found["responses"]["sent"] > 0
