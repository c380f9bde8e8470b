"""From a configuration to a corpus: sources listed, tokenizer ready, caches complete or growing, everything checked.

``prepare`` is the one way in. What exists is opened, what is missing is built, by any number of processes that share
the work; two runs that want the same cache share it. Invariants: a corpus is a function of the configuration and of
the text; a cache's directory is named by its recipe and by the content of its files, so that text that changed on disk
gets another cache and a run that resumes finds its old one or is told that it is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from vorox.core.atomic import make_directory
from vorox.core.config.cross_checks import exact_weight
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.core.schema.data import DataConfig, SourceConfig
from vorox.data.cache.build import BuildOptions
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.report import BuildReport
from vorox.data.cache.scheduler import BuildScheduler
from vorox.data.cache_location import cache_root
from vorox.data.cache_opener import CacheOpener, PrepareProgress, report_of
from vorox.data.difficulty_buckets import measure_buckets
from vorox.data.plan import Plan
from vorox.data.plan_events import Bucket, GrowthRule, PlanSource, PlanStart
from vorox.data.source_listing import list_sources
from vorox.data.streaming.stream import StreamReader
from vorox.data.streaming.stream_group import StreamGroup
from vorox.data.text.holdout import Split
from vorox.data.text.listing import Note
from vorox.data.text.sources import Source
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.data.transforms.registry import check_transforms


@dataclass(frozen=True, slots=True)
class CorpusCache:
    """One split of one source: its files, its packed rows, and what is in them."""

    source: Source
    split: Split
    reader: CacheReader
    report: BuildReport


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
        held_out: What is validated on, for a person.
        notes: What a person should know: a fallback that is used, duplicates, empty files, a small vocabulary.
        validation_caches: Packed rows of ``data.validation.sources``.
        streams: What builds the rows while they are read, under ``data.mode: streaming``.
        backgrounds: What builds the rest of caches that are read already, under ``data.growth``.
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
        """End what is being built in the background. Repeatable."""
        if self.streams is not None:
            self.streams.close()
        for background in self.backgrounds:
            background.close()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources)

    @property
    def train(self) -> tuple[CacheReader, ...]:
        """Training rows of each source."""
        return tuple(source.train for source in self.sources)

    @property
    def caches(self) -> Iterator[CorpusCache]:
        """Every cache: each source's training rows before its held-out rows, then those that only validate."""
        for source in self.sources:
            yield CorpusCache(source.source, "train", source.train, source.train_report)
            if source.validation is not None and source.validation_report is not None:
                yield CorpusCache(source.source, "validation", source.validation, source.validation_report)
        yield from self.validation_caches

    @property
    def validation(self) -> tuple[CacheReader, ...]:
        """Rows to validate on; empty when nothing is held out."""
        return tuple(cache.reader for cache in self.caches if cache.split == "validation")

    @property
    def validation_text(self) -> tuple[Source, ...]:
        """The sources of the rows to validate on."""
        return tuple(cache.source for cache in self.caches if cache.split == "validation")

    @property
    def estimated_tokens(self) -> int:
        """Tokens of one pass over all training text: what ``schedule.warmup_fraction`` is a fraction of."""
        return sum(source.train_report.tokens for source in self.sources)

    @property
    def reports(self) -> dict[str, BuildReport]:
        """What each cache holds, by its directory's first words: ``NAME train``, ``NAME validation``."""
        return {f"{cache.source.config.name} {cache.split}": cache.report for cache in self.caches}


def prepare(
    config: RunConfig,
    *,
    on_progress: PrepareProgress | None = None,
    build: bool = True,
    repair: bool = False,
    options: BuildOptions | None = None,
    tokenizer: Tokenizer | None = None,
) -> Corpus:
    """Make everything that training reads.

    Args:
        config: The whole configuration; the sections ``data`` and ``tokenizer`` count.
        on_progress: Told what is being done.
        build: Build what is missing. Off: refuse instead.
        repair: Check every byte of what is there first, and build damaged chunks again.
        options: How caches are built, in more detail; ``build`` and ``repair`` override it.
        tokenizer: That of the run which goes on; ``None`` takes or trains the configured one.

    Raises:
        ConfigError: The configuration contradicts itself, or holds out nothing where it should.
        DataError: Text is missing, unreadable or broken, a cache is damaged, or something is missing and ``build``
            is off.
        Preempted: The build was asked to stop.
    """
    report = on_progress or _silent
    options = options or BuildOptions()
    options = replace(options, build=options.build and build, verify="full" if repair else options.verify)
    data = config.data
    weights = exact_weights(data)
    check_transforms(data)
    root = cache_root(data)
    if options.build:
        _check_writable(root)
    with ExitStack() as reads:
        listed = list_sources(config, weights, root, report, tokenizer=tokenizer, build=options.build, reads=reads)
        assert listed.tokenizer is not None, "only a dry run goes without one"
        tokenizer = listed.tokenizer
        streams = StreamGroup(data) if data.mode == "streaming" else None
        opener = CacheOpener(data, tokenizer, root, report, options, streams)
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
        replace(source, train=reader, train_report=report_of(reader.manifest, reader.recipe))
        for source, reader in zip(sources, readers, strict=True)
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


def plan_start(config: RunConfig, corpus: Corpus, recorded: Plan | None = None) -> PlanStart:
    """Return what the data order of a run is a function of, besides the caches' content.

    Args:
        config: The run.
        corpus: Its caches.
        recorded: The plan that the run began with; its buckets are kept as they were measured.
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
    return PlanStart(config.run.seed, config.data.shuffle, config.train.global_batch_sequences, tuple(sources), rule)


def _buckets(
    section: SourceConfig, cache: CacheReader, known: Mapping[str, PlanSource], config: RunConfig
) -> list[tuple[str, Bucket | None, Fraction]]:
    """Return name, definition and share of the rows of each bucket of a source; the whole where it is not divided."""
    if section.split_by is None:
        return [(section.name, None, Fraction(1))]
    names = [f"{section.name}.{part}" for part in section.split_names]
    if names[0] in known:
        sources = [known[name] for name in names]
        whole = sum(source.weight for source in sources)
        return [(source.name, source.bucket, source.weight / whole) for source in sources]
    growth = config.data.growth
    first = growth.first_segment_units if growth.mode == "strict" else None  # all that is sure to be there
    measured = measure_buckets(cache, section.name, section.split_by, section.split_quantiles, last_unit=first)
    return [(name, bucket, share) for name, (bucket, share) in zip(names, measured, strict=True)]
