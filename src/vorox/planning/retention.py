"""What a retention policy costs: how long any step of a run takes to compute again, and the share of the disk.

In: the save schedule, the retention rules and the length of a run. Out: the number of steps from the nearest kept
checkpoint (or the initial weights) to every step, and how many of the saved states stay. Checkpoints that are kept for
their validation loss lie anywhere; they count for the disk only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vorox.core.batch_sizes import batch_sizes_of
from vorox.core.schema import CheckpointConfig, RunConfig
from vorox.planning.disk_space import save_interval_seconds

ASSUMED_START_SECONDS = 20.0
"""Assumed time to open caches and model for a re-execution, where none is recorded."""
_READING_BYTES_PER_SECOND = 1e9  # a local disk


@dataclass(frozen=True, slots=True)
class RetentionCost:
    """The cost of a retention policy, at the end of a run.

    Attributes:
        num_saved: States that the run saves.
        num_kept: Those that stay.
        worst_steps: Most steps to compute for any state.
        median_steps: Steps to compute for half of all states, at most.
        start_seconds: Time before the first of them.
        step_seconds: Time of each; ``None``: not known.
    """

    num_saved: int
    num_kept: int
    worst_steps: int
    median_steps: int
    start_seconds: float
    step_seconds: float | None

    @property
    def disk_fraction(self) -> float:
        """Share of the disk that all saved states would take."""
        return self.num_kept / max(1, self.num_saved)

    def seconds(self, num_steps: int) -> float | None:
        """Return the time to compute a number of steps; none takes no start."""
        if self.step_seconds is None:
            return None
        return self.start_seconds + num_steps * self.step_seconds if num_steps else 0.0


def assumed_start_seconds(checkpoint_bytes: int) -> float:
    """Return the assumed time before the first step of a re-execution, which reads a state and writes another."""
    return ASSUMED_START_SECONDS + 2 * checkpoint_bytes / _READING_BYTES_PER_SECOND


def planned_steps(config: RunConfig) -> int | None:
    """Return the length of a run in steps; ``None`` if it depends on the size of the text."""
    train = config.train
    if train.num_steps is not None or train.num_tokens is None:
        return train.num_steps
    return batch_sizes_of(config).step_at(-(-train.num_tokens // config.data.sequence_length_tokens))


def retention_cost(
    rules: CheckpointConfig, total_steps: int, *, start_seconds: float, step_seconds: float | None
) -> RetentionCost | None:
    """Return what a retention policy costs; ``None`` if saves by time need a speed that is not known.

    Args:
        rules: The save schedule and retention.
        total_steps: Length of the run.
        start_seconds: Time that a re-execution takes before its first step.
        step_seconds: Time of a step; ``None``: not known.
    """
    every, interval_seconds = rules.every_steps, save_interval_seconds(rules)
    if interval_seconds is not None:
        if step_seconds is None:
            return None
        by_time = max(1, round(interval_seconds / step_seconds))
        every = by_time if every is None else min(every, by_time)
    saved = _saved_steps(rules, total_steps, every)
    kept = saved[-rules.keep_last :]
    if rules.keep_every_steps is not None:
        kept = np.union1d(kept, saved[saved % rules.keep_every_steps == 0])
    needed = steps_to_compute(saved, kept, total_steps)
    best = min(rules.keep_best, len(saved) - len(kept))
    return RetentionCost(
        len(saved), len(kept) + best, int(needed.max(initial=0)), int(np.median(needed)) if len(needed) else 0,
        start_seconds, step_seconds,
    )  # fmt: skip


def steps_to_compute(
    saved: npt.NDArray[np.int64], kept: npt.NDArray[np.int64], total_steps: int
) -> npt.NDArray[np.int64]:
    """Return how many steps each state from step 1 on takes: up to it, and one more that proves a state never saved."""
    steps = np.arange(1, total_steps + 1)
    origins = np.concatenate(([0], kept))
    needed = steps - origins[np.searchsorted(origins, steps, side="right") - 1]
    return needed + ((needed > 0) & ~np.isin(steps, saved) & (steps < total_steps))


def _saved_steps(rules: CheckpointConfig, total_steps: int, every: int | None) -> npt.NDArray[np.int64]:
    steps = np.arange(every, total_steps + 1, every) if every is not None else np.zeros(0, np.int64)
    if rules.at_end and total_steps and (not len(steps) or steps[-1] != total_steps):
        steps = np.append(steps, total_steps)
    return steps.astype(np.int64)
