"""The start of a plan: what a configuration and its caches fix about the data order for the whole run.

``train`` and ``RemoteIterableDataset`` both begin here, so a configuration has one data order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from vorox.core.schema import RunConfig
from vorox.core.schema.data import SourceConfig
from vorox.data.cache.reader import CacheReader
from vorox.data.dataset import Corpus
from vorox.data.difficulty_buckets import measure_buckets
from vorox.data.plan import Plan
from vorox.data.plan_events import Bucket, GrowthRule, PlanSource, PlanStart


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
