"""Rows of every step, and its positions, for a global batch that changes by stage.

In: the rows of the first stage, and the first step and rows of later ones. Out: the positions of a step, and the step
of a position. Steps count from 0 here; a position is a number of rows from the start of the run.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vorox.core.schema import RunConfig


class BatchStage(NamedTuple):
    """The rows of every step from ``start_step`` (from 0) on."""

    start_step: int
    rows: int


class BatchSizes:
    """The rows of every step of a run.

    Args:
        rows: Rows of a step before the first stage.
        stages: Later stages, by ascending start; all start after step 0.
    """

    def __init__(self, rows: int, stages: Sequence[BatchStage] = ()) -> None:
        self._stages = (BatchStage(0, rows), *stages)
        self._steps = [stage.start_step for stage in self._stages]
        self._positions = [0]
        for before, after in zip(self._stages, self._stages[1:], strict=False):
            steps = after.start_step - before.start_step
            self._positions.append(self._positions[-1] + steps * before.rows)

    @property
    def stages(self) -> tuple[BatchStage, ...]:
        """All stages; the first starts at step 0."""
        return self._stages

    @property
    def largest(self) -> int:
        """Rows of the largest step."""
        return max(stage.rows for stage in self._stages)

    def rows_of(self, step: int) -> int:
        """Return the rows of a step."""
        return self._stages[bisect_right(self._steps, step) - 1].rows

    def position_of(self, step: int) -> int:
        """Return the first position of a step, which is also the number of rows of all steps before it."""
        index = max(0, bisect_right(self._steps, step) - 1)
        return self._positions[index] + (step - self._steps[index]) * self._stages[index].rows

    def step_at(self, position: int) -> int:
        """Return the step that contains a position, which is also the number of whole steps before it."""
        index = max(0, bisect_right(self._positions, position) - 1)
        return self._steps[index] + (position - self._positions[index]) // self._stages[index].rows

    def floor(self, position: int) -> int:
        """Return the first position of the step that contains a position."""
        return self.position_of(self.step_at(position))

    def num_steps(self, rows: int) -> int:
        """Return the number of steps that read at least so many rows."""
        step = self.step_at(rows)
        return step + (self.position_of(step) < rows)

    def is_start(self, position: int) -> bool:
        """Return whether a step starts at a position."""
        return self.floor(position) == position

    def is_uniform(self, first_step: int, last_step: int) -> bool:
        """Return whether both steps and those between them are in the same stage."""
        return bisect_right(self._steps, first_step) == bisect_right(self._steps, last_step)

    def parts(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the first position, the end and the rows of a step for each stage within ``[start, end)``."""
        for index, stage in enumerate(self._stages):
            stage_end = self._positions[index + 1] if index + 1 < len(self._stages) else end
            first, last = max(start, self._positions[index]), min(end, stage_end)
            if first < last:
                yield first, last, stage.rows


@functools.lru_cache(maxsize=64)
def batch_sizes(rows: int, stages: tuple[BatchStage, ...] = ()) -> BatchSizes:
    """Return the rows of every step, built once for the same arguments."""
    return BatchSizes(rows, stages)


def _stages(
    rows: int, settings: Sequence[tuple[int | None, int | None, int]], row_tokens: int
) -> tuple[BatchStage, ...]:
    """Return the later stages of a schedule.

    Args:
        rows: Rows of a step before the first stage.
        settings: For each stage, its first step from 1 or ``None``, the tokens before it or ``None``, and its rows.
        row_tokens: Tokens of a row.

    Raises:
        ValueError: A stage does not start after the previous one.
    """
    stages: list[BatchStage] = []
    for number, (start_step, start_tokens, stage_rows) in enumerate(settings):
        sizes = BatchSizes(rows, stages)
        tokens_before = start_tokens or 0
        step = sizes.num_steps(-(-tokens_before // row_tokens)) if start_step is None else start_step - 1
        if step <= sizes.stages[-1].start_step:
            raise ValueError(
                f"train.batch_stages.{number} starts at step {step + 1:,}, which is not after the start of the "
                f"previous stage, step {sizes.stages[-1].start_step + 1:,}"
            )
        stages.append(BatchStage(step, stage_rows))
    return tuple(stages)


def batch_sizes_of(config: RunConfig) -> BatchSizes:
    """Return the rows of every step of a run.

    Raises:
        ValueError: A stage does not start after the previous one.
    """
    return batch_sizes(config.train.global_batch_sequences, batch_stages_of(config))


def batch_stages_of(config: RunConfig) -> tuple[BatchStage, ...]:
    """Return the later stages of a run's batch size.

    Raises:
        ValueError: A stage does not start after the previous one.
    """
    train = config.train
    settings = [(one.start_step, one.start_tokens, one.global_batch_sequences) for one in train.batch_stages]
    return _stages(train.global_batch_sequences, settings, config.data.sequence_length_tokens)
