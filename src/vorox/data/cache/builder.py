"""Building a cache: whatever is planned and not done gets done, by any number of builders at once.

Units of text go in, committed chunks come out. Builders on one cache, in one process or on many machines, need not
know of each other: what is missing is what is planned and not done, a lease keeps two of them from the same unit, and
``commit`` decides what counts. Invariant: the dataset digest depends neither on the order of the units nor on
interruptions, the number of builders or the codec.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from vorox.core.atomic import is_disk_full, make_directory, sweep_temporary
from vorox.core.disk_errors import disk_error, room_text
from vorox.core.errors import DataError
from vorox.core.lock import FileLock
from vorox.data.cache import inventory
from vorox.data.cache.commit import adopt_unit, commit_unit
from vorox.data.cache.condition import Depth, is_intact
from vorox.data.cache.leases import Leases
from vorox.data.cache.manifest import LOCK_NAME, SNAPSHOT_INTERVAL_ENTRIES, Manifest, chunk_path, planned_entry
from vorox.data.cache.recipe import RECIPE_NAME, check_recipe, read_recipe, write_recipe
from vorox.data.cache.report import BuildProgress, committed
from vorox.data.cache.unit_work import BuiltUnit, UnitWork
from vorox.data.documents import Unit
from vorox.data.pipeline.statistics import PipelineStatistics

SNAPSHOT_FROM_BYTES = 1 << 15
"""A shorter log, of some ninety chunks, opens as quickly without a snapshot."""

_FIRST_GUESS_CACHE_PER_TEXT_BYTE = 0.4
_SHORTEST_WAIT_SECONDS = 0.02
_LONGEST_WAIT_SECONDS = 0.5
_PATIENCE_SECONDS = 1.0
"""Small units are read ahead by number, so that other builders find some; large ones by the pipeline's bytes."""

Mode = Literal["forward", "inverse", "gaps"]
OnProgress = Callable[[BuildProgress], None]


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How a cache is built; nothing of it changes what comes out.

    Attributes:
        mode: Which missing unit is next: ``forward`` the lowest, ``inverse`` the highest, ``gaps`` those that lie
            before one that is done, then the others.
        bad_record_fraction: Unreadable records of a unit, rounded up, that are put aside before the build stops.
        last_unit: Build only units below this; None for all.
        rebuild: Units that are done and have a chunk that is lost or damaged.
        depth: How closely their chunks are looked at.
    """

    mode: Mode = "forward"
    bad_record_fraction: float = 0.001
    last_unit: int | None = None
    rebuild: frozenset[int] = frozenset()
    depth: Depth = "quick"


def never() -> bool:
    return False


def prepare_directory(
    directory: Path,
    work: UnitWork,
    units: Sequence[Unit],
    *,
    stop: Callable[[], bool] = never,
    on_compared: Callable[[int], None] | None = None,
) -> Manifest:
    """Clear away what dead builders left, record what is to be built, find duplicates where a transform removes them.

    Any number of builders may do so. Once ``stop`` says yes, the search for duplicates is left as it is;
    ``on_compared`` is told how many bytes of text it has looked at.

    Raises:
        DataError: The cache is of another recipe or source, or is damaged.
    """
    with begun(directory, work) as manifest:
        inventory.record(directory, manifest, work.files, units)
        if manifest.planned_units < len(units) or manifest.planned_files < len(work.files):
            entry = planned_entry(len(units), work.recipe.digest, len(work.files))
            manifest = manifest.appended(directory, [entry])
    work.at(directory).find_duplicates(units, on_compared=on_compared, stop=stop)
    return manifest


@contextlib.contextmanager
def begun(directory: Path, work: UnitWork) -> Generator[Manifest]:
    """Clear away what dead builders left, record the recipe, and keep others from planning meanwhile.

    Raises:
        DataError: The cache is of another recipe, or is damaged.
    """
    make_directory(directory)
    chunk_directories = sorted((directory / "chunks").glob("*"))
    lists = (directory / name for name in ("manifest", "quarantine", "leases"))
    for place in (directory, *lists, *chunk_directories):
        sweep_temporary(place)
    with FileLock(directory / LOCK_NAME):
        if (directory / RECIPE_NAME).exists():
            check_recipe(directory, read_recipe(directory), work.recipe)
        else:
            write_recipe(directory, work.recipe)
        make_directory(directory / "manifest")
        manifest = Manifest.open(directory)
        manifest.check_recipe(directory, work.recipe.digest)
        yield manifest


class Builder:
    """One builder of a cache that is prepared.

    Args:
        directory: The cache.
        work: What its units are a function of.
        units: The planned units.
        options: How to go about it.
        on_progress: Told after every batch of documents and every unit.
        stop: Asked between units; once it says yes, ``run`` returns.

    Attributes:
        manifest: The cache as last seen.
        progress: How far it is, and what this builder did for it.
        units_built: Units that this builder made.
        units_adopted: Units that it found complete on disk, left by one that died.
    """

    def __init__(
        self,
        directory: Path,
        work: UnitWork,
        units: Sequence[Unit],
        options: BuildOptions,
        *,
        on_progress: OnProgress | None = None,
        stop: Callable[[], bool] = never,
    ) -> None:
        self.directory = directory
        self.units_built = self.units_adopted = 0
        self.work, self.options = work.at(directory), options
        self._units = units
        self._on_progress, self._stop = on_progress, stop
        self._source_bytes_U = source_bytes(units)
        stages = work.pipeline
        self._units_ahead = 1 + stages.fetch_threads + stages.tokenize_threads + stages.pack_threads
        self._settled: set[int] = set()
        self._writing: int | None = None
        self._writing_bytes = self._pending_bytes = 0
        self._told_generation = -1
        self.manifest = Manifest.empty()
        self.progress = BuildProgress(
            0, len(units), source_bytes=int(self._source_bytes_U.sum()), row_tokens=work.recipe.row_tokens
        )

    def run(self) -> None:
        """Build, or wait for others to build, until nothing is missing or ``stop`` says so.

        Raises:
            DataError: A text cannot be tokenised, too many records are bad, or the disk is full or refuses to be
                written to. What was committed stays.
        """
        wait_seconds = _SHORTEST_WAIT_SECONDS
        with self.explained():
            self._see(Manifest.open(self.directory))
            with Leases(self.directory) as leases:
                while (wanted := self._wanted()) and not self._stop():
                    if self._adopt(wanted, leases) + self._build(wanted, leases) > 0:
                        wait_seconds = _SHORTEST_WAIT_SECONDS
                    elif wanted := self._wanted():
                        self.tell(waiting_for=f"{leases.holder(wanted[0]) or 'another builder'}")
                        time.sleep(wait_seconds)
                        wait_seconds = min(2 * wait_seconds, _LONGEST_WAIT_SECONDS)
            if self.manifest.position.end_bytes >= SNAPSHOT_FROM_BYTES and self.units_built + self.units_adopted:
                self.manifest.write_snapshot(self.directory)

    @property
    def num_units(self) -> int:
        return len(self._units)

    def is_stopped(self) -> bool:
        """Whether it was asked to stop."""
        return self._stop()

    def look(self, **counts: int) -> None:
        """See what others did meanwhile. For who lets others build; ``counts`` is what is known of them."""
        self.tell(**counts)
        self._see(self.manifest.refreshed(self.directory))

    def _wanted(self) -> list[int]:
        """What is missing or to be built again, in the order of the mode."""
        self._see(self.manifest.refreshed(self.directory))
        last = len(self._units) if self.options.last_unit is None else min(len(self._units), self.options.last_unit)
        missing: list[int] = self.manifest.missing_units(0, last).tolist()
        again = [unit for unit in self.options.rebuild - self._settled if self.manifest.has_unit(unit)]
        wanted = sorted({*missing, *again}, reverse=self.options.mode == "inverse")
        if self.options.mode == "gaps" and len(self.manifest.units):
            highest = int(self.manifest.units["unit"][-1])
            return [unit for unit in wanted if unit <= highest] + [unit for unit in wanted if unit > highest]
        return wanted

    def _is_done(self, unit: int) -> bool:
        if not self.manifest.has_unit(unit):
            return False
        if unit not in self.options.rebuild or unit in self._settled:
            return True
        if is_intact(self.directory, self.manifest, unit, self.options.depth):  # another builder was faster
            self._settled.add(unit)
            return True
        return False

    def _leased(self, wanted: Sequence[int], leases: Leases) -> Iterator[Unit]:
        for unit in wanted:
            if self._stop():
                return
            leases.wait_for_room(self._units_ahead, _PATIENCE_SECONDS)
            if self._is_done(unit) or not leases.take(unit):
                continue
            self.manifest = self.manifest.refreshed(self.directory)
            if self._is_done(unit):
                leases.release(unit)
            else:
                yield self._units[unit]

    def _adopt(self, wanted: Sequence[int], leases: Leases) -> int:
        """Take over what dead builders left on disk; returns how many units that gave."""
        adopted = 0
        orphans = [unit for unit in wanted if chunk_path(self.directory, unit, 0).exists()]
        for unit in self._leased([unit for unit in orphans if not self.manifest.has_unit(unit)], leases):
            manifest, done = adopt_unit(self.manifest, self.directory, unit, self.work)
            leases.release(unit.unit_id)
            adopted += done
            self.units_adopted += done
            self._see(manifest)
        return adopted

    def _build(self, wanted: Sequence[int], leases: Leases) -> int:
        built = 0
        units = self.work.run(
            self._leased(wanted, leases), on_documents=self._add_documents, on_statistics=self._see_stages,
            stop=self._stop,
        )  # fmt: skip
        try:
            for unit in units:
                self._commit(unit)
                leases.release(unit.unit_id)
                built += 1
        finally:
            if isinstance(units, Generator):
                units.close()  # ends what it reads ahead
        return built

    def _commit(self, built: BuiltUnit) -> None:
        self._writing = built.unit_id
        self._writing_bytes = self._pending_bytes = sum(record.size_bytes for _, record in built.chunks)
        manifest, counts = commit_unit(
            self.manifest, self.directory, built, self.work, self.options.bad_record_fraction,
            replace=built.unit_id in self.options.rebuild, on_written=self._count_written,
        )  # fmt: skip
        self._writing, self._writing_bytes, self._pending_bytes = None, 0, 0
        self._settled.add(built.unit_id)
        self.units_built += counts
        self._see(manifest)
        if counts and self.units_built % SNAPSHOT_INTERVAL_ENTRIES == 0:
            manifest.write_snapshot(self.directory)

    def _count_written(self, size_bytes: int) -> None:
        self._pending_bytes -= size_bytes

    def _see(self, manifest: Manifest) -> None:
        changed = manifest.generation != self._told_generation
        self.manifest = manifest
        if changed:
            self._told_generation = manifest.generation
            self.tell(waiting_for="", **committed(manifest, self._source_bytes_U))

    def _see_stages(self, statistics: PipelineStatistics) -> None:
        self.progress = replace(self.progress, stages=statistics)

    def _add_documents(self, documents: int, text_bytes: int, tokens: int) -> None:
        progress = self.progress
        self.tell(
            documents=progress.documents + documents,
            text_bytes=progress.text_bytes + text_bytes,
            tokens=progress.tokens + tokens,
        )

    def tell(self, **changes: int | str) -> None:
        """Change what is known of the progress, and pass it on."""
        self.progress = replace(self.progress, **changes)
        if self._on_progress is not None:
            self._on_progress(self.progress)

    @contextlib.contextmanager
    def explained(self) -> Generator[None]:
        """Say what a refused write means."""
        try:
            yield
        except OSError as error:
            done = f"{self.progress.units_done} of {len(self._units)} units; the next build goes on from there"
            raise refused_write(error, self.directory, saved=done, needed_bytes=self._needed_bytes()) from error

    def _needed_bytes(self) -> int:
        """Chunks not yet written; those of units not yet read by what the others came to."""
        known = [int(unit) for unit in self.manifest.units["unit"] if unit < len(self._units)]
        if self._writing is not None:
            known.append(self._writing)
        known_text_bytes = int(self._source_bytes_U[np.unique(np.array(known, np.int64))].sum())
        known_bytes = int(self.manifest.chunks["size_bytes"].sum(dtype=np.int64)) + self._writing_bytes
        rate = known_bytes / known_text_bytes if known_text_bytes else _FIRST_GUESS_CACHE_PER_TEXT_BYTE
        return self._pending_bytes + round(rate * (int(self._source_bytes_U.sum()) - known_text_bytes))


def source_bytes(units: Collection[Unit]) -> npt.NDArray[np.int64]:
    """Bytes of the source that each unit is made of."""
    return np.array([sum(span.end_byte - span.start_byte for span in unit.spans) for unit in units], np.int64)


def refused_write(error: OSError, directory: Path, *, saved: str, needed_bytes: int) -> DataError:
    """What a write to the cache that the system refused means to a person."""
    where = str(error.filename or directory)
    if not is_disk_full(error):
        known = disk_error(error, where)
        return DataError(
            f"the cache cannot be written: {os.strerror(error.errno) if error.errno else error}", where=where,
            saved=saved,
            hint=known.hint if known else "give write permission, or set data.cache.directory to a place that has it",
        )  # fmt: skip
    return DataError(
        f"no room for the rest of the cache: {room_text(needed_bytes, directory, error)}",
        where=where, saved=saved,
        hint="make room, or set data.cache.directory to another disk, and run the same command again",
    )  # fmt: skip
