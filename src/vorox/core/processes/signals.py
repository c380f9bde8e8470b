"""Signals that stop a run, and the child processes of a run when one arrives or the run is killed.

A terminal sends SIGINT, and SIGHUP when it is closed, to all processes in it. The process of the run saves its state;
its children end with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_LIBC: ctypes.CDLL | None = ctypes.CDLL(None) if sys.platform == "linux" else None


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run; a SIGHUP that this process ignores, as under ``nohup``, stays ignored."""
    found = [signal.SIGTERM, signal.SIGINT]
    if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found


def ignore_terminal() -> None:
    """Ignore the signals of the terminal, in a child that its parent ends."""
    for number in stop_signals():
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> Callable[[], None] | None:
    """Return a ``preexec_fn`` for a child that gets SIGTERM when this process dies, however it dies.

    A child of Vorox then saves its state. ``None`` where the operating system has no such signal (all but Linux).
    """
    if _LIBC is None:
        return None
    parent = os.getpid()

    def in_child() -> None:
        assert _LIBC is not None
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the call
            os.kill(os.getpid(), signal.SIGTERM)

    return in_child
