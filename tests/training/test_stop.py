"""Signals: at once while preparing, between steps while training, and a second SIGINT ends everything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from eventually import PATIENCE_SECONDS
from vorox.core.errors import Preempted
from vorox.training.stop import INTERRUPTED_EXIT_CODE, StopRequest


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
        "from vorox.training.stop import StopRequest\n"
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
