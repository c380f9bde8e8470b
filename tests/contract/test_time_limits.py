"""A file is imported where its tests run, and a test that hangs fails and shows where every thread stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scheduling import (
    COSTS,
    FAST,
    SLOW,
    is_of_other_part,
    is_slow_module,
)

ROOT = Path(__file__).parents[2]

HANGS = """
import ctypes, threading

def waits_beside():
    threading.Event().wait()

def test_hangs():
    threading.Thread(target=waits_beside, daemon=True).start()
    {hang}
"""


@pytest.mark.parametrize(
    ("hang", "limit"),
    [
        ("threading.Event().wait()", ["-o", "timeout=1"]),
        ("while True: ctypes.PyDLL(None).sleep(1000)", ["-o", "timeout=0", "-o", "faulthandler_timeout=1"]),
    ],
    ids=["waiting", "deaf"],
)
def test_what_hangs_fails_and_shows_every_thread(tmp_path: Path, hang: str, limit: list[str]) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS.format(hang=hang))
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:xdist", *limit, "."]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 1, found.stdout + found.stderr
    assert "waits_beside" in found.stdout + found.stderr
    assert "test_hangs" in found.stdout + found.stderr


def test_every_test_has_a_limit(request: pytest.FixtureRequest) -> None:
    config = request.config
    assert 0 < float(config.getini("timeout")) < float(config.getini("faulthandler_timeout"))
    assert config.getini("faulthandler_exit_on_timeout")


@pytest.mark.parametrize(
    ("text", "is_slow"),
    [
        ("pytestmark = pytest.mark.slow\n", True),
        ("pytestmark = [pytest.mark.torch, pytest.mark.slow]\n", True),
        ("pytestmark = [\n    pytest.mark.torch,\n    pytest.mark.slow,  # [for a reason]\n]\nX = 1\n", True),
        ("pytestmark = [\n    pytest.mark.torch,\n]\n\n\n@pytest.mark.slow\ndef test_it() -> None: ...\n", False),
        ("pytestmark = pytest.mark.torch\nX = [pytest.mark.slow]\n", False),
        ("@pytest.mark.slow\ndef test_it() -> None: ...\n", False),
    ],
)
def test_files_without_a_test_of_a_part_are_left_out(text: str, is_slow: bool) -> None:
    assert is_slow_module(text) == is_slow
    assert is_of_other_part("tests/test_any.py", text, FAST) == is_slow
    assert not is_of_other_part("tests/test_any.py", text, SLOW), "it has a slow test"
    assert not is_of_other_part("tests/test_any.py", text, "")


def test_a_file_without_slow_tests_is_left_out_unless_a_test_is_long() -> None:
    recorded = next(test for test, cost in COSTS.items() if "::" in test and cost[1] > 5).partition("::")[0]
    assert is_of_other_part("tests/test_any.py", "def test_it() -> None: ...\n", SLOW)
    assert not is_of_other_part(recorded, "def test_it() -> None: ...\n", SLOW)
