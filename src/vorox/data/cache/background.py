"""Building a cache while it is read: a worker process that nobody waits for.

A cache whose first units are there goes in; the others appear in it while the caller goes on. What the worker meets
is raised where somebody asks for units that are not there yet. Invariant: ending it, at any instant, leaves a cache
that the next build goes on from.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from vorox.core.errors import VoroxError
from vorox.data.cache.builder import Builder, BuildOptions
from vorox.data.cache.unit_work import UnitWork
from vorox.data.cache.workers import run_processes
from vorox.data.documents import Unit

_DRAIN_SECONDS = 2.0


class BackgroundBuild:
    """A build in a process of its own. Close it to end it.

    Args:
        directory: The cache, prepared.
        work: What its units are a function of.
        units: The planned units.
        bad_record_fraction: The budget of bad records of a unit.
        num_workers: How many processes.
    """

    def __init__(
        self,
        directory: Path,
        work: UnitWork,
        units: Sequence[Unit],
        *,
        bad_record_fraction: float,
        num_workers: int = 1,
    ) -> None:
        self._ended = threading.Event()
        self._error: VoroxError | None = None
        options = BuildOptions("forward", bad_record_fraction)
        self._builder = Builder(directory, work, units, options, stop=self._ended.is_set)
        self._thread = threading.Thread(
            target=self._run, args=(num_workers,), name=f"build {directory.name}", daemon=True
        )
        self._thread.start()

    def _run(self, num_workers: int) -> None:
        try:
            run_processes(self._builder, num_workers, drain_seconds=_DRAIN_SECONDS)
        except VoroxError as error:
            self._error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def check(self) -> None:
        """Raise what ended the build, if something did.

        Raises:
            DataError: A unit cannot be built.
        """
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End it; a unit that is not finished within moments is dropped. Repeatable."""
        self._ended.set()
        self._thread.join()
