"""Heartbeats: what a rank is doing, in a small mapped file that the watchdog of its machine reads.

In: the phase and step of the training loop. Out: ``watchdog/rank-00000.beat`` in the run directory, for the dashboard
and the watchdog; and the time that the loop has spent in each phase, in all and by step
(``records/step_times.py``). The loop only stores into memory, without a system call.

Without a time limit, a thread writes the file twice a second, and an error of the disk is ignored. With one, the file
is mapped, so that it is current also while the interpreter hangs; a thread adds what the main thread cannot report
while it waits; when the watchdog requests it, the thread appends the stacks of all threads to
``watchdog/stacks-00000.txt``, or ends the process; and the rank with local rank 0 starts the watchdog
(``runtime/watchdog.py``) as a process of its own. ``SIGUSR2`` appends the stacks too, for the case that native code
holds the interpreter lock; while threads run Python, faulthandler's handler of a signal may crash, because it reads
their frames without that lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from types import TracebackType
from typing import IO

from vorox.core.errors import StalledError
from vorox.core.files.file_holder import ProcessIdentity, this_process
from vorox.core.files.json_reader import MalformedJson, parse_json, read_regular
from vorox.core.processes.child_process import child_command
from vorox.core.run_layout import RunLayout
from vorox.records.step_times import PHASES, Phase, StepTimes

WATCHED: frozenset[Phase] = frozenset({"data", "step", "sync", "settle"})

STACKS_SIGNAL = getattr(signal, "SIGUSR2", None)
_MAGIC = b"VXBEAT01"
_FIXED_BYTES = 448
_FILE_BYTES = 512
_COUNT, _STEP, _PHASE, _QUEUE, _WAITING, _STACKS, _ENDS = range(7)
_ATTEND_SECONDS = 0.2
_WRITE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Beat:
    """The content of a heartbeat file.

    Attributes:
        rank: Rank, from 0.
        attempt: Number of the attempt.
        process: The rank's process.
        count: Changes with every sign of progress.
        step: The step that the phase belongs to, from 1.
        phase: What the rank is doing.
        queue_depth: Batches that are ready.
        is_waiting: Whether a store does not answer, which storage retries and logs itself.
    """

    rank: int
    attempt: int
    process: ProcessIdentity
    count: int
    step: int
    phase: Phase
    queue_depth: int
    is_waiting: bool


class Heartbeat:
    """The heartbeat of this rank. Use it as a context manager.

    Args:
        run_directory: The run.
        rank: Rank, from 0.
        local_rank: Rank on this machine; 0 starts the watchdog.
        attempt: Number of the attempt.
        timeout_seconds: Time without progress after which the watchdog ends the run; ``None``: no watchdog.
        long_timeout_seconds: The same for start, compilation, saves and validation; ``None``: no limit.
        notice: A program that the watchdog runs after it ended a stalled run, or found the run killed: its words, and
            environment variables.
        times: Receives the time of every phase, by step; ``None`` on ranks that do not write.
        clock: A monotonic clock, in seconds.

    Attributes:
        seconds: Time spent in each phase, without the one that has not ended.
        observe: Returns the number of ready batches, and whether storage waits for a store; called from a thread.
        listen: Called at the start of every phase, also without a watchdog.
    """

    def __init__(
        self, run_directory: Path, *, rank: int = 0, local_rank: int = 0, attempt: int = 1,
        timeout_seconds: float | None = None, long_timeout_seconds: float | None = None,
        notice: tuple[Sequence[str], Mapping[str, str]] = ((), {}),
        times: StepTimes | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._layout, self._rank, self._local_rank, self._attempt = RunLayout(run_directory), rank, local_rank, attempt
        self._timeout_seconds, self._long_timeout_seconds = timeout_seconds, long_timeout_seconds
        self._notice, self._times = notice, times
        self._cells = memoryview(bytearray(_FILE_BYTES - _FIXED_BYTES)).cast("Q")
        self._shapes: set[tuple[int, ...]] = set()
        self._clock, self._entered_at = clock, clock()
        self.seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._closed = threading.Event()
        self._stack = contextlib.ExitStack()
        self.observe: Callable[[], tuple[int, bool]] = lambda: (0, False)
        self.listen: Callable[[Phase], None] = lambda _: None

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """Record the start of a phase, and the time of the one before."""
        now = self._clock()
        ended, entered, seconds = self._cells[_PHASE], PHASES.index(phase), now - self._entered_at
        self.seconds[PHASES[ended]] += seconds
        self._entered_at = now
        if step is not None:
            self._cells[_STEP] = step
        self._cells[_PHASE] = entered
        if self._times is not None:
            self._times.enter(ended, seconds, entered)
        self._cells[_COUNT] += 1
        self.listen(phase)

    def begin_step(self, step: int) -> None:
        """Record that the loop waits for the batch of a step: the end of all that belongs to the step before."""
        self.enter("data", step)
        if self._times is not None:
            self._times.begin_step(step)

    def wait_for_ranks(self, seconds: float) -> None:
        """Record how much of this step's time its collectives waited for slower ranks."""
        if self._times is not None:
            self._times.wait_for_ranks(seconds)

    def progressed(self) -> None:
        """Record a sign of progress within a phase; from any thread."""
        self._cells[_COUNT] += 1

    def compute(self, step: int, shape: tuple[int, ...]) -> None:
        """Record the start of a step; one with a new batch shape may compile first, which may take any time."""
        self.enter("step" if shape in self._shapes else "compile", step)
        self._shapes.add(shape)

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Generator[None]:
        """Record a phase for the duration of a block, then the one before."""
        before = PHASES[self._cells[_PHASE]]
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def __enter__(self) -> Heartbeat:
        if self._times is not None:
            self._times.open()
            self._stack.callback(self._times.close)  # after the thread, which ends first
        if self._timeout_seconds is None:
            with contextlib.suppress(OSError):
                self._start_writing()
            return self
        self._layout.watchdog.mkdir(exist_ok=True)
        self._map_file()
        stacks = self._open_stacks()
        thread = threading.Thread(target=self._attend, args=(stacks,), name="vorox-heartbeat", daemon=True)
        self._stack.callback(thread.join, 5.0)
        self._stack.callback(self._closed.set)
        if self._local_rank == 0:
            self._stack.callback(_end, self._start_watchdog())
        thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.enter("end")
        self._stack.close()

    def _create_file(self) -> Path:
        path = self._layout.heartbeat(self._rank)
        fixed = _MAGIC + json.dumps({"rank": self._rank, "attempt": self._attempt, **this_process().to_json()}).encode()
        path.write_bytes(fixed.ljust(_FILE_BYTES, b"\0"))
        return path

    def _start_writing(self) -> None:
        """Create the file, and write the newest values into it from a thread until the end."""
        self._layout.watchdog.mkdir(exist_ok=True)
        self._stack.callback(_remove_folder_if_empty, self._layout.watchdog)
        path = self._create_file()
        self._stack.callback(path.unlink, missing_ok=True)
        file = self._stack.enter_context(path.open("r+b", buffering=0))
        thread = threading.Thread(target=self._write, args=(file,), name="vorox-heartbeat", daemon=True)
        self._stack.callback(thread.join, 5.0)
        self._stack.callback(self._closed.set)
        thread.start()

    def _write(self, file: RawIOBase) -> None:
        while not self._closed.wait(_WRITE_SECONDS):
            depth, is_waiting = self.observe()
            self._cells[_QUEUE], self._cells[_WAITING] = depth, is_waiting
            self._note_alive()
            with contextlib.suppress(OSError):
                file.seek(_FIXED_BYTES)
                file.write(bytes(self._cells))

    def _map_file(self) -> None:
        path = self._create_file()
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), _FILE_BYTES)
        view = memoryview(mapped)[_FIXED_BYTES:]
        cells = view.cast("Q")
        cells[:] = self._cells
        self._cells = cells
        self._stack.callback(path.unlink, missing_ok=True)

    def _open_stacks(self) -> IO[bytes]:
        """Create the file of the stacks, which ``STACKS_SIGNAL`` also writes, where it exists."""
        path = self._layout.stacks(self._rank)
        file: IO[bytes] = self._stack.enter_context(path.open("wb"))
        self._stack.callback(_remove_if_empty, path)
        if STACKS_SIGNAL is not None and hasattr(faulthandler, "register"):
            has_handler = callable(signal.getsignal(STACKS_SIGNAL))
            faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=has_handler)
            self._stack.callback(faulthandler.unregister, STACKS_SIGNAL)
        return file

    def _start_watchdog(self) -> subprocess.Popen[bytes]:
        limits = [str(self._timeout_seconds), str(self._long_timeout_seconds).lower()]
        words = [str(self._layout.directory), str(self._attempt), *limits, *self._notice[0]]
        program = child_command("vorox.runtime.watchdog", *words)
        return subprocess.Popen(program, stdin=subprocess.DEVNULL, env={**os.environ, **self._notice[1]})

    def _note_alive(self) -> None:
        if self._times is not None:
            self._times.live()

    def _attend(self, stacks: IO[bytes]) -> None:
        """Report what the main thread cannot report while it waits; do what the watchdog requests."""
        cells, known_depth = self._cells, 0
        while not self._closed.wait(_ATTEND_SECONDS):
            depth, is_waiting = self.observe()
            cells[_QUEUE], cells[_WAITING] = depth, is_waiting
            self._note_alive()
            if depth > known_depth:
                self.progressed()
            known_depth = depth
            if cells[_STACKS]:
                cells[_STACKS] = 0
                faulthandler.dump_traceback(stacks, all_threads=True)
            if cells[_ENDS]:
                os._exit(StalledError.exit_code)


def read_beat(path: Path) -> Beat | None:
    """Read a heartbeat file; ``None`` if it is absent or not complete yet."""
    try:
        raw = read_regular(path, _FILE_BYTES)
    except (OSError, MalformedJson):
        return None
    if len(raw) != _FILE_BYTES or not raw.startswith(_MAGIC):
        return None
    try:
        fixed = parse_json(raw[len(_MAGIC) : _FIXED_BYTES].rstrip(b"\0"), path, {"rank": int, "attempt": int})
    except MalformedJson:
        return None
    process = ProcessIdentity.from_json(fixed)
    cells = memoryview(raw)[_FIXED_BYTES:].cast("Q")
    if process is None or not {"rank", "attempt"} <= fixed.keys() or cells[_PHASE] >= len(PHASES):
        return None
    return Beat(
        fixed["rank"], fixed["attempt"], process, cells[_COUNT], cells[_STEP], PHASES[cells[_PHASE]], cells[_QUEUE],
        bool(cells[_WAITING]),
    )  # fmt: skip


def request_stacks(path: Path) -> None:
    """Request that the rank of a heartbeat file appends the stacks of all its threads to its file."""
    _set_cell(path, _STACKS)


def request_end(path: Path) -> None:
    """Request that the rank of a heartbeat file ends with the exit code of a stall."""
    _set_cell(path, _ENDS)


def _set_cell(path: Path, cell: int) -> None:
    with contextlib.suppress(OSError), path.open("r+b") as file, mmap.mmap(file.fileno(), _FILE_BYTES) as mapped:
        mapped[_FIXED_BYTES + 8 * cell] = 1


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5.0)


def _remove_folder_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.stat().st_size == 0:
            path.unlink()
