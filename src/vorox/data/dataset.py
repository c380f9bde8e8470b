"""From a configuration to a corpus: sources listed, tokenizer ready, caches complete, everything checked.

``prepare`` is the one way in. What exists is opened, what is missing is built, by one process at a time; two runs that
want the same cache share it. Invariants: a corpus is a function of the configuration and of the text; a cache's
directory is named by its recipe and by the content of its files, so that text that changed on disk gets another cache
and a run that resumes finds its old one or is told that it is gone.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from vorox.core.atomic import canonical_json, make_directory
from vorox.core.config.checks import exact_weight
from vorox.core.errors import ConfigError, DataError
from vorox.core.schema import RunConfig
from vorox.core.schema.data import DataConfig
from vorox.data.cache.build import build as build_cache
from vorox.data.cache.inventory import read_units
from vorox.data.cache.manifest import Manifest
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.recipe import RECIPE_NAME, Recipe
from vorox.data.cache.report import BuildProgress, BuildReport, build_report
from vorox.data.cache.unit_work import UnitWork
from vorox.data.documents import Unit
from vorox.data.storage import ContentVersions
from vorox.data.streaming.preparation import DIRECTORY_NAME as STREAMS_NAME
from vorox.data.streaming.preparation import Streams
from vorox.data.streaming.reader import StreamReader
from vorox.data.text.listing import Note
from vorox.data.text.sources import Source, cut_units, first_units, for_tokenizer, list_source, read_unit
from vorox.data.text.splits import Split
from vorox.data.tokenizers.store import tokenizer_for
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.data.transforms.registry import check_special_tokens, check_transforms, recipe_of, transforms_of

PrepareProgress = Callable[[str, int, int, Mapping[str, float]], None]
"""Called with (phase, done, total, rates), counted in bytes of text. Phases: ``list NAME``, ``tokenizer``,
``build NAME train``, ``build NAME validation``, with the rates ``text_mb_per_second`` and ``tokens_per_second``; and
``wait NAME train`` while another process builds that cache."""


@dataclass(frozen=True, slots=True)
class CorpusSource:
    """One source, ready to read.

    Attributes:
        source: Its files.
        train: Its packed training rows.
        validation: Its packed held-out rows; ``None`` when nothing is held out.
        train_report: What is in the training cache.
        validation_report: What is in the validation cache.
    """

    source: Source
    train: CacheReader
    validation: CacheReader | None
    train_report: BuildReport
    validation_report: BuildReport | None

    @property
    def name(self) -> str:
        return self.source.config.name


@dataclass(frozen=True, slots=True)
class Corpus:
    """All the text of a run.

    Attributes:
        config: The section ``data``.
        tokenizer: Text to tokens.
        sources: In the order of the configuration.
        weights: Exact share of each source in the training rows; they sum to 1.
        root: Root of the caches.
        streams: What builds the rows while they are read, under ``data.mode: streaming``.
    """

    config: DataConfig
    tokenizer: Tokenizer
    sources: tuple[CorpusSource, ...]
    weights: tuple[Fraction, ...]
    root: Path
    streams: Streams | None = None

    def close(self) -> None:
        """End what is being built in the background. Repeatable."""
        if self.streams is not None:
            self.streams.close()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources)

    @property
    def train(self) -> tuple[CacheReader, ...]:
        """Training rows of each source."""
        return tuple(source.train for source in self.sources)

    @property
    def validation(self) -> tuple[CacheReader, ...]:
        """Held-out rows of each source; empty when nothing is held out."""
        return tuple(source.validation for source in self.sources if source.validation is not None)

    @property
    def notes(self) -> tuple[Note, ...]:
        """What a person should know of the sources: a fallback that is used, duplicates, empty files."""
        return tuple(note for source in self.sources for note in source.source.notes)

    @property
    def estimated_tokens(self) -> int:
        """Tokens of one pass over all training text: what ``schedule.warmup_fraction`` is a fraction of."""
        return sum(source.train_report.tokens for source in self.sources)

    @property
    def reports(self) -> dict[str, BuildReport]:
        """What each cache holds, by its directory's first words: ``NAME train``, ``NAME validation``."""
        found: dict[str, BuildReport] = {}
        for source in self.sources:
            found[f"{source.name} train"] = source.train_report
            if source.validation_report is not None:
                found[f"{source.name} validation"] = source.validation_report
        return found


def cache_root(data: DataConfig) -> Path:
    """Root of all caches: ``data.cache.directory``, else ``$VOROX_CACHE``, else ``~/.cache/vorox``."""
    return Path(data.cache.directory or os.environ.get("VOROX_CACHE") or "~/.cache/vorox").expanduser().absolute()


def prepare(
    config: RunConfig, *, on_progress: PrepareProgress | None = None, build: bool = True, repair: bool = False
) -> Corpus:
    """Make everything that training reads.

    Args:
        config: The whole configuration; the sections ``data`` and ``tokenizer`` count.
        on_progress: Told what is being done.
        build: Build what is missing. Off: refuse instead.
        repair: Check every byte of what is there first, and build damaged chunks again.

    Raises:
        ConfigError: The configuration contradicts itself, or holds out nothing where it should.
        DataError: Text is missing, unreadable or broken, a cache is damaged, or something is missing and ``build``
            is off.
    """
    report = on_progress or _silent
    data = config.data
    weights = exact_weights(data)
    check_transforms(data)
    root = cache_root(data)
    if build:
        _check_writable(root)
    sources = [_list(data, index, root, report) for index in range(len(data.sources))]
    tokenizer = tokenizer_for(
        config.tokenizer, data, sources, weights, root=root, build=build,
        on_progress=lambda done, total: report("tokenizer", done, total, {}),
    )  # fmt: skip
    called = [config.tokenizer.path or config.tokenizer.kind]
    sources = [for_tokenizer(source, tokenizer.fingerprint, tokenizer.end_of_text_id, called) for source in sources]
    streams = Streams(data) if data.mode == "streaming" else None
    preparation = _Preparation(data, tokenizer, root, report, build, repair, streams)
    opened = tuple(preparation.open_source(source) for source in sources)
    if streams is not None:
        opened = _with_first_segments(opened, streams, report)
    return Corpus(data, tokenizer, opened, weights, root, streams)


def _with_first_segments(
    sources: tuple[CorpusSource, ...], streams: Streams, report: PrepareProgress
) -> tuple[CorpusSource, ...]:
    """The sources of a streamed corpus once the first rows of each are there."""
    names = {source.train.directory: source.name for source in sources}
    readers = [source.train for source in sources if isinstance(source.train, StreamReader)]
    try:
        readers = streams.wait_for_first_segments(
            readers, lambda reader, done, total: report(f"build {names[reader.directory]} train", done, total, {})
        )
    except BaseException:
        streams.close()
        raise
    return tuple(
        replace(source, train=reader, train_report=_report_of(reader))
        for source, reader in zip(sources, readers, strict=True)
    )


def _report_of(reader: CacheReader) -> BuildReport:
    return build_report(
        reader.manifest, reader.row_tokens, units_built=0, units_adopted=0, built_text_bytes=0, seconds=0.0
    )


def exact_weights(data: DataConfig) -> tuple[Fraction, ...]:
    """The share of each source, exact.

    Raises:
        ConfigError: Two sources have one name, or a weight is not a positive number.
    """
    names = [source.name for source in data.sources]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(
                f"two sources are called {name!r}", where=f"data.sources.{index}.name", hint="give each its own name"
            )
    weights: list[Fraction] = []
    for index, source in enumerate(data.sources):
        try:
            weights.append(exact_weight(source.weight))
        except ValueError as error:
            raise ConfigError(str(error), where=f"data.sources.{index}.weight") from error
    return tuple(weight / sum(weights) for weight in weights)


def _silent(phase: str, done: int, total: int, rates: Mapping[str, float]) -> None:
    del phase, done, total, rates


def _check_writable(root: Path) -> None:
    try:
        make_directory(root)
    except OSError as error:
        raise ConfigError(
            f"the cache directory cannot be made: {error.strerror}", where=str(root),
            hint="set data.cache.directory or $VOROX_CACHE to a place that can be written",
        ) from error  # fmt: skip


def _list(data: DataConfig, index: int, root: Path, report: PrepareProgress) -> Source:
    config = data.sources[index]
    definition = canonical_json([config.format, list(config.paths)])
    versions = ContentVersions(root / "versions" / f"{hashlib.sha256(definition).hexdigest()[:16]}.json")
    return list_source(
        config, key=f"data.sources.{index}", versions=versions,
        on_progress=lambda done, total: report(f"list {config.name}", done, total, {}),
    )  # fmt: skip


def recipe_for(data: DataConfig, source: Source, split: Split, tokenizer: Tokenizer) -> Recipe:
    """What the rows of one split of a source are a function of, besides its files."""
    held_out = data.validation.held_out_fraction
    rule = data.validation.split if held_out else "none"
    transforms = transforms_of(data, source.config, split, source.key)
    check_special_tokens(transforms, tokenizer)
    return Recipe(
        tokenizer=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        end_of_text_id=tokenizer.end_of_text_id,
        row_tokens=data.sequence_length_tokens + 1,
        source={**source.definition, "unit_bytes": data.cache.unit_bytes},
        split={"name": split, "held_out": rule, "held_out_fraction": str(Fraction(str(held_out)))},
        packing=data.packing,
        chunk_rows=data.cache.chunk_rows,
        transforms=recipe_of(transforms, data.transform_seed),
    )


def cache_directory(root: Path, source: Source, split: Split, recipe: Recipe) -> Path:
    """Where a cache lies: named by source, split, recipe and content, so that none of them can change under a run."""
    return root / f"{source.config.name}-{split}-{recipe.digest[:12]}-{source.digest[:8]}"


@dataclass(frozen=True)
class _Preparation:
    """What all caches of one ``prepare`` have in common."""

    data: DataConfig
    tokenizer: Tokenizer
    root: Path
    report: PrepareProgress
    build: bool
    repair: bool
    streams: Streams | None

    def open_source(self, source: Source) -> CorpusSource:
        open_train = self._open_split if self.streams is None else self._open_stream
        train, train_report = open_train(source, "train")
        if self.data.validation.held_out_fraction == 0:
            return CorpusSource(source, train, None, train_report, None)
        validation, validation_report = self._open_split(source, "validation")
        return CorpusSource(source, train, validation, train_report, validation_report)

    def _open_split(self, source: Source, split: Split) -> tuple[CacheReader, BuildReport]:
        rule, unit_bytes = self.data.validation, self.data.cache.unit_bytes
        recipe = recipe_for(self.data, source, split, self.tokenizer)
        units: Sequence[Unit] | None = None
        if self.streams is not None:
            recipe, units = self._beginning(source, split, recipe)
        directory = cache_directory(self.root, source, split, recipe)
        recorded = _recorded_units(directory)
        if recorded is None:
            if not self.build:
                raise self._not_built(source, split, directory)
            recorded = units or cut_units(source, split, rule, unit_bytes)
            if not _has_records(source, recorded, split, self.data):
                raise _empty_split(self.data, source, split)
        report = build_cache(
            directory, self._work(source, split, recipe), recorded,
            bad_record_fraction=source.config.bad_record_fraction,
            check="full" if self.repair else None, on_progress=self._watch(f"{source.config.name} {split}", recorded),
        )  # fmt: skip
        return CacheReader.open(directory, recipe), report

    def _beginning(self, source: Source, split: Split, recipe: Recipe) -> tuple[Recipe, Sequence[Unit]]:
        """The part of a held-out split that a streamed corpus is validated on: that of the beginning of the source."""
        limit_bytes = self.data.streaming.validation_bytes
        while True:
            units, is_all = first_units(
                source, split, self.data.validation, self.data.cache.unit_bytes, limit_bytes=limit_bytes
            )
            if is_all:
                return recipe, units
            if _has_records(source, units, split, self.data):
                return replace(recipe, split={**recipe.split, "first_bytes": limit_bytes}), units
            limit_bytes *= 2

    def _open_stream(self, source: Source, split: Split) -> tuple[CacheReader, BuildReport]:
        """The rows of a split that are built while they are read."""
        assert self.streams is not None
        recipe = recipe_for(self.data, source, split, self.tokenizer)
        directory = cache_directory(self.root / STREAMS_NAME, source, split, recipe)
        units = _planned_units(directory)
        if units is None:
            if not self.build:
                raise self._not_built(source, split, directory)
            units = cut_units(source, split, self.data.validation, self.data.cache.unit_bytes)
            if not _has_records(source, units, split, self.data):
                raise _empty_split(self.data, source, split)
        fraction = source.config.bad_record_fraction
        work = self._work(source, split, recipe)
        reader = self.streams.open(directory, work, units, bad_record_fraction=fraction)
        return reader, _report_of(reader)

    def _work(self, source: Source, split: Split, recipe: Recipe) -> UnitWork:
        read = functools.partial(read_unit, source, split=split, validation=self.data.validation)
        cache = self.data.cache
        transforms = transforms_of(self.data, source.config, split, source.key)
        return UnitWork(
            source.files, read, self.tokenizer, recipe, cache.codec, cache.block_rows,
            transforms, self.data.transform_seed, self.data.pipeline,
        )  # fmt: skip

    def _not_built(self, source: Source, split: Split, directory: Path) -> DataError:
        return DataError(
            f"the {split} cache of source {source.config.name!r} is not built", where=str(directory),
            hint="run `vorox data build` with the same configuration first",
        )  # fmt: skip

    def _watch(self, name: str, units: Sequence[Unit]) -> Callable[[BuildProgress], None]:
        """Tells bytes of text instead of units of work, which are too coarse for a person who waits."""
        started = time.perf_counter()
        ends = [0, *itertools.accumulate(sum(span.end_byte - span.start_byte for span in unit.spans) for unit in units)]
        done = text_bytes = 0

        def on_progress(progress: BuildProgress) -> None:
            nonlocal done, text_bytes
            done = min(max(ends[progress.units_done], done + progress.text_bytes - text_bytes), ends[-1])
            text_bytes = progress.text_bytes
            seconds = max(time.perf_counter() - started, 1e-9)
            rates = {
                "text_mb_per_second": progress.text_bytes / 1e6 / seconds,
                "tokens_per_second": progress.tokens / seconds,
            }
            phase = f"wait {name}" if progress.waiting_for else f"build {name}"
            self.report(phase, done, ends[-1], rates)

        return on_progress


def _planned_units(directory: Path) -> Sequence[Unit] | None:
    """The units of a cache of which all are planned, built or not."""
    if not (directory / RECIPE_NAME).exists():
        return None
    num_units = Manifest.open(directory).planned_units
    return read_units(directory)[:num_units] if num_units else None


def _recorded_units(directory: Path) -> Sequence[Unit] | None:
    """The units of a complete cache: large files need not be cut again to find that nothing is missing."""
    if not (directory / RECIPE_NAME).exists():
        return None
    manifest = Manifest.open(directory)
    if manifest.planned_units == 0 or len(manifest.missing_units()):
        return None
    return read_units(directory)[: manifest.planned_units]


def _has_records(source: Source, units: Sequence[Unit], split: Split, data: DataConfig) -> bool:
    return any(True for unit in units for _ in read_unit(source, unit, split, data.validation))


def _empty_split(data: DataConfig, source: Source, split: Split) -> ConfigError:
    rule, files = data.validation, len(source.files)
    what = {"file": "files", "document": "documents", "tail": "tails"}[rule.split]
    share = f"data.validation.held_out_fraction={rule.held_out_fraction:g} of the {what}"
    name = f"source {source.config.name!r} ({files:,} file{'s' if files > 1 else ''}, {source.size_bytes:,} bytes)"
    if split == "train":
        problem = f"holding out {share} leaves no text of {name} to train on"
    else:
        problem = f"{share} holds out nothing of {name}"
    return ConfigError(
        problem,
        where="data.validation",
        hint="set data.validation.split=tail to hold out the end of every file, change the fraction, "
        "or set data.validation.held_out_fraction=0 to train without validation",
    )
