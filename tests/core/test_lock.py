"""Exclusive files between real processes."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eventually import wait_until
from vorox.core import file_holder
from vorox.core.errors import ConfigError
from vorox.core.file_holder import FileLock, this_process

HOLDER = """
import sys, pathlib
from vorox.core.file_holder import FileLock
lock = FileLock(pathlib.Path(sys.argv[1])).acquire()
print("locked", flush=True)
sys.stdin.readline()
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until it reads a line."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_process_is_refused_with_the_holder_named(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    with holder(path) as process:
        with pytest.raises(ConfigError) as caught:
            FileLock(path, blocking=False, purpose="the run x").acquire()
        assert caught.value.exit_code == 2
        assert caught.value.what == f"The run x is in use by process {process.pid} on {socket.gethostname()}"
        assert caught.value.where == str(path)


def test_a_file_system_without_locks_is_no_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, blocking: bool) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(file_holder, "_lock", refuse)
    with pytest.raises(ConfigError) as caught:
        FileLock(tmp_path / "LOCK", blocking=False, purpose="the run x").acquire()
    assert caught.value.what == f"The run x cannot be locked: {os.strerror(errno.ENOLCK)}"
    assert "supports file locks" in caught.value.hint


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_death_of_the_holder_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    with holder(path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        with FileLock(path, blocking=False):
            assert json.loads(path.read_bytes()) == this_process().to_json()


def test_release_frees_and_can_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    first = FileLock(path, blocking=False).acquire()
    with pytest.raises(ConfigError):  # also inside one process
        FileLock(path, blocking=False).acquire()
    first.release()
    first.release()
    with FileLock(path, blocking=False):
        pass


def test_an_error_inside_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    with pytest.raises(RuntimeError), FileLock(path, blocking=False):
        raise RuntimeError
    FileLock(path, blocking=False).acquire().release()


def test_a_refused_attempt_does_not_disturb_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    with FileLock(path, blocking=False):
        before = path.read_bytes()
        for _ in range(3):
            with pytest.raises(ConfigError):
                FileLock(path, blocking=False).acquire()
        assert path.read_bytes() == before


def waits_for_a_lock(process: subprocess.Popen[str]) -> bool:
    """Whether the system has it wait; what waits for nothing would go on and end."""
    assert process.poll() is None, "it did not wait"
    waiting = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "-> FLOCK" in line]
    return str(process.pid) in {words[words.index("->") + 4] for words in waiting}


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="the system does not say who waits")
def test_blocking_waits_for_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    waiter = textwrap.dedent(
        """
        import sys, pathlib
        from vorox.core.file_holder import FileLock
        print("waiting", flush=True)
        with FileLock(pathlib.Path(sys.argv[1])):
            print("mine", flush=True)
        """
    )
    with holder(path) as first:
        assert first.stdin is not None
        with subprocess.Popen([sys.executable, "-c", waiter, str(path)], stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "waiting\n"
            wait_until(lambda: waits_for_a_lock(second))
            first.stdin.write("\n")
            first.stdin.flush()
            assert second.stdout.readline() == "mine\n"


@pytest.mark.parametrize("content", [b"", b"garbage", b"[]", b'{"pid": 1}'])
def test_an_unreadable_holder_is_called_another_process(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "LOCK"
    with FileLock(path, blocking=False):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="in use by another process"):
            FileLock(path, blocking=False).acquire()


def test_a_folder_that_is_missing_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "missing" / "LOCK").acquire()
