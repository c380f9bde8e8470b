"""One split of one source whose chunk files come and go: what is on disk, what is wanted next, and who builds it.

Readers say what they touch; a thread cuts the source into the units of the segment that is being read and of the next
ones, as far as they are not known, and builds them in the order of their need, within the room of the ring. A unit
that was built once is recorded in the cache's manifest for ever; when its chunks are needed after they were removed,
the unit is built again from its text and must come out with the content that was recorded. Invariant: what a reader
gets is what a cache of the same recipe holds, or an error at the very row that needs it; neither the network nor the
room on disk changes an order or leaves something out.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from vorox.core.atomic import make_directory, write_file
from vorox.core.errors import DataError
from vorox.data.cache.commit import commit_unit
from vorox.data.cache.format import ChunkRecord
from vorox.data.cache.leases import Leases
from vorox.data.cache.manifest import Manifest, chunk_path
from vorox.data.cache.planning import write_error
from vorox.data.cache.unit_builder import BuiltUnit, UnitBuilder
from vorox.data.documents import Unit
from vorox.data.pipeline.statistics import PipelineStatistics
from vorox.data.storage.waiting import may_wait
from vorox.data.streaming.figures import StreamStatistics
from vorox.data.streaming.need import Need
from vorox.data.streaming.retention import Ring, remove_chunks, resident_units
from vorox.data.streaming.unit_list import UnitList
from vorox.data.streaming.windows import Range, SegmentRule, Window

_CLOSE_SECONDS = 10.0
_OTHERS_SECONDS = 0.1
"""How often it is looked whether another process has finished a unit."""


class Forgetful(Protocol):
    """A reader that has chunk files open."""

    def forget(self, unit: int, /) -> None: ...


class Stream:
    """An open stream. Nothing is built before somebody reads or waits.

    Args:
        directory: A directory that ``open_directory`` made.
        work: What its units are a function of.
        units: Those that are known, and where more come from; the thread's from now on.
        rule: Which of them are read together.
        ring: The room for its chunks.
        prefetch_segments: Segments that are built ahead of the one being read.
        bad_record_fraction: Unreadable records of a unit, rounded up, that are put aside before the stream stops.
    """

    def __init__(
        self,
        directory: Path,
        work: UnitBuilder,
        units: UnitList,
        rule: SegmentRule,
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
        self._units = units
        self._unit_work = dataclasses.replace(work.at(directory), bad_record_fraction=bad_record_fraction)
        self._rule, self._ahead = rule, prefetch_segments + 1
        self._need = Need(self._segments(), prefetch_segments)
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
                self._settle()
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
            self._refresh()
            missing: list[int] = self.manifest.missing_units(0, awaited_units).tolist()
            if not missing and not self.manifest.units_final and self.manifest.planned_units < awaited_units:
                missing = [self.manifest.planned_units]
            if missing:
                awaited = self._need.segment_of(missing[0])
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

    def _refresh(self) -> None:
        """See what is recorded by now. The caller has the ring."""
        before = self.manifest
        self.manifest = before.refreshed(self.directory)
        if (self.manifest.planned_units, self.manifest.units_final) != (before.planned_units, before.units_final):
            self._need.know(self._segments())
        self._settle()

    def _settle(self) -> None:
        """Stop awaiting what is recorded."""
        awaited = self._need.awaited
        if awaited is None or self._need.awaits_more(self._known):
            return
        if not len(self.manifest.missing_units(*self._need.segments[awaited])):
            self._need.was_recorded()

    def _segments(self) -> list[Range]:
        manifest = self.manifest
        return self._rule.ranges(manifest.planned_units, is_all=manifest.units_final, ahead=self._ahead)

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
        self.statistics = self.statistics.with_evicted_unit()
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
        while (wanted := self._next_wanted()) is not None:
            targets, cut_to = wanted
            try:
                if targets:
                    self._build(targets)
                else:
                    self._cut(cut_to)
            except BaseException as error:  # whatever it is, who waits for the unit must see it
                self._failed(targets[0] if targets else self.manifest.planned_units, error)
        self._units.close()

    def _build(self, targets: Sequence[int]) -> None:
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
        except BaseException as error:
            self._failed(claimed[kept] if kept < len(claimed) else targets[0], error)

    def _cut(self, num_units: int) -> None:
        """Have more units recorded, or wait for another process that cuts."""
        awaited = self._need.awaited

        def stop() -> bool:
            with self.ring.changed:
                return self.ring.closed or bool(self._demanded) or self._need.awaited not in (None, awaited)

        is_mine = self._units.extend(num_units, stop) is not None
        with self.ring.changed:
            if not is_mine:
                self.ring.changed.wait(_OTHERS_SECONDS)
            self._refresh()
            self.ring.changed.notify_all()

    def _next_wanted(self) -> tuple[list[int], int] | None:
        """Units to build, or how many are to be known; waits until there is any. None: the ring is closed."""
        with self.ring.changed:
            while not self.ring.closed:
                self._units.see(self.manifest)
                self._find_on_disk()
                settled = self._resident | self._postponed | self._errors.keys()
                done = set(self.manifest.units["unit"].tolist())
                targets, cut_to = self._need.wanted(self._demanded, done, settled, self._known)
                self._targets = frozenset(targets)
                if targets or cut_to:
                    return targets, cut_to
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

    def _urgent(self) -> set[int]:
        """Units that somebody waits for."""
        urgent = set(self._demanded)
        if self._need.awaited is not None:
            urgent.update(self.manifest.missing_units(*self._need.segments[self._need.awaited]).tolist())
        return urgent - self._resident - self._errors.keys()

    def _is_interrupted(self) -> bool:
        """Whether something is waited for that is not among what is being built."""
        with self.ring.changed:
            urgent = self._urgent()
            return self.ring.closed or not urgent <= self._targets or (self._awaits_cutting() and not urgent)

    def _gives_way(self, unit: int) -> bool:
        """Whether a unit that there is no room for should not wait, because another one is waited for."""
        urgent = self._urgent()
        return unit not in urgent and (bool(urgent) or self._awaits_cutting())

    def _awaits_cutting(self) -> bool:
        """Whether somebody waits for units that are not known yet, and could be."""
        return self.manifest.planned_units not in self._errors and self._need.awaits_more(self._known)

    @property
    def _known(self) -> int | None:
        """How many units are known, if more follow."""
        return None if self.manifest.units_final else self.manifest.planned_units

    def _claim(self, targets: Sequence[int], leases: Leases, claimed: list[int]) -> Iterator[Unit]:
        """The units that no other process builds or has built by now."""
        for unit in targets:
            if not leases.acquire(unit):
                continue
            with self.ring.changed:
                self._refresh()
                self._find_on_disk()
                if unit in self._resident:
                    leases.release(unit)
                    continue
                claimed.append(unit)
            yield self._units.units[unit]
        if not claimed:
            with self.ring.changed:
                self.ring.changed.wait(_OTHERS_SECONDS)

    def _keep(self, built: BuiltUnit) -> bool:
        """Write a unit when there is room and record it; False if something else became more urgent first."""
        unit = built.unit_id
        records = [record for _, record in built.chunks]
        with self.ring.changed:
            self._refresh()
            manifest = self.manifest
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
                    manifest, self.directory, built, self._unit_work, replace=False,
                    on_written=lambda _: None,
                )  # fmt: skip
            if not is_new:
                for data, record in built.chunks:
                    path = chunk_path(self.directory, unit, record.part)
                    make_directory(path.parent)
                    write_file(path, data)
            with self.ring.changed:
                self._refresh()
                self._resident.add(unit)
                self.statistics = self.statistics.with_unit(built, is_new=is_new)
        return True

    def _failed(self, unit: int, error: BaseException) -> None:
        """Who waits for the unit gets the error; if nobody does yet, it is tried again when somebody does."""
        if isinstance(error, OSError):
            saved = f"{len(self.manifest.units)} units are recorded"
            refused = write_error(error, self.directory, saved=saved, needed_bytes=self.ring.limit_bytes)
            refused.__cause__ = error
            error = refused
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
