"""A disk that is full in the middle of a save, by a real limit on the size of files: exit code 5, nothing lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_runs import configuration
from vorox.core.run_layout import step_directories
from vorox.records.replay_chain import read_chain
from vorox.training.checkpoints.store import latest_valid

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="RLIMIT_FSIZE"),
]
LIMITED = (
    "import resource, runpy, sys; limit = int(sys.argv.pop(1)); "
    "resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)); sys.argv[0] = 'vorox'; "
    "runpy.run_module('vorox', run_name='__main__')"
)


def train(directory: Path, limit_bytes: int | None, *settings: str) -> subprocess.CompletedProcess[str]:
    program = ["-m", "vorox"] if limit_bytes is None else ["-c", LIMITED, str(limit_bytes)]
    command = [sys.executable, *program, "train", "tiny.yaml", *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=directory, capture_output=True, text=True, check=False, timeout=300, env=environment
    )


def test_no_room_for_a_checkpoint(tmp_path: Path) -> None:
    configuration(tmp_path)
    straight = train(tmp_path, None, "run.directory=straight")
    assert straight.returncode == 0, straight.stderr
    directory = next((tmp_path / "straight").iterdir())
    largest_bytes = max(file.stat().st_size for file in step_directories(directory)[12].iterdir())

    failed = train(tmp_path, largest_bytes - 1)  # all but the last byte of the largest file fits
    assert failed.returncode == 5, failed.stderr
    assert "No room for the checkpoint of step 4" in failed.stderr
    broken = next((tmp_path / "runs").iterdir())
    assert list((broken / "checkpoints").iterdir()) == [], "nothing half-written is left"
    assert (broken / "failure.json").exists()

    resumed = train(tmp_path, None)
    assert resumed.returncode == 0, resumed.stderr
    found, expected = latest_valid(broken), latest_valid(directory)
    assert found is not None
    assert expected is not None
    assert found.metadata["fingerprint"] == expected.metadata["fingerprint"]
    assert read_chain(broken) == read_chain(directory)
