"""Several processes of this machine that build one cache, and the one that watches over them.

The children are builders like any other: they meet through leases, and what they have in common is on disk. Each has
a pipe to its parent. It carries counts up, and the end of the child's work or what ended it; closing it asks the child
to stop after the unit in hand, which is also what the parent's death does. A child that dies leaves a void lease and
is replaced. Invariant: whatever happens to parent or children, the cache is valid and the next build goes on from it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from vorox.core.environment import usable_cores
from vorox.core.errors import ConfigError, DataError, VoroxError
from vorox.data.cache.builder import Builder
from vorox.data.cache.inventory import read_units
from vorox.data.cache.report import BuildProgress

_LOOK_EVERY_SECONDS = 0.25
_TELL_EVERY_SECONDS = 0.1
_DRAIN_SECONDS = 30.0
_DEATHS_WITHOUT_A_UNIT = 5
_KINDS: dict[str, type[VoroxError]] = {kind.__name__: kind for kind in (ConfigError, DataError)}


@dataclass(frozen=True, slots=True)
class Counts:
    """What a worker has done so far."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    units_built: int = 0
    units_adopted: int = 0


@dataclass
class _Child:
    process: SpawnProcess
    connection: Connection
    counts: Counts = field(default_factory=Counts)
    finished: bool = False
    died: bool = False


def run_processes(builder: Builder, num_workers: int, *, drain_seconds: float = _DRAIN_SECONDS) -> None:
    """Build with processes until nothing is missing or the builder is asked to stop.

    Args:
        builder: Says what is to be done; its counts and its manifest are those of all workers afterwards.
        num_workers: How many processes.
        drain_seconds: How long a worker that is asked to stop may take for the unit in hand before it is killed.

    Raises:
        DataError: A worker met something that stops the build, or they die without getting anywhere.
    """
    team = _Team(builder, num_workers, drain_seconds)
    try:
        team.run()
    finally:
        team.end()
        builder.look()


class _Team:
    """The children of one build."""

    def __init__(self, builder: Builder, num_workers: int, drain_seconds: float) -> None:
        self._builder = builder
        self._drain_seconds = drain_seconds
        self._num_workers = num_workers
        self._context = multiprocessing.get_context("spawn")
        self._children: list[_Child] = []
        self._before = Counts()
        self._error: VoroxError | None = None
        self._deaths = 0

    def run(self) -> None:
        for child in [self._start() for _ in range(self._num_workers)]:
            self._give_work(child)
        generation, stopping = -1, False
        while running := [child for child in self._children if not child.finished]:
            ready = wait([child.connection for child in running], timeout=_LOOK_EVERY_SECONDS)
            for child in running:
                if child.connection in ready:
                    self._hear(child)
            self._builder.look(**self._summed())
            if self._builder.manifest.generation != generation:
                generation, self._deaths = self._builder.manifest.generation, 0
            if (self._error is not None or self._builder.is_stopped()) and not stopping:
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

    def _give_work(self, child: _Child) -> None:
        """Not as arguments of the process: whoever starts one waits for ever if it dies before it has read them."""
        builder = self._builder
        threads = max(1, usable_cores() // self._num_workers)
        with contextlib.suppress(OSError):  # it died; ``_hear`` learns it too
            child.connection.send((builder.directory, builder.work, builder.options, builder.num_units, threads))

    def _hear(self, child: _Child) -> None:
        """Take in what a child said, or that it is gone."""
        try:
            while child.connection.poll():
                kind, value = child.connection.recv()
                if kind == "counts":
                    child.counts = Counts(*value)
                elif kind == "finished":
                    child.counts, child.finished = Counts(*value), True
                else:
                    self._error = self._error or error_of(kind, value)
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
                where=str(self._builder.directory), hint="build with fewer workers, or a smaller data.cache.unit_bytes",
            )  # fmt: skip
        for child in dead:
            self._before = sum_of([self._before, child.counts])
            self._children = [other for other in self._children if other is not child]
            child.connection.close()
            self._give_work(self._start())

    def _summed(self) -> dict[str, int]:
        total = sum_of([self._before, *(child.counts for child in self._children)])
        self._builder.units_built, self._builder.units_adopted = total.units_built, total.units_adopted
        return {"documents": total.documents, "text_bytes": total.text_bytes, "tokens": total.tokens}


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


def sum_of(counts: Sequence[Counts]) -> Counts:
    """What several workers have done."""
    return Counts(
        sum(count.documents for count in counts),
        sum(count.text_bytes for count in counts),
        sum(count.tokens for count in counts),
        sum(count.units_built for count in counts),
        sum(count.units_adopted for count in counts),
    )


def _ask_to_stop(child: _Child) -> None:
    with contextlib.suppress(OSError):
        child.connection.send("stop")


def described(error: VoroxError) -> tuple[str, dict[str, str]]:
    """An error in words that cross from one process to another."""
    value = {"what": error.what, "where": error.where, "hint": error.hint, "saved": error.saved}
    return type(error).__name__, value


def error_of(kind: str, value: Any) -> VoroxError:
    """The error again."""
    if kind in _KINDS:
        return _KINDS[kind](**value)
    return VoroxError(f"a worker failed: {kind}: {value['what']}", hint=value["hint"], where=value["where"])


def _work(connection: Connection) -> None:
    """The life of a worker process; what is to be done comes first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told_at = 0.0

    def tell(kind: str, value: Any) -> None:
        with contextlib.suppress(OSError):  # the parent is gone: `stop` says so too
            connection.send((kind, value))

    def counts(progress: BuildProgress) -> tuple[int, ...]:
        return (
            progress.documents, progress.text_bytes, progress.tokens, builder.units_built, builder.units_adopted
        )  # fmt: skip

    def on_progress(progress: BuildProgress) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= _TELL_EVERY_SECONDS:
            told_at = time.monotonic()
            tell("counts", counts(progress))

    def stop() -> bool:
        try:
            return connection.poll()  # a word from the parent, or its end
        except OSError:
            return True

    try:
        directory, work, options, num_units, num_threads = connection.recv()
        os.environ["RAYON_NUM_THREADS"] = str(num_threads)  # of the tokenizers library, which starts them later
        units = read_units(directory)[:num_units]
        builder = Builder(directory, work, units, options, on_progress=on_progress, stop=stop)
        builder.run()
        tell("finished", counts(builder.progress))
    except VoroxError as error:
        tell(*described(error))
    except Exception as error:
        frames = "".join(traceback.format_exception(error))
        tell(type(error).__name__, {"what": str(error), "where": f"process {os.getpid()}", "hint": frames})
