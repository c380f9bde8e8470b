"""The notice before a preemption, against the measured time of steps and saves.

In: the time between SIGTERM and the end of the process (``checkpoint.notice_seconds``), and the duration of steps and
saves, of earlier attempts at the start. Out: a warning when a save would not fit, whether the last save starts, the
time that is left for the mirror, and how long the last save took.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from vorox.core.batch import Progress
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.experiments.tracking import read_metrics
from vorox.records.log import RunLog
from vorox.training.checkpoints.writer import CheckpointWriter
from vorox.training.steps.stop import Stop, seconds_left

_GROWTH = 1.25
"""A warning is repeated when a stop takes longer than at the last one by this factor."""


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """The longest step and save of a run, and the shortest save, in seconds; ``None`` if there was none."""

    step_seconds: float | None = None
    save_seconds: float | None = None
    shortest_save_seconds: float | None = None

    @classmethod
    def of_run(cls, directory: Path) -> MeasuredTimes:
        """Return the times in the metrics of a run."""
        metrics = list(read_metrics(directory).values())
        steps = [values["step_seconds"] for values in metrics if "step_seconds" in values]
        saves = [
            values["checkpoint_write_seconds"] + values.get("checkpoint_seconds", 0.0)
            for values in metrics
            if "checkpoint_write_seconds" in values
        ]
        return cls(max(steps, default=None), max(saves, default=None), min(saves, default=None))


class PreemptionNotice:
    """Compares the notice with what a stop takes: the rest of a step, and two saves, since one may have just started.

    Args:
        notice_seconds: ``checkpoint.notice_seconds``; a run without it has no ``PreemptionNotice``.
        log: Receives the warnings.
        earlier: Times of earlier attempts.
        dist: The ranks that save together; default: one.
    """

    def __init__(
        self,
        notice_seconds: float,
        log: RunLog,
        earlier: MeasuredTimes,
        dist: DistributedContext | None = None,
    ) -> None:
        self._notice_seconds, self._log = notice_seconds, log
        self._dist = dist or DistributedContext()
        self._step_seconds, self._save_seconds = earlier.step_seconds or 0.0, earlier.save_seconds
        self._shortest_save_seconds = earlier.shortest_save_seconds
        self._reported_seconds = 0.0
        self._lock = threading.Lock()
        self._check()

    def step(self, seconds: float | None) -> None:
        """Take the duration of a step."""
        with self._lock:
            self._step_seconds = max(self._step_seconds, seconds or 0.0)
            self._check()

    def saved(self, seconds: float) -> None:
        """Take the duration of a save; from any thread."""
        with self._lock:
            self._save_seconds = max(self._save_seconds or 0.0, seconds)
            self._shortest_save_seconds = min(self._shortest_save_seconds or seconds, seconds)
            self._check()

    def skip_save(self, stop: Stop, checkpoints: CheckpointWriter, progress: Progress) -> str:
        """Return why no rank begins the save after the last step; empty if all do. A collective.

        A save that cannot end within the notice is not begun if there is an earlier checkpoint. The shortest save so
        far decides, so that none is given up that can succeed. It is called when no write is in flight.
        """
        if not checkpoints.is_unsaved(progress):
            return ""

        def decide() -> str:
            left, shortest = seconds_left(self._notice_seconds, stop), self._shortest_save_seconds
            if shortest is None or shortest <= left or not checkpoints.has_saved:
                return ""
            return f"{left:.1f} s of the notice are left, and the shortest save took {shortest:.1f} s"

        reason = self._dist.decide("last save", decide)
        if not reason:
            return ""
        text = f"State after step {progress.step:,} is not saved: {reason}. {checkpoints.safe()}"
        self._log.event("save_skipped", text, level="warning", step=progress.step)
        return f"state not saved, because {reason}"

    def stopped(self, stop: Stop) -> None:
        """Report the time from a signal to the end of its save."""
        if not stop.requested:
            return
        seconds = time.monotonic() - stop.requested_at
        is_late = seconds > self._notice_seconds
        place = "later than" if is_late else "within"
        text = f"Saved {seconds:.1f} s after {stop.requested}, {place} the notice of {self._notice_seconds:g} s"
        self._log.event("stop_saved", text, level="warning" if is_late else "info", seconds=seconds)

    def _check(self) -> None:
        if self._save_seconds is None:
            return
        needed = self._step_seconds + 2 * self._save_seconds
        if needed <= max(self._notice_seconds, _GROWTH * self._reported_seconds):
            return
        self._reported_seconds = needed
        text = (
            f"A stop takes up to {needed:,.1f} s: a step of {self._step_seconds:,.1f} s and two saves of "
            f"{self._save_seconds:,.1f} s; the notice is {self._notice_seconds:g} s. Save more often "
            "(checkpoint.every_seconds), so that less is lost, or lengthen the notice (checkpoint.notice_seconds)"
        )
        self._log.event("short_notice", text, level="warning", needed_seconds=needed)
