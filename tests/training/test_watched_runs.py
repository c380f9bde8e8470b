"""Runs under a watchdog: a stall in a step or its data ends the run and is named; slow data and validation are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from eventually import PATIENCE_SECONDS
from tiny_runs import configuration, result, run, use_numpy_engine
from vorox.core.config.resolve import dump_yaml
from vorox.core.run_layout import RunLayout
from vorox.records.replay_chain import read_chain
from vorox.run import Outcome
from vorox.training.checkpoints.store import latest_valid

TIMEOUT_SECONDS = 5.0
SETTINGS = [f"runtime.stall_timeout_seconds={TIMEOUT_SECONDS}", "eval.at_end=false"]


def train(directory: Path, fault: str, overrides: Sequence[str] = ()) -> tuple[subprocess.CompletedProcess[str], Path]:
    file = directory / "watched.yaml"
    file.write_text(dump_yaml(configuration(directory, [*SETTINGS, *overrides])), encoding="utf-8")
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(Path(__file__).with_name("watched_run.py")), str(file), fault]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=PATIENCE_SECONDS)
    return done, next((directory / "runs").iterdir())


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        use_numpy_engine(patch)
        return run(configuration(tmp_path_factory.mktemp("straight"), ["eval.at_end=false"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("step", "has not finished forward and backward pass of step 6 for "),
        ("data", "has waited for the batch of step 6 for "),
    ],
)
def test_a_stall_ends_the_run_and_a_resume_is_bit_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: Outcome, fault: str, sentence: str
) -> None:
    done, directory = train(tmp_path, fault)
    assert done.returncode == 6, done.stderr
    failure = json.loads(RunLayout(directory).failure.read_bytes())
    assert (failure["error"], failure["exit_code"]) == ("StalledError", 6)
    assert sentence in failure["what"]
    assert sentence in done.stderr
    assert ("data queue is empty" in failure["what"]) == (fault == "data")
    assert failure["saved"] == "training state up to step 4 is safe in step-00000004"
    assert "stuck" in failure["traceback"]
    use_numpy_engine(monkeypatch)
    resumed = run(configuration(tmp_path, SETTINGS))
    assert result(resumed)["chain"] == result(straight)["chain"]
    assert resumed.fingerprint == straight.fingerprint
    attempts = json.loads(RunLayout(directory).record.read_bytes())["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == ["killed", "finished"]
    assert attempts[0]["failure"]["error"] == "StalledError"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("validation", " has made no progress in the validation after step 6 for 10 s"),
        ("save", " has not finished the save after step 12 for 10 s"),
    ],
)
def test_a_hang_inside_a_validation_or_a_save_ends_the_run(tmp_path: Path, fault: str, sentence: str) -> None:
    """The save of step 8 hangs in the background; the loop waits for it before it saves step 12."""
    done, directory = train(tmp_path, fault, ["runtime.long_stall_timeout_seconds=10"])
    assert done.returncode == 6, done.stderr
    failure = json.loads(RunLayout(directory).failure.read_bytes())
    assert failure["error"] == "StalledError"
    assert sentence in failure["what"]
    assert failure["saved"] == "training state up to step 4 is safe in step-00000004"
    assert "stuck" in failure["traceback"]


@pytest.mark.slow
def test_a_slow_store_and_a_long_validation_are_no_stall(tmp_path: Path, straight: Outcome) -> None:
    """Each takes more than twice the limit; no bit changes."""
    done, directory = train(tmp_path, "slow")
    assert done.returncode == 0, done.stderr
    assert read_chain(directory) == read_chain(straight.run_directory)
    assert list(RunLayout(directory).watchdog.iterdir()) == []
    checkpoint = latest_valid(directory)
    assert checkpoint is not None
    assert checkpoint.metadata["fingerprint"] == straight.fingerprint
