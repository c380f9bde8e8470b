"""``build``: bring a cache to completion, in this process, in several, or on several machines.

A cache directory, the work that decides its units and the units go in; a report comes out. One builder works in this
process; ``workers`` of them are processes of this machine, or Ray tasks wherever the cluster has room, on a directory
that all of them see. A cache that is complete is only looked at, so it may lie on a read-only disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from vorox.core.errors import DataError
from vorox.data.cache import inventory
from vorox.data.cache.builder import Builder, BuildOptions, Mode, OnProgress, never, prepare_directory
from vorox.data.cache.condition import Depth, damaged_units
from vorox.data.cache.manifest import Manifest
from vorox.data.cache.quarantine import DIRECTORY_NAME as QUARANTINE_NAME
from vorox.data.cache.quarantine import first_quarantined, report_quarantine
from vorox.data.cache.recipe import RECIPE_NAME, check_recipe, read_recipe
from vorox.data.cache.report import BuildReport, build_report, transform_counts
from vorox.data.cache.unit_work import UnitWork
from vorox.data.cache.workers import run_processes
from vorox.data.documents import Unit

Executor = Literal["process", "ray"]


def build(
    directory: Path,
    work: UnitWork,
    units: Sequence[Unit],
    *,
    mode: Mode = "forward",
    bad_record_fraction: float = 0.001,
    last_unit: int | None = None,
    check: Depth | None = None,
    workers: int = 1,
    executor: Executor = "process",
    on_progress: OnProgress | None = None,
    on_check: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] = never,
) -> BuildReport:
    """Build what a cache lacks.

    Args:
        directory: The cache; made if need be.
        work: What its units are a function of. Of its files, those recorded in the cache must be the first, unchanged.
        units: The units of work, likewise.
        mode: Which missing unit is next.
        bad_record_fraction: Unreadable records of a unit, rounded up, that are put aside before the build stops.
        last_unit: Build only the units below this; None for all.
        check: Look at every chunk first, so closely, and build the units of lost and damaged ones again.
        workers: Builders that work at once.
        executor: What they are when they are several: processes, or tasks of Ray (also when it is one).
        on_progress: Told after every batch of documents and every unit.
        on_check: Told (bytes of chunk files looked at, all of them) by ``check``.
        stop: Asked between units; once it says yes, the cache is left as it is: valid, and incomplete.

    Raises:
        ConfigError: Ray is asked for and not installed.
        DataError: The cache is of another recipe or source, a text cannot be tokenised, too many records are bad,
            there is no text at all, or the disk is full or refuses to be written to. What was committed stays.
    """
    started = time.perf_counter()
    _check_tokenizer(work)
    options = BuildOptions(mode, bad_record_fraction, last_unit, depth=check or "quick")
    builder = Builder(directory, work, units, options, on_progress=on_progress, stop=stop)
    manifest = _complete(directory, work, units, last_unit)
    if units and (check is not None or manifest is None):
        with builder.explained():
            manifest = prepare_directory(
                directory, work, units, stop=stop, on_compared=lambda size: builder.tell(compared_bytes=size)
            )
            builder.tell(compared_bytes=0)
        damaged = damaged_units(directory, manifest, check, on_check) if check is not None else {}
        if damaged:
            options = BuildOptions(mode, bad_record_fraction, last_unit, frozenset(damaged), check or "quick")
            builder = Builder(directory, work, units, options, on_progress=on_progress, stop=stop)
        num_units = len(manifest.missing_units(0, last_unit)) + len(damaged)
        manifest = _run(builder, executor, workers, num_units)
    manifest = manifest or Manifest.empty()
    if manifest.num_rows == 0 and len(manifest.units) == len(units):
        raise _nothing_to_build(directory)
    report = build_report(
        manifest,
        work.recipe.row_tokens,
        units_built=builder.units_built,
        units_adopted=builder.units_adopted,
        built_text_bytes=builder.progress.text_bytes,
        seconds=time.perf_counter() - started,
        stages=builder.progress.stages,
        transforms=transform_counts(directory) if work.transforms else {},
    )
    if report.units_built or report.units_adopted:
        report_quarantine(directory, report.quarantined)
    return report


def _nothing_to_build(directory: Path) -> DataError:
    """The error for a source without a single document, and why it has none."""
    first = first_quarantined(directory, 1)
    if not first:
        return DataError(
            "there is no text to build a cache from", where=str(directory),
            hint="check the source's paths; for a validation split, hold out a larger fraction",
        )  # fmt: skip
    place, reason = first[0]
    return DataError(
        f"no record of the source can be read; the first: {reason}", where=place,
        hint="convert the file to UTF-8, for example: iconv -f LATIN1 -t UTF-8 OLD > NEW" if "UTF-8" in reason
        else f"mend the records; all are listed in {directory / QUARANTINE_NAME}",
    )  # fmt: skip


def _run(builder: Builder, executor: Executor, workers: int, num_units: int) -> Manifest:
    """Build what is to be built, by one or many; the state after it."""
    if executor == "ray":
        from vorox.data.cache.ray_workers import run_on_ray

        run_on_ray(builder, workers)
    elif workers > 1 and num_units > 1:
        run_processes(builder, min(workers, num_units))
    else:
        builder.run()
    return builder.manifest


def _check_tokenizer(work: UnitWork) -> None:
    recipe, tokenizer = work.recipe, work.tokenizer
    given = (tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.end_of_text_id)
    if given != (recipe.tokenizer, recipe.vocab_size, recipe.end_of_text_id):
        raise DataError(
            f"tokenizer {tokenizer.fingerprint} ({tokenizer.vocab_size} tokens, end of text "
            f"{tokenizer.end_of_text_id}) is not the one of the recipe: {recipe.tokenizer} "
            f"({recipe.vocab_size} tokens, end of text {recipe.end_of_text_id})",
            hint="build with the tokenizer that the recipe was made with",
        )


def _complete(directory: Path, work: UnitWork, units: Sequence[Unit], last_unit: int | None) -> Manifest | None:
    """The state of a cache in which there is nothing to do; ``None`` if there is.

    Raises:
        DataError: The cache is not of this recipe or source, or is damaged.
    """
    if not (directory / RECIPE_NAME).exists():
        return None
    check_recipe(directory, read_recipe(directory), work.recipe)
    manifest = Manifest.open(directory)
    manifest.check_recipe(directory, work.recipe.digest)
    if not inventory.is_recorded(directory, manifest, work.files, units):
        return None
    done = manifest.planned_units == len(units) and not len(manifest.missing_units(0, last_unit))
    return manifest if done else None


def rebuild_unit(
    directory: Path, work: UnitWork, units: Sequence[Unit], unit: int, *, bad_record_fraction: float
) -> None:
    """Build one unit again of which a chunk is lost or damaged, unless somebody else does.

    Raises:
        DataError: It cannot be built, or is no longer what was committed.
    """
    options = BuildOptions("forward", bad_record_fraction, 0, frozenset({unit}), "full")
    Builder(directory, work, units, options).run()
