"""Signals: at once while preparing, between steps while training, and a second SIGINT ends everything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from eventually import PATIENCE_SECONDS
from vorox.core.errors import INTERRUPTED_EXIT_CODE, LostRankError, Preempted
from vorox.training.steps.stop import StopRequest


def test_at_once_while_preparing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop, pytest.raises(Preempted, match="SIGTERM: stopped while preparing") as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested == "SIGTERM"
    assert stopped.value.exit_code == 75
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_flag_while_training() -> None:
    with StopRequest() as stop, stop.deferred():
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested == "SIGINT"
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == "SIGINT", "the first one counts, and a SIGTERM after it changes nothing"


def test_a_signal_after_an_error_leaves_the_error_as_it_is() -> None:
    """A launcher ends the other ranks when one is lost, while this one is about to say what happened."""
    with pytest.raises(LostRankError, match="rank 1"), StopRequest() as stop:  # noqa: PT012
        try:
            with stop.deferred():
                raise LostRankError("rank 1 is lost")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested == "SIGTERM"


def test_another_thread_catches_nothing_and_says_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def enter() -> None:
        with StopRequest() as stop:
            seen.append((signal.getsignal(signal.SIGINT), stop.requested))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(before, "")]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_second_interrupt_ends_the_process() -> None:
    program = (
        "import os, signal\n"
        "from vorox.training.steps.stop import StopRequest\n"
        "with StopRequest() as stop, stop.deferred():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print(stop.requested, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('still here')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
    )
    assert result.returncode == INTERRUPTED_EXIT_CODE
    assert result.stdout == "SIGINT\n"
    assert "exiting without saving" in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="SIGHUP")
@pytest.mark.filterwarnings("ignore:os.fork", "ignore::pytest.PytestUnraisableExceptionWarning")  # of JAX, if imported
@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_stops_the_run_unless_it_is_ignored(ignored: bool) -> None:
    """A real terminal whose other end is closed; with ``nohup`` nothing is requested."""
    import pty

    before = "signal.signal(signal.SIGHUP, signal.SIG_IGN)" if ignored else ""
    program = (
        f"import os, signal, sys, time\n{before}\n"
        "from vorox.training.steps.stop import StopRequest\n"
        "with StopRequest() as stop, stop.deferred():\n"
        "    os.write(1, b'ready\\n')\n"
        "    end = time.monotonic() + 2\n"
        "    while not stop.requested and time.monotonic() < end: time.sleep(0.01)\n"
        "with open(sys.argv[1], 'w') as file: file.write(stop.requested or 'nothing')\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        child, terminal = pty.fork()
        if child == 0:
            os.execv(sys.executable, [sys.executable, "-c", program, f"{folder}/found"])
        assert os.read(terminal, 100) == b"ready\r\n"
        os.close(terminal)
        assert os.waitpid(child, 0)[1] == 0
        assert Path(folder, "found").read_text() == ("nothing" if ignored else "SIGHUP")
