"""The suite selects its tests by what is installed: with only torch, only JAX, and neither, what is left passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("without", ["torch", "jax", "torch,jax"])
def test_what_is_left_passes(without: str) -> None:
    """Everything is collected; loop, resume, replay and the conformance of the engines that are left are run."""
    environment = {**os.environ, "VOROX_TESTS_WITHOUT": without}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    collected = subprocess.run(
        [*command, "--collect-only", "tests"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert collected.returncode == 0, collected.stdout[-3000:]
    chosen = [
        "tests/conformance",
        "tests/training/test_resume.py",
        "tests/training/test_replay.py",
        "tests/test_examples.py",
    ]
    found = subprocess.run([*command, *chosen], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-3000:]
    for name in without.split(","):
        assert f"{name} is not installed" in found.stdout
