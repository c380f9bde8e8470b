"""Trains under a schedule of kills and times every process, step and save with a stopwatch of its own.

Called by ``test_run_time.py`` as a script, because forking wants a process without threads. Every life is a forked
process that trains a tiny run with the numpy engine, whose steps and commits of checkpoints sleep for a known time. All
but the last are killed (SIGKILL) at the given number of seconds after their start. Prints one JSON object: when each
life began and ended as this process saw it, and when each step and commit did as the lives saw it, by the same clock.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from numpy_engine import NumpyEngine
from tiny_runs import configuration, run, use_numpy_engine
from vorox.core.files.staged_directory import StagedDirectory
from vorox.core.processes.process_start import process_started_at
from vorox.data.prefetch import Prefetcher
from vorox.training.checkpoints.writer import CheckpointWriter

KINDS = ("wait", "got", "step", "stepped", "save", "saved")
SHARED = memoryview(mmap.mmap(-1, 1 << 20)).cast("d")
"""The marks of all lives, in memory that a kill leaves: their number, then life, kind, step and time of each."""


def main() -> None:
    directory, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    use_numpy_engine(pytest.MonkeyPatch())
    configuration(directory)  # writes the text
    lives: list[tuple[float, float]] = []
    for number, (kill_after, pause) in enumerate(zip([*plan["kills"], None], [*plan["pauses"], 0.0], strict=True)):
        began = time.monotonic()
        process = os.fork()
        if process == 0:
            live(directory, number, plan)
        ended = wait(process, None if kill_after is None else began + kill_after)
        lives.append((began, time.monotonic()))
        if ended:
            break
        time.sleep(pause)
    cells = [SHARED[1 + 4 * index : 5 + 4 * index].tolist() for index in range(int(SHARED[0]))]
    marks = [(int(life), KINDS[int(kind)], int(step), at) for life, kind, step, at in cells]
    print(json.dumps({"lives": lives, "marks": marks}))


def wait(process: int, until: float | None) -> bool:
    """Wait for the end of a process, or kill it; whether it came to its end."""
    while until is not None and time.monotonic() < until:
        if os.waitpid(process, os.WNOHANG)[0]:
            return True
        time.sleep(0.001)
    if until is not None:
        os.kill(process, signal.SIGKILL)
    status = os.waitpid(process, 0)[1]
    assert until is not None or status == 0, "the last life failed"
    return status == 0


def live(directory: Path, number: int, plan: dict[str, Any]) -> None:
    started_at = process_started_at()

    def mark(kind: str, step: int = 0) -> None:
        start = 1 + 4 * int(SHARED[0])
        for offset, value in enumerate((number, KINDS.index(kind), step, time.monotonic())):
            SHARED[start + offset] = value
        SHARED[0] += 1

    step, save, commit = NumpyEngine.train_step, CheckpointWriter.save, StagedDirectory.commit
    following = Prefetcher.__next__

    def train_step(self: NumpyEngine, batch: Any, **arguments: Any) -> Any:
        mark("step", batch.step + 1)
        time.sleep(plan["step_seconds"])
        found = step(self, batch, **arguments)
        mark("stepped", batch.step + 1)
        return found

    def slow_commit(self: StagedDirectory, *arguments: Any, **named: Any) -> Any:
        time.sleep(plan["save_seconds"])
        return commit(self, *arguments, **named)

    def timed_save(self: CheckpointWriter, *arguments: Any, **named: Any) -> None:
        mark("save")
        save(self, *arguments, **named)
        mark("saved")

    def timed_next(self: Prefetcher[Any]) -> Any:
        mark("wait")
        found = following(self)
        mark("got")
        return found

    Prefetcher.__next__ = timed_next
    NumpyEngine.train_step, CheckpointWriter.save, StagedDirectory.commit = train_step, timed_save, slow_commit
    try:
        run(configuration(directory, plan["settings"]), launched_at=started_at)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
