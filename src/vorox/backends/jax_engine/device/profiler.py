"""The profiler of the JAX engine: ``jax.profiler``.

In: the steps between start and stop. Out: a Chrome trace, a folder beside it for XProf and TensorBoard, and the phases
of the loop. JAX has no interface to read operators back, so none are returned.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Generator
from contextlib import AbstractContextManager
from pathlib import Path

import jax

from vorox.core.step_profile import PHASE_PREFIX, Activity, Phase


class JaxRecording:
    """See ``core.step_profile.StepRecording``. Python calls are not recorded.

    Args:
        trace: The file to write, ``.json.gz``; the folder for XProf has the same name without the ending.
    """

    def __init__(self, trace: Path) -> None:
        self._trace, self._folder, self._is_open = trace, trace.with_name(trace.name.removesuffix(".json.gz")), True
        self._phases: list[Phase] = []
        shutil.rmtree(self._folder, ignore_errors=True)  # of an attempt that ran the same steps
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(self._folder, profiler_options=options)

    def annotate(self, name: str) -> AbstractContextManager[object]:
        return self._timed(name)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Generator[None]:
        started = time.perf_counter()
        with jax.profiler.TraceAnnotation(name):
            yield
        if name.startswith(PHASE_PREFIX):
            self._phases.append(Phase(name.removeprefix(PHASE_PREFIX), (started, time.perf_counter())))

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            jax.profiler.stop_trace()

    def save(self) -> Activity:
        written = sorted(self._folder.glob("**/*.trace.json.gz"))
        shutil.copyfile(written[-1], self._trace)
        return Activity(self._phases)
