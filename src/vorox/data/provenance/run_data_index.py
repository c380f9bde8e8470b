"""A run's plan and token caches, opened for provenance queries.

A run directory goes in; the plan and one reader per source come out, checked against each other. Caches are found by
the notes of the run's attempts, or else by name. Chunks that a streamed run has evicted are rebuilt on access; nothing
else is built.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import cast

import numpy as np
import numpy.typing as npt

from vorox.core.batch_sizes import BatchSizes
from vorox.core.errors import ConfigError, DataError
from vorox.core.files.json_reader import mapping
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import RunLayout
from vorox.data.cache.files.manifest import Manifest
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.upkeep.disk_budget import is_evictable, resident_units
from vorox.data.cache.upkeep.retention import register_run
from vorox.data.corpus.view_records import is_restored, is_stream
from vorox.data.order.difficulty_buckets import SourceReader, reader_of, readers_of
from vorox.data.order.growth import await_planned_units
from vorox.data.order.plan import DataPlan
from vorox.records.attempts import intervals
from vorox.records.executed_steps import PLAN_NOTE, executed_attempts
from vorox.records.run_lookup import attempt_notes, run_argument

_MAX_CANDIDATES = 64
_POSITIONS_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True)
class RunDataIndex:
    """A run's plan and caches. Open it with ``RunDataIndex.open``; it is a context manager.

    Attributes:
        directory: The run directory.
        plan: The run's plan.
        readers: A reader of each source, in the plan's order.
        close: Stops the builder of a streamed run; does nothing for complete caches.
    """

    directory: Path
    plan: DataPlan
    readers: tuple[SourceReader, ...]
    close: Callable[[], None] = lambda: None

    @classmethod
    def open(cls, run_directory: Path, opened: dict[Path, CacheReader] | None = None) -> RunDataIndex:
        """Open the plan and the caches of a run.

        Args:
            run_directory: The run.
            opened: Caches that are open already, by directory; extended by those of this run.

        Raises:
            DataError: The run has no plan, its plan has lost events, or a cache is missing or has changed.
        """
        plan_notes = attempt_notes(run_directory, PLAN_NOTE)  # before the plan, which a live run extends
        plan = DataPlan.open(RunLayout(run_directory).plan)
        _check_events(plan, plan_notes)
        choices = [_candidates(run_directory, plan, index) for index in range(len(plan.sources))]
        first_error: DataError | None = None
        for directories in itertools.islice(itertools.product(*choices), _MAX_CANDIDATES):
            try:
                caches = [_open_cache(directory, opened) for directory in directories]
                if any(_is_lost_stream(cache) for cache in caches):
                    return cls._rebuilding(run_directory, plan)
                readers = tuple(reader_of(source, cache) for source, cache in zip(plan.sources, caches, strict=True))
                plan.check(readers)
            except DataError as error:
                first_error = first_error or error
                continue
            for cache in caches:
                register_run(cache.directory, run_directory)  # it may have moved
            if all(_has_all_chunks(cache) for cache in caches):
                return cls(run_directory, plan, readers)
            return cls(run_directory, plan, *_streamed_readers(run_directory, plan))
        assert first_error is not None, "every source has at least one candidate"
        raise first_error

    @classmethod
    def _rebuilding(cls, run_directory: Path, plan: DataPlan) -> RunDataIndex:
        """Open a streamed run whose chunks are lost, and rebuild those of its plan."""
        readers, close = _streamed_readers(run_directory, plan)
        try:
            rebuilt = await_planned_units(plan, readers)
            plan.check(rebuilt)
        except BaseException:
            close()
            raise
        return cls(run_directory, plan, cast("tuple[SourceReader, ...]", tuple(rebuilt)), close)

    def __enter__(self) -> RunDataIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_steps(self) -> int:
        """Number of steps that the plan covers."""
        return self._sizes.step_at(self.plan.num_positions)

    def positions_of_step(self, step: int) -> range:
        """Return the positions of a step's slots, in slot order.

        Raises:
            ConfigError: The plan does not cover the step.
        """
        if not 1 <= step <= self.num_steps:
            raise ConfigError(
                f"Step {step:,} is not in the run's data plan, which has steps 1 to {self.num_steps:,}",
                where=str(self.plan.path), hint="steps count from 1, as in the log and in checkpoints",
            )  # fmt: skip
        return range(self._sizes.position_of(step - 1), self._sizes.position_of(step))

    def is_skipped(self, step: int) -> bool:
        """Whether the update of a step was skipped."""
        return self.plan.is_skipped(self._sizes.position_of(step - 1))

    def applied_steps(self) -> npt.NDArray[np.int64]:
        """Return the steps whose updates the weights hold, ascending: executed, neither rolled back nor skipped.

        Raises:
            DataError: The record of the executed steps is lost.
        """
        history = intervals(executed_attempts(self.directory))
        parts = [np.arange(one.first_step, one.last_step + 1) for one in history if one.outcome != "rolled_back"]
        steps = np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
        return np.setdiff1d(steps[steps <= self.num_steps], self.skipped_steps())

    def skipped_steps(self) -> npt.NDArray[np.int64]:
        """Return the steps whose update is skipped because of a loss spike, ascending."""
        return self.plan.state.skipped_steps() + 1

    def row_uses(self, steps: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """Return how often some steps read each row of each source."""
        uses = [np.zeros(reader.num_rows, np.int64) for reader in self.readers]
        steps_at_once = max(1, _POSITIONS_AT_ONCE // self._sizes.largest)
        for first in range(0, len(steps), steps_at_once):
            part = [self.positions_of_step(step) for step in steps[first : first + steps_at_once].tolist()]
            found = self.plan.locate(np.concatenate([np.arange(one.start, one.stop, dtype=np.int64) for one in part]))
            for index, reader in enumerate(self.readers):
                here = found.source_index == index
                np.add.at(uses[index], found.row[here] + reader.unit_row_starts[found.unit_start[here]], 1)
        return uses

    def step_and_slot(self, position: int) -> tuple[int, int]:
        """Return the step (from 1) and the slot (from 0) of a position."""
        step = self._sizes.step_at(position)
        return step + 1, position - self._sizes.position_of(step)

    @property
    def _sizes(self) -> BatchSizes:
        return self.plan.start.batch_sizes


def _open_cache(directory: Path, opened: dict[Path, CacheReader] | None) -> CacheReader:
    if opened is None:
        return CacheReader.open(directory, complete=False)
    if directory not in opened:
        opened[directory] = CacheReader.open(directory, complete=False)
    return opened[directory]


def _check_events(plan: DataPlan, notes: Sequence[object]) -> None:
    """Check that a plan has all events that the attempts of the run recorded: a lost one changes what a step was.

    Raises:
        DataError: It has lost events, or has others.
    """
    for note in map(mapping, notes):
        events, digest = note.get("events"), note.get("digest")
        if type(events) is int and plan.digest_at(events) != digest:
            lost = f"has {plan.num_events:,} of {events:,} events" if plan.num_events < events else "has other events"
            raise DataError(
                f"Data plan is not the one that the run trained by: it {lost}", where=str(plan.path),
                saved="the run was not changed", hint="restore plan.jsonl from a copy of the run, such as its mirror",
            )  # fmt: skip


def _is_lost_stream(cache: CacheReader) -> bool:
    """Return whether a stream was restored from the run's records, and not all of its units are built again."""
    return is_restored(cache.directory) and is_stream(cache.directory) and len(cache.manifest.missing_units()) > 0


def _has_all_chunks(cache: CacheReader) -> bool:
    """Return whether all chunks are on disk: none has been evicted."""
    return not is_evictable(cache.directory) or len(resident_units(cache.directory)) == len(cache.manifest.units)


def _streamed_readers(run_directory: Path, plan: DataPlan) -> tuple[tuple[SourceReader, ...], Callable[[], None]]:
    """Return readers that rebuild evicted chunks on access, and the function that stops their builder."""
    from vorox.data.corpus.corpus import prepare_recorded
    from vorox.records.run_context import recorded_config

    corpus = prepare_recorded(run_directory, recorded_config(run_directory))
    found = readers_of(plan.sources, {source.name: source.train for source in corpus.sources})
    readers = tuple(reader for reader in found if reader is not None)
    if len(readers) < len(found):
        corpus.close()
        missing = ", ".join(s.name for s, reader in zip(plan.sources, found, strict=True) if reader is None)
        raise DataError(
            f"Rows of source {missing} cannot be rebuilt: the run's configuration no longer has the source",
            where=str(RunLayout(run_directory).config),
            hint="earlier configurations of the run are in configs/ of the run directory",
        )  # fmt: skip
    return readers, corpus.close


def _candidates(run_directory: Path, plan: DataPlan, source_index: int) -> list[Path]:
    """Return the possible directories of a source's cache: as recorded by attempts, or else found by name."""
    source = plan.sources[source_index]
    name = source.configured_name
    recorded = [cast("dict[str, str]", caches).get(name) for caches in attempt_notes(run_directory, "caches")]
    paths = [Path(path) for path in recorded if path]
    found = [path for path in paths if path.is_dir()]
    if not found:
        from vorox.data.corpus.cache_location import cache_root
        from vorox.data.corpus.run_views import TRAIN_NOTE, RunViews
        from vorox.data.streaming.stream_group import DIRECTORY_NAME as STREAMS_NAME
        from vorox.records.run_context import recorded_config

        data = recorded_config(run_directory).data
        root, streams = cache_root(data), data.mode == "streaming"  # chunks of a stream are built when they are read
        view = RunViews.of_run(run_directory, root, restore=streams).directories.get(TRAIN_NOTE, {}).get(name)
        if view is not None:
            missing = () if is_stream(view) else Manifest.open(view).missing_units()
            if len(missing):
                raise DataError(
                    f"The cache of source {source.name!r} is lost: {pluralize(len(missing), 'unit')} of it are missing",
                    where=str(paths[0]) if paths else source.name,
                    hint=f"build it again from the files that the run has recorded: vorox data build "
                    f"{run_argument(run_directory)}",
                )
            return [view]
        pattern = f"{name}-train-{source.recipe_digest[:12]}-*"
        found = sorted(root.glob(pattern)) + sorted((root / STREAMS_NAME).glob(pattern))
    if not found:
        raise DataError(
            f"The cache of source {source.name!r} is missing", where=str(paths[0]) if paths else source.name,
            hint="restore it, or build it again from the files that the run has recorded: vorox data build "
            f"{run_argument(run_directory)}",
        )  # fmt: skip
    return list(dict.fromkeys(found))
