"""The build scheduler: units that are wanted become committed chunks, next to any number of other builders.

A queue says which units are wanted and how urgently, a ``UnitBuilder`` makes them, a residency says what may be on
disk. Builders on one cache, in one process or on many machines, need not know of each other: a lease keeps two of them
from the same unit, and ``commit`` decides what counts. A build command, a worker process, a Ray task, a growing cache,
a stream and a mended chunk differ in queue, residency and thread alone. Invariant: the dataset digest depends neither
on the order of the units nor on interruptions, the number of builders or the codec.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vorox.core.atomic import is_disk_full
from vorox.core.disk_errors import disk_error, room_text
from vorox.core.errors import DataError, VoroxError
from vorox.core.schema.data import PipelineConfig
from vorox.data.cache.build_queue import BuildQueue, never
from vorox.data.cache.commit import adopt_unit, commit_unit
from vorox.data.cache.leases import Leases
from vorox.data.cache.manifest import SNAPSHOT_INTERVAL_ENTRIES, Manifest, chunk_path
from vorox.data.cache.report import BuildProgress, committed
from vorox.data.cache.residency import Permanent, Residency
from vorox.data.cache.unit_builder import BuiltUnit, UnitBuilder
from vorox.data.documents import Record, Unit
from vorox.data.pipeline.pipeline import PipelineStatistics

SNAPSHOT_FROM_BYTES = 1 << 15
"""A shorter log, of some ninety chunks, opens as quickly without a snapshot."""

_FIRST_GUESS_CACHE_PER_TEXT_BYTE = 0.4
_SHORTEST_WAIT_SECONDS = 0.02
_LONGEST_WAIT_SECONDS = 0.5
_PATIENCE_SECONDS = 1.0
"""Small units are read ahead by number, so that other builders find some; large ones by the pipeline's bytes."""

_SERIAL = PipelineConfig(staged=False)

OnProgress = Callable[[BuildProgress], None]


class BuildScheduler:
    """Builds the wanted units of one planned cache.

    Args:
        directory: The cache.
        builder: What its units are a function of.
        units: The planned units; a list that only grows may be given.
        queue: Which of them are wanted. None: all that are missing.
        residency: Which chunks may be on disk. None: all, for good.
        on_progress: Called after every batch of documents and every unit.
        stop: Polled between units; once it returns true, ``run`` returns.

    Attributes:
        manifest: The cache as last seen.
        progress: How far it is, and what this scheduler did for it.
        units_built: Units that this scheduler made.
        units_adopted: Units that it found complete on disk, left by a builder that died.
    """

    def __init__(
        self,
        directory: Path,
        builder: UnitBuilder,
        units: Sequence[Unit],
        queue: BuildQueue | None = None,
        *,
        residency: Residency | None = None,
        on_progress: OnProgress | None = None,
        stop: Callable[[], bool] = never,
    ) -> None:
        self.directory, self.builder, self.units = directory, builder.at(directory), units
        self.queue = queue or BuildQueue()
        self.residency = residency or Permanent(directory)
        self.units_built = self.units_adopted = 0
        self._on_progress, self._stop = on_progress, stop
        stages = builder.pipeline
        self._units_ahead = 1 + stages.fetch_threads + stages.tokenize_threads + stages.pack_threads
        self._rebuilding: set[int] = set()
        self._in_flight: list[int] = []
        self._writing: int | None = None
        self._writing_bytes = self._pending_bytes = 0
        self._reported_generation = -1
        self.manifest = Manifest.empty()
        self._sizes_U = _source_bytes(units)
        self.progress = BuildProgress(
            0, len(units), source_bytes=int(self._sizes_U.sum()), row_tokens=builder.recipe.row_tokens
        )
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Build, or wait for others to build, until nothing is wanted or ``stop`` returns true.

        Raises:
            DataError: A text cannot be tokenised, too many records are bad, or the disk is full or refuses to be
                written to. What was committed stays.
        """
        wait_seconds = _SHORTEST_WAIT_SECONDS
        with self.translate_os_errors():
            self.observe(Manifest.open(self.directory))
            with Leases(self.directory) as leases:
                while not self._stop() and (batch := self._next_batch()) is not None:
                    if self._attempt(batch, leases) > 0:
                        wait_seconds = _SHORTEST_WAIT_SECONDS
                    elif not self._stop() and (batch := self._next_batch()):
                        self.report_progress(waiting_for=f"{leases.holder(batch[0]) or 'another builder'}")
                        self.queue.wait(wait_seconds)
                        wait_seconds = min(2 * wait_seconds, _LONGEST_WAIT_SECONDS)
            if self.manifest.position.end_bytes >= SNAPSHOT_FROM_BYTES and self.units_built + self.units_adopted:
                self.manifest.write_snapshot(self.directory)

    def start(self, run: Callable[[], None] | None = None) -> None:
        """Build in a daemon thread until nothing is wanted or ``close``.

        Args:
            run: What the thread does. None: ``run``, with the threads of this process.
        """

        def work() -> None:
            try:
                (run or self.run)()
            except Exception as error:  # raised where somebody waits for a unit
                self._error = error
                self.queue.close(error)

        self._thread = threading.Thread(target=work, name=f"build {self.directory.name}", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread builds or waits."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise what ended the thread, if something did."""
        if self._error is not None:
            raise self._error

    def close(self, timeout_seconds: float | None = None) -> None:
        """End the thread after what it has in hand, and wait for it. Repeatable."""
        self.queue.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)

    def is_stopped(self) -> bool:
        """Whether a stop was requested."""
        return self._stop() or self.queue.closed

    def poll(self, **counts: int) -> None:
        """See what other builders committed meanwhile; ``counts`` is what is known of them."""
        self.report_progress(**counts)
        self.observe(self.manifest.refreshed(self.directory))

    def _next_batch(self) -> list[int] | None:
        self.observe(self.manifest.refreshed(self.directory))
        return self.queue.next_batch(self.manifest, self.residency.damaged)

    def _attempt(self, batch: Sequence[int], leases: Leases) -> int:
        """Build what nobody else has in hand; returns how many units were built, adopted or found done."""
        self._in_flight = []
        try:
            return self._adopt(batch, leases) + self._build(batch, leases)
        except Exception as error:  # whatever it is, who waits for the unit must see it
            failed = self._in_flight[0] if self._in_flight else batch[0]
            reason = self._translated(error) if isinstance(error, OSError) else error
            if not self.queue.fail(failed, reason):
                raise
            return 1
        finally:
            for unit in self._in_flight:
                leases.release(unit)

    def _leased(self, batch: Sequence[int], leases: Leases) -> Iterator[Unit]:
        for unit in batch:
            if self._stop() or self.queue.preempts(batch):
                return
            leases.wait_for_room(self._units_ahead, _PATIENCE_SECONDS)
            if self._claim(unit, leases):
                self._in_flight.append(unit)
                yield self.units[unit]

    def _claim(self, unit: int, leases: Leases) -> bool:
        """Lease a unit that is still to be built."""
        if self._is_settled(unit) or not leases.acquire(unit):
            return False
        self.manifest = self.manifest.refreshed(self.directory)
        if self._is_settled(unit):
            leases.release(unit)
            return False
        if self.manifest.has_unit(unit):
            self._rebuilding.add(unit)
        return True

    def _is_settled(self, unit: int) -> bool:
        if not self.residency.is_resident(self.manifest, unit):
            return False
        self.queue.settle(unit)
        return True

    def _adopt(self, batch: Sequence[int], leases: Leases) -> int:
        """Take over what dead builders left on disk; returns how many units that gave."""
        adopted = 0
        orphans = [unit for unit in batch if chunk_path(self.directory, unit, 0).exists()]
        for unit in self._leased([unit for unit in orphans if not self.manifest.has_unit(unit)], leases):
            manifest, done = adopt_unit(self.manifest, self.directory, unit, self.builder)
            self._in_flight.remove(unit.unit_id)
            leases.release(unit.unit_id)
            if done:
                self.queue.settle(unit.unit_id)
            adopted += done
            self.units_adopted += done
            self.observe(manifest)
        return adopted

    def _build(self, batch: Sequence[int], leases: Leases) -> int:
        built = 0
        units = self.builder.run(
            self._leased(batch, leases), on_documents=self._add_documents, on_statistics=self._see_stages,
            stop=lambda: self._stop() or self.queue.preempts(batch),
        )  # fmt: skip
        try:
            for unit in units:
                if not self._commit(unit):
                    break
                self._in_flight.remove(unit.unit_id)
                leases.release(unit.unit_id)
                built += 1
        finally:
            if isinstance(units, Generator):
                units.close()  # ends what it reads ahead
        return built

    def build_from(self, unit: Unit, records: Sequence[Record]) -> None:
        """Build a leased unit in this thread from records that were read elsewhere."""

        def read_unit(unit: Unit) -> Sequence[Record]:
            del unit
            return records

        builder = replace(self.builder, read_unit=read_unit, pipeline=_SERIAL)
        for built in builder.run([unit], on_documents=self._add_documents):
            self._commit(built)

    def _commit(self, built: BuiltUnit) -> bool:
        """Write a unit and make it count; False if there is no room for it now."""
        unit = built.unit_id
        with self.residency.room(unit, built.size_bytes) as there_is_room:
            if not there_is_room:
                return False
            self._writing, self._writing_bytes = unit, built.size_bytes
            self._pending_bytes = built.size_bytes
            manifest, counts = commit_unit(
                self.manifest, self.directory, built, self.builder,
                replace=unit in self._rebuilding, on_written=self._count_written,
            )  # fmt: skip
            self._writing, self._writing_bytes, self._pending_bytes = None, 0, 0
            self._rebuilding.discard(unit)
            self.residency.mark_written(unit)
        self.queue.settle(unit)
        self.units_built += counts
        self.observe(manifest)
        if counts and self.units_built % SNAPSHOT_INTERVAL_ENTRIES == 0:
            manifest.write_snapshot(self.directory)
        return True

    def _count_written(self, size_bytes: int) -> None:
        self._pending_bytes -= size_bytes

    def observe(self, manifest: Manifest) -> None:
        """Take a state of the cache for the current one, and report what changed."""
        changed = manifest.generation != self._reported_generation
        self.manifest = manifest
        if changed:
            self._reported_generation = manifest.generation
            self.report_progress(waiting_for="", **committed(manifest, self._unit_bytes()))

    def _unit_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of the source of every unit that is known by now."""
        if len(self._sizes_U) < len(self.units):
            self._sizes_U = np.append(self._sizes_U, _source_bytes(self.units[len(self._sizes_U) :]))
            self.progress = replace(self.progress, units=len(self.units), source_bytes=int(self._sizes_U.sum()))
        return self._sizes_U

    def _see_stages(self, statistics: PipelineStatistics) -> None:
        self.progress = replace(self.progress, stages=statistics)

    def _add_documents(self, documents: int, text_bytes: int, tokens: int) -> None:
        progress = self.progress
        self.report_progress(
            documents=progress.documents + documents,
            text_bytes=progress.text_bytes + text_bytes,
            tokens=progress.tokens + tokens,
        )

    def report_progress(self, **changes: int | str) -> None:
        """Change what is known of the progress, and report it."""
        self.progress = replace(self.progress, **changes)
        if self._on_progress is not None:
            self._on_progress(self.progress)

    @contextlib.contextmanager
    def silenced(self) -> Generator[None]:
        """Report no progress: the cache is built on the side of another one."""
        on_progress, self._on_progress = self._on_progress, None
        try:
            yield
        finally:
            self._on_progress = on_progress

    @contextlib.contextmanager
    def translate_os_errors(self) -> Generator[None]:
        """Raise a ``DataError`` that says what to do for a write that the system refused."""
        try:
            yield
        except OSError as error:
            raise self._translated(error) from error

    def _translated(self, error: OSError) -> VoroxError:
        done = f"{self.progress.units_done} of {len(self.units)} units; the next build goes on from there"
        return cache_write_error(error, self.directory, saved=done, needed_bytes=self._needed_bytes())

    def _needed_bytes(self) -> int:
        """Bytes of chunks that are not written yet; of units not read yet, by the ratio of the others."""
        known = [int(unit) for unit in self.manifest.units["unit"] if unit < len(self.units)]
        if self._writing is not None:
            known.append(self._writing)
        sizes = self._unit_bytes()
        known_text_bytes = int(sizes[np.unique(np.array(known, np.int64))].sum())
        known_bytes = int(self.manifest.chunks["size_bytes"].sum(dtype=np.int64)) + self._writing_bytes
        rate = known_bytes / known_text_bytes if known_text_bytes else _FIRST_GUESS_CACHE_PER_TEXT_BYTE
        return self._pending_bytes + round(rate * (int(sizes.sum()) - known_text_bytes))


def _source_bytes(units: Collection[Unit]) -> npt.NDArray[np.int64]:
    """Return the bytes of source text of each unit."""
    return np.array([unit.size_bytes for unit in units], np.int64)


def cache_write_error(error: OSError, directory: Path, *, saved: str, needed_bytes: int) -> DataError:
    """Return the error for a failed write to a cache."""
    where = str(error.filename or directory)
    if not is_disk_full(error):
        known = disk_error(error, where)
        return DataError(
            f"Cannot write to the cache: {os.strerror(error.errno) if error.errno else error}", where=where,
            saved=saved,
            hint=known.hint if known else "grant write permission, or set data.cache.directory to a writable path",
        )  # fmt: skip
    return DataError(
        f"No space left for the rest of the cache: {room_text(needed_bytes, directory, error)}",
        where=where, saved=saved,
        hint="free some space, or set data.cache.directory to another disk, and run the same command again",
    )  # fmt: skip
