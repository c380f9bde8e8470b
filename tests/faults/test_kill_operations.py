"""Killed at a file operation, anywhere between the first directory and the last checkpoint, and again while resuming.

Random instants rarely fall into the microseconds in which files are created, renamed and removed; here every kill does.
The run is tiny and has the numpy engine; data, cache, plan, loop and checkpoints are the real ones.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="forks"),
]
SCRIPT = Path(__file__).with_name("kill_operations.py")


def run_script(numbers: list[int]) -> list[dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), *map(str, numbers)]
    environment = {"PYTHONPATH": str(SCRIPT.parents[1]), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def one_of_each_kind(operations: list[str]) -> list[int]:
    """Numbers of operations, such that every write, rename and removal on every kind of file is among them."""
    first: dict[str, int] = {}
    for number, name in enumerate(operations, start=1):
        if not name.startswith(("write ", "rename ", "remove ", "mkdir ")):
            continue
        kind = re.sub(r"\.tmp-\S+-[0-9a-f]{8}-", ".tmp-", name)
        kind = re.sub(r"chunks/\S+", "chunk", re.sub(r"-[0-9a-f]{8,12}\b|\d+", "", kind))
        first.setdefault(kind, number)
    return sorted(first.values())


def test_killed_at_a_file_operation_and_again_while_resuming() -> None:
    (straight,) = run_script([0])
    operations = straight["operations"]
    numbers = sorted({*one_of_each_kind(operations), *range(1, len(operations), 61), len(operations)})
    outcomes = run_script(numbers)
    assert [outcome["at"] for outcome in outcomes] == numbers
    for outcome in outcomes:
        for key in ("chain", "fingerprint", "eval_losses"):
            assert outcome[key] == straight[key], f"{key} differs after kills at {outcome['died']}"
    died = [place for outcome in outcomes for place in outcome["died"] if place]
    assert len(died) > 1.5 * len(numbers)
    for place in ("cache/", "chunks/", "step-0", "MANIFEST.json", "chain.jsonl", "plan.jsonl", "run.json", "log.txt"):
        assert any(place in text for text in died), f"no kill fell on {place}"
    for kind in ("mkdir", "write", "rename", "remove"):
        assert any(text.startswith(kind + " ") for text in died), f"no kill fell on a {kind}"
