"""Which units of a cache are wanted, and how urgently.

Readers request units; a scheduler takes batches. A unit that somebody waits for comes before one that is planned, one
that is planned before the backlog of everything that is missing. There is no I/O in here; ``changed`` guards the state
and is notified whenever it changes. Invariant: an error of a unit goes to who waits for it; a planned unit that failed
is not tried again before somebody waits for it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Literal

from vorox.data.cache.manifest import Manifest

Mode = Literal["forward", "inverse", "gaps"]


def never() -> bool:
    return False


class BuildQueue:
    """The units of one cache that are wanted, by priority.

    Args:
        mode: The order of the backlog.
        last_unit: The backlog is what is missing below this unit; None: everything, 0: nothing.
        lasting: Stay open when nothing is wanted, until ``close``; else the build ends there.
        changed: Guards this queue; several queues and a disk budget may share one.
    """

    def __init__(
        self,
        mode: Mode = "forward",
        last_unit: int | None = None,
        *,
        lasting: bool = False,
        changed: threading.Condition | None = None,
    ) -> None:
        self.mode: Mode = mode
        self.last_unit, self.lasting = last_unit, lasting
        self.changed = changed or threading.Condition()
        self.closed = False
        self._fatal: BaseException | None = None
        self._waited: Counter[int] = Counter()
        self._planned: list[int] = []
        self._settled: set[int] = set()
        self._postponed: set[int] = set()
        self._errors: dict[int, BaseException] = {}

    # What readers request.

    def wait_for(self, unit: int) -> None:
        """Return when the chunks of a unit are on disk.

        Raises:
            DataError: The unit cannot be built. The next call tries again.
            RuntimeError: The queue was closed meanwhile.
        """
        with self.changed:
            self._waited[unit] += 1
            self._settled.discard(unit)
            self._postponed.discard(unit)
            self.changed.notify_all()
            try:
                self.changed.wait_for(lambda: self.closed or unit in self._settled or unit in self._errors)
                error = self._errors.get(unit, self._fatal)
                if error is not None:
                    raise error
                if unit not in self._settled:
                    raise RuntimeError("the build was closed while a unit was waited for")
            finally:
                self._waited[unit] -= 1
                if not self._waited[unit]:
                    del self._waited[unit]
                    if self._errors.pop(unit, None):
                        self._postponed.add(unit)

    def plan(self, units: Iterable[int]) -> None:
        """Replace the planned units by these, the most urgent first."""
        with self.changed:
            self._planned = list(dict.fromkeys(units))
            self.changed.notify_all()

    def lost(self, unit: int) -> None:
        """The chunks of a unit are no longer on disk: it is wanted again wherever it is planned."""
        with self.changed:
            self._settled.discard(unit)

    def close(self, error: BaseException | None = None) -> None:
        """End the build after what is in flight, and wake everybody who waits, with ``error`` if there is one."""
        with self.changed:
            self.closed = True
            self._fatal = self._fatal or error
            self.changed.notify_all()

    # What the scheduler asks and reports; it holds no lock when it does.

    def next_batch(self, manifest: Manifest, damaged: Collection[int]) -> list[int] | None:
        """Units to build, the most urgent first; None when there will be no more.

        Args:
            manifest: The state of the cache.
            damaged: Units that are done and must be built again.
        """
        with self.changed:
            while not self.closed:
                urgent = [*sorted(self._waited), *self._planned]
                first = [unit for unit in urgent if unit not in self._settled | self._postponed | self._errors.keys()]
                wanted = dict.fromkeys(first) | dict.fromkeys(self._backlog(manifest, damaged))
                if wanted or not self.lasting:
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
        """Whether a unit outside the batch is waited for, or the queue was closed: no more of the batch is begun."""
        with self.changed:
            return self.closed or any(
                unit not in batch and unit not in self._settled and unit not in self._errors for unit in self._waited
            )

    def settle(self, unit: int) -> None:
        """The chunks of a unit are on disk."""
        with self.changed:
            self._settled.add(unit)
            self.changed.notify_all()

    def fail(self, unit: int, error: BaseException) -> bool:
        """Give the error of a unit to who waits for it. False: the queue does not last, so it ends the build."""
        if not self.lasting:
            return False
        with self.changed:
            if unit in self._waited:
                self._errors[unit] = error
            else:
                self._postponed.add(unit)
            self.changed.notify_all()
        return True

    def wait(self, timeout_seconds: float) -> None:
        """Wait for a change, such as another builder's progress, for some time at most."""
        with self.changed:
            if not self.closed:
                self.changed.wait(timeout_seconds)
