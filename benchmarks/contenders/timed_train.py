"""``vorox train`` with clocks around its display and metrics calls: timed_train.py REPORT WARMUP_STEPS WORDS...

It writes REPORT, a JSON file with figures of the steps after the first WARMUP_STEPS:

* ``step_seconds``: wall time of the loop per step.
* ``cpu_seconds``: processor time of the whole process per step, all threads.
* ``display_seconds``: time of the training thread inside calls of the display, per step.
* ``tracker_seconds``: time of the training thread inside calls of the tracker (metrics file and other sinks), per step.
* ``record_seconds``: time of the training thread inside ``StepRecords.record``, per step: the two above, reading speed
  and memory for them, and the checks of each settled step.
* ``monitor_seconds``: time of the training thread inside all monitors, per step: ``StepRecords.record``, heartbeats for
  the watchdog, schedule of the profiler, limit of loss spikes, counting of steps.
* ``display_cpu_seconds`` and so on: processor time of the training thread in these calls, without waiting for a core.
* ``display_calls`` and ``steps``: how many there were.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vorox.cli import main
from vorox.cli.terminal.build_display import RunScreen
from vorox.experiments.tracking import Tracker
from vorox.runtime.heartbeat import Heartbeat
from vorox.training.loop.observer import SpeedMeter
from vorox.training.loop.step_profiler import StepProfiler
from vorox.training.loop.step_records import StepRecords
from vorox.training.steps.loss_spikes import LossSpikes

DISPLAY = ("step", "message", "sample", "waiting")
TRACKER = ("observe", "log", "flush")
MONITORS = (
    (StepRecords, "record"), (Heartbeat, "enter"), (Heartbeat, "compute"), (StepProfiler, "begin"),
    (StepProfiler, "end"), (LossSpikes, "max_loss"), (SpeedMeter, "count"),
)  # fmt: skip
CALLS = ("display", "tracker", "record", "monitor")


class Clocks:
    """What the training thread has spent, and when its steps started."""

    def __init__(self, warmup_steps: int) -> None:
        self._warmup, self.seconds, self.calls = (
            warmup_steps,
            defaultdict[str, float](float),
            defaultdict[str, int](int),
        )
        self._open = set[str]()
        self.num_steps, self._began, self._ended = 0, (0.0, 0.0), (0.0, 0.0)

    def wrap(self, owner: type, method: str, name: str) -> None:
        """Count the time of a method under a name, once where calls of this name are nested."""
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread() or name in self._open:
                return original(*arguments, **options)
            self._open.add(name)
            started, cpu_started = time.perf_counter(), time.thread_time()
            try:
                return original(*arguments, **options)
            finally:
                self._open.remove(name)
                self.seconds[f"{name}_seconds"] += time.perf_counter() - started
                self.seconds[f"{name}_cpu_seconds"] += time.thread_time() - cpu_started
                self.calls[name] += 1

        setattr(owner, method, timed)

    def follow_steps(self) -> None:
        original = SpeedMeter.count

        def count(speed: SpeedMeter, *arguments: Any) -> None:
            self._step()
            original(speed, *arguments)

        SpeedMeter.count = count

    def _step(self) -> None:
        """Mark a step that has been started; only whole steps after the first ones count."""
        self._ended = time.perf_counter(), time.process_time()
        if self.num_steps == self._warmup:
            self._began = self._ended
            self.seconds.clear()
            self.calls.clear()
        self.num_steps += 1
        self._at_last = dict(self.seconds), dict(self.calls)

    def report(self) -> dict[str, float]:
        steps = self.num_steps - self._warmup - 1
        seconds, calls = self._at_last
        names = [f"{call}{kind}_seconds" for call in CALLS for kind in ("", "_cpu")]
        found = {name: seconds.get(name, 0.0) / steps for name in names}
        wall, cpu = (end - start for end, start in zip(self._ended, self._began, strict=True))
        return {
            "steps": steps, "step_seconds": wall / steps, "cpu_seconds": cpu / steps, **found,
            "display_calls": calls.get("display", 0),
        }  # fmt: skip


def run() -> int:
    report, warmup_steps, *words = sys.argv[1:]
    clocks = Clocks(int(warmup_steps))
    for owner, methods, name in ((RunScreen, DISPLAY, "display"), (Tracker, TRACKER, "tracker")):
        for method in methods:
            clocks.wrap(owner, method, name)
    clocks.wrap(StepRecords, "record", "record")
    for owner, method in MONITORS:
        clocks.wrap(owner, method, "monitor")
    clocks.follow_steps()
    code = main(["train", *words])
    if code == 0:
        Path(report).write_text(json.dumps(clocks.report()))
    return code


if __name__ == "__main__":
    sys.exit(run())
