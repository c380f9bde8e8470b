"""The suite selects its tests by what is installed; `make test-frameworks` runs what is left in real environments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


BELOW_FRAMEWORKS = ["core", "data", "faults", "integration", "servers"]
"""Folders that are collected only where neither framework is, as `make test-frameworks` runs them."""


@pytest.mark.slow
@pytest.mark.parametrize("without", ["torch", "jax", "torch,jax"])
def test_what_is_left_is_collected(without: str) -> None:
    """No module that is collected imports what is not there, and the summary says what was left out."""
    environment = {name: value for name, value in os.environ.items() if name != "TESTS_COMPLETE"}
    environment["TESTS_WITHOUT"] = without
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--collect-only"]
    if "," not in without:
        command += [f"--ignore=tests/{folder}" for folder in BELOW_FRAMEWORKS]
    found = subprocess.run([*command, "tests"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-3000:]
    header = next(line for line in found.stdout.splitlines() if line.startswith("without "))
    assert set(without.split(",")) <= set(header.removeprefix("without ").partition(":")[0].split(", "))
