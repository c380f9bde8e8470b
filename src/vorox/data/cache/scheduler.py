"""The build scheduler: builds the requested units of a cache, alongside any number of other builders.

A queue orders the requested units, a ``UnitBuilder`` builds them, a residency decides which chunks may be on disk.
Builders of one cache, in one process or on many machines, coordinate through the file system only: leases keep two of
them from building the same unit, and ``commit`` decides which result counts. A build command, a worker process, a Ray
task, a growing cache, a stream and a repair differ only in queue, residency and thread. Invariant: the dataset digest
does not depend on the order of the units, on interruptions, on the number of builders or on the codec.
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
from vorox.data.cache.build_queue import BuildQueue, Permanent, Residency, never
from vorox.data.cache.commit import adopt_unit, commit_unit
from vorox.data.cache.leases import Leases
from vorox.data.cache.manifest import SNAPSHOT_INTERVAL_ENTRIES, Manifest, chunk_path
from vorox.data.cache.report import BuildProgress, committed_progress
from vorox.data.cache.unit_builder import BuiltUnit, UnitBuilder
from vorox.data.documents import Record, Unit
from vorox.data.pipeline.pipeline import PipelineStatistics

SNAPSHOT_FROM_BYTES = 1 << 15
"""A shorter log, of about ninety chunks, opens as fast without a snapshot."""

_DEFAULT_CACHE_BYTES_PER_TEXT_BYTE = 0.4
_SHORTEST_WAIT_SECONDS = 0.02
_LONGEST_WAIT_SECONDS = 0.5
_PATIENCE_SECONDS = 1.0
"""How long to hold back before leasing more units than the threads need, so that other builders find some."""

_SERIAL = PipelineConfig(staged=False)

OnProgress = Callable[[BuildProgress], None]


class BuildScheduler:
    """Builds the requested units of one planned cache.

    Args:
        directory: The cache.
        builder: The unit builder of the cache.
        units: The planned units; an append-only list is allowed.
        queue: The requested units. None: all missing ones.
        residency: Which chunks may be on disk. None: all of them, permanently.
        on_progress: Called after every batch of documents and every unit.
        stop: Polled between units; once it returns true, ``run`` returns.

    Attributes:
        manifest: The latest known state of the cache.
        progress: Progress of the build and this scheduler's share of it.
        units_built: Units built by this scheduler.
        units_adopted: Units found complete on disk, written by a builder that died.
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
        self.directory, self.builder, self.units = directory, builder.with_directory(directory), units
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
        """Build, or wait for other builders, until no unit is requested or ``stop`` returns true.

        Raises:
            DataError: A text cannot be tokenised, too many records are bad, or the disk is full or not writable.
                Committed units stay.
        """
        wait_seconds = _SHORTEST_WAIT_SECONDS
        with self.translate_os_errors():
            self.observe(Manifest.open(self.directory))
            with Leases(self.directory) as leases:
                while not self._stop() and (batch := self._next_batch()) is not None:
                    if self._process(batch, leases) > 0:
                        wait_seconds = _SHORTEST_WAIT_SECONDS
                    elif not self._stop() and (batch := self._next_batch()):
                        self.report_progress(waiting_for=f"{leases.holder(batch[0]) or 'another builder'}")
                        self.queue.wait(wait_seconds)
                        wait_seconds = min(2 * wait_seconds, _LONGEST_WAIT_SECONDS)
            if self.manifest.position.end_bytes >= SNAPSHOT_FROM_BYTES and self.units_built + self.units_adopted:
                self.manifest.write_snapshot(self.directory)

    def start(self, run: Callable[[], None] | None = None) -> None:
        """Build in a daemon thread until no unit is requested, or until ``close``.

        Args:
            run: The thread's function. None: ``run``.
        """

        def work() -> None:
            try:
                (run or self.run)()
            except Exception as error:  # raised in the threads that wait for a unit
                self._error = error
                self.queue.close(error)

        self._thread = threading.Thread(target=work, name=f"build {self.directory.name}", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the build thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise the exception that ended the thread, if any."""
        if self._error is not None:
            raise self._error

    def close(self, timeout_seconds: float | None = None) -> None:
        """Stop the thread after the unit in progress, and join it. Idempotent."""
        self.queue.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)

    def should_stop(self) -> bool:
        """Whether a stop was requested."""
        return self._stop() or self.queue.closed

    def poll(self, **counts: int) -> None:
        """Read what other builders have committed, and report progress with the given counts."""
        self.report_progress(**counts)
        self.observe(self.manifest.refreshed(self.directory))

    def _next_batch(self) -> list[int] | None:
        self.observe(self.manifest.refreshed(self.directory))
        return self.queue.next_batch(self.manifest, self.residency.damaged)

    def _process(self, batch: Sequence[int], leases: Leases) -> int:
        """Build the units of a batch that no other builder holds; return how many units this made progress on."""
        self._in_flight = []
        try:
            return self._adopt(batch, leases) + self._build(batch, leases)
        except Exception as error:  # of any kind: the threads that wait for the unit must see it
            failed = self._in_flight[0] if self._in_flight else batch[0]
            reason = self._translate(error) if isinstance(error, OSError) else error
            if not self.queue.fail(failed, reason):
                raise
            return 1
        finally:
            for unit in self._in_flight:
                leases.release(unit)

    def _lease_units(self, batch: Sequence[int], leases: Leases) -> Iterator[Unit]:
        for unit in batch:
            if self._stop() or self.queue.preempts(batch):
                return
            leases.wait_for_room(self._units_ahead, _PATIENCE_SECONDS)
            if self._claim(unit, leases):
                self._in_flight.append(unit)
                yield self.units[unit]

    def _claim(self, unit: int, leases: Leases) -> bool:
        """Lease a unit that still has to be built."""
        if self._is_done(unit) or not leases.acquire(unit):
            return False
        self.manifest = self.manifest.refreshed(self.directory)
        if self._is_done(unit):
            leases.release(unit)
            return False
        if self.manifest.has_unit(unit):
            self._rebuilding.add(unit)
        return True

    def _is_done(self, unit: int) -> bool:
        if not self.residency.is_resident(self.manifest, unit):
            return False
        self.queue.mark_done(unit)
        return True

    def _adopt(self, batch: Sequence[int], leases: Leases) -> int:
        """Commit complete units of dead builders; returns how many."""
        adopted = 0
        orphans = [unit for unit in batch if chunk_path(self.directory, unit, 0).exists()]
        for unit in self._lease_units([unit for unit in orphans if not self.manifest.has_unit(unit)], leases):
            manifest, done = adopt_unit(self.manifest, self.directory, unit, self.builder)
            self._in_flight.remove(unit.unit_id)
            leases.release(unit.unit_id)
            if done:
                self.queue.mark_done(unit.unit_id)
            adopted += done
            self.units_adopted += done
            self.observe(manifest)
        return adopted

    def _build(self, batch: Sequence[int], leases: Leases) -> int:
        built = 0
        units = self.builder.run(
            self._lease_units(batch, leases), on_documents=self._add_documents, on_statistics=self._update_stages,
            stop=lambda: self._stop() or self.queue.preempts(batch),
        )  # fmt: skip
        with contextlib.closing(units):  # ends its read-ahead
            for unit in units:
                if not self._commit(unit):
                    break
                self._in_flight.remove(unit.unit_id)
                leases.release(unit.unit_id)
                built += 1
        return built

    def build_from(self, unit: Unit, records: Sequence[Record]) -> None:
        """Build a leased unit in this thread from records that are already in memory."""

        def read_unit(unit: Unit) -> Sequence[Record]:
            del unit
            return records

        builder = replace(self.builder, read_unit=read_unit, pipeline=_SERIAL)
        for built in builder.run([unit], on_documents=self._add_documents):
            self._commit(built)

    def _commit(self, built: BuiltUnit) -> bool:
        """Write and commit a unit. False: there is no room for it now."""
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
        self.queue.mark_done(unit)
        self.units_built += counts
        self.observe(manifest)
        if counts and self.units_built % SNAPSHOT_INTERVAL_ENTRIES == 0:
            manifest.write_snapshot(self.directory)
        return True

    def _count_written(self, size_bytes: int) -> None:
        self._pending_bytes -= size_bytes

    def observe(self, manifest: Manifest) -> None:
        """Adopt a newer state of the cache and report progress if it changed."""
        changed = manifest.generation != self._reported_generation
        self.manifest = manifest
        if changed:
            self._reported_generation = manifest.generation
            self.report_progress(waiting_for="", **committed_progress(manifest, self._unit_bytes()))

    def _unit_bytes(self) -> npt.NDArray[np.int64]:
        """Return the source bytes of every unit known so far."""
        if len(self._sizes_U) < len(self.units):
            self._sizes_U = np.append(self._sizes_U, _source_bytes(self.units[len(self._sizes_U) :]))
            self.progress = replace(self.progress, units=len(self.units), source_bytes=int(self._sizes_U.sum()))
        return self._sizes_U

    def _update_stages(self, statistics: PipelineStatistics) -> None:
        self.progress = replace(self.progress, stages=statistics)

    def _add_documents(self, documents: int, text_bytes: int, tokens: int) -> None:
        progress = self.progress
        self.report_progress(
            documents=progress.documents + documents,
            text_bytes=progress.text_bytes + text_bytes,
            tokens=progress.tokens + tokens,
        )

    def report_progress(self, **changes: int | str) -> None:
        """Update the progress and report it."""
        self.progress = replace(self.progress, **changes)
        if self._on_progress is not None:
            self._on_progress(self.progress)

    @contextlib.contextmanager
    def without_progress(self) -> Generator[None]:
        """Suppress progress reports: the cache is built alongside another one."""
        on_progress, self._on_progress = self._on_progress, None
        try:
            yield
        finally:
            self._on_progress = on_progress

    @contextlib.contextmanager
    def translate_os_errors(self) -> Generator[None]:
        """Turn an ``OSError`` of a failed write into a ``DataError`` with a remedy."""
        try:
            yield
        except OSError as error:
            raise self._translate(error) from error

    def _translate(self, error: OSError) -> VoroxError:
        done = f"{self.progress.units_done} of {len(self.units)} units; the next build continues from there"
        return cache_write_error(error, self.directory, saved=done, needed_bytes=self._needed_bytes())

    def _needed_bytes(self) -> int:
        """Return the bytes still to be written; units not read yet are estimated from the ratio of the others."""
        known = [int(unit) for unit in self.manifest.units["unit"] if unit < len(self.units)]
        if self._writing is not None:
            known.append(self._writing)
        sizes = self._unit_bytes()
        known_text_bytes = int(sizes[np.unique(np.array(known, np.int64))].sum())
        known_bytes = int(self.manifest.chunks["size_bytes"].sum(dtype=np.int64)) + self._writing_bytes
        rate = known_bytes / known_text_bytes if known_text_bytes else _DEFAULT_CACHE_BYTES_PER_TEXT_BYTE
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
