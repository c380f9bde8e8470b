"""Open the cache of a split of a source: find it, extend it, build it, or build it in the background.

The settings that all caches of a corpus share go in, then one source at a time; readers and reports come out.
Invariant: the rows are a function of the configuration and the text, however often the build was interrupted and
whichever processes took part.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

from vorox.core.errors import ConfigError, DataError, Preempted
from vorox.core.pluralize import pluralize
from vorox.core.schema.data import DataConfig, Split
from vorox.data.cache.build import BuildOptions, BuildTarget, build, build_in_background, build_pair, rebuild_unit
from vorox.data.cache.building.initialize import InputsDiffer, planned_inputs
from vorox.data.cache.building.report import BuildReport, PrepareProgress, build_report, bytes_reporter
from vorox.data.cache.building.scheduler import BuildScheduler
from vorox.data.cache.files.manifest import Manifest
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.units.unit_builder import UnitBuilder
from vorox.data.cache.upkeep.replacement import replacing
from vorox.data.cache.upkeep.retention import mark_used
from vorox.data.corpus.cache_location import (
    CacheLocation,
    all_units,
    find_location,
    fresh_location,
    recorded_location,
    with_recorded,
)
from vorox.data.corpus.run_views import RunViews
from vorox.data.corpus.view_records import is_restored
from vorox.data.documents import Unit
from vorox.data.images.layout import ImageLayout
from vorox.data.recipe import RECIPE_NAME, Recipe, read_recipe
from vorox.data.streaming.stream_group import DIRECTORY_NAME as STREAMS_NAME
from vorox.data.streaming.stream_group import StreamGroup
from vorox.data.streaming.unit_list import UnitList
from vorox.data.text.holdout import SPLITS
from vorox.data.text.sources import Source, list_source
from vorox.data.text.unit_reader import SplitPairReader, UnitReader, read_units, splits_share_units
from vorox.data.text.unit_splitter import UnitSplitter, first_units, reject_empty_source, units_of_both_splits
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.data.transforms.registry import check_special_tokens, recipe_of, transforms_of

_POLL_SECONDS = 0.1


def recipe_for(
    data: DataConfig, source: Source, split: Split, tokenizer: Tokenizer, *, images: ImageLayout | None = None
) -> Recipe:
    """Return the recipe of a split of a source: everything besides its files that determines the rows."""
    rule = source.holdout
    share = rule.held_out_fraction if rule.split != "named" else 0
    held_out = rule.split if rule.held_out_fraction else "none"
    transforms = transforms_of(data, source.config, split, source.key)
    check_special_tokens(transforms, tokenizer)
    start_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = (tokenizer.end_of_text_id,)
    if source.config.chat_fields:
        end_ids = ()  # the template writes all tokens
    elif not source.config.has_tokens:
        start_ids, end_ids = tokenizer.start_ids, tokenizer.end_ids
    return Recipe(
        tokenizer=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        end_of_text_id=tokenizer.end_of_text_id,
        row_tokens=data.sequence_length_tokens + 1,
        source={**source.definition, "unit_bytes": data.cache.unit_bytes},
        split={"name": split, "held_out": held_out, "held_out_fraction": str(Fraction(str(share)))},
        packing=data.packing,
        chunk_rows=data.cache.chunk_rows,
        transforms=recipe_of(transforms, data.transform_seed),
        images=images,
        start_ids=start_ids,
        end_ids=None if end_ids == (tokenizer.end_of_text_id,) else end_ids,
    )


T = TypeVar("T")

_MAX_RACES = 20
"""How often to look again for a growing view that other processes extend meanwhile."""


@dataclass(frozen=True)
class CacheOpener:
    """Opens the caches of a corpus, and builds missing units.

    Attributes:
        data: The section ``data``.
        tokenizer: The tokenizer of the corpus.
        root: Root directory of the caches.
        report: Called with the progress.
        options: How missing units are built.
        streams: The streams of the training text under ``data.mode: streaming``; else ``None``.
        images: How images are placed in rows; ``None`` without images.
        views: The views of the run that continues.
        backgrounds: Builds that continue after opening; the corpus closes them.
    """

    data: DataConfig
    tokenizer: Tokenizer
    root: Path
    report: PrepareProgress
    options: BuildOptions
    streams: StreamGroup | None
    images: ImageLayout | None = None
    views: RunViews = field(default_factory=RunViews)
    backgrounds: list[BuildScheduler] = field(default_factory=list[BuildScheduler])

    def open(self, source: Source, split: Split) -> tuple[CacheReader, BuildReport]:
        """Open the cache of a split of a source, and build it if needed.

        Raises:
            DataError: The cache is not built and building is off, or it cannot be built.
            Preempted: A stop was requested during the build.
        """
        return self._retried(lambda: self._open(source, split))

    def _retried(self, action: Callable[[], T]) -> T:
        """Call a function again if another process extended a growing view at the same time."""
        for _ in range(_MAX_RACES):
            try:
                return action()
            except InputsDiffer:
                if not self.data.cache.grow:
                    raise
        return action()

    def _open(self, source: Source, split: Split) -> tuple[CacheReader, BuildReport]:
        recipe = self._recipe(source, split)
        if self.streams is not None and split == "train":
            return self._open_stream(source, recipe)
        units: Sequence[Unit] | None = None
        if self.streams is not None:
            recipe, units = self._validation_prefix(source, split, recipe)
        location = self._locate(source, split, recipe)
        name = f"{source.config.name} {split}"
        if split == "train" and not self._waits_for_all:
            return self._open_growing(location, recipe, name)
        units = self._units(location, split, units)
        with replacing(location.directory, wanted=self.options.force_rebuild) as directory:
            report = self._build(replace(location, directory=directory), recipe, units, None)
        return self._reader(location, recipe, name, complete=True), report

    def open_splits(self, source: Source) -> tuple[tuple[CacheReader, BuildReport], tuple[CacheReader, BuildReport]]:
        """Open the training and the validation cache of a source, with one pass over its text if they share units.

        Raises:
            DataError, Preempted: As ``open``.
        """
        return self._retried(lambda: self._open_splits(source))

    def _open_splits(self, source: Source) -> tuple[tuple[CacheReader, BuildReport], tuple[CacheReader, BuildReport]]:
        recipes = {split: self._recipe(source, split) for split in SPLITS}
        locations = {split: self._locate(source, split, recipes[split]) for split in SPLITS}
        train, held_out = locations["train"], locations["validation"]
        options = self.options
        serial = options.workers == 1 and options.executor == "process" and options.build and self._waits_for_all
        if any(is_restored(location.directory) for location in locations.values()):
            serial = False  # one pass for both splits assumes that both list the same text; these lists are untrusted
        planned = train.units is not None or held_out.units is not None
        if not serial or not splits_share_units(source) or train.source.files != held_out.source.files:
            return self._open(source, "train"), self._open(source, "validation")
        cut = (None, None) if planned else units_of_both_splits(train.source, self.data.cache.unit_bytes)
        units = {split: self._units(locations[split], split, known) for split, known in zip(SPLITS, cut, strict=True)}
        reader = SplitPairReader(train.source, "train")
        with ExitStack() as stack:
            targets: list[BuildTarget] = []
            for split, location in locations.items():
                directory = stack.enter_context(replacing(location.directory, wanted=self.options.force_rebuild))
                targets.append(self._target(replace(location, directory=directory), recipes[split], units[split]))
            pair = replace(targets[0], builder=replace(targets[0].builder, read_unit=reader)), targets[1]
            reports = build_pair(*pair, self.options)
            for split, target, report in zip(SPLITS, targets, reports, strict=True):
                self._check_finished(f"{source.config.name} {split}", target.directory, report)
        train_reader, validation_reader = (
            self._reader(location, recipes[split], f"{source.config.name} {split}", complete=True)
            for split, location in locations.items()
        )
        return (train_reader, reports[0]), (validation_reader, reports[1])

    def _recipe(self, source: Source, split: Split) -> Recipe:
        return recipe_for(self.data, source, split, self.tokenizer, images=self.images)

    @property
    def _waits_for_all(self) -> bool:
        """Whether all units of the training text are built before the first row is read."""
        wait_for = self.options.wait_for or ("complete" if self.data.growth.mode == "complete" else "first_segment")
        return wait_for == "complete" and self.streams is None

    def _locate(self, source: Source, split: Split, recipe: Recipe) -> CacheLocation:
        return self._find(self.root, source, split, recipe, grow=self.data.cache.grow)

    def _find(self, root: Path, source: Source, split: Split, recipe: Recipe, *, grow: bool) -> CacheLocation:
        """Return the view that the run has recorded, else the one of the current files."""
        if self.options.force_rebuild:
            return fresh_location(root, source, split, recipe, self.data, grow=grow)
        recorded = self.views.directory(source, split)
        if recorded is not None and (recorded.parent.name == STREAMS_NAME) != (root.name == STREAMS_NAME):
            recorded = None  # the run goes on streamed where it was cached, or the other way round
        if recorded is not None and read_recipe(recorded).digest == recipe.digest:
            return recorded_location(root, recorded, source, split, recipe, self.data, grow=grow)
        location = find_location(root, source, split, recipe, self.data, grow=grow)
        if location.twin is None or self.options.build:
            return location
        files, _ = planned_inputs(location.twin, Manifest.open(location.twin))
        return replace(location, directory=location.twin, source=with_recorded(source, files, ()))

    def _validation_prefix(self, source: Source, split: Split, recipe: Recipe) -> tuple[Recipe, Sequence[Unit]]:
        """Return the recipe and units of a streamed corpus's validation text: the held-out part of the first bytes."""
        limit_bytes = self.data.streaming.validation_bytes
        whole = self._planned(source, split, recipe)
        if whole is not None and sum(unit.size_bytes for unit in whole) <= limit_bytes:
            return recipe, whole
        while True:
            first = replace(recipe, split={**recipe.split, "first_bytes": limit_bytes})
            planned = self._planned(source, split, first)
            if planned is not None:
                return first, planned
            units, is_complete = first_units(
                source, split, source.holdout, self.data.cache.unit_bytes, limit_bytes=limit_bytes
            )
            if is_complete:
                return recipe, units
            if _has_records(source, units, split):
                return first, units
            limit_bytes *= 2

    def _planned(self, source: Source, split: Split, recipe: Recipe) -> Sequence[Unit] | None:
        """Return the units of a cache that exists, so that its text is not read again."""
        if self.data.cache.grow or self.options.force_rebuild:
            return None
        location = self._find(self.root, source, split, recipe, grow=False)
        return location.units if location.is_planned else None

    def _units(self, location: CacheLocation, split: Split, units: Sequence[Unit] | None) -> Sequence[Unit]:
        """Return the units of a split; split its text if they are not planned yet."""
        if location.is_planned and location.units is not None:
            return location.units
        if not self.options.build:
            raise not_built(location.source, split, location.directory)
        if units is None:
            units = all_units(location, split, self.data)
        if not location.units and not _has_records(location.source, units, split):
            raise _without_records(location.source, split)
        return units

    def _build(
        self, location: CacheLocation, recipe: Recipe, units: Sequence[Unit], last_unit: int | None
    ) -> BuildReport:
        # What a streamed run has lost is rebuilt on access, and `vorox data build` builds no stream.
        rebuilds = self.options.build or (self.streams is not None and is_restored(location.directory))
        if not rebuilds and not _is_done(location.directory, last_unit):
            raise not_built(location.source, recipe.split["name"], location.directory)
        target = self._target(location, recipe, units)
        report = build(
            target.directory, target.builder, units, replace(self.options, last_unit=last_unit),
            on_progress=target.on_progress, on_verified=target.on_verified,
        )  # fmt: skip
        self._check_finished(f"{location.source.config.name} {recipe.split['name']}", target.directory, report)
        return report

    def _target(self, location: CacheLocation, recipe: Recipe, units: Sequence[Unit]) -> BuildTarget:
        name = f"{location.source.config.name} {recipe.split['name']}"
        return BuildTarget(
            location.directory, self.unit_builder(location.source, recipe), units, bytes_reporter(self.report, name),
            lambda done, total: self.report(f"check {name}", done, total, {}),
        )  # fmt: skip

    def _check_finished(self, name: str, directory: Path, report: BuildReport) -> None:
        if self.options.stop() and report.units_missing:
            raise Preempted(
                f"Stopped while building {name}", where=str(directory),
                saved=f"{report.units - report.units_missing:,} of {report.units:,} units of this cache",
                hint="run the same command again to continue",
            )  # fmt: skip

    def _open_growing(self, location: CacheLocation, recipe: Recipe, name: str) -> tuple[CacheReader, BuildReport]:
        """Return a reader of the first units; this process's background build or other processes build the rest."""
        growth = self.data.growth
        builds = self.options.build and self.options.leads and growth.build
        if builds:
            units = self._units(location, "train", None)
            last = min(growth.first_segment_units if growth.mode == "strict" else 1, len(units))
            report = self._build(location, recipe, units, last)
        elif not self.options.build and not _is_done(location.directory, 1):
            raise not_built(location.source, "train", location.directory)
        else:
            if self.options.build:
                self._await(location, growth.first_segment_units if growth.mode == "strict" else 1, name)
            manifest = Manifest.open(location.directory)
            report = build_report(manifest, recipe.row_tokens)
            units = self._locate(location.source, "train", recipe).units or ()
        reader = self._reader(location, recipe, name, complete=False)
        if builds and report.units_missing:
            reader.background = build_in_background(
                location.directory, self.unit_builder(location.source, recipe), units, self.options
            )
            self.backgrounds.append(reader.background)
        return reader, report

    def _await(self, location: CacheLocation, num_units: int, name: str) -> None:
        """Wait until other processes have built the first units."""
        while not _is_done(location.directory, num_units):
            if self.options.stop():
                raise Preempted(f"Stopped while waiting for {name}", hint="run the same command again")
            self.report(f"wait {name}", 0, 0, {})
            time.sleep(_POLL_SECONDS)

    def _reader(self, location: CacheLocation, recipe: Recipe, name: str, *, complete: bool) -> CacheReader:
        reader = CacheReader.open(location.directory, recipe, complete=complete and not self.data.cache.grow)
        if complete and len(missing := reader.manifest.missing_units()):
            raise InputsDiffer(f"Another process adds {pluralize(len(missing), 'unit')}", where=str(location.directory))
        mark_used(location.directory)
        if self.options.build:
            reader.repair = functools.partial(self._repair, location, recipe, name)
        return reader

    def _repair(self, location: CacheLocation, recipe: Recipe, name: str, unit: int, error: DataError) -> None:
        if self.options.on_repair is not None:
            self.options.on_repair(f"{name}: {error}; rebuilding unit {unit}")
        try:
            # Other processes may have planned units since, also of files that this process has not listed.
            _, units = planned_inputs(location.directory, Manifest.open(location.directory))
            if any(span.file_index >= len(location.source.files) for span in units[unit].spans):
                raise DataError("its file was added after this process had opened the cache")
            source = location.source
            if not source.is_listed:  # opened without its files
                listed = list_source(source.config, key=source.key)
                source = with_recorded(replace(source, **_files_of(listed)), source.files, ())
            rebuild_unit(location.directory, self.unit_builder(source, recipe), units, unit)
        except DataError as failure:
            hint = f"{error.hint}; rebuilding the unit failed: {failure.what}"
            raise DataError(error.what, where=error.where, hint=hint) from failure

    def _open_stream(self, source: Source, recipe: Recipe) -> tuple[CacheReader, BuildReport]:
        """Return a reader of the training text, which is built while it is read."""
        assert self.streams is not None
        if self.options.wait_for == "complete":
            raise ConfigError(
                "A streamed corpus cannot be built in advance: chunks are built and evicted while training runs",
                where="data.mode", hint="set data.mode=cached to build a permanent cache",
            )  # fmt: skip
        location = self._find(self.root / STREAMS_NAME, source, "train", recipe, grow=False)
        source = location.source
        self.streams.share_reads(source.stored)
        builder = self.unit_builder(source, recipe)
        splitter = UnitSplitter(source, "train", source.holdout, self.data.cache.unit_bytes)
        units = UnitList(location.directory, builder, splitter)
        if not units.units:
            self._split_first(splitter, units, location)
        reader = self.streams.open(location.directory, builder, units)
        mark_used(location.directory)
        return reader, build_report(reader.manifest, recipe.row_tokens)

    def _split_first(self, splitter: UnitSplitter, units: UnitList, location: CacheLocation) -> None:
        """Split the text of a stream until a unit with a record is found."""
        if not self.options.build:
            raise not_built(location.source, "train", location.directory)
        known, num_units = 0, self.data.growth.first_segment_units
        while not units.is_complete:
            units.split(num_units)
            if splitter.has_records(units.units[known:]):
                return
            known, num_units = len(units.units), 2 * num_units
        if not units.units:
            reject_empty_source(location.source)
        raise _without_records(location.source, "train")

    def unit_builder(self, source: Source, recipe: Recipe) -> UnitBuilder:
        """Return the builder of the units of a split of a source."""
        split: Split = recipe.split["name"]
        read = UnitReader(source, split, source.holdout)
        cache = self.data.cache
        transforms = transforms_of(self.data, source.config, split, source.key)
        return UnitBuilder(
            source.files, read, self.tokenizer, recipe, cache.codec, cache.block_rows, transforms,
            self.data.transform_seed, self.data.pipeline, source.config.bad_record_fraction,
        )  # fmt: skip


def _files_of(source: Source) -> dict[str, Any]:
    return {name: getattr(source, name) for name in ("stored", "files", "relative_paths", "end_bytes")}


def _is_done(directory: Path, num_units: int | None) -> bool:
    """Return whether a cache exists and its first ``num_units`` units (``None``: all) are built."""
    if not (directory / RECIPE_NAME).exists():
        return False
    manifest = Manifest.open(directory)
    last = manifest.planned_units if num_units is None else min(num_units, manifest.planned_units)
    return manifest.planned_units > 0 and not len(manifest.missing_units(0, last))


class NotBuiltError(DataError):
    """A cache that may not be built here does not exist."""


def not_built(source: Source, split: str, directory: Path) -> NotBuiltError:
    return NotBuiltError(
        f"The {split} cache of source {source.config.name!r} is not built", where=str(directory),
        hint="run `vorox data build` with the same configuration, or with the run's name, first",
    )  # fmt: skip


def _has_records(source: Source, units: Sequence[Unit], split: Split) -> bool:
    return any(True for _ in read_units(source, units, split, source.holdout))


def _without_records(source: Source, split: Split) -> DataError:
    return DataError(
        f"The {split} files of source {source.config.name!r} contain no record to train on",
        where=f"{source.key}.paths",
        hint="name files with text, check the weights and labels of answers, or change the share of data.validation",
    )  # fmt: skip
