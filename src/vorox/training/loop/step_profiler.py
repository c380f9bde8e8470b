"""Profile scheduled steps: a trace and a table for each series of ``runtime.profile_steps``.

In: the start and end of every step, and the phases of the loop between them. Out: ``profile/step-00000010-rank-00000``
with ``.json.gz``, a Chrome trace, and ``.txt``, a table. No bit of the run changes. A profiler that fails is reported
once; the run continues without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from vorox.core.engine import Engine
from vorox.core.files import atomic
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import RunLayout
from vorox.core.step_profile import PHASE_PREFIX, StepRecording, profile_table
from vorox.records.log import RunLog

_STEP_NAME = "ProfilerStep#{}"
"""The name that PyTorch gives to steps; tools that compare the steps of a trace look for it."""


class StepProfiler:
    """Profiles the steps of one rank. Nothing happens outside of the scheduled steps.

    Args:
        run_directory: The run.
        steps: Steps to profile, from 1.
        engine: Has the profiler of its framework.
        distributed: This process's rank.
        log: Receives the paths, and a failure.
        is_stopping: Whether no other step follows.
    """

    def __init__(
        self, run_directory: Path, steps: Sequence[int], engine: Engine, distributed: DistributedContext, log: RunLog,
        is_stopping: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._layout, self._engine, self._dist, self._log = RunLayout(run_directory), engine, distributed, log
        self._steps, self._is_stopping, self._has_failed = frozenset(steps), is_stopping, False
        self._recording: StepRecording | None = None
        self._first_step, self._in_series = 0, False
        self._marks: list[AbstractContextManager[object]] = []  # open ones: the step, then the phase
        self._phase = ""

    def begin(self, step: int) -> None:
        """Begin a step, before its batch is read; start the profiler if it is the first of a series."""
        if step not in self._steps:
            return
        if not self._in_series:
            self._in_series = True
            with self._reporting_failure(step):
                self._start(step)
            self._dist.barrier("profiler")  # the step does not wait for a rank whose profiler starts slowly
        if self._recording is not None:
            with self._reporting_failure(step):
                self._unmark()
                self._mark(_STEP_NAME.format(step))

    def enter(self, phase: str) -> None:
        """Record the start of a phase of the loop."""
        if self._recording is not None:
            with self._reporting_failure(self._first_step):
                if self._phase:
                    self._marks.pop().__exit__(None, None, None)
                self._mark(PHASE_PREFIX + phase)
                self._phase = phase

    def end(self, step: int) -> None:
        """End a started step; after the last one of a series, write its trace and its table."""
        is_last = step + 1 not in self._steps or self._is_stopping()
        if is_last:
            self._in_series = False
        if self._recording is None:
            return
        with self._reporting_failure(step):
            if is_last:
                self._engine.synchronize()
            self._unmark()
            if is_last:
                recording, self._recording = self._recording, None
                recording.close()
                self._write(recording, step)

    def close(self) -> None:
        """Stop a profiler that a failed run left running; its steps are not written."""
        if self._dist.world_size == 1:  # with others, the device may wait for a lost rank, and the profiler for it
            self._abandon()

    def _abandon(self) -> None:
        """Stop the profiler and start none again."""
        self._has_failed = True
        recording, self._recording = self._recording, None
        if recording is not None:
            with contextlib.suppress(Exception):
                self._unmark()
                recording.close()

    def _start(self, step: int) -> None:
        """Start the profiler, unless it has failed before."""
        if not self._has_failed:
            self._engine.synchronize()
            trace = self._layout.profile_trace(step, self._dist.rank)
            atomic.make_directory(trace.parent)
            self._recording, self._first_step = self._engine.start_profiler(trace), step

    def _mark(self, name: str) -> None:
        assert self._recording is not None
        mark = self._recording.annotate(name)
        mark.__enter__()
        self._marks.append(mark)

    def _unmark(self) -> None:
        self._phase = ""
        while self._marks:
            self._marks.pop().__exit__(None, None, None)

    def _write(self, recording: StepRecording, last_step: int) -> None:
        trace = self._layout.profile_trace(self._first_step, self._dist.rank)
        activity = recording.save()
        steps = (
            f"step {last_step:,}" if last_step == self._first_step else f"steps {self._first_step:,} to {last_step:,}"
        )
        table = self._layout.profile_table(self._first_step, self._dist.rank)
        title = f"{steps.capitalize()} of rank {self._dist.rank}"
        atomic.write_file(table, profile_table(title, activity).encode())
        text = f"Profiled {steps}: {table} and, for https://ui.perfetto.dev, {trace.name}"
        self._log.event(
            "profile", text, step=last_step, first_step=self._first_step, trace=str(trace), table=str(table)
        )

    @contextlib.contextmanager
    def _reporting_failure(self, step: int) -> Generator[None]:
        """Report that a block failed and profile no more."""
        try:
            yield
        except Exception as error:  # profilers fail in many ways, and none may end the run
            self._abandon()
            text = f"Profiler failed at step {step:,}; the run continues without it: {error}"
            self._log.event("profile_failed", text, level="warning", step=step)
