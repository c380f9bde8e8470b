"""The trail of a run: its plan and the caches that it reads, opened to ask where its data came from.

In: a run directory. Out: the plan and one reader per source, checked against each other; found by what the run's
attempts noted, else by their names. Nothing is built, except chunks that a streamed run removed after use: they are
made again from their files while they are asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import cast

from vorox.core.errors import ConfigError, DataError
from vorox.core.run_layout import RunLayout
from vorox.core.run_lookup import run_attempts
from vorox.data.cache.reader import CacheReader
from vorox.data.parts import SourceReader, cache_name, reader_of, readers_of
from vorox.data.plan import Plan
from vorox.data.streaming.retention import is_marked, resident_units

_MOST_CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class Trail:
    """A run's plan and the caches that it reads, open. Make one with ``open_trail``; use it as a context manager.

    Attributes:
        directory: The run.
        plan: Its plan.
        readers: The rows of each source, in the plan's order.
        close: Ends what builds rows of a streamed run again; does nothing for caches.
    """

    directory: Path
    plan: Plan
    readers: tuple[SourceReader, ...]
    close: Callable[[], None] = lambda: None

    def __enter__(self) -> Trail:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_steps(self) -> int:
        """Steps that the plan covers."""
        return self.plan.num_positions // self.plan.start.global_batch_sequences

    def positions_of_step(self, step: int) -> range:
        """Positions of the slots of a step, in slot order.

        Raises:
            ConfigError: The plan has no such step.
        """
        if not 1 <= step <= self.num_steps:
            raise ConfigError(
                f"there is no step {step:,} in the run's plan, which has the steps 1 to {self.num_steps:,}",
                where=str(self.plan.path), hint="steps count from 1, as in the log and in checkpoints",
            )  # fmt: skip
        batch = self.plan.start.global_batch_sequences
        return range((step - 1) * batch, step * batch)

    def step_and_slot(self, position: int) -> tuple[int, int]:
        step, slot = divmod(position, self.plan.start.global_batch_sequences)
        return step + 1, slot


def open_trail(run_directory: Path) -> Trail:
    """Open what a run's provenance is computed from.

    Rows of a streamed run whose chunks were removed after use are built again from their files when they are asked for.

    Raises:
        DataError: The run has no plan, or the cache that it was made for is not there any more.
    """
    plan = Plan.open(RunLayout(run_directory).plan)
    choices = [_candidates(run_directory, plan, index) for index in range(len(plan.sources))]
    failure: DataError | None = None
    for directories in itertools.islice(itertools.product(*choices), _MOST_CANDIDATES):
        try:
            caches = [CacheReader.open(directory, complete=False) for directory in directories]
            readers = tuple(reader_of(source, cache) for source, cache in zip(plan.sources, caches, strict=True))
            plan.check(readers)
        except DataError as error:
            failure = failure or error
            continue
        whole = all(_is_whole(cache) for cache in caches)
        return Trail(run_directory, plan, readers) if whole else _open_streams(run_directory, plan)
    assert failure is not None, "a source without a directory was refused"
    raise failure


def _is_whole(cache: CacheReader) -> bool:
    """Whether every chunk is on disk, as far as anybody may have removed some."""
    return not is_marked(cache.directory) or len(resident_units(cache.directory)) == len(cache.manifest.units)


def _open_streams(run_directory: Path, plan: Plan) -> Trail:
    from vorox.core.run_context import recorded_config
    from vorox.data.dataset import prepare

    corpus = prepare(recorded_config(run_directory), build=False)
    found = readers_of(plan.sources, {source.name: source.train for source in corpus.sources})
    readers = tuple(reader for reader in found if reader is not None)
    if len(readers) < len(found):
        corpus.close()
        missing = ", ".join(s.name for s, reader in zip(plan.sources, found, strict=True) if reader is None)
        raise DataError(
            f"rows of source {missing} cannot be built again: the run's configuration no longer has it",
            where=str(RunLayout(run_directory).config),
            hint="see configs/ in the run directory for the one that had it",
        )  # fmt: skip
    return Trail(run_directory, plan, readers, corpus.close)


def _candidates(run_directory: Path, plan: Plan, source_index: int) -> list[Path]:
    """Cache directories that may be a source's: as its attempts noted, else by name below today's root of caches."""
    source = plan.sources[source_index]
    name = cache_name(source)
    paths = [
        path for caches in noted(run_directory, "caches") if (path := cast("dict[str, str]", caches).get(name, ""))
    ]
    found = [Path(path) for path in paths if Path(path).is_dir()]
    if not found:
        from vorox.core.run_context import recorded_config
        from vorox.data.cache_location import cache_root
        from vorox.data.streaming.preparation import DIRECTORY_NAME as STREAMS_NAME

        root = cache_root(recorded_config(run_directory).data)
        pattern = f"{name}-train-{source.recipe_digest[:12]}-*"
        found = sorted(root.glob(pattern)) + sorted((root / STREAMS_NAME).glob(pattern))
    if not found:
        raise DataError(
            f"the cache of source {source.name!r} is not there", where=(paths or [source.name])[0],
            hint="bring it back, or build it again from the same files with `vorox data build` and the run's name",
        )  # fmt: skip
    return list(dict.fromkeys(found))


def noted(run_directory: Path, name: str) -> list[object]:
    """What the attempts noted in ``run.json`` under a name, the newest first."""
    notes = [cast("dict[str, object]", attempt.get("notes") or {}) for attempt in run_attempts(run_directory)]
    return [note[name] for note in reversed(notes) if name in note]
