"""Call paths stay as short as ``docs/decisions.md`` says (``make structure`` prints them)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_MODULES = {"document to chunk": 29, "chunk to batch": 10, "step to disk": 14, "save": 15, "resume": 17}


@pytest.mark.slow
def test_no_path_executes_more_modules() -> None:
    printed = subprocess.run(
        [sys.executable, "tests/structure.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    found = {name: int(count) for name, count in re.findall(r"^([a-z ]+): (\d+) modules", printed, re.MULTILINE)}
    assert found.keys() == MOST_MODULES.keys()
    assert {name: count for name, count in found.items() if count > MOST_MODULES[name]} == {}
