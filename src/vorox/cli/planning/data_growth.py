"""Growth of the data since a run started: the new length of the run, or why it refuses new files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vorox.cli.terminal import humanize
from vorox.core.errors import VoroxError
from vorox.core.pluralize import pluralize
from vorox.core.schema import RunConfig
from vorox.data.cache.reader import CacheReader
from vorox.data.order.size_estimate import estimate
from vorox.training.checkpoints.store import read_state
from vorox.training.steps.schedule import Horizon, horizon


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
