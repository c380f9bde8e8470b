"""Growth of the data since a run started: the new length of the run, or why it refuses new files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vorox.cli import humanize
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import RunLayout

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vorox.core.schema import RunConfig
    from vorox.data.cache.reader import CacheReader
    from vorox.data.plan import DataPlan
    from vorox.data.source_listing import ListedSources
    from vorox.data.text.sources import Source
    from vorox.data.tokenizers.tokenizer import Tokenizer
    from vorox.training.schedule import Horizon


@dataclass(frozen=True, slots=True)
class DataGrowth:
    """The length of a run when it started, and with the data of today.

    Attributes:
        recorded: Length and dataset size at the start.
        now: Length and dataset size with the data of today.
        can_extend: Whether the length depends on the data (``train.num_epochs``) and would be longer.
    """

    recorded: Horizon
    now: Horizon
    can_extend: bool

    def lines(self) -> Iterator[str]:
        """Yield the lines of a plan about the growth."""
        yield (
            f"growth         the data grew from {humanize.count(self.recorded.dataset_tokens)} to "
            f"{humanize.count(self.now.dataset_tokens)} tokens since the run started"
        )
        if self.can_extend:
            yield (
                f"               all of it takes {pluralize(self.now.total_steps, 'step')} instead of "
                f"{self.recorded.total_steps:,}, with a warm-up of {self.now.warmup_steps:,} instead of "
                f"{self.recorded.warmup_steps:,}; train.follow_growth=true extends the run and keeps its warm-up"
            )


def find_growth(config: RunConfig, checkpoint: Path, readers: Sequence[CacheReader]) -> DataGrowth | None:
    """Compare the data of today with the data of a run; ``None`` if it did not grow.

    Args:
        config: The configuration of the run.
        checkpoint: A checkpoint of it.
        readers: The complete caches of its training text.
    """
    from vorox.core.errors import VoroxError
    from vorox.data.size_estimate import estimate
    from vorox.training.checkpoints.store import read_state
    from vorox.training.schedule import horizon

    try:
        recorded = read_state(checkpoint).horizon
    except VoroxError:
        return None  # the resume reports it
    size = estimate(readers)
    if recorded.dataset_tokens is None or size.tokens <= recorded.dataset_tokens:
        return None
    now = replace(
        horizon(config, num_train_rows=size.rows, full_dataset_tokens=size.tokens), dataset_tokens=size.tokens
    )
    return DataGrowth(recorded, now, config.train.num_epochs is not None and now.total_steps > recorded.total_steps)


def check_unchanged(config: RunConfig, directory: Path, listed: ListedSources) -> None:
    """Check that a run which is resumed still finds the rows of its plan, as far as caches on this disk show.

    Raises:
        DataError: The text of a source has changed since the run started, or files were added to it.
    """
    from vorox.data.plan import DataPlan

    plan = DataPlan.find(RunLayout(directory).plan)
    if plan is None or listed.tokenizer is None or config.data.mode == "streaming" or config.data.cache.grow:
        return
    if [source.name for source in plan.sources] == [source.config.name for source in listed.train]:
        for index, source in enumerate(listed.train):
            _check_source(config, plan, index, source, listed.tokenizer)


def _check_source(config: RunConfig, plan: DataPlan, index: int, source: Source, tokenizer: Tokenizer) -> None:
    from vorox.core.errors import DataError
    from vorox.data.cache.manifest import Manifest
    from vorox.data.cache.reader import CacheReader
    from vorox.data.cache.recipe import RECIPE_NAME
    from vorox.data.cache_location import cache_directory, cache_root, find_location
    from vorox.data.cache_opener import recipe_for
    from vorox.data.image_layout import image_layout
    from vorox.training.run_plan import added_files_error

    def check(path: Path) -> None:
        reader = CacheReader.open(path, recipe)
        plan.check([reader if number == index else None for number in range(len(plan.sources))])

    root, recipe = (
        cache_root(config.data),
        recipe_for(config.data, source, "train", tokenizer, images=image_layout(config.model)),
    )
    exact = cache_directory(root, source, "train", recipe)
    if (exact / RECIPE_NAME).exists():
        if not len(Manifest.open(exact).missing_units()):
            check(exact)
        return
    try:
        found = find_location(root, source, "train", recipe, grow=source.config.max_bytes is None)
        if found.units is None:
            return
        check(found.directory)
    except DataError:
        return  # caches of other runs: the resume compares what it builds
    raise added_files_error(source.config.name, source.config.paths[0], plan.path.parent)
