"""Build a cache completely: in this process, in several, or on several machines.

A cache directory, a ``UnitBuilder``, the units and options go in; a report comes out. A complete cache is only read, so
it may be on a read-only disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from vorox.core.errors import DataError
from vorox.data.cache.building.build_queue import BuildQueue, Mode, Permanent, never
from vorox.data.cache.building.initialize import has_planned, prepare_directory
from vorox.data.cache.building.report import BuildReport, OnProgress, build_report, transform_counts
from vorox.data.cache.building.scheduler import BuildScheduler, PairedScheduler
from vorox.data.cache.building.workers import run_processes
from vorox.data.cache.files.manifest import Manifest
from vorox.data.cache.files.quarantine import DIRECTORY_NAME as QUARANTINE_NAME
from vorox.data.cache.files.quarantine import encoding_remedy, first_quarantined, report_quarantine, split_remedy
from vorox.data.cache.files.verify import Depth, damaged_units
from vorox.data.cache.units.unit_builder import UnitBuilder
from vorox.data.documents import Unit
from vorox.data.recipe import RECIPE_NAME, check_recipe, read_recipe

Executor = Literal["process", "ray"]
_BACKGROUND_DRAIN_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Options of a build. None of them changes a row.

    Attributes:
        build: Build missing units. False: refuse an incomplete cache.
        verify: Check all chunks first, at this level, and rebuild damaged ones.
        mode: Order of the missing units: ``forward`` lowest first, ``inverse`` highest first, ``gaps`` first those
            below the highest one built.
        workers: Number of concurrent builders; 1 builds with the threads of this process.
        executor: Run workers as processes or as Ray tasks (also a single one).
        force_rebuild: Rebuild everything, and replace the existing cache once the new one is complete.
        wait_for: ``first_segment`` returns when the first units of the training text are built and builds the others
            in the background; ``complete`` waits for all. None: follow ``data.growth.mode``.
        last_unit: Build only units below this; None: all.
        stop: Polled between units; once it returns true, the build ends and committed units stay.
        on_repair: Called with a message for every unit that is rebuilt because reading found a damaged chunk.
        leads: Whether this process builds for all processes of this machine that train on the same caches.
    """

    build: bool = True
    verify: Depth | None = None
    mode: Mode = "forward"
    workers: int = 1
    executor: Executor = "process"
    force_rebuild: bool = False
    wait_for: Literal["complete", "first_segment"] | None = None
    last_unit: int | None = None
    stop: Callable[[], bool] = never
    on_repair: Callable[[str], None] | None = None
    leads: bool = True


_DEFAULTS = BuildOptions()


@dataclass(frozen=True, slots=True)
class BuildTarget:
    """A cache to build.

    Attributes:
        directory: The cache; created if need be.
        builder: The unit builder. Its files must start with those recorded in the cache, unchanged.
        units: The units, which must start with the recorded ones too.
        on_progress: Called after every batch of documents and every unit.
        on_verified: Called with (bytes of chunk files checked, total bytes) during ``BuildOptions.verify``.
    """

    directory: Path
    builder: UnitBuilder
    units: Sequence[Unit]
    on_progress: OnProgress | None = None
    on_verified: Callable[[int, int], None] | None = None


def build(
    directory: Path,
    builder: UnitBuilder,
    units: Sequence[Unit],
    options: BuildOptions = _DEFAULTS,
    *,
    on_progress: OnProgress | None = None,
    on_verified: Callable[[int, int], None] | None = None,
) -> BuildReport:
    """Build the missing units of a cache; for the arguments, see ``BuildTarget``.

    Raises:
        ConfigError: Ray is requested and not installed.
        DataError: The cache has a different recipe or source, a text cannot be tokenised, too many records are bad,
            the source is empty, or the disk is full or not writable. Committed units stay.
    """
    started = time.perf_counter()
    one = _Build(BuildTarget(directory, builder, units, on_progress, on_verified), options)
    one.run()
    return one.report(time.perf_counter() - started)


def build_pair(
    first: BuildTarget, second: BuildTarget, options: BuildOptions = _DEFAULTS
) -> tuple[BuildReport, BuildReport]:
    """Build the missing units of both splits of a source, reading the text once. For one worker.

    Args:
        first: The cache whose builder reads the text, by a ``SplitPairReader``.
        second: The other cache, which is built from the records that this reader holds.
        options: Options of both builds.

    Raises:
        ConfigError, DataError: As ``build``.
    """
    started = time.perf_counter()
    one, two = _Build(first, options), _Build(second, options)
    one.run(companion=two.scheduler if two.num_missing else None)
    between = time.perf_counter()
    two.run()
    return one.report(between - started), two.report(time.perf_counter() - between)


class _Build:
    """The build of one cache; the constructor plans and checks it."""

    def __init__(self, target: BuildTarget, options: BuildOptions) -> None:
        _check_tokenizer(target.builder)
        self._target, self._options = target, options
        directory, builder, units = target.directory, target.builder, target.units
        # Another builder that knows more files may plan units beyond these.
        last_unit = len(units) if options.last_unit is None else min(len(units), options.last_unit)
        queue = BuildQueue(options.mode, last_unit)
        self.scheduler = BuildScheduler(
            directory, builder, units, queue, on_progress=target.on_progress, stop=options.stop
        )
        self.num_missing = 0
        manifest = _read_if_complete(directory, builder, units, options.last_unit)
        damaged = set[int]() if manifest is None else self._damaged(manifest)
        if units and (manifest is None or damaged):
            with self.scheduler.translate_os_errors():
                planned = prepare_directory(
                    directory, builder, units, stop=options.stop,
                    on_compared=lambda size: self.scheduler.tracker.update(compared_bytes=size),
                )  # fmt: skip
                self.scheduler.tracker.update(compared_bytes=0)
            damaged = damaged if manifest is not None else self._damaged(planned)
            manifest = planned
            if options.verify is not None:
                self.scheduler.residency = Permanent(directory, damaged, options.verify)
            self.num_missing = len(manifest.missing_units(0, last_unit)) + len(damaged)
        self._manifest = manifest or Manifest.empty()

    def _damaged(self, manifest: Manifest) -> set[int]:
        """Return the units with a lost or damaged chunk, if the options want that checked."""
        depth = self._options.verify
        if depth is None:
            return set()
        return set(damaged_units(self._target.directory, manifest, depth, self._target.on_verified))

    def run(self, companion: BuildScheduler | None = None) -> None:
        """Build the missing units, and alongside them those of a companion."""
        target, scheduler = self._target, self.scheduler
        if not self.num_missing:
            return
        self._manifest = self._manifest.refreshed(target.directory)
        remaining = len(self._manifest.missing_units(0, scheduler.queue.last_unit)) + len(scheduler.residency.damaged)
        if not remaining:  # built alongside another cache
            scheduler.poll()
            return
        if companion is not None:
            scheduler = self.scheduler = PairedScheduler(
                target.directory, target.builder, target.units, scheduler.queue, companion=companion,
                residency=scheduler.residency, on_progress=target.on_progress, stop=self._options.stop,
            )  # fmt: skip
        _run_scheduler(scheduler, self._options, remaining)
        self._manifest = scheduler.manifest

    def report(self, seconds: float) -> BuildReport:
        """Return the report of this build.

        Raises:
            DataError: The cache is complete, and no token of it is trained on.
        """
        manifest, scheduler, builder = self._manifest, self.scheduler, self._target.builder
        targets = int(manifest.units["targets"].sum(dtype=np.int64))
        if targets == 0 and len(manifest.units) == len(self._target.units):
            raise _empty_source(self._target.directory)
        report = build_report(
            manifest,
            builder.recipe.row_tokens,
            units_built=scheduler.units_built,
            units_adopted=scheduler.units_adopted,
            built_text_bytes=scheduler.tracker.progress.text_bytes,
            seconds=seconds,
            stages=scheduler.tracker.progress.stages,
            transforms=transform_counts(self._target.directory) if builder.transforms else {},
        )
        if report.units_built or report.units_adopted:
            report_quarantine(self._target.directory, report.quarantined)
        return report


def build_in_background(
    directory: Path, builder: UnitBuilder, units: Sequence[Unit], options: BuildOptions = _DEFAULTS
) -> BuildScheduler:
    """Build the missing units of a planned cache in worker processes while it is read.

    ``close`` stops the build at any time; ``check`` raises the exception that ended it.
    """
    # Units that another process plans meanwhile are built there, where their files are known.
    scheduler = BuildScheduler(directory, builder, units, BuildQueue(options.mode, len(units)))
    scheduler.start(lambda: run_processes(scheduler, options.workers, drain_seconds=_BACKGROUND_DRAIN_SECONDS))
    return scheduler


def rebuild_unit(directory: Path, builder: UnitBuilder, units: Sequence[Unit], unit: int) -> None:
    """Rebuild one unit with a lost or damaged chunk in this thread, unless another builder does.

    Raises:
        DataError: It cannot be built, or its content differs from what was committed.
    """
    residency = Permanent(directory, {unit}, "full")
    BuildScheduler(directory, builder, units, BuildQueue(last_unit=0), residency=residency).run()


def _run_scheduler(scheduler: BuildScheduler, options: BuildOptions, num_units: int) -> None:
    """Build ``num_units`` missing units with the configured workers."""
    if options.executor == "ray":
        from vorox.data.cache.building.ray_workers import run_on_ray

        run_on_ray(scheduler, options.workers)
    elif options.workers > 1 and num_units > 1:
        run_processes(scheduler, min(options.workers, num_units))
    else:
        scheduler.run()


def _empty_source(directory: Path) -> DataError:
    """Return the error for a source without documents, with the reason."""
    first = first_quarantined(directory, 1)
    if not first:
        return DataError(
            "No token of the source is trained on: it has no text, or all of its answers are left out",
            where=str(directory),
            hint="check the paths of the source, and the weights and labels of its answers; for a validation split, "
            "hold out a larger fraction",
        )  # fmt: skip
    place, reason = first[0]
    reason, remedy = split_remedy(reason)
    if "UTF-8" in reason:
        remedy = f"{encoding_remedy(place, num_files=1)}, or check data.sources.0.format (0 is the first source)"
    return DataError(
        f"Cannot read any record of the source; the first error: {reason}", where=place,
        hint=f"{remedy or 'repair the records'}; all are listed in {directory / QUARANTINE_NAME}",
    )  # fmt: skip


def _check_tokenizer(builder: UnitBuilder) -> None:
    recipe, tokenizer = builder.recipe, builder.tokenizer
    given = (tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.end_of_text_id)
    if given != (recipe.tokenizer, recipe.vocab_size, recipe.end_of_text_id):
        raise DataError(
            f"Tokenizer {tokenizer.fingerprint} ({tokenizer.vocab_size} tokens, end of text "
            f"{tokenizer.end_of_text_id}) does not match the recipe: {recipe.tokenizer} "
            f"({recipe.vocab_size} tokens, end of text {recipe.end_of_text_id})",
            hint="build with the tokenizer named in the recipe",
        )


def _read_if_complete(
    directory: Path, builder: UnitBuilder, units: Sequence[Unit], last_unit: int | None
) -> Manifest | None:
    """Return the manifest of a complete cache; None if units are missing.

    Raises:
        DataError: The cache has a different recipe or source, or is damaged.
    """
    if not (directory / RECIPE_NAME).exists():
        return None
    check_recipe(directory, read_recipe(directory), builder.recipe)
    manifest = Manifest.open(directory)
    manifest.check_recipe(directory, builder.recipe.digest)
    if not has_planned(directory, manifest, builder.files, units):
        return None
    done = manifest.planned_units == len(units) and not len(manifest.missing_units(0, last_unit))
    return manifest if done else None
