"""What other save intervals would have made of a run: its recorded attempts, computed again with each.

In: the time of a run (``run_time.py``). Every attempt starts, takes its steps and is killed as long after its first
step as the recorded one was; only where it starts from and what it saves follow from the interval. The last attempt
goes on to the last step of the run. A save costs what the recorded ones cost on average, and counts once it is
committed; where a save would begin before the one before it is written, it waits. No law of failures is assumed:
Young's and Daly's formulas answer for failures to come, this for those that came.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vorox.training.reports.run_time import RunTime

_SEARCHED = 100
"""Intervals among which the best is searched."""


@dataclass(frozen=True, slots=True)
class IntervalOutcome:
    """A run as another save interval would have made it.

    Attributes:
        every_steps: Steps between two saves.
        wall_seconds: From the start of the first attempt to the last step of the run.
        redone_seconds: Steps that were lost and done again.
        save_seconds: Time in which saves held up training.
        num_saves: Saves that this took.
        goodput_fraction: Share of the wall time that computed the steps which count.
    """

    every_steps: int
    wall_seconds: float
    redone_seconds: float
    save_seconds: float
    num_saves: int
    goodput_fraction: float


@dataclass(frozen=True, slots=True)
class _Life:
    """What an attempt has whatever the interval: the time to its first step, the time after it, and how it ends."""

    start_seconds: float
    step_seconds: float
    is_killed: bool
    is_last: bool


class SaveIntervals:
    """Computes the attempts of a run again.

    Args:
        time: The time of the run.

    Attributes:
        recorded: The interval that the run had: the median number of steps between two saves; ``None`` without any.
        reason: Why nothing can be computed; empty if it can.
    """

    def __init__(self, time: RunTime) -> None:
        self._time, steps = time, time.steps
        self.recorded = _recorded_interval(time)
        saved = steps.save[steps.save > 0]
        self.reason = ""
        if time.goodput_fraction is None:
            self.reason = "too much of its time is unknown"
        elif not len(steps.step):
            self.reason = "it finished no step"
        elif not len(saved) or time.write_seconds is None:
            self.reason = "it saved no checkpoint, so the cost of a save is not known"
        if self.reason:
            return
        self._save_seconds = float(saved.mean())
        self._write_seconds = max(self._save_seconds, time.write_seconds or 0.0)
        self._first, self._last = int(steps.step.min()) - 1, int(steps.step.max())
        self._after = self._sums(steps.train)
        self._computed = float(self._sums(steps.compute)[-1])
        self._mean = float(self._after[-1]) / (self._last - self._first)
        self._lives, self._fixed_seconds = self._find_lives()

    def outcome(self, every_steps: int) -> IntervalOutcome:
        """Return what the run would have been with a save every so many steps."""
        wall, redone, saving, num_saves, saved = self._fixed_seconds, 0.0, 0.0, 0, self._first
        cost = max(self._save_seconds, self._write_seconds - every_steps * self._mean)
        for life in self._lives:
            wall += life.start_seconds
            limit = np.inf if life.is_last else life.step_seconds
            reached = self._reach(saved, every_steps, cost, limit)
            saves = reached // every_steps - saved // every_steps
            saves += reached == self._last and reached % every_steps > 0  # the last step is always saved
            spent = self._span(saved, reached) + saves * cost
            num_saves, saving = num_saves + saves, saving + saves * cost
            if reached == self._last:
                wall += spent
                break
            wall += limit
            if not life.is_killed:
                saved = reached
                continue
            kept = self._committed(saved, reached, every_steps, cost, limit)
            redone += max(0.0, limit - self._span(saved, kept) - saves * cost)
            saved = kept
        return IntervalOutcome(every_steps, wall, redone, saving, num_saves, self._computed / wall)

    def table(self) -> list[IntervalOutcome]:
        """Return the recorded interval, quarters to fourfold of it, and the best of all, by interval."""
        steps = self._last - self._first
        searched = {int(every) for every in np.geomspace(1, steps, _SEARCHED)}
        recorded = self.recorded or 1
        shown = {max(1, round(recorded * factor)) for factor in (0.25, 0.5, 1, 2, 4)}
        shown = {every for every in shown if every <= steps} | {recorded}
        best = max((self.outcome(every) for every in searched | shown), key=lambda found: found.goodput_fraction)
        return [self.outcome(every) for every in sorted(shown | {best.every_steps})]

    def _sums(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the seconds up to every step; a step without a time takes the mean, one done again its last time."""
        found = np.full(self._last - self._first, np.nan)
        found[self._time.steps.step - self._first - 1] = values
        found[np.isnan(found)] = np.nanmean(found)
        return np.concatenate([[0.0], np.cumsum(found)])

    def _span(self, first: int, last: int) -> float:
        return float(self._after[last - self._first] - self._after[first - self._first])

    def _elapsed(self, start: int, step: int, every: int, cost: float) -> float:
        """Return the seconds of an attempt from ``start`` until a step is done, with the saves before it."""
        return self._span(start, step) + max(0, (step - 1) // every - start // every) * cost

    def _reach(self, start: int, every: int, cost: float, limit: float) -> int:
        """Return the last step that an attempt finishes."""
        if not np.isfinite(limit):
            return self._last
        steps = range(start + 1, self._last + 1)
        return start + bisect.bisect_right(steps, limit, key=lambda step: self._elapsed(start, step, every, cost))

    def _committed(self, start: int, reached: int, every: int, cost: float, limit: float) -> int:
        """Return the last step that a killed attempt has saved."""
        for step in range(reached - reached % every, start, -every):
            if self._elapsed(start, step, every, cost) + self._write_seconds <= limit:
                return step
        return start

    def _find_lives(self) -> tuple[list[_Life], float]:
        """Return the attempts with steps, and the seconds that no interval changes."""
        lives, fixed = list[_Life](), sum(self._time.absent_seconds)
        stepped = [attempt for attempt in self._time.attempts if attempt.last_step is not None]
        for attempt in self._time.attempts:
            start = attempt.start_seconds
            if attempt.last_step is None:
                fixed += attempt.wall_seconds
                continue
            is_killed = attempt.outcome in {"killed", "rolled_back"} or not attempt.is_saved
            lives.append(_Life(start, attempt.wall_seconds - start, is_killed, attempt is stepped[-1]))
        last = stepped[-1]
        own = self._time.steps.attempt == last.number
        trained = float((self._time.steps.train + self._time.steps.save)[own].sum())
        return lives, fixed + max(0.0, lives[-1].step_seconds - trained)  # what it did beside its steps: closing


def _recorded_interval(time: RunTime) -> int | None:
    """Return the median number of steps from one save to the next within an attempt."""
    found: list[int] = []
    for attempt in time.attempts:
        steps: Sequence[int] = sorted(set(time.save_steps.get(attempt.number, ())))
        start = [] if attempt.first_step is None else [attempt.first_step - 1]
        found += [second - first for first, second in zip([*start, *steps], steps, strict=False)]
    return max(1, round(float(np.median(found)))) if found else None
