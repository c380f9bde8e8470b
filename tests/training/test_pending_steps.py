"""Pending steps: settled one step late, nothing skipped, and the right steps counted as failures."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vorox.core.batch import Batch, DataCursor, Progress
from vorox.core.engine import StepValues
from vorox.core.errors import NumericalError
from vorox.records.replay_chain import ReplayChain, read_chain
from vorox.training.steps.pending_steps import InFlightStep, PendingSteps, SettledStep

START = Progress(0, 0, DataCursor("d", 1, 0, 0, 7))


class Result:
    """Says when it was waited for."""

    def __init__(self, step: int, values: StepValues, fetched: list[int]) -> None:
        self._step, self._values, self._fetched = step, values, fetched

    def fetch(self) -> StepValues:
        self._fetched.append(self._step)
        return self._values


class Steps:
    """Pending steps and a way to submit them."""

    def __init__(self, directory: Path, *, allowed: int = 2, in_a_row: int = 0) -> None:
        self.fetched: list[int] = []
        self.settled: list[int] = []
        self.pending = PendingSteps(
            ReplayChain(directory, START), max_nonfinite_steps=allowed, nonfinite_in_a_row=in_a_row
        )
        self.progress = START

    def take(self, loss: float, *, grad_norm: float = 1.0, **extra: float) -> None:
        step = self.progress.step
        rows = np.zeros((1, 1, 2), np.int32)
        cursor = DataCursor("d", 1, step + 1, step + 1, 7)
        found = Batch(step, rows, rows, None, None, np.full((1, 1), step, np.uint64), 2, cursor)
        batch = found.with_lanes(np.arange(1))
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        result = Result(step + 1, StepValues(loss, grad_norm, finite, extra), self.fetched)
        self.progress = self.progress.advance(batch)
        self._take(self.pending.submit(InFlightStep(self.progress, batch.digest(), result, 0.1, 0.0)))

    def drain(self) -> Progress:
        self._take(self.pending.drain())
        return replace(self.progress, chain=self.pending.chain.head)

    def _take(self, settled: SettledStep | None) -> None:
        if settled is not None:
            self.settled.append(settled.number)
            if settled.ends_run:
                raise settled.numerical_error("")


def test_settles_one_step_late_and_catches_up(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    steps.take(3.0)
    assert steps.fetched == []
    steps.take(2.0)
    assert steps.fetched == steps.settled == [1]
    progress = steps.drain()
    assert steps.fetched == [1, 2]
    assert steps.drain() == progress
    assert steps.fetched == [1, 2], "nothing is fetched twice"
    steps.pending.chain.flush()
    assert progress.chain == read_chain(tmp_path)[2].chain


def test_counts_in_a_row_and_across_a_resume(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    for loss in (math.nan, math.inf, 1.0, math.nan, math.nan, math.nan):
        steps.take(loss)
    assert steps.pending.nonfinite_in_a_row == 2
    with pytest.raises(NumericalError, match="3 times in a row") as stopped:
        steps.drain()
    assert stopped.value.where == "step 6"
    (tmp_path / "resumed").mkdir()
    resumed = Steps(tmp_path / "resumed", in_a_row=2)
    resumed.take(1.0, grad_norm=math.inf)
    with pytest.raises(NumericalError):
        resumed.drain()


def test_a_loss_scale_that_comes_down_is_no_failure(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    for exponent in range(10, 0, -1):
        steps.take(3.0, grad_norm=math.inf, loss_scale=2.0**exponent)
    steps.drain()
    assert steps.pending.nonfinite_in_a_row == 0
    for _ in range(3):  # it cannot go lower, or the loss itself is broken
        steps.take(3.0, grad_norm=math.inf, loss_scale=1.0)
    with pytest.raises(NumericalError):
        steps.drain()
    (tmp_path / "other").mkdir()
    broken = Steps(tmp_path / "other", allowed=0)
    broken.take(math.nan, loss_scale=1024.0)
    with pytest.raises(NumericalError):
        broken.drain()
