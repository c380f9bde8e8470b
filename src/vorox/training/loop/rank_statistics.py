"""Times and metrics of ranks in the exchange during every step; names a slow rank.

In: the time that this rank waited for its batch and computed, without collectives, in which all ranks wait for the
slowest. Out, on the main rank: metrics of all ranks, combined by their declared reductions, and a warning that names a
rank which is slower than the others for some time, with the cause. Nothing is exchanged for it: the numbers are part of
the report that decides on saves and stops.
"""

from __future__ import annotations

import functools
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vorox.core.engine import Engine
from vorox.experiments.tracking import reduce
from vorox.records.log import RunLog
from vorox.runtime.heartbeat import Heartbeat, Phase
from vorox.runtime.throughput import host_memory
from vorox.training.loop.observer import is_logged_step
from vorox.training.steps.workload import Workload

FACTOR = 1.5
"""Time of a straggler over the median of the other ranks."""
WINDOW_SECONDS = 10.0
NUM_WINDOWS = 3
"""Windows in a row in which a rank must be slower: a rank that is busy for a moment is no straggler."""
_NUM_UNTIMED_REPORTS = 2
"""Reports of a process without a compute time: a report has the previous step's, and the first step may compile."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slower than the others.

    Attributes:
        rank: Rank, from 0.
        cause: ``data`` if it waits for batches, ``compute`` if its steps take longer.
        ratio: Its time over the median of the other ranks.
        excess_seconds: What it takes longer, per step.
    """

    rank: int
    cause: Literal["data", "compute"]
    ratio: float
    excess_seconds: float


class StragglerDetector:
    """Finds a rank that is persistently slower than the median of the others.

    Args:
        window_seconds: Time of the median rank that a window covers.
        num_windows: Windows in a row in which the same rank must be slower, for the same cause.
    """

    def __init__(self, window_seconds: float, num_windows: int) -> None:
        self._window_seconds, self._num_windows = window_seconds, num_windows
        self._sums: list[list[float]] = []
        self._num_steps, self._in_a_row, self._last = 0, 0, (-1, "")

    def add(self, times: Sequence[tuple[float, float]]) -> Straggler | None:
        """Add a step; return the straggler when its last window ends.

        Args:
            times: By rank: seconds of waiting for the batch, and of computing.
        """
        sums = self._sums or [[0.0, 0.0] for _ in times]
        self._sums = [[a + b for a, b in zip(old, new, strict=True)] for old, new in zip(sums, times, strict=True)]
        self._num_steps += 1
        totals = [sum(parts) for parts in self._sums]
        if statistics.median(totals) < self._window_seconds:
            return None
        found = self._slowest(totals)
        self._sums, self._num_steps = [], 0
        key = (-1, "") if found is None else (found.rank, found.cause)
        self._in_a_row = self._in_a_row + 1 if key == self._last else 1
        self._last = key
        return found if found is not None and self._in_a_row % self._num_windows == 0 else None

    def _slowest(self, totals: Sequence[float]) -> Straggler | None:
        rank = max(range(len(totals)), key=totals.__getitem__)
        others = [index for index in range(len(totals)) if index != rank]
        median = statistics.median(totals[index] for index in others)
        if totals[rank] < FACTOR * median:
            return None
        data, compute = (
            self._sums[rank][part] - statistics.median(self._sums[index][part] for index in others) for part in (0, 1)
        )
        excess = (totals[rank] - median) / self._num_steps
        ratio = totals[rank] / max(median, 1e-9)
        return Straggler(rank, "data" if data > compute else "compute", ratio, excess)


class RankStatistics:
    """Times and metrics of this rank, and on the main rank those of all.

    Args:
        engine: Whose steps are timed.
        phase_seconds: Time that the loop has spent in each phase: ``Heartbeat.seconds``, which stays current.
        log: Receives the warning.
        is_logged: Whether the metrics of a step are recorded.
        detector: Finds a straggler.

    Attributes:
        metrics: Metrics of all ranks at the last exchange; empty with one rank.
        behind_seconds: On the main rank: how much longer than this rank the slowest took for the step before the last.
    """

    def __init__(
        self,
        engine: Engine,
        phase_seconds: Mapping[Phase, float],
        log: RunLog,
        is_logged: Callable[[int], bool],
        detector: StragglerDetector | None = None,
    ) -> None:
        self._engine, self._phase_seconds, self._log, self._is_logged = engine, phase_seconds, log, is_logged
        self._detector = detector or StragglerDetector(WINDOW_SECONDS, NUM_WINDOWS)
        self._host = platform.node()
        self._seconds_before = dict(phase_seconds)
        self._collectives_before = self._step_collective_seconds = 0.0
        self._num_reports = 0
        self._hosts: list[str] = []
        self.metrics: dict[str, float] = {}
        self.behind_seconds = 0.0

    @classmethod
    def of(cls, workload: Workload, heartbeat: Heartbeat, total_steps: int) -> RankStatistics:
        """Return the statistics of this rank in a run."""
        is_logged = functools.partial(is_logged_step, workload.config.log.every_steps, total_steps)
        return cls(workload.engine, heartbeat.seconds, workload.log, is_logged)

    def end_step(self) -> None:
        """Record how long the collectives of a step took; ``report`` starts their time."""
        self._step_collective_seconds = self._engine.collective_seconds - self._collectives_before

    def report(self, step: int) -> dict[str, Any]:
        """Return this rank's part of the exchange during a step, as plain JSON; called in the phase of the step.

        It has the times of the step before: computing it, and then waiting for the batch of this one.

        Args:
            step: The step that starts.
        """
        self._num_reports += 1
        before, self._seconds_before = self._seconds_before, dict(self._phase_seconds)
        spent = {phase: seconds - before[phase] for phase, seconds in self._seconds_before.items()}
        self._collectives_before = self._engine.collective_seconds
        report: dict[str, Any] = {}
        if self._num_reports == 1:
            report["host"] = self._host
        if self._num_reports > _NUM_UNTIMED_REPORTS:
            report["compute_seconds"] = max(0.0, spent["step"] - self._step_collective_seconds)
            report["waited_seconds"] = spent["data"]
        if self._is_logged(step - 1):  # the step that settles next
            report["metrics"] = {**host_memory(), **self._engine.device_stats()}
        return report

    def receive(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Combine the reports of all ranks of a step; on the main rank."""
        if "host" in reports[0]:
            self._hosts = [str(report.get("host", "?")) for report in reports]
        values = [report["metrics"] for report in reports if "metrics" in report]
        for name in values[0] if values else ():
            self.metrics[name] = reduce(name, [value[name] for value in values if name in value])
        if "compute_seconds" not in reports[0]:
            return
        times = [(float(report["waited_seconds"]), float(report["compute_seconds"])) for report in reports]
        totals = [waited + compute for waited, compute in times]
        self.behind_seconds = max(totals) - totals[0]
        self.metrics |= {"ranks/slowest_seconds": max(totals), "ranks/median_seconds": statistics.median(totals)}
        found = self._detector.add(times)
        if found is not None:
            what = {"data": "waits for its batches", "compute": "computes"}[found.cause]
            text = (
                f"Rank {found.rank} on host {self._hosts[found.rank]} is slower than the others: it {what} "
                f"{found.excess_seconds:.2f} s longer per step ({found.ratio:.1f} times the median)"
            )
            self._log.event(
                "straggler", text, level="warning", rank=found.rank, host=self._hosts[found.rank], cause=found.cause,
                ratio=found.ratio,
            )  # fmt: skip
