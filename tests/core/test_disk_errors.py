"""Errors of disks, shares and memory: which are transient, and what each advises."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from tiny_runs import configuration
from vorox.cli.failure import report_failure
from vorox.cli.launch.restarts import FINAL_EXIT_CODES
from vorox.core.errors import CheckpointError, ConfigError, DataError, DoesNotFitError, VoroxError
from vorox.core.files import file_holder
from vorox.core.files.disk_errors import disk_error, exhausts_memory, memory_error, translate_machine_errors
from vorox.core.files.file_holder import FileLock
from vorox.data.cache.files.chunk import Chunk
from vorox.records import run_record
from vorox.records.run_context import RunContext

TRANSIENT = [errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.ENODEV, errno.EHOSTDOWN, errno.EREMOTEIO]


def failing(number: int, path: Path | None = None) -> OSError:
    return OSError(number, os.strerror(number), *([] if path is None else [str(path)]))


@pytest.mark.parametrize("number", TRANSIENT)
@pytest.mark.parametrize("where", ["LOCK", "run.json"])
def test_an_input_error_at_the_start_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, where: str
) -> None:
    """2 is final for --max-restarts and a requeue; the share may be back in a minute."""

    def fail(*arguments: object, **options: object) -> None:
        raise failing(number)

    config = configuration(tmp_path)
    with RunContext.create(config, argv=["t"]):
        pass
    monkeypatch.setattr(*((file_holder, "_lock", fail) if where == "LOCK" else (run_record, "read_json", fail)))
    with pytest.raises(VoroxError) as caught:
        RunContext.open_or_create(config, argv=["t"])
    assert caught.value.exit_code not in FINAL_EXIT_CODES
    assert isinstance(caught.value, CheckpointError)
    assert "check the disk or the network share" in caught.value.hint


def test_a_file_system_without_locks_is_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise failing(errno.ENOSYS)

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(ConfigError, match="cannot be locked"):
        FileLock(tmp_path / "LOCK", blocking=False).acquire()


def test_an_error_of_a_socket_is_none_of_a_disk() -> None:
    assert disk_error(failing(errno.ETIMEDOUT), "runs") is None
    assert disk_error(failing(errno.ETIMEDOUT, Path("runs/a")), "runs") is not None
    assert disk_error(failing(errno.ENOENT, Path("runs/a")), "runs") is None


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "ulimit -n"), (errno.EIO, "network share"), (errno.ENOMEM, "memory"),
     (errno.ENOTCONN, "network share"), (errno.ENOENT, "data build --repair")],
)  # fmt: skip
def test_a_chunk_is_called_damaged_only_if_it_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def fail(path: Path, *arguments: object, **options: object) -> None:
        raise failing(number, path)

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(DataError) as caught:
        Chunk.open(tmp_path / "u1.psc")
    assert advice in caught.value.hint
    assert ("--repair" in caught.value.hint) == (number == errno.ENOENT)


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), True),
        (ImportError("a.so: cannot open shared object file: Cannot allocate memory"), True),
        (ImportError("a.so: failed to map segment from shared object: Operation not permitted"), False),
        (ImportError("libgomp.so.1: cannot allocate memory in static TLS block"), False),
        (ImportError("No module named torch"), False),
        (OSError(errno.EIO, "Input/output error"), False),
        (RuntimeError("Cannot allocate memory"), False),
    ],
)
def test_memory_that_is_exhausted_while_a_library_loads(
    error: BaseException, is_memory: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("VOROX_CACHE", str(tmp_path))
    assert exhausts_memory(error) == is_memory
    with pytest.raises(DoesNotFitError if is_memory else Exception), translate_machine_errors(tmp_path):
        raise error
    code = report_failure(error, ["train"])
    assert (code == DoesNotFitError.exit_code, "does not fit" in capsys.readouterr().err) == (is_memory, is_memory)
    assert isinstance(memory_error(error), DoesNotFitError)
