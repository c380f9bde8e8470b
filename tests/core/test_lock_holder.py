"""Asking who holds a lock, without taking it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vorox.core.file_holder import FileLock, lock_holder

HOLDER = """
import sys, pathlib
from vorox.core.file_holder import FileLock
lock = FileLock(pathlib.Path(sys.argv[1])).acquire()
print("locked", flush=True)
sys.stdin.readline()
"""


def test_a_living_holder_is_named_and_a_dead_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    assert lock_holder(path) is None
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        before = path.read_bytes()
        for _ in range(3):
            assert lock_holder(path) == f"process {process.pid} on {socket.gethostname()}"
        assert path.read_bytes() == before
        process.send_signal(signal.SIGTERM)
        process.wait()
    assert lock_holder(path) is None
    assert path.read_bytes() == before, "asking changes nothing"


def test_a_number_that_another_process_has_by_now_is_no_holder(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    path.write_text(json.dumps({"pid": os.getppid(), "host": socket.gethostname()}))
    assert lock_holder(path) is None


def test_asking_does_not_keep_anybody_out(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    path.write_text(json.dumps({"pid": os.getppid(), "host": socket.gethostname()}))
    assert lock_holder(path) is None
    with FileLock(path, blocking=False):
        assert lock_holder(path) == f"process {os.getpid()} on {socket.gethostname()}"


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"pid": "x", "host": 1}'])
def test_any_content(tmp_path: Path, content: str) -> None:
    path = tmp_path / "LOCK"
    path.write_text(content)
    assert lock_holder(path) is None
