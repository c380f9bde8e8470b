"""Worker processes: several schedulers of this machine on one cache, and the process that supervises them.

The workers build like any other scheduler: they meet through leases, and what they share is on disk. Each has a pipe to
its parent. It carries counts up, and the end of the worker's build or what ended it; closing it asks the worker to stop
after the unit in hand, as does the parent's death. A worker that dies leaves an expired lease and is replaced.
Invariant: whatever happens to parent or workers, the cache is valid and the next build continues from it.
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

from vorox.core.environment import usable_cores
from vorox.core.errors import ConfigError, DataError, VoroxError
from vorox.data.cache.build_queue import BuildQueue, Mode, never
from vorox.data.cache.recipe import read_units
from vorox.data.cache.report import BuildProgress
from vorox.data.cache.residency import Permanent
from vorox.data.cache.scheduler import BuildScheduler, OnProgress
from vorox.data.cache.unit_builder import UnitBuilder
from vorox.data.cache.verify import Depth

_POLL_SECONDS = 0.25
_REPORT_SECONDS = 0.1
_DRAIN_SECONDS = 30.0
_DEATHS_WITHOUT_A_UNIT = 5
_KINDS: dict[str, type[VoroxError]] = {kind.__name__: kind for kind in (ConfigError, DataError)}


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker is to do: everything of a scheduler that can be sent to another process or machine."""

    directory: Path
    builder: UnitBuilder
    num_units: int
    mode: Mode
    last_unit: int | None
    damaged: frozenset[int]
    depth: Depth

    @classmethod
    def of(cls, scheduler: BuildScheduler) -> Assignment:
        queue, residency = scheduler.queue, scheduler.residency
        depth: Depth = residency.depth if isinstance(residency, Permanent) else "quick"
        return cls(
            scheduler.directory, scheduler.builder, len(scheduler.units), queue.mode, queue.last_unit,
            frozenset(residency.damaged), depth,
        )  # fmt: skip

    def scheduler(
        self, *, on_progress: OnProgress | None = None, stop: Callable[[], bool] = never
    ) -> BuildScheduler:  # fmt: skip
        """The scheduler of a worker."""
        return BuildScheduler(
            self.directory, self.builder, read_units(self.directory)[: self.num_units],
            BuildQueue(self.mode, self.last_unit), residency=Permanent(self.directory, self.damaged, self.depth),
            on_progress=on_progress, stop=stop,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Counts:
    """What a worker has done so far."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    units_built: int = 0
    units_adopted: int = 0

    @classmethod
    def of(cls, scheduler: BuildScheduler) -> Counts:
        progress = scheduler.progress
        return cls(
            progress.documents, progress.text_bytes, progress.tokens, scheduler.units_built, scheduler.units_adopted
        )

    @classmethod
    def sum(cls, counts: Iterable[Counts]) -> Counts:
        """What several workers have done."""
        return cls(*(sum(values) for values in zip(*map(astuple, (cls(), *counts)), strict=True)))

    def apply(self, scheduler: BuildScheduler) -> None:
        """Make these the counts of the scheduler that supervises the workers, which then looks at the cache."""
        scheduler.units_built, scheduler.units_adopted = self.units_built, self.units_adopted
        scheduler.poll(documents=self.documents, text_bytes=self.text_bytes, tokens=self.tokens)


@dataclass
class _Child:
    process: SpawnProcess
    connection: Connection
    counts: Counts = field(default_factory=Counts)
    finished: bool = False
    died: bool = False


def run_processes(scheduler: BuildScheduler, num_workers: int, *, drain_seconds: float = _DRAIN_SECONDS) -> None:
    """Build with processes until nothing is missing or a stop is requested.

    Args:
        scheduler: What is to be done; its counts and its manifest are those of all workers afterwards.
        num_workers: How many processes.
        drain_seconds: Time that a stopping worker has to finish its unit before it is killed.

    Raises:
        DataError: A worker failed, or workers die without finishing a unit.
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
        self._before = Counts()
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
            Counts.sum([self._before, *(child.counts for child in self._children)]).apply(self._scheduler)
            if self._scheduler.manifest.generation != generation:
                generation, self._deaths = self._scheduler.manifest.generation, 0
            if (self._error is not None or self._scheduler.is_stopped()) and not stopping:
                stopping = True
                for child in self._children:
                    _ask_to_stop(child)
            if stopping:
                self.end()
            else:
                self._replace_the_dead()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Ask all that still run to finish the unit in hand, and wait for them."""
        for child in self._children:
            _ask_to_stop(child)
        deadline = time.monotonic() + self._drain_seconds
        for child in self._children:
            child.process.join(max(0.0, deadline - time.monotonic()))
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
            child.finished = True

    def _start(self) -> _Child:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, name="cache worker", daemon=True, args=(theirs,))
        with _interrupts_ignored():  # as the child inherits, from its first instant
            process.start()
        theirs.close()
        self._children.append(_Child(process, ours))
        return self._children[-1]

    def _assign(self, child: _Child) -> None:
        """Not as arguments of the process: starting one blocks forever if it dies before it has read them."""
        threads = max(1, usable_cores() // self._num_workers)
        with contextlib.suppress(OSError):  # it died; ``_receive`` learns it too
            child.connection.send((Assignment.of(self._scheduler), threads))

    def _receive(self, child: _Child) -> None:
        """Receive what a worker reported, or that it is gone."""
        try:
            while child.connection.poll():
                kind, value = child.connection.recv()
                if kind == "counts":
                    child.counts = Counts(*value)
                elif kind == "finished":
                    child.counts, child.finished = Counts(*value), True
                else:
                    self._error = self._error or decode_error(kind, value)
                    child.finished = True
        except (EOFError, OSError):
            if not child.finished:
                child.finished = child.died = True
                child.process.join()
                self._deaths += 1

    def _replace_the_dead(self) -> None:
        dead = [child for child in self._children if child.died]
        if self._deaths > _DEATHS_WITHOUT_A_UNIT + self._num_workers:
            codes = sorted({str(child.process.exitcode) for child in dead})
            raise DataError(
                f"workers die without finishing a unit (exit code {', '.join(codes)}; -9 is often a lack of memory)",
                where=str(self._scheduler.directory),
                hint="build with fewer workers, or a smaller data.cache.unit_bytes",
            )  # fmt: skip
        for child in dead:
            self._before = Counts.sum([self._before, child.counts])
            self._children = [other for other in self._children if other is not child]
            child.connection.close()
            self._assign(self._start())


@contextlib.contextmanager
def _interrupts_ignored() -> Generator[None]:
    """A terminal sends SIGINT to all of its processes; the parent alone decides what that means."""
    if threading.current_thread() is not threading.main_thread():  # Python sets handlers only there
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _ask_to_stop(child: _Child) -> None:
    with contextlib.suppress(OSError):
        child.connection.send("stop")


def encode_error(error: VoroxError) -> tuple[str, dict[str, str]]:
    """An error in a form that crosses from one process to another."""
    value = {"what": error.what, "where": error.where, "hint": error.hint, "saved": error.saved}
    return type(error).__name__, value


def decode_error(kind: str, value: Any) -> VoroxError:
    """The inverse of ``encode_error``; also of an exception that is none of ours."""
    if kind in _KINDS:
        return _KINDS[kind](**value)
    return VoroxError(f"a worker failed: {kind}: {value['what']}", hint=value["hint"], where=value["where"])


def _work(connection: Connection) -> None:
    """The life of a worker process: its assignment comes first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reported_at = 0.0

    def report(kind: str, value: Any) -> None:
        with contextlib.suppress(OSError):  # the parent is gone: `stop` says so too
            connection.send((kind, value))

    def on_progress(_: BuildProgress) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at >= _REPORT_SECONDS:
            reported_at = time.monotonic()
            report("counts", astuple(Counts.of(scheduler)))

    def stop() -> bool:
        try:
            return connection.poll()  # a word from the parent, or its end
        except OSError:
            return True

    try:
        assignment, num_threads = connection.recv()
        os.environ["RAYON_NUM_THREADS"] = str(num_threads)  # of the tokenizers library, which starts them later
        scheduler = assignment.scheduler(on_progress=on_progress, stop=stop)
        scheduler.run()
        report("finished", astuple(Counts.of(scheduler)))
    except VoroxError as error:
        report(*encode_error(error))
    except Exception as error:
        frames = "".join(traceback.format_exception(error))
        report(type(error).__name__, {"what": str(error), "where": f"process {os.getpid()}", "hint": frames})
