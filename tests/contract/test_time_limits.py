"""A test that hangs fails and shows where every thread stands, also one that Python cannot interrupt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
