"""Worker processes: several schedulers on this machine build one cache under a supervising parent.

Workers coordinate through leases and share state on disk only, like any other schedulers. A pipe to the parent carries
a worker's counts and its result or error. A message on the pipe, or the parent's death, stops the worker after the unit
in progress. A worker that dies leaves an expired lease and is replaced. Invariant: however parent or workers end, the
cache is valid and the next build continues from it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from dataclasses import astuple, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from vorox.core.errors import ConfigError, DataError, VoroxError
from vorox.core.platform.environment import usable_cores
from vorox.core.processes.child_process import forget_safe_spawning, is_safe_path_set, safe_spawning
from vorox.core.processes.signals import ignore_terminal
from vorox.data.cache.building.build_queue import BuildQueue, Mode, Permanent, never
from vorox.data.cache.building.report import BuildProgress, OnProgress
from vorox.data.cache.building.scheduler import BuildScheduler
from vorox.data.cache.files.verify import Depth
from vorox.data.cache.units.unit_builder import UnitBuilder
from vorox.data.recipe import read_units

_POLL_SECONDS = 0.25
_REPORT_SECONDS = 0.1
_DRAIN_SECONDS = 30.0
_DEATHS_WITHOUT_A_UNIT = 5
_KINDS: dict[str, type[VoroxError]] = {kind.__name__: kind for kind in (ConfigError, DataError)}


@dataclass(frozen=True, slots=True)
class Assignment:
    """The parts of a scheduler that a worker needs, in a picklable form."""

    directory: Path
    builder: UnitBuilder
    num_units: int
    mode: Mode
    last_unit: int | None
    damaged: frozenset[int]
    depth: Depth

    @classmethod
    def from_scheduler(cls, scheduler: BuildScheduler) -> Assignment:
        queue, residency = scheduler.queue, scheduler.residency
        depth: Depth = residency.depth if isinstance(residency, Permanent) else "quick"
        return cls(
            scheduler.directory, scheduler.builder, len(scheduler.units), queue.mode, queue.last_unit,
            frozenset(residency.damaged), depth,
        )  # fmt: skip

    def scheduler(
        self, *, on_progress: OnProgress | None = None, stop: Callable[[], bool] = never
    ) -> BuildScheduler:  # fmt: skip
        """Create the scheduler of a worker."""
        return BuildScheduler(
            self.directory, self.builder, read_units(self.directory)[: self.num_units],
            BuildQueue(self.mode, self.last_unit), residency=Permanent(self.directory, self.damaged, self.depth),
            on_progress=on_progress, stop=stop,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """Progress counts of a worker."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    units_built: int = 0
    units_adopted: int = 0

    @classmethod
    def from_scheduler(cls, scheduler: BuildScheduler) -> WorkerCounts:
        progress = scheduler.tracker.progress
        return cls(
            progress.documents, progress.text_bytes, progress.tokens, scheduler.units_built, scheduler.units_adopted
        )

    @classmethod
    def total(cls, counts: Iterable[WorkerCounts]) -> WorkerCounts:
        """Sum the counts of several workers."""
        return cls(*(sum(values) for values in zip(*map(astuple, (cls(), *counts)), strict=True)))

    def report_to(self, scheduler: BuildScheduler) -> None:
        """Set the counts of the supervising scheduler, and let it poll the cache."""
        scheduler.units_built, scheduler.units_adopted = self.units_built, self.units_adopted
        scheduler.poll(documents=self.documents, text_bytes=self.text_bytes, tokens=self.tokens)


@dataclass
class _Child:
    process: SpawnProcess
    connection: Connection
    counts: WorkerCounts = field(default_factory=WorkerCounts)
    finished: bool = False
    died: bool = False


def run_processes(scheduler: BuildScheduler, num_workers: int, *, drain_seconds: float = _DRAIN_SECONDS) -> None:
    """Build with worker processes until nothing is missing or a stop is requested.

    Args:
        scheduler: The scheduler to run; afterwards its counts and manifest include the work of all workers.
        num_workers: Number of processes.
        drain_seconds: How long a stopping worker may take to finish its unit before it is killed.

    Raises:
        DataError: A worker failed, or workers keep dying without finishing a unit.
    """
    team = _Team(scheduler, num_workers, drain_seconds)
    try:
        team.run()
    finally:
        team.end()
        scheduler.poll()


class _Team:
    """The workers of one build."""

    def __init__(self, scheduler: BuildScheduler, num_workers: int, drain_seconds: float) -> None:
        self._scheduler = scheduler
        self._drain_seconds = drain_seconds
        self._num_workers = num_workers
        self._context = multiprocessing.get_context("spawn")
        self._children: list[_Child] = []
        self._before = WorkerCounts()
        self._error: VoroxError | None = None
        self._deaths = 0

    def run(self) -> None:
        for child in [self._start() for _ in range(self._num_workers)]:
            self._assign(child)
        generation, stopping = -1, False
        while running := [child for child in self._children if not child.finished]:
            ready = wait([child.connection for child in running], timeout=_POLL_SECONDS)
            for child in running:
                if child.connection in ready:
                    self._receive(child)
            WorkerCounts.total([self._before, *(child.counts for child in self._children)]).report_to(self._scheduler)
            if self._scheduler.manifest.generation != generation:
                generation, self._deaths = self._scheduler.manifest.generation, 0
            if (self._error is not None or self._scheduler.should_stop()) and not stopping:
                stopping = True
                for child in self._children:
                    _request_stop(child)
            if stopping:
                self.end()
            else:
                self._replace_dead_workers()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Stop the running workers after the unit in progress, and join them."""
        for child in self._children:
            _request_stop(child)
        deadline = time.monotonic() + self._drain_seconds
        for child in self._children:
            child.process.join(max(0.0, deadline - time.monotonic()))
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
            child.finished = True

    def _start(self) -> _Child:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_work, name="cache worker", daemon=True, args=(theirs, is_safe_path_set())
        )
        with _interrupts_ignored(), safe_spawning():  # both are inherited by the child
            process.start()
        theirs.close()
        self._children.append(_Child(process, ours))
        return self._children[-1]

    def _assign(self, child: _Child) -> None:
        """Send a worker its assignment. As a process argument it could block: a child may die before reading it."""
        threads = max(1, usable_cores() // self._num_workers)
        with contextlib.suppress(OSError):  # it died; ``_receive`` notices
            child.connection.send((Assignment.from_scheduler(self._scheduler), threads))

    def _receive(self, child: _Child) -> None:
        """Receive a worker's messages, or notice its death."""
        try:
            while child.connection.poll():
                kind, value = child.connection.recv()
                if kind == "counts":
                    child.counts = WorkerCounts(*value)
                elif kind == "finished":
                    child.counts, child.finished = WorkerCounts(*value), True
                else:
                    self._error = self._error or decode_error(kind, value)
                    child.finished = True
        except (EOFError, OSError):
            if not child.finished:
                child.finished = child.died = True
                child.process.join()
                self._deaths += 1

    def _replace_dead_workers(self) -> None:
        dead = [child for child in self._children if child.died]
        if self._deaths > _DEATHS_WITHOUT_A_UNIT + self._num_workers:
            codes = sorted({str(child.process.exitcode) for child in dead})
            raise DataError(
                f"Workers die without finishing a unit (exit code {', '.join(codes)}; -9 often means out of memory)",
                where=str(self._scheduler.directory),
                hint="use fewer workers, or a smaller data.cache.unit_bytes",
            )  # fmt: skip
        for child in dead:
            self._before = WorkerCounts.total([self._before, child.counts])
            self._children = [other for other in self._children if other is not child]
            child.connection.close()
            self._assign(self._start())


@contextlib.contextmanager
def _interrupts_ignored() -> Generator[None]:
    """Ignore SIGINT: a terminal sends it to all processes, but the parent alone handles it."""
    if threading.current_thread() is not threading.main_thread():  # signal handlers can only be set there
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _request_stop(child: _Child) -> None:
    with contextlib.suppress(OSError):
        child.connection.send("stop")


def encode_error(error: VoroxError) -> tuple[str, dict[str, str]]:
    """Encode an error for another process."""
    value = {"what": error.what, "where": error.where, "hint": error.hint, "saved": error.saved}
    return type(error).__name__, value


def decode_error(kind: str, value: Any) -> VoroxError:
    """Decode ``encode_error``, and exceptions that are not a ``VoroxError``."""
    if kind in _KINDS:
        return _KINDS[kind](**value)
    return VoroxError(f"A worker failed: {kind}: {value['what']}", hint=value["hint"], where=value["where"])


def _work(connection: Connection, is_safe_path_set: bool) -> None:
    """The main function of a worker process; the first message is its assignment."""
    forget_safe_spawning(is_safe_path_set)
    ignore_terminal()  # the parent ends the worker, also by its own death
    reported_at = 0.0

    def report(kind: str, value: Any) -> None:
        with contextlib.suppress(OSError):  # the parent is gone; ``stop`` notices too
            connection.send((kind, value))

    def on_progress(_: BuildProgress) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at >= _REPORT_SECONDS:
            reported_at = time.monotonic()
            report("counts", astuple(WorkerCounts.from_scheduler(scheduler)))

    def stop() -> bool:
        try:
            return connection.poll()  # a message from the parent, or its death
        except OSError:
            return True

    try:
        assignment, num_threads = connection.recv()
        os.environ["RAYON_NUM_THREADS"] = str(num_threads)  # read by the tokenizers library when it starts its threads
        scheduler = assignment.scheduler(on_progress=on_progress, stop=stop)
        scheduler.run()
        report("finished", astuple(WorkerCounts.from_scheduler(scheduler)))
    except VoroxError as error:
        report(*encode_error(error))
    except Exception as error:
        frames = "".join(traceback.format_exception(error))
        report(type(error).__name__, {"what": str(error), "where": f"process {os.getpid()}", "hint": frames})
