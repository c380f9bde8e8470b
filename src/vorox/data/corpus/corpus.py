"""Open the corpus of a configuration: list sources, load the tokenizer, open or build caches.

``prepare`` opens existing caches and builds missing ones; any number of processes share the build, and runs with the
same recipe share a cache. Invariants: a corpus is a function of the configuration and the text; a cache's directory is
named by its recipe and the content of its files, so changed text gets a new cache, and a run that resumes finds its
own cache or fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from vorox.core.batch_sizes import batch_stages_of
from vorox.core.config.checks.sources import bucket_names, exact_weight, list_problems, refuse
from vorox.core.errors import ConfigError
from vorox.core.files.atomic import make_directory
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.core.schema.data import DataConfig, SourceConfig, Split
from vorox.data.cache.build import BuildOptions
from vorox.data.cache.building.report import BuildReport, PrepareProgress, build_report, report_nothing
from vorox.data.cache.building.scheduler import BuildScheduler
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.upkeep.unit_store import DIRECTORY_NAME as UNITS_NAME
from vorox.data.corpus.cache_location import cache_root
from vorox.data.corpus.cache_opener import CacheOpener
from vorox.data.corpus.run_views import HOLDOUT_NOTE, SHARES_NOTE, TRAIN_NOTE, VALIDATION_NOTE, RunViews
from vorox.data.corpus.source_listing import list_sources
from vorox.data.corpus.view_records import ViewRecorder
from vorox.data.images.layout import image_layout
from vorox.data.order.difficulty_buckets import measure_buckets
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_events import Bucket, GrowthRule, PlanSource, PlanStart
from vorox.data.streaming.stream import StreamReader
from vorox.data.streaming.stream_group import StreamGroup
from vorox.data.text.listing import Note
from vorox.data.text.sources import Source
from vorox.data.tokenizers.store import configured_untrained, load_run_tokenizer
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.data.transforms.registry import check_transforms


@dataclass(frozen=True, slots=True)
class CorpusCache:
    """The cache of one split of a source, open for reading."""

    source: Source
    split: Split
    reader: CacheReader
    report: BuildReport


@dataclass(frozen=True, slots=True)
class CorpusSource:
    """One source with its open caches.

    Attributes:
        source: The listed source.
        train: The training rows.
        validation: The validation rows; ``None`` if nothing is held out.
        train_report: Content of the training cache.
        validation_report: Content of the validation cache.
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
    """The text of a run: its tokenizer and the open caches of its sources.

    Attributes:
        config: The section ``data``.
        tokenizer: The tokenizer.
        sources: The sources, in the order of the configuration.
        weights: Exact share of each source in the training rows; they sum to 1.
        root: Root directory of the caches.
        held_out: Description of the validation text.
        notes: Notes for the user: a fallback in use, duplicates, empty files, a small vocabulary.
        validation_caches: Caches of ``data.validation.sources``.
        streams: The streams that build rows while they are read, under ``data.mode: streaming``.
        backgrounds: Background builds of caches that are already read, under ``data.growth``.
    """

    config: DataConfig
    tokenizer: Tokenizer
    sources: tuple[CorpusSource, ...]
    weights: tuple[Fraction, ...]
    root: Path
    held_out: str = ""
    notes: tuple[Note, ...] = ()
    validation_caches: tuple[CorpusCache, ...] = ()
    streams: StreamGroup | None = None
    backgrounds: tuple[BuildScheduler, ...] = ()

    def close(self) -> None:
        """Stop all background builds. Idempotent."""
        if self.streams is not None:
            self.streams.close()
        for background in self.backgrounds:
            background.close()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources)

    @property
    def train(self) -> tuple[CacheReader, ...]:
        """The training rows of each source."""
        return tuple(source.train for source in self.sources)

    @property
    def caches(self) -> Iterator[CorpusCache]:
        """All caches: the training and validation cache of each source, then those of ``data.validation.sources``."""
        for source in self.sources:
            yield CorpusCache(source.source, "train", source.train, source.train_report)
            if source.validation is not None and source.validation_report is not None:
                yield CorpusCache(source.source, "validation", source.validation, source.validation_report)
        yield from self.validation_caches

    @property
    def validation(self) -> tuple[CacheReader, ...]:
        """All validation rows; empty if nothing is held out."""
        return tuple(cache.reader for cache in self.caches if cache.split == "validation")

    @property
    def validation_text(self) -> tuple[Source, ...]:
        """The sources of the validation rows."""
        return tuple(cache.source for cache in self.caches if cache.split == "validation")

    @property
    def estimated_tokens(self) -> int:
        """Number of tokens in one pass over the training text; ``schedule.warmup_fraction`` is a fraction of it."""
        return sum(source.train_report.tokens for source in self.sources)

    @property
    def trained_tokens(self) -> str:
        """How many tokens of each training source are trained on; empty while a cache is being built."""
        if any(source.train_report.units_missing or not source.train_report.tokens for source in self.sources):
            return ""
        parts = (
            f"{source.name} {report.targets:,} of {report.tokens:,} ({report.targets / report.tokens:.0%})"
            for source in self.sources
            for report in (source.train_report,)
        )
        return "; ".join(parts)

    @property
    def view_notes(self) -> dict[str, dict[str, str] | dict[str, float]]:
        """Return the notes by which a run finds these caches again (``run_views.RunViews``)."""
        held_out = [(source.name, source.validation) for source in self.sources]
        shares = {
            cache.source.config.name: cache.source.held_out_share for cache in self.caches if cache.split == "train"
        }
        return {
            TRAIN_NOTE: {source.name: str(source.train.directory) for source in self.sources},
            HOLDOUT_NOTE: {name: str(reader.directory) for name, reader in held_out if reader is not None},
            VALIDATION_NOTE: {
                cache.source.config.name: str(cache.reader.directory) for cache in self.validation_caches
            },
            SHARES_NOTE: {name: share for name, share in shares.items() if share is not None},
        }

    def view_recorder(self, run_directory: Path) -> ViewRecorder:
        """Return what records these caches in the directory of a run that reads them."""
        return ViewRecorder(run_directory, [cache.reader.directory for cache in self.caches])

    @property
    def reports(self) -> dict[str, BuildReport]:
        """The content of each cache by name and split: ``NAME train``, ``NAME validation``."""
        return {f"{cache.source.config.name} {cache.split}": cache.report for cache in self.caches}


def prepare_recorded(run_directory: Path, config: RunConfig) -> Corpus:
    """Open the corpus of a run with its recorded tokenizer and views; nothing is built.

    Raises:
        DataError: A cache is missing or damaged.
    """
    kept = load_run_tokenizer(RunLayout(run_directory).tokenizer, config.tokenizer)
    streams = config.data.mode == "streaming"  # whose chunks are built when they are read
    views = RunViews.of_run(run_directory, cache_root(config.data), restore=streams)
    views.register(run_directory)
    return prepare(config, build=False, tokenizer=kept or configured_untrained(config.tokenizer), views=views)


def prepare(
    config: RunConfig,
    *,
    on_progress: PrepareProgress | None = None,
    build: bool = True,
    repair: bool = False,
    options: BuildOptions | None = None,
    tokenizer: Tokenizer | None = None,
    views: RunViews | None = None,
) -> Corpus:
    """Open the corpus of a configuration, and build missing caches.

    Args:
        config: The configuration; the sections ``data`` and ``tokenizer`` matter.
        on_progress: Called with the progress.
        build: Whether to build what is missing; otherwise it is an error.
        repair: Whether to verify every byte of existing caches first and rebuild damaged chunks.
        options: Details of the build; ``build`` and ``repair`` override them.
        tokenizer: A tokenizer that is already known; ``None`` loads or trains the configured one, or takes that of the
            caches that ``data.cache.grow`` extends.
        views: The views of the run that continues; ``None`` for a new run, and for no run.

    Raises:
        ConfigError: The configuration contradicts itself, or its holdout is empty.
        DataError: Text is missing or unreadable, a cache is damaged, or something is missing and ``build`` is off.
        Preempted: A stop was requested during the build.
    """
    report = on_progress or report_nothing
    options = options or BuildOptions()
    options = replace(options, build=options.build and build, verify="full" if repair else options.verify)
    data = config.data
    weights = exact_weights(data)
    check_transforms(data)
    root = cache_root(data)
    if options.build:
        _create_root(root)
    with ExitStack() as reads:
        listed = list_sources(
            config, weights, root, report,
            tokenizer=tokenizer, build=options.build, force_rebuild=options.force_rebuild, reads=reads, views=views,
        )  # fmt: skip
        assert listed.tokenizer is not None, "only a dry run has no tokenizer"
        tokenizer = listed.tokenizer
        streams = StreamGroup(data, leads=options.leads) if data.mode == "streaming" else None
        opener = CacheOpener(
            data, tokenizer, root, report, options, streams, image_layout(config.model), views or RunViews()
        )
        try:
            opened = tuple(_open_source(opener, source) for source in listed.train)
            validated = tuple(
                CorpusCache(source, "validation", *opener.open(source, "validation")) for source in listed.validation
            )
        except BaseException:
            for background in opener.backgrounds:
                background.close()
            if streams is not None:
                streams.close()
            raise
    if streams is not None:
        opened = _with_first_segments(opened, streams, report)
    backgrounds = tuple(opener.backgrounds)
    return Corpus(
        data, tokenizer, opened, weights, root, listed.held_out, listed.notes, validated, streams, backgrounds
    )


def _open_source(opener: CacheOpener, source: Source) -> CorpusSource:
    if opener.data.validation.sources or source.holdout.held_out_fraction == 0:
        train, train_report = opener.open(source, "train")
        return CorpusSource(source, train, None, train_report, None)
    (train, train_report), (validation, validation_report) = opener.open_splits(source)
    return CorpusSource(source, train, validation, train_report, validation_report)


def _with_first_segments(
    sources: tuple[CorpusSource, ...], streams: StreamGroup, report: PrepareProgress
) -> tuple[CorpusSource, ...]:
    """Wait for the first segment of each source of a streamed corpus; return the sources with readers that see it."""
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
        replace(source, train=reader, train_report=build_report(reader.manifest, reader.recipe.row_tokens))
        for source, reader in zip(sources, readers, strict=True)
    )


def exact_weights(data: DataConfig) -> tuple[Fraction, ...]:
    """Return the exact share of each source.

    Raises:
        ConfigError: Two sources have the same name, or a weight is not a positive number.
    """
    refuse(list_problems("data.sources", data.sources))
    weights = [exact_weight(source.weight) for source in data.sources]
    return tuple(weight / sum(weights) for weight in weights)


def _create_root(root: Path) -> None:
    """Create the root of the caches, and the store of their units."""
    try:
        make_directory(root)
        with contextlib.suppress(OSError):  # a complete cache on a read-only disk is only read
            make_directory(root / UNITS_NAME)
    except OSError as error:
        raise ConfigError(
            f"Cannot create the cache directory: {error.strerror}", where=str(root),
            hint="set data.cache.directory or $VOROX_CACHE to a writable directory",
        ) from error  # fmt: skip


def plan_start(config: RunConfig, corpus: Corpus, recorded: DataPlan | None = None) -> PlanStart:
    """Return the start event of a run's plan: everything besides cache content that determines the data order.

    Args:
        config: The run's configuration.
        corpus: Its corpus.
        recorded: The existing plan of the run, whose bucket bounds are kept.
    """
    growth, known = config.data.growth, {source.name: source for source in recorded.sources} if recorded else {}
    rule = None
    if growth.mode == "strict":
        rule = GrowthRule("strict", growth.first_segment_units, growth.max_segment_units, growth.later_passes)
    elif growth.mode == "elastic":
        rule = GrowthRule("elastic")
    sources: list[PlanSource] = []
    for source, weight, section in zip(corpus.sources, corpus.weights, config.data.sources, strict=True):
        whole = PlanSource(
            source.name, weight, source.train.recipe.digest, source.train.row_tokens, section.max_epochs,
            section.on_exhausted,
        )  # fmt: skip
        for name, bucket, share in _buckets(section, source.train, known, config):
            sources.append(replace(whole, name=name, bucket=bucket, weight=weight * share))
    return PlanStart(
        config.run.seed, config.data.shuffle, config.train.global_batch_sequences, tuple(sources), rule,
        batch_stages_of(config),
    )  # fmt: skip


def _buckets(
    section: SourceConfig, cache: CacheReader, known: Mapping[str, PlanSource], config: RunConfig
) -> list[tuple[str, Bucket | None, Fraction]]:
    """Return name, definition and share of the rows of each bucket of a source; a single entry if it is not split."""
    if section.split_by is None:
        return [(section.name, None, Fraction(1))]
    names = bucket_names(section)
    if names[0] in known:
        sources = [known[name] for name in names]
        whole = sum(source.weight for source in sources)
        return [(source.name, source.bucket, source.weight / whole) for source in sources]
    growth = config.data.growth
    first = growth.first_segment_units if growth.mode == "strict" else None  # the only units certain to be built
    measured = measure_buckets(cache, section.name, section.split_by, section.split_quantiles, last_unit=first)
    return [(name, bucket, share) for name, (bucket, share) in zip(names, measured, strict=True)]
