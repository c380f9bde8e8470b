"""Runs a tiny training in child processes and has each killed (SIGKILL) at one of its file operations.

Called by ``test_kill_operations.py`` as a script, because forking wants a process without threads. For every number
given: a fresh directory, a child that kills itself before that operation (or in the middle of it, if it is a write),
a second child killed the same way while resuming, and a third that goes on to the end. Prints one JSON line per
number: what the child was doing when it died, and what the run came to.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from tiny_runs import configuration, run, use_numpy_engine
from vorox.core import atomic
from vorox.core.atomic import FileOperation
from vorox.training.chain import read_chain


def main() -> None:
    use_numpy_engine(pytest.MonkeyPatch())
    os.fsync = lambda descriptor: None  # a kill does not lose what the system has taken
    for number in map(int, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch)
            died = [in_child(directory, number), in_child(directory, number * 7 % 60 + 1)] if number else []
            assert in_child(directory, 0) == "", "nobody killed it"
            outcome = json.loads((directory / "outcome.json").read_text())
            print(json.dumps({"at": number, "died": died, **outcome}), flush=True)


def in_child(directory: Path, kill_at: int) -> str:
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


def train(directory: Path, kill_at: int) -> None:
    names: list[str] = []

    def observer(operation: FileOperation) -> None:
        name = f"{operation.kind} {operation.path.relative_to(directory).as_posix()}"
        names.append(name)
        if len(names) == kill_at:
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
