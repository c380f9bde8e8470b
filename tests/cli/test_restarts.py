"""--max-restarts: which failures restart, from where, and when the launcher gives up. Ranks here are shells."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from vorox.cli.launch import rank_launcher
from vorox.cli.launch.restarts import Restarts
from vorox.core.errors import StalledError
from vorox.records.attempts import AttemptRecord


def restarts(directory: Path, limit: int, resume: str = "auto") -> Restarts:
    return Restarts(limit, directory, resume, lambda resume: ["train", "--resume", resume])


def attempt(directory: Path, number: int, start: int, last: int) -> None:
    """An attempt that started steps up to ``last``."""
    with AttemptRecord(directory, number, start, 0) as record:
        record.record_started(last)


def test_the_limit_counts_all_restarts(tmp_path: Path) -> None:
    found = restarts(tmp_path, 4)
    for number in range(1, 5):
        attempt(tmp_path, number, 0, 10 * number)
        assert found.after_failure("") == ["train", "--resume", "auto"]
    attempt(tmp_path, 5, 40, 50)
    assert found.after_failure("") is None


@pytest.mark.parametrize(("limit", "restarted"), [(1, 1), (2, 2), (3, 3), (100, 3)])
def test_restarts_without_progress_end_the_command(tmp_path: Path, limit: int, restarted: int) -> None:
    """Each start repeats steps 5 to 7 and fails; repeated steps are no progress."""
    found = restarts(tmp_path, limit)
    for number in range(1, restarted + 1):
        attempt(tmp_path, number, 4 if number > 1 else 0, 7)
        assert found.after_failure("") is not None
    attempt(tmp_path, restarted + 1, 4, 7)
    with pytest.raises(StalledError, match=rf"No progress after {restarted} restarts? at step 7 ") as stalled:
        found.after_failure("")
    assert stalled.value.exit_code == 6


def test_a_start_that_reaches_no_step_makes_no_progress(tmp_path: Path) -> None:
    attempt(tmp_path, 1, 0, 90)  # of an earlier command
    found = restarts(tmp_path, 9)
    for _ in range(3):
        assert found.after_failure("") is not None
    with pytest.raises(StalledError, match="No progress after 3 restarts at step 90"):
        found.after_failure("")


def test_progress_is_counted_anew(tmp_path: Path) -> None:
    """Two starts without progress, one with, three without."""
    found = restarts(tmp_path, 20)
    for number, last in enumerate((5, 5, 5, 6, 6, 6), start=1):
        attempt(tmp_path, number, 4, last)
        assert found.after_failure("") is not None
    attempt(tmp_path, 7, 4, 6)
    with pytest.raises(StalledError, match="after 3 restarts at step 6"):
        found.after_failure("")


def test_steps_after_a_named_checkpoint_are_progress_even_if_an_earlier_start_went_further(tmp_path: Path) -> None:
    attempt(tmp_path, 1, 0, 90)
    found = restarts(tmp_path, 2, resume=str(tmp_path / "checkpoints/step-00000004"))
    attempt(tmp_path, 2, 4, 8)
    assert found.after_failure("") is not None
    attempt(tmp_path, 3, 8, 12)
    assert found.after_failure("") is not None


def test_a_restart_resumes_what_the_command_started(tmp_path: Path) -> None:
    """A new run is not started twice, and a named checkpoint is not resumed twice."""
    new = restarts(tmp_path, 9, "never")
    assert new.after_failure("") == ["train", "--resume", "never"], "there is no run yet"
    (tmp_path / "config.yaml").touch()
    assert new.after_failure("") == ["train", "--resume", "auto"]
    named = restarts(tmp_path, 9, "the-checkpoint")
    assert named.after_failure("") == ["train", "--resume", "the-checkpoint"], "it has not resumed it yet"
    attempt(tmp_path, 1, 4, 5)
    assert named.after_failure("") == ["train", "--resume", str(tmp_path)]


class Program:
    """Stands in for the interpreter of the ranks: a shell that runs ``text``, given rank and start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path, text: str) -> None:
        self.directory = directory
        program = directory / "program.sh"
        program.write_text(f'#!/bin/sh\necho "$*" >> {directory}/starts-$RANK\ncase $RANK in\n{text}\nesac\n')
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    def starts(self, rank: int = 0) -> Sequence[str]:
        return (self.directory / f"starts-{rank}").read_text().splitlines()


@pytest.mark.parametrize("code", [1, 4, 5, 6])
def test_failures_restart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    program = Program(
        monkeypatch, tmp_path, f"0) [ -e {tmp_path}/failed ] || {{ touch {tmp_path}/failed; exit {code}; }};;"
    )
    assert rank_launcher.launch_ranks(2, ["train"], restarts(tmp_path / "run", 1)) == 0
    assert program.starts(0) == program.starts(1)
    assert [line.partition("] vorox ")[2] for line in program.starts(0)] == ["train", "train --resume auto"]
    assert "Restarting (1 of 1)" in capfd.readouterr().err


@pytest.mark.parametrize("code", [0, 2, 3, 7, 75, 130])
def test_ends_that_would_repeat_or_were_requested_do_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    program = Program(monkeypatch, tmp_path, f"*) exit {code};;")
    assert rank_launcher.launch_ranks(2, ["train"], restarts(tmp_path / "run", 5)) == code
    assert len(program.starts()) == 1


def test_a_kill_restarts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = Program(monkeypatch, tmp_path, "1) kill -9 $$;;")
    with pytest.raises(StalledError, match="No progress after 2 restarts at step 0"):
        rank_launcher.launch_ranks(2, ["train"], restarts(tmp_path / "run", 2))
    assert len(program.starts()) == 3
    assert capfd.readouterr().err.count("Rank 1 of 2 was killed by SIGKILL. Restarting") == 2


def test_a_stop_request_is_not_undone_by_a_restart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SIGTERM reaches ranks that do not handle it; the command ends as pre-empted."""
    program = Program(monkeypatch, tmp_path, "*) exec sleep 600;;")

    def stop() -> None:
        while not all((tmp_path / f"starts-{rank}").exists() for rank in (0, 1)):
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    assert rank_launcher.launch_ranks(2, ["train"], restarts(tmp_path / "run", 5)) == 75
    thread.join()
    assert len(program.starts()) == 1
