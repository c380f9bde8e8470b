"""One split of one source whose chunk files come and go: what is on disk, what is wanted next, and who builds it.

Readers say what they touch; a thread builds the units of the segment that is being read and of the next ones, in the
order of their need, within the room of the ring. A unit that was built once is recorded in the cache's manifest for
ever; when its chunks are needed after they were removed, the unit is built again from its text and must come out with
the content that was recorded. Invariant: what a reader gets is what a cache of the same recipe holds, or an error at
the very row that needs it; neither the network nor the room on disk changes an order or leaves something out.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from vorox.core.atomic import make_directory, write_file
from vorox.core.errors import DataError
from vorox.data.cache.builder import prepare_directory, refused_write
from vorox.data.cache.commit import commit_unit
from vorox.data.cache.format import ChunkRecord
from vorox.data.cache.leases import Leases
from vorox.data.cache.manifest import Manifest, chunk_path
from vorox.data.cache.unit_work import BuiltUnit, UnitWork
from vorox.data.documents import Unit
from vorox.data.pipeline.statistics import PipelineStatistics
from vorox.data.storage.waiting import may_wait
from vorox.data.streaming.need import Need
from vorox.data.streaming.retention import Ring, mark, remove_chunks, resident_units
from vorox.data.streaming.windows import Range, Window

_CLOSE_SECONDS = 10.0
_OTHERS_SECONDS = 0.1
"""How often it is looked whether another process has finished a unit."""


class Forgetful(Protocol):
    """A reader that has chunk files open."""

    def forget(self, unit: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """What a stream did since it was opened.

    Attributes:
        units_built: Units built for the first time.
        units_rebuilt: Units built again because their chunks had been removed.
        text_bytes: UTF-8 bytes of text that became tokens, those of units built again included.
        tokens: Their tokens.
        evicted_units: Units whose chunks were removed.
    """

    units_built: int = 0
    units_rebuilt: int = 0
    text_bytes: int = 0
    tokens: int = 0
    evicted_units: int = 0


def open_directory(directory: Path, work: UnitWork, units: Sequence[Unit]) -> Manifest:
    """Make or find the directory of a stream, with its recipe, files and units recorded.

    Raises:
        DataError: It is of another recipe or source, or holds a cache that is meant to stay.
    """
    make_directory(directory)
    mark(directory)
    return prepare_directory(directory, work, units)


class Stream:
    """An open stream. Nothing is built before somebody reads or waits.

    Args:
        directory: A directory that ``open_directory`` made.
        work: What its units are a function of.
        units: All of them.
        segments: Ranges of units that are read together, one after the other, without gaps.
        ring: The room for its chunks.
        prefetch_segments: Segments that are built ahead of the one being read.
        bad_record_fraction: Unreadable records of a unit, rounded up, that are put aside before the stream stops.
    """

    def __init__(
        self,
        directory: Path,
        work: UnitWork,
        units: Sequence[Unit],
        segments: Sequence[Range],
        ring: Ring,
        *,
        prefetch_segments: int = 1,
        bad_record_fraction: float = 0.001,
    ) -> None:
        self.directory = directory
        self.ring = ring
        self.statistics = StreamStatistics()
        self.stages: PipelineStatistics | None = None
        self.manifest = Manifest.open(directory)
        self._unit_work, self._units, self._bad_record_fraction = work.at(directory), units, bad_record_fraction
        self._need = Need(segments, prefetch_segments)
        self._resident: set[int] = set()
        self._demanded: dict[int, int] = {}
        self._targets: frozenset[int] = frozenset()
        self._errors: dict[int, BaseException] = {}
        self._postponed: set[int] = set()
        self._readers: weakref.WeakSet[Forgetful] = weakref.WeakSet()
        self._window, self._others = Window(directory), list[Range]()
        self._thread: threading.Thread | None = None
        ring.join(self)

    # What readers say.

    def register(self, reader: Forgetful) -> None:
        """Tell a reader when chunks are removed, so that it lets go of the files."""
        with self.ring.changed:
            self._readers.add(reader)

    def touch(self, units: Sequence[int]) -> None:
        """Rows of these units are read now, as part of the order of training."""
        with self.ring.changed:
            if self._need.touch(units):
                self._start()
                self.ring.changed.notify_all()

    def ensure(self, unit: int) -> None:
        """Return when the chunks of a unit are on disk.

        Raises:
            DataError: It cannot be built, or comes out as something else than what was recorded.
        """
        with may_wait(str(self.directory)) as wait, self.ring.changed:
            if unit in self._resident:
                return
            wait.because(f"unit {unit} is being built", failed=False)
            self._demanded[unit] = self._demanded.get(unit, 0) + 1
            self._postponed.discard(unit)
            self._start()
            self.ring.changed.notify_all()
            try:
                self.ring.changed.wait_for(lambda: self.ring.closed or unit in self._resident or unit in self._errors)
                if unit in self._resident:
                    return
                if unit in self._errors:
                    raise self._errors[unit]
                raise RuntimeError("the stream was closed while a chunk was waited for")
            finally:
                self._demanded[unit] -= 1
                if not self._demanded[unit]:
                    del self._demanded[unit]
                    if self._errors.pop(unit, None):  # whoever asks next has it tried again
                        self._postponed.add(unit)

    def lost(self, unit: int) -> None:
        """The chunks of a unit are not on disk after all: another process removed them."""
        with self.ring.changed:
            self._resident.discard(unit)

    def discard(self, unit: int, error: DataError) -> None:
        """Remove the chunks of a unit that turned out to be damaged, so that they are built again.

        Raises:
            DataError: ``error`` itself, if no chunk is there that could be damaged.
        """
        with self.ring.changed:
            files = resident_units(self.directory).get(unit)
            if not files:
                raise error
            remove_chunks(files)
            self._resident.discard(unit)

    def grown(self, *, awaited_units: int = 0) -> Manifest:
        """What is recorded by now.

        Args:
            awaited_units: The asker waits until all units below this are recorded, so their segment is built first.

        Raises:
            DataError: One of them cannot be built.
        """
        with self.ring.changed:
            self.manifest = self.manifest.refreshed(self.directory)
            missing = self.manifest.missing_units(0, awaited_units)
            if len(missing):
                awaited = self._need.segment_of(int(missing[0]))
                first, last = self._need.segments[awaited]
                for unit in sorted(self._errors.keys() & set(range(first, last))):
                    self.ring.changed.notify_all()  # it is tried again
                    raise self._errors.pop(unit)
                if awaited != self._need.awaited:
                    self._need.awaited = awaited
                    self._postponed.difference_update(range(first, last))
                    self._start()
                    self.ring.changed.notify_all()
            return self.manifest

    @property
    def first_segment_units(self) -> int:
        return self._need.segments[0][1]

    def close(self) -> None:
        """Wait for the thread to end; the ring must have been closed."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_SECONDS)
        self._window.close()

    # What the ring asks.

    def dispensability(self, unit: int, /) -> int:
        return 0 if unit in self._demanded else self._need.rank(unit, self._others)

    def look_around(self) -> None:
        self._others = self._window.others()

    def evicted(self, unit: int, /) -> None:
        self._resident.discard(unit)
        self.statistics = replace(self.statistics, evicted_units=self.statistics.evicted_units + 1)
        for reader in list(self._readers):
            reader.forget(unit)

    # The thread that builds.

    def _start(self) -> None:
        if self._thread is None and not self.ring.closed:
            self._thread = threading.Thread(target=self._work, name=f"vorox-stream-{self.directory.name}", daemon=True)
            self._thread.start()
        if window := self._need.window():
            self._window.say(window)

    def _see(self, stages: PipelineStatistics) -> None:
        self.stages = stages

    def _work(self) -> None:
        while (targets := self._next_targets()) is not None:
            claimed: list[int] = []
            kept = 0
            try:
                with Leases(self.directory) as leases:
                    units = self._claim(targets, leases, claimed)
                    for built in self._unit_work.run(units, on_statistics=self._see, stop=self._is_interrupted):
                        if not self._keep(built):
                            break
                        leases.release(built.unit_id)
                        kept += 1
            except OSError as error:
                saved = f"{len(self.manifest.units)} of {len(self._units)} units are recorded"
                refused = refused_write(error, self.directory, saved=saved, needed_bytes=self.ring.limit_bytes)
                refused.__cause__ = error
                self._failed(claimed[kept] if kept < len(claimed) else targets[0], refused)
            except BaseException as error:  # whatever it is, who waits for the unit must see it
                self._failed(claimed[kept] if kept < len(claimed) else targets[0], error)

    def _next_targets(self) -> list[int] | None:
        """Waits until there is something to build; None when the ring is closed."""
        with self.ring.changed:
            while not self.ring.closed:
                self._find_on_disk()
                targets = self._wanted()
                self._targets = frozenset(targets)
                if targets:
                    return targets
                self.ring.changed.wait()
            return None

    def _find_on_disk(self) -> None:
        on_disk = resident_units(self.directory)
        self._resident = {unit for unit in on_disk if self._is_whole(unit, on_disk[unit])}
        empty = set(self.manifest.units["unit"].tolist()) - set(self.manifest.chunks["unit"].tolist())
        self._resident |= empty
        self.ring.changed.notify_all()

    def _is_whole(self, unit: int, files: Mapping[Path, int]) -> bool:
        chunks = self.manifest.unit_chunks(unit) if unit >= 0 else []
        return bool(chunks) and all(chunk_path(self.directory, unit, chunk.part) in files for chunk in chunks)

    def _wanted(self) -> list[int]:
        """Units to build, the most urgent ones first."""
        done = set(self.manifest.units["unit"].tolist())
        settled = self._resident | self._postponed | self._errors.keys()
        wanted = dict.fromkeys(sorted(self._demanded))
        for segment in self._need.to_build():
            wanted |= dict.fromkeys(sorted(range(*segment), key=lambda unit: unit in done))
        return [unit for unit in wanted if unit not in settled]

    def _urgent(self) -> set[int]:
        """Units that somebody waits for."""
        urgent = set(self._demanded)
        if self._need.awaited is not None:
            urgent.update(self.manifest.missing_units(*self._need.segments[self._need.awaited]).tolist())
        return urgent - self._resident - self._errors.keys()

    def _is_interrupted(self) -> bool:
        """Whether something is waited for that is not among what is being built."""
        with self.ring.changed:
            return self.ring.closed or not self._urgent() <= self._targets

    def _gives_way(self, unit: int) -> bool:
        """Whether a unit that there is no room for should not wait, because another one is waited for."""
        urgent = self._urgent()
        return bool(urgent) and unit not in urgent

    def _claim(self, targets: Sequence[int], leases: Leases, claimed: list[int]) -> Iterator[Unit]:
        """The units that no other process builds or has built by now."""
        for unit in targets:
            if not leases.take(unit):
                continue
            with self.ring.changed:
                self.manifest = self.manifest.refreshed(self.directory)
                self._find_on_disk()
                if unit in self._resident:
                    leases.release(unit)
                    continue
                claimed.append(unit)
            yield self._units[unit]
        if not claimed:
            with self.ring.changed:
                self.ring.changed.wait(_OTHERS_SECONDS)

    def _keep(self, built: BuiltUnit) -> bool:
        """Write a unit when there is room and record it; False if something else became more urgent first."""
        unit = built.unit_id
        records = [record for _, record in built.chunks]
        with self.ring.changed:
            manifest = self.manifest = self.manifest.refreshed(self.directory)
        is_new = not manifest.has_unit(unit)
        if not is_new:
            _check_content(self.directory, manifest, unit, records)
        size_bytes = sum(record.size_bytes for record in records)
        given_up = functools.partial(self._gives_way, unit)
        with self.ring.room(self, unit, size_bytes, given_up=given_up) as there_is_room:
            if not there_is_room:
                return False
            if is_new:
                manifest, is_new = commit_unit(
                    manifest, self.directory, built, self._unit_work, self._bad_record_fraction, replace=False,
                    on_written=lambda _: None,
                )  # fmt: skip
            if not is_new:
                for data, record in built.chunks:
                    path = chunk_path(self.directory, unit, record.part)
                    make_directory(path.parent)
                    write_file(path, data)
            with self.ring.changed:
                self.manifest = manifest
                self._resident.add(unit)
                done = self.statistics
                self.statistics = replace(
                    done,
                    units_built=done.units_built + is_new,
                    units_rebuilt=done.units_rebuilt + (not is_new),
                    text_bytes=done.text_bytes + built.statistics.text_bytes,
                    tokens=done.tokens + built.statistics.tokens,
                )
        return True

    def _failed(self, unit: int, error: BaseException) -> None:
        """Who waits for the unit gets the error; if nobody does yet, it is tried again when somebody does."""
        with self.ring.changed:
            if unit in self._demanded or self._need.segment_of(unit) == self._need.awaited:
                self._errors[unit] = error
            else:
                self._postponed.add(unit)
            self.ring.changed.notify_all()


def _check_content(directory: Path, manifest: Manifest, unit: int, records: Sequence[ChunkRecord]) -> None:
    if [record.content for record in manifest.unit_chunks(unit)] != [record.content for record in records]:
        raise DataError(
            f"unit {unit} was built again and is not what was recorded: a replay could not be exact",
            where=str(directory),
            hint="the source or the tokenizer's library changed: restore it, or start another run",
        )
