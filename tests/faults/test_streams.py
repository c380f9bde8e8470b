"""Standard output and error that are closed, full or unread: runs go on, reading commands end quietly."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
from vorox.cli import main
from vorox.core.files import atomic
from vorox.core.files.atomic import FileOperation
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.experiments.artifacts import inspect_run
from vorox.records.attempts import AttemptRecord
from vorox.records.log import RunLog
from vorox.records.run_context import RunContext
from vorox.records.run_lookup import run_attempts, run_directories

CHILD = Path(__file__).with_name("streams_child.py")
SECONDS = 120
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration, its cache and a finished run."""
    directory = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as monkeypatch:
        tiny_runs.use_numpy_engine(monkeypatch)
        tiny_runs.run(tiny_runs.configuration(directory))
    return directory


def unread_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def vorox(directory: Path, redirection: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    """A command with its output closed, full or sent to a pipe that nobody reads."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(tiny_runs.__file__).parent), *sys.path])}
    command = [sys.executable, str(CHILD), *words]
    if redirection == "pipe":
        writing = unread_pipe()
        try:
            return subprocess.run(
                command, stdout=writing, stderr=subprocess.PIPE, cwd=directory, env=environment, timeout=SECONDS
            )
        finally:
            os.close(writing)
    shell = ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", *command]
    return subprocess.run(shell, stderr=subprocess.PIPE, cwd=directory, env=environment, timeout=SECONDS)


@pytest.mark.skipif(os.name == "nt", reason="no such pipes")
@pytest.mark.parametrize("redirection", ["pipe", ">&- 2>&-", pytest.param(">/dev/full 2>/dev/full", marks=needs_full)])
def test_a_run_outlives_its_reader(prepared: Path, tmp_path: Path, redirection: str) -> None:
    done = vorox(prepared, redirection, "train", "tiny.yaml", f"run.directory={tmp_path}/runs")
    assert (done.returncode, done.stderr) == (0, b"")
    (directory,) = run_directories(tmp_path / "runs")
    assert inspect_run(directory).step == 12
    assert [attempt["outcome"] for attempt in run_attempts(directory)] == ["finished"]
    again = vorox(prepared, redirection, "train", "tiny.yaml", f"run.directory={tmp_path}/runs")
    assert again.returncode == 0


@pytest.mark.skipif(os.name == "nt", reason="no such pipes")
@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [("pipe", 0, b""), (">&-", 0, b""), pytest.param(">/dev/full", 5, b"cannot be written", marks=needs_full)],
)
def test_a_reading_command_ends_quietly(prepared: Path, redirection: str, code: int, said: bytes) -> None:
    done = vorox(prepared, redirection, "runs", "show", "latest")
    assert done.returncode == code
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == (4 if said else 0)


def test_a_log_that_cannot_be_shown_stops_nothing(tmp_path: Path) -> None:
    def broken(text: str, level: str) -> None:
        raise RuntimeError("the terminal has gone")

    log = RunLog(tmp_path, echo=broken)
    log.info("first")
    log.event("second", "second")
    log.close()
    assert "second" in (tmp_path / "log.txt").read_text()


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "somewhere")

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("target", [(Tokenizer, "save"), (AttemptRecord, "__init__"), (RunContext, "note")])
def test_an_error_of_the_disk_is_no_crash(
    prepared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: tuple[type, str],
    number: int,
) -> None:
    monkeypatch.chdir(prepared)
    tiny_runs.use_numpy_engine(monkeypatch)
    monkeypatch.setattr(*target, failing(number))
    assert main(["train", "tiny.yaml", f"run.directory={tmp_path}/runs"]) == 5
    error = capsys.readouterr().err
    assert "run the same command again" in error
    assert "report" not in error
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_error_of_the_disk_after_a_save_says_what_is_safe(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """The replay chain is written at every step and cannot wait in memory, unlike observations."""
    monkeypatch.chdir(prepared)
    tiny_runs.use_numpy_engine(monkeypatch)

    def refuse(operation: FileOperation) -> None:
        if operation.path.name == "chain.jsonl" and b'"step":6' in operation.data.replace(b" ", b""):
            raise OSError(number, os.strerror(number), str(operation.path))

    with atomic.observe(refuse):
        assert main(["train", "tiny.yaml", f"run.directory={tmp_path}/runs"]) == 5
    error = capsys.readouterr().err
    assert "step 4" in error
    (directory,) = run_directories(tmp_path / "runs")
    assert main(["train", "tiny.yaml", f"run.directory={tmp_path}/runs"]) == 0
    assert inspect_run(directory).step == 12
