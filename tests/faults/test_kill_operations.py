"""Killed at a file operation, anywhere between the first directory and the last checkpoint, and again while resuming.

Random instants rarely fall into the microseconds in which files are created, renamed and removed; here every kill does.
The run is tiny and has the numpy engine; data, cache, plan, loop and checkpoints are the real ones.
"""

from __future__ import annotations

import json
import os
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


Place = list[str | int]
"""Name of an operation, and how often that name came before it."""


def run_script(places: list[Place | None]) -> list[dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), json.dumps(places)]
    path = os.pathsep.join([str(SCRIPT.parents[1]), *sys.path])  # the package that is tested here
    environment = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def one_of_each_kind(operations: list[Place]) -> list[Place]:
    """Operations such that every write, rename and removal on every kind of file is among them."""
    first: dict[str, Place] = {}
    for name, count in operations:
        assert isinstance(name, str)
        if name.startswith(("write ", "rename ", "remove ", "mkdir ")):
            kind = re.sub(r"chunks/\S+", "chunk", re.sub(r"-[0-9a-f]{8,12}\b|\d+", "", name))
            first.setdefault(kind, [name, count])
    return list(first.values())


def test_killed_at_a_file_operation_and_again_while_resuming() -> None:
    (straight,) = run_script([None])
    operations: list[Place] = straight["operations"]
    places = one_of_each_kind(operations)
    places += [place for place in [*operations[::61], operations[-1]] if place not in places]
    outcomes = run_script([*places])
    assert [outcome["at"] for outcome in outcomes] == places
    for outcome in outcomes:
        for key in ("chain", "fingerprint", "eval_losses"):
            assert outcome[key] == straight[key], f"{key} differs after kills at {outcome['died']}"
    died = [place for outcome in outcomes for place in outcome["died"] if place]
    assert len(died) > 1.5 * len(places)
    for place in ("cache/", "chunks/", "step-0", "MANIFEST.json", "chain.jsonl", "plan.jsonl", "run.json", "log.txt"):
        assert any(place in text for text in died), f"no kill fell on {place}"
    for kind in ("mkdir", "write", "rename", "remove"):
        assert any(text.startswith(kind + " ") for text in died), f"no kill fell on a {kind}"
