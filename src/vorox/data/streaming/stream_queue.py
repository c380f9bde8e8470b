"""The build queue of a stream: which units to build next, and when to split more of the source.

Reads and waits go in, those of other processes too (``poll_peers``); batches of units for the build scheduler come out.
A unit that is on disk is *done*.
Invariant: an error is raised in the readers that wait for its unit or segment; a failed unit without a waiting reader
is retried when a reader waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from vorox.data.cache.building.build_queue import BuildQueue
from vorox.data.cache.building.commit import cache_write_error
from vorox.data.cache.files.manifest import Manifest, chunk_path
from vorox.data.cache.upkeep.disk_budget import DiskBudget, resident_units
from vorox.data.streaming.prefetch_scheduler import PrefetchScheduler, SegmentRule
from vorox.data.streaming.read_windows import PeerReads, ReadWindow, UnitRange
from vorox.data.streaming.unit_list import UnitList

_IDLE_SECONDS = 0.2
"""Poll interval for the needs of peers while nothing is to be built."""
_PEER_SECONDS = 0.1
"""Poll interval for units recorded by a peer that is splitting the source."""


class StreamQueue(BuildQueue):
    """The build queue of a stream. It stays open until ``close``.

    Args:
        directory: The stream's directory.
        units: The known units, which can be extended; used by the building thread only.
        rule: How units are grouped into segments.
        budget: The disk budget, whose lock the queue shares.
        prefetch_segments: Number of segments that are built ahead of the one being read.

    Attributes:
        manifest: The manifest as of the last refresh.
        schedule: The prefetch scheduler.
    """

    def __init__(
        self, directory: Path, units: UnitList, rule: SegmentRule, budget: DiskBudget, prefetch_segments: int
    ) -> None:
        super().__init__(keep_open=True, changed=budget.changed)
        self.manifest = Manifest.open(directory)
        self._directory, self._units, self._rule, self._budget = directory, units, rule, budget
        self._ahead = prefetch_segments + 1
        self.window, self._peers = ReadWindow(directory), PeerReads()
        self.schedule = PrefetchScheduler(self._segments(), prefetch_segments)

    def touch(self, units: Sequence[int]) -> bool:
        """Record a read of these units; return whether the needed units have changed."""
        with self.changed:
            if not self.schedule.touch(units):
                return False
            self._clear_awaited()
            self.changed.notify_all()
            return True

    def is_done(self, unit: int) -> bool:
        """Return whether the chunks of a unit are on disk, as of the last refresh."""
        with self.changed:
            return unit in self._done

    def refresh(self) -> None:
        """Read the newest manifest."""
        with self.changed:
            before = self.manifest
            self.manifest = before.refreshed(self._directory)
            if (self.manifest.planned_units, self.manifest.units_final) != (before.planned_units, before.units_final):
                self.schedule.set_segments(self._segments())
            self._clear_awaited()

    def await_units(self, num_units: int) -> int | None:
        """Request the first segment with a missing unit below ``num_units``; return that unit.

        Raises:
            DataError: A unit of that segment cannot be built. The next call tries again.
        """
        with self.changed:
            self.refresh()
            if self._fatal is not None:
                raise self._fatal
            missing: list[int] = self.manifest.missing_units(0, num_units).tolist()
            if not missing and not self.manifest.units_final and self.manifest.planned_units < num_units:
                missing = [self.manifest.planned_units]
            if not missing:
                return None
            awaited = self.schedule.segment_of(missing[0])
            first, last = self.schedule.segments[awaited]
            for unit in sorted(self._errors.keys() & set(range(first, last))):
                self.changed.notify_all()  # the builder tries the unit again
                raise self._errors.pop(unit)
            if awaited != self.schedule.awaited:
                self.schedule.awaited = awaited
                self._postponed.difference_update(range(first, last))
                self.changed.notify_all()
            return missing[0]

    def poll_peers(self) -> bool:
        """Find out what other processes need; return whether they need anything. The lock is held."""
        self._peers = self.window.peers()
        return any(self._peers)

    def eviction_priority(self, unit: int) -> int:
        """Return the eviction priority of a unit: 0 if it is needed now, by this process or another one."""
        is_awaited = unit in self._awaited or any(first <= unit < last for first, last in self._peers.awaited)
        return 0 if is_awaited else self.schedule.eviction_priority(unit, self._peers.windows)

    def gives_way(self, unit: int) -> bool:
        """Return whether a unit that does not fit into the budget should yield to an awaited one."""
        urgent = self._urgent()
        return unit not in urgent and (bool(urgent) or self._awaits_split())

    # Called by the build scheduler.

    def next_batch(self, manifest: Manifest, damaged: Collection[int]) -> list[int] | None:
        del manifest, damaged
        while True:
            with self.changed:
                if self.closed:
                    return None
                self.refresh()
                self.poll_peers()
                self._units.update_from(self.manifest)
                self._done = self._find_on_disk()
                self.changed.notify_all()
                batch, num_units = self.schedule.next_units(
                    self._awaited.keys() | self._awaited_by_peers(), set(self.manifest.units["unit"].tolist()),
                    self._done | self._postponed | self._errors.keys(), self._known_units,
                )  # fmt: skip
                if batch:
                    return batch
                if not num_units and self._peers_await_split():
                    num_units = self.manifest.planned_units + 1
                if not num_units:
                    self.changed.wait(_IDLE_SECONDS)
                    continue
            self._split(num_units)

    def preempts(self, batch: Collection[int]) -> bool:
        with self.changed:
            urgent = self._urgent()
            return self.closed or not urgent <= set(batch) or (self._awaits_split() and not urgent)

    def fail(self, unit: int, error: BaseException) -> bool:
        with self.changed:
            if unit in self._awaited or self.schedule.segment_of(unit) == self.schedule.awaited:
                self._errors[unit] = error
            else:
                self._postponed.add(unit)
            self.changed.notify_all()
        return True

    def _split(self, num_units: int) -> None:
        """Split and record more units, or wait for the peer that records them."""
        awaited = self.schedule.awaited

        def stop() -> bool:
            with self.changed:
                return self.closed or bool(self._awaited) or self.schedule.awaited not in (None, awaited)

        try:
            is_mine = self._units.extend(num_units, stop) is not None
        except OSError as error:
            saved = f"{len(self.manifest.units)} units are recorded"
            refused = cache_write_error(error, self._directory, saved=saved, needed_bytes=self._budget.limit_bytes)
            refused.__cause__ = error
            self.fail(self.manifest.planned_units, refused)
        except Exception as error:  # the waiting reader raises it
            self.fail(self.manifest.planned_units, error)
        else:
            if not is_mine:
                self.wait(_PEER_SECONDS)

    def _find_on_disk(self) -> set[int]:
        on_disk = resident_units(self._directory)
        chunks = self.manifest.chunks["unit"]
        empty = set(self.manifest.units["unit"].tolist()) - set(chunks.tolist())
        return empty | {unit for unit in on_disk if self._is_whole(unit, on_disk[unit])}

    def _is_whole(self, unit: int, files: Mapping[Path, int]) -> bool:
        chunks = self.manifest.unit_chunks(unit) if unit >= 0 else []
        return bool(chunks) and all(chunk_path(self._directory, unit, chunk.part) in files for chunk in chunks)

    def _clear_awaited(self) -> None:
        """Stop awaiting a segment that is recorded."""
        awaited = self.schedule.awaited
        if awaited is None or self.schedule.awaits_more(self._known_units):
            return
        if not len(self.manifest.missing_units(*self.schedule.segments[awaited])):
            self.schedule.clear_awaited()

    def _awaited_by_peers(self) -> set[int]:
        """Return the known units that processes of this machine wait for."""
        known = self.manifest.planned_units
        return {unit for first, last in self._peers.awaited for unit in range(first, min(last, known))}

    def _peers_await_split(self) -> bool:
        """Return whether a process of this machine waits for units that have yet to be split from the source."""
        known = self._known_units
        if known is None or known in self._postponed | self._errors.keys():
            return False
        return any(last > known for _, last in self._peers.awaited)

    def _urgent(self) -> set[int]:
        """Return the units that readers wait for."""
        urgent = set(self._awaited) | (self._awaited_by_peers() - self._postponed)
        if self.schedule.awaited is not None:
            urgent.update(self.manifest.missing_units(*self.schedule.segments[self.schedule.awaited]).tolist())
        return urgent - self._done - self._errors.keys()

    def _awaits_split(self) -> bool:
        """Return whether a reader waits for units that have yet to be split from the source."""
        awaits_more = self._peers_await_split() or self.schedule.awaits_more(self._known_units)
        return awaits_more and self.manifest.planned_units not in self._errors

    def _segments(self) -> list[UnitRange]:
        return self._rule.ranges(self.manifest.planned_units, is_complete=self.manifest.units_final, ahead=self._ahead)

    @property
    def _known_units(self) -> int | None:
        """Number of known units; ``None`` if all units are known."""
        return None if self.manifest.units_final else self.manifest.planned_units
