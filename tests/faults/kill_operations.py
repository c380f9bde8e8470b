"""Runs a tiny training in child processes and has each killed (SIGKILL) at one of its file operations.

Called by ``test_kill_operations.py`` as a script, because forking wants a process without threads. For every operation
given (its name, which no run decides otherwise, and how often that name came before it): a fresh directory, a child
that kills itself before that operation (or in the middle of it, if it is a write), a second child killed at some number
of operations while resuming, and a third that goes on to the end. A name and not a number, because the thread that
writes checkpoints and the loop take turns as they please. Prints one JSON line per operation: what the child was doing
when it died, and what the run came to.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

import pytest

from tiny_runs import configuration, run, use_numpy_engine
from vorox.core.files import atomic
from vorox.core.files.atomic import FileOperation
from vorox.records.replay_chain import read_chain

Place = tuple[str, int]
"""An operation: its name, and how often that name came before it."""


def main() -> None:
    use_numpy_engine(pytest.MonkeyPatch())
    os.fsync = lambda descriptor: None  # a kill does not lose what the system has taken
    for order, place in enumerate(json.loads(sys.argv[1])):
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch)
            died: list[str] = []
            if place is not None:
                died = [in_child(directory, tuple(place)), in_child(directory, order * 7 % 60 + 1)]
            assert in_child(directory, None) == "", "nobody killed it"
            outcome = json.loads((directory / "outcome.json").read_text())
            print(json.dumps({"at": place, "died": died, **outcome}), flush=True)


def in_child(directory: Path, kill_at: Place | int | None) -> str:
    """Train in a child; returns the operation before which it died, or nothing if it lived."""
    process = os.fork()
    if process == 0:
        try:
            train(directory, kill_at)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    status = os.waitpid(process, 0)[1]
    if os.WIFSIGNALED(status):
        return (directory / "last-operation").read_text()
    assert os.WEXITSTATUS(status) == 0, f"the child failed with {os.WEXITSTATUS(status)}"
    return ""


def same_in_every_run(name: str) -> str:
    """The name of an operation without what depends on process and place: temporary names, and hashes with the path."""
    return re.sub(r"-[0-9a-f]{8,12}\b", "", re.sub(r"\.tmp-\S+?-\d+-(s[0-9a-f]+-)?[0-9a-f]{8}-", ".tmp-", name))


def train(directory: Path, kill_at: Place | int | None) -> None:
    names: list[Place] = []
    seen: Counter[str] = Counter()
    turn = threading.RLock()

    def observer(operation: FileOperation) -> None:
        with turn:
            observe(operation)

    def observe(operation: FileOperation) -> None:
        name = f"{operation.kind} {operation.path.relative_to(directory).as_posix()}"
        stable = same_in_every_run(name)
        names.append((stable, seen[stable]))
        seen[stable] += 1
        if names[-1] == kill_at or len(names) == kill_at:
            if operation.kind == "write":  # a torn one
                with operation.path.open("ab") as file:
                    file.write(operation.data[: len(operation.data) // 2])
            (directory / "last-operation").write_text(name)
            os.kill(os.getpid(), signal.SIGKILL)

    with atomic.observe(observer):
        outcome = run(configuration(directory))
    found = {
        "operations": names,
        "chain": [entry.chain for entry in read_chain(outcome.run_directory).values()],
        "fingerprint": outcome.fingerprint,
        "eval_losses": {str(step): loss.hex() for step, loss in outcome.eval_losses.items()},
    }
    (directory / "outcome.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
