"""What a build has to do: the requested units, by priority, and the chunks that stay on disk.

Readers request units, and a scheduler takes batches. Awaited units come first, then planned ones, then the backlog of
all missing units. The queue does no I/O; ``changed`` guards its state and is notified of every change. The scheduler
asks a ``Residency`` before it builds a unit and before it writes one: ``Permanent`` keeps all chunks, a stream those
within its disk budget.

Invariants: the error of a unit is raised in the threads that wait for it; a planned unit that failed is retried only
once it is awaited; a residency decides which chunks are on disk, never what they contain.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Collection, Generator, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, Protocol

from vorox.data.cache.files.manifest import Manifest
from vorox.data.cache.files.verify import Depth, is_intact

Mode = Literal["forward", "inverse", "gaps"]
"""Order of the backlog: lowest unit first, highest first, or first the missing units below the highest one built."""


def never() -> bool:
    return False


class BuildQueue:
    """The requested units of one cache, by priority.

    Args:
        mode: The order of the backlog.
        last_unit: The backlog contains missing units below this one; None: all, 0: none.
        keep_open: Stay open when no unit is requested, until ``close``; else the build ends.
        changed: Guards the queue; several queues and a disk budget may share it.
    """

    def __init__(
        self,
        mode: Mode = "forward",
        last_unit: int | None = None,
        *,
        keep_open: bool = False,
        changed: threading.Condition | None = None,
    ) -> None:
        self.mode: Mode = mode
        self.last_unit, self.keep_open = last_unit, keep_open
        self.changed = changed or threading.Condition()
        self.closed = False
        self._fatal: BaseException | None = None
        self._awaited: Counter[int] = Counter()
        self._planned: list[int] = []
        self._done: set[int] = set()
        self._postponed: set[int] = set()
        self._errors: dict[int, BaseException] = {}

    # Called by readers.

    def wait_for(self, unit: int) -> None:
        """Block until the chunks of a unit are on disk.

        Raises:
            DataError: The unit cannot be built. The next call retries.
            RuntimeError: The queue was closed.
        """
        with self.changed:
            self._awaited[unit] += 1
            self._done.discard(unit)
            self._postponed.discard(unit)
            self.changed.notify_all()
            try:
                self.changed.wait_for(lambda: self.closed or unit in self._done or unit in self._errors)
                error = self._errors.get(unit, self._fatal)
                if error is not None:
                    raise error
                if unit not in self._done:
                    raise RuntimeError("The build was closed while a thread waited for a unit")
            finally:
                self._awaited[unit] -= 1
                if not self._awaited[unit]:
                    del self._awaited[unit]
                    if self._errors.pop(unit, None):
                        self._postponed.add(unit)

    def plan(self, units: Iterable[int]) -> None:
        """Replace the planned units, the most urgent first."""
        with self.changed:
            self._planned = list(dict.fromkeys(units))
            self.changed.notify_all()

    def mark_lost(self, unit: int) -> None:
        """Record that the chunks of a unit are no longer on disk, so a request for it counts again."""
        with self.changed:
            self._done.discard(unit)

    def close(self, error: BaseException | None = None) -> None:
        """End the build after the units in flight and wake all waiting threads, which raise ``error`` if given."""
        with self.changed:
            self.closed = True
            self._fatal = self._fatal or error
            self.changed.notify_all()

    # Called by the scheduler, which holds no lock.

    def next_batch(self, manifest: Manifest, damaged: Collection[int]) -> list[int] | None:
        """Return units to build, the most urgent first; None at the end of the build.

        Args:
            manifest: The state of the cache.
            damaged: Committed units that must be rebuilt.
        """
        with self.changed:
            while not self.closed:
                urgent = [*sorted(self._awaited), *self._planned]
                first = [unit for unit in urgent if unit not in self._done | self._postponed | self._errors.keys()]
                wanted = dict.fromkeys(first) | dict.fromkeys(self._backlog(manifest, damaged))
                if wanted or not self.keep_open:
                    return list(wanted) or None
                self.changed.wait()
            return None

    def _backlog(self, manifest: Manifest, damaged: Collection[int]) -> list[int]:
        last = manifest.planned_units if self.last_unit is None else min(manifest.planned_units, self.last_unit)
        missing: list[int] = manifest.missing_units(0, last).tolist()
        again = (unit for unit in damaged if manifest.has_unit(unit))
        units = sorted({*missing, *again} - self._postponed, reverse=self.mode == "inverse")
        if self.mode == "gaps" and len(manifest.units):
            highest = int(manifest.units["unit"][-1])
            return [unit for unit in units if unit <= highest] + [unit for unit in units if unit > highest]
        return units

    def preempts(self, batch: Collection[int]) -> bool:
        """Whether to abandon the rest of a batch: the queue is closed, or a thread waits for a unit outside it."""
        with self.changed:
            return self.closed or any(
                unit not in batch and unit not in self._done and unit not in self._errors for unit in self._awaited
            )

    def mark_done(self, unit: int) -> None:
        """Record that the chunks of a unit are on disk."""
        with self.changed:
            self._done.add(unit)
            self.changed.notify_all()

    def fail(self, unit: int, error: BaseException) -> bool:
        """Raise an error in the threads that wait for a unit. False: no ``keep_open``, so the error ends the build."""
        if not self.keep_open:
            return False
        with self.changed:
            if unit in self._awaited:
                self._errors[unit] = error
            else:
                self._postponed.add(unit)
            self.changed.notify_all()
        return True

    def wait(self, timeout_seconds: float) -> None:
        """Wait for a change of the queue, up to a timeout."""
        with self.changed:
            if not self.closed:
                self.changed.wait(timeout_seconds)


class Residency(Protocol):
    """The policy that decides which units have their chunks on disk."""

    @property
    def damaged(self) -> Collection[int]:
        """Committed units that must be rebuilt."""
        ...

    def is_resident(self, manifest: Manifest, unit: int, /) -> bool:
        """Whether a unit is committed and its chunks are on disk; checked immediately before building it."""
        ...

    def room(self, unit: int, size_bytes: int, /) -> AbstractContextManager[bool]:
        """Reserve disk space while the chunks of a unit are written. False: no room, drop the unit."""
        ...

    def mark_written(self, unit: int, /) -> None:
        """Record that the chunks of a unit are on disk."""
        ...


class Permanent:
    """The residency of a cache that keeps all chunks; there is always room.

    Args:
        directory: The cache.
        damaged: Units with a lost or damaged chunk.
        depth: How thoroughly to check whether another builder has already rebuilt one of them.
    """

    def __init__(self, directory: Path, damaged: Collection[int] = (), depth: Depth = "quick") -> None:
        self.damaged: set[int] = set(damaged)
        self.depth: Depth = depth
        self._directory = directory

    def is_resident(self, manifest: Manifest, unit: int, /) -> bool:
        if manifest.has_unit(unit) and unit in self.damaged and is_intact(self._directory, manifest, unit, self.depth):
            self.damaged.discard(unit)  # another builder was faster
        return manifest.has_unit(unit) and unit not in self.damaged

    @contextlib.contextmanager
    def room(self, unit: int, size_bytes: int, /) -> Generator[bool]:
        del unit, size_bytes
        yield True

    def mark_written(self, unit: int, /) -> None:
        self.damaged.discard(unit)
