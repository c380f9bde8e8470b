"""The build scheduler: builds the requested units of a cache, alongside any number of other builders.

A queue orders the requested units, a ``UnitBuilder`` builds them, a residency decides which chunks may be on disk.
Builders of one cache, in one process or on many machines, coordinate through the file system only: leases keep two of
them from building the same unit, and ``commit`` decides which result counts. A build command, a worker process, a Ray
task, a growing cache, a stream and a repair differ only in queue, residency and thread. Invariant: the dataset digest
does not depend on the order of the units, on interruptions, on the number of builders or on the codec.

A ``PairedScheduler`` builds the caches of both splits of a source in one pass over its text.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from vorox.core.errors import VoroxError
from vorox.core.schema.data import BuildPipelineConfig
from vorox.data.cache.building.build_queue import BuildQueue, Permanent, Residency, never
from vorox.data.cache.building.commit import adopt_unit, cache_write_error, commit_unit, link_unit
from vorox.data.cache.building.report import OnProgress, ProgressTracker
from vorox.data.cache.files.leases import Leases
from vorox.data.cache.files.manifest import SNAPSHOT_INTERVAL_ENTRIES, Manifest, chunk_path
from vorox.data.cache.units.unit_builder import BuiltUnit, UnitBuilder
from vorox.data.cache.upkeep.disk_budget import is_evictable
from vorox.data.cache.upkeep.unit_store import UnitStore
from vorox.data.documents import Record, Unit
from vorox.data.storage import abandon_late_requests
from vorox.data.text.unit_reader import SplitPairReader

SNAPSHOT_FROM_BYTES = 1 << 15
"""A shorter log, of about ninety chunks, opens as fast without a snapshot."""

_SHORTEST_WAIT_SECONDS = 0.02
_LONGEST_WAIT_SECONDS = 0.5
_PATIENCE_SECONDS = 1.0
"""How long to hold back before leasing more units than the threads need, so that other builders find some."""

_SERIAL = BuildPipelineConfig(staged=False)


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
        tracker: Progress of the build and this scheduler's share of it.
        units_built: Units built by this scheduler.
        units_adopted: Units found complete on disk: built for another cache, or written by a builder that died.
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
        self._stop = stop
        stages = builder.pipeline
        self._units_ahead = 1 + stages.fetch_threads + stages.tokenize_threads + stages.pack_threads
        self._rebuilding: set[int] = set()
        # A stream removes chunks to free their disk space, which other links to them would keep.
        self._store = None if is_evictable(directory) else UnitStore.of_cache(directory)
        self._key_leases: Leases | None = None
        self._keys: dict[int, str] = {}
        self._unusable: set[int] = set()
        self._in_flight: list[int] = []
        self.manifest = Manifest.empty()
        self.tracker = ProgressTracker(units, builder.recipe.row_tokens, on_progress)
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
            with Leases(self.directory) as leases, self._leasing_keys():
                while not self._stop() and (batch := self._next_batch()) is not None:
                    if self._process(batch, leases) > 0:
                        wait_seconds = _SHORTEST_WAIT_SECONDS
                    elif not self._stop() and (batch := self._next_batch()):
                        self.tracker.update(waiting_for=f"{leases.holder(batch[0]) or 'another builder'}")
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
                with abandon_late_requests(self.should_stop):
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
        """Stop the thread after the unit in progress, or when its store is late, and join it. Idempotent."""
        self.queue.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)

    def should_stop(self) -> bool:
        """Whether a stop was requested."""
        return self._stop() or self.queue.closed

    def poll(self, **counts: int) -> None:
        """Read what other builders have committed, and report progress with the given counts."""
        self.tracker.update(**counts)
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
                self._release(unit, leases)

    def _lease_units(self, batch: Sequence[int], leases: Leases, *, keys: bool = False) -> Iterator[Unit]:
        for unit in batch:
            if self._stop() or self.queue.preempts(batch):
                return
            leases.wait_for_room(self._units_ahead, _PATIENCE_SECONDS)
            if self._claim(unit, leases, keys=keys):
                self._in_flight.append(unit)
                yield self.units[unit]

    def _claim(self, unit: int, leases: Leases, *, keys: bool = False) -> bool:
        """Lease a unit that still has to be built, and its key if ``keys``."""
        if self._is_done(unit) or not leases.acquire(unit):
            return False
        self.manifest = self.manifest.refreshed(self.directory)
        if self._is_done(unit):
            leases.release(unit)
            return False
        if self.manifest.has_unit(unit):
            self._rebuilding.add(unit)
        if keys and not self._claim_key(unit):
            leases.release(unit)
            return False
        return True

    @contextlib.contextmanager
    def _leasing_keys(self) -> Generator[None]:
        """Hold leases on the keys of units too, so that builders of different caches do not build the same unit."""
        with contextlib.ExitStack() as stack:
            if self._store is not None:
                with contextlib.suppress(OSError):  # the root is not writable: nothing is shared
                    self._key_leases = stack.enter_context(Leases(self._store.directory))
            yield
        self._key_leases = None

    def _claim_key(self, unit: int) -> bool:
        """Lease the key of a unit; false if a builder of another cache holds it, or has built the unit meanwhile."""
        if self._key_leases is None or self._store is None:
            return True
        key = self._keys[unit] = self.builder.key_of(self.units[unit])
        if not self._key_leases.acquire(key):
            return False
        if self._store.has(key) and unit not in self._unusable and unit not in self._rebuilding:
            self._key_leases.release(key)
            return False  # the next round links it
        return True

    def _release(self, unit: int, leases: Leases) -> None:
        leases.release(unit)
        if self._key_leases is not None and unit in self._keys:
            self._key_leases.release(self._keys.pop(unit))

    def _is_done(self, unit: int) -> bool:
        if not self.residency.is_resident(self.manifest, unit):
            return False
        self.queue.mark_done(unit)
        return True

    def _adopt(self, batch: Sequence[int], leases: Leases) -> int:
        """Commit complete units of dead builders; returns how many."""
        adopted = 0
        for unit in self._lease_units([unit for unit in batch if self._may_exist(unit)], leases):
            number, replaces = unit.unit_id, self.manifest.has_unit(unit.unit_id)
            manifest, done = self.manifest, False
            if self._store is not None and self._store.serves:
                manifest, done = link_unit(manifest, self.directory, unit, self.builder, self._store, replace=replaces)
                if not done:
                    self._unusable.add(number)
            if not done and not replaces:
                manifest, done = adopt_unit(manifest, self.directory, unit, self.builder)
            self._in_flight.remove(number)
            leases.release(number)
            if done:
                self._rebuilding.discard(number)
                self.residency.mark_written(number)
                self.queue.mark_done(number)
            adopted += done
            self.units_adopted += done
            self.observe(manifest)
        return adopted

    def _may_exist(self, unit: int) -> bool:
        """Whether a unit may be complete: its chunks in this cache without an entry, or those of another cache."""
        if unit not in self._unusable and self._store is not None and self._store.serves:
            is_stored = self._store.has(self.builder.key_of(self.units[unit]))
        else:
            is_stored = False
        return is_stored or (not self.manifest.has_unit(unit) and chunk_path(self.directory, unit, 0).exists())

    def _build(self, batch: Sequence[int], leases: Leases) -> int:
        built = 0
        units = self.builder.run(
            self._lease_units(batch, leases, keys=True),
            on_documents=self.tracker.add_documents, on_statistics=self.tracker.set_stages,
            stop=lambda: self._stop() or self.queue.preempts(batch),
        )  # fmt: skip
        with contextlib.closing(units):  # ends its read-ahead
            for unit in units:
                if not self._commit(unit):
                    break
                self._in_flight.remove(unit.unit_id)
                self._release(unit.unit_id, leases)
                built += 1
        return built

    def build_from(self, unit: Unit, records: Sequence[Record]) -> None:
        """Build a leased unit in this thread from records that are already in memory."""

        def read_unit(unit: Unit) -> Sequence[Record]:
            del unit
            return records

        builder = replace(self.builder, read_unit=read_unit, pipeline=_SERIAL)
        for built in builder.run([unit], on_documents=self.tracker.add_documents):
            self._commit(built)

    def _commit(self, built: BuiltUnit) -> bool:
        """Write and commit a unit. False: there is no room for it now."""
        unit = built.unit_id
        with self.residency.room(unit, built.size_bytes) as there_is_room:
            if not there_is_room:
                return False
            self.tracker.add_unit(unit, built.size_bytes)
            manifest, counts = commit_unit(
                self.manifest, self.directory, built, self.builder, replace=unit in self._rebuilding
            )
            if counts and self._store is not None and not manifest.erased_in(unit):
                replaces = unit in self._rebuilding or unit in self._unusable
                self._store.publish(built.key, self.directory, built, replace_unit=replaces)
            self._rebuilding.discard(unit)
            self.residency.mark_written(unit)
        self.queue.mark_done(unit)
        self.units_built += counts
        self.observe(manifest)
        if counts and self.units_built % SNAPSHOT_INTERVAL_ENTRIES == 0:
            manifest.write_snapshot(self.directory)
        return True

    def observe(self, manifest: Manifest) -> None:
        """Adopt a newer state of the cache and report progress if it changed."""
        self.manifest = manifest
        self.tracker.observe(manifest)

    @contextlib.contextmanager
    def translate_os_errors(self) -> Generator[None]:
        """Turn an ``OSError`` of a failed write into a ``DataError`` with a remedy."""
        try:
            yield
        except OSError as error:
            raise self._translate(error) from error

    def _translate(self, error: OSError) -> VoroxError:
        done = f"{self.tracker.progress.units_done} of {len(self.units)} units; the next build continues from there"
        return cache_write_error(error, self.directory, saved=done, needed_bytes=self.tracker.needed_bytes)


class PairedScheduler(BuildScheduler):
    """A scheduler that also builds units of the other split's cache from the text that it reads.

    Both caches consist of the same pieces of text, grouped into units of different sizes. The reader of the first split
    holds the records of the other one; once the units that cover a unit of the second cache are committed, its
    scheduler, the companion, builds that unit from the held records. Units that exist or that another builder holds are
    skipped. Invariant: the second cache is identical to one built alone; a later build completes what it still lacks.

    Args:
        builder: The unit builder of the first cache, which reads the units by a ``SplitPairReader``.
        companion: The scheduler of the second cache, which is planned and has units of the same pieces.

    Other arguments: see ``BuildScheduler``.
    """

    def __init__(
        self,
        directory: Path,
        builder: UnitBuilder,
        units: Sequence[Unit],
        queue: BuildQueue | None = None,
        *,
        companion: BuildScheduler,
        residency: Residency | None = None,
        on_progress: OnProgress | None = None,
        stop: Callable[[], bool] = never,
    ) -> None:
        super().__init__(directory, builder, units, queue, residency=residency, on_progress=on_progress, stop=stop)
        assert isinstance(builder.read_unit, SplitPairReader)
        self.companion, self._reader = companion, builder.read_unit
        owner = {(span.file_index, span.start_byte): unit.unit_id for unit in companion.units for span in unit.spans}
        self._targets = [{owner[span.file_index, span.start_byte] for span in unit.spans} for unit in units]
        self._owner = owner
        self._parts: dict[int, dict[int, list[Record]]] = {}
        self._covering: defaultdict[int, set[int]] = defaultdict(set)
        for unit, targets in enumerate(self._targets):
            for target in targets:
                self._covering[target].add(unit)
        self._leases: Leases | None = None
        self._adopting = False

    def run(self) -> None:
        companion = self.companion
        with contextlib.ExitStack() as stack:
            self._leases = stack.enter_context(Leases(companion.directory))
            stack.enter_context(companion.tracker.silenced())
            companion.observe(Manifest.open(companion.directory))
            missing = set(Manifest.open(self.directory).missing_units().tolist())
            for target, covering in self._covering.items():
                if covering <= missing and companion._claim(target, self._leases):
                    self._parts[target] = {}
            super().run()
        self._leases = None

    def _adopt(self, batch: Sequence[int], leases: Leases) -> int:
        self._adopting = True  # adopting reads no records
        try:
            return super()._adopt(batch, leases)
        finally:
            self._adopting = False

    def _claim(self, unit: int, leases: Leases, *, keys: bool = False) -> bool:
        claimed = super()._claim(unit, leases, keys=keys)
        for target in self._targets[unit] & self._parts.keys():
            if claimed and not self._adopting:
                self._reader.hold(unit)
            else:
                self._skip(target)
        return claimed

    def _commit(self, built: BuiltUnit) -> bool:
        if not super()._commit(built):
            return False
        unit = built.unit_id
        records, targets = self._reader.take(unit), self._targets[unit] & self._parts.keys()
        for target in targets:
            if records is None:
                self._skip(target)
                continue
            self._parts[target][unit] = [record for record in records if self._find_target(unit, record) == target]
            if self._parts[target].keys() == self._covering[target]:
                self._build_companion(target)
        return True

    def _find_target(self, unit: int, record: Record) -> int:
        """Return the companion's unit that a record belongs to."""
        if len(self._targets[unit]) == 1:
            return next(iter(self._targets[unit]))
        starts = (
            span.start_byte
            for span in self.units[unit].spans
            if span.file_index == record.file_index and span.start_byte <= record.byte_offset
        )
        return self._owner[record.file_index, max(starts)]

    def _build_companion(self, target: int) -> None:
        assert self._leases is not None
        parts = self._parts.pop(target)
        records = [record for unit in sorted(parts) for record in parts[unit]]
        self.companion.build_from(self.companion.units[target], records)
        self._leases.release(target)

    def _skip(self, target: int) -> None:
        """Leave a unit to a later build."""
        assert self._leases is not None
        if self._parts.pop(target, None) is not None:
            self._leases.release(target)
