"""The process of a trial, with a shell script for ``vorox train``: what it records, how it ends, and with whom."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from eventually import wait_until
from vorox.core.files.file_holder import FileLock
from vorox.sweeps.trial_process import TrialProcess, Validation

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell"),
    pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning"),  # of JAX, if other tests loaded it
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path


def start(place: Path, monkeypatch: pytest.MonkeyPatch, script: str, **environment: str | None) -> TrialProcess:
    program = place / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return TrialProcess(
        ["train", "x.yaml"], run_directory=place / "run", working_directory=place, output=place / "output.txt",
        environment=environment,
    )  # fmt: skip


def test_validations_in_the_order_of_steps(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was killed after step 30 resumes from step 20, and validates step 30 again."""
    (place / "run" / "evaluations.jsonl").write_text(
        '{"step":10,"loss":3.0}\n{"step":20,"loss":2.5}\n{"step":30,"loss":2.0}\n{"step":40,"lo'
    )
    script = """
    printf '\\n{"resume_step":20}\\n{"step":30,"loss":2.0}\\n{"step":40,' >> run/evaluations.jsonl
    echo "$@"
    printf '"loss":"nan"}\\n{"step":50,"loss":1.0}\\n' >> run/evaluations.jsonl
    exit 7"""
    process = start(place, monkeypatch, script)
    found: list[Validation] = []
    while (validation := process.next_validation()) is not None:
        found.append(validation)
    assert [validation.step for validation in found] == [10, 20, 30, 40, 50]
    assert [validation.loss for validation in found if not math.isnan(validation.loss)] == [3.0, 2.5, 2.0, 1.0]
    assert process.exit_code == 7
    assert (place / "output.txt").read_text().endswith("] vorox train x.yaml\n")


SAVES = """
trap 'echo saved; exit 75' TERM
echo '{"step":10,"loss":3.0}' >> run/evaluations.jsonl
while true; do sleep 0.02; done"""


def test_a_stop_waits_for_the_save(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(place, monkeypatch, SAVES)
    assert process.next_validation() == Validation(10, 3.0)
    assert process.exit_code is None
    process.stop()
    assert process.exit_code == 75
    assert (place / "output.txt").read_text() == "saved\n"
    process.stop()  # of an ended process, does nothing


def test_variables_are_set_and_removed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    process = start(
        place, monkeypatch, 'echo "$OMP_NUM_THREADS,$VOROX_CACHE"', OMP_NUM_THREADS=None, VOROX_CACHE="here"
    )
    assert process.next_validation() is None
    assert (place / "output.txt").read_text() == ",here\n"


def test_it_waits_for_a_process_that_still_saves(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FileLock(place / "run" / "LOCK").acquire()
    threading.Timer(0.3, lock.release).start()
    process = start(place, monkeypatch, "echo started")
    assert lock._file is None
    assert process.next_validation() is None


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_it_saves_when_the_process_that_started_it_is_killed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "program").write_text(f"#!/bin/sh\n{SAVES}\n")
    (place / "program").chmod(0o755)
    parent = f"""
import sys, time
from pathlib import Path
from vorox.sweeps.trial_process import TrialProcess
sys.executable = {str(place / "program")!r}
place = Path({str(place)!r})
TrialProcess([], run_directory=place / "run", working_directory=place, output=place / "output.txt", environment={{}})
time.sleep(600)
"""
    child = subprocess.Popen([sys.executable, "-c", parent])
    wait_until((place / "run" / "evaluations.jsonl").exists)
    child.send_signal(signal.SIGKILL)
    child.wait()
    wait_until(lambda: (place / "output.txt").read_text() == "saved\n")
