"""The tracker: measured values in, every sink out; and reading them back.

``observe`` collects values of steps in between, ``log`` writes one step: what was observed since, reduced as the
registry says, and the values given. Names must be registered. A sink that fails is reported once and never stops the
training; the others go on. ``read_metrics`` returns what counts: torn lines are skipped, and where several attempts
speak of a step, the later one is believed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vorox.core.distributed_context import DistributedContext
from vorox.core.json_lines import as_number, read_lines
from vorox.core.log import RunLog
from vorox.core.run_layout import RunLayout
from vorox.core.schema import LogConfig
from vorox.experiments.metrics import MetricFunctions, metric, reduce
from vorox.experiments.sinks import JsonLinesSink, Sink, TensorBoardSink, open_custom_sink
from vorox.experiments.wandb_sink import WandbSink


class Tracker:
    """Fans measured values out to sinks.

    Args:
        sinks: Where they go; none in processes that do not write.
        log: Told once about each sink that fails.
        custom: Metrics of the user, from the step and everything else that is written for it.
    """

    def __init__(self, sinks: Sequence[Sink], log: RunLog, custom: MetricFunctions | None = None) -> None:
        self._custom = custom
        self._sinks = tuple(sinks)
        self._log = log
        self._observed: dict[str, list[float]] = {}
        self._lock = threading.Lock()
        self._failures: dict[str, int] = {}

    @classmethod
    def open(
        cls,
        run_directory: Path,
        config: LogConfig,
        *,
        attempt: int = 1,
        resume_step: int = 0,
        distributed: DistributedContext | None = None,
        log: RunLog | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Tracker:
        """The tracker of this process of a run.

        Args:
            run_directory: Where ``metrics.jsonl`` goes.
            config: Which sinks.
            attempt: Number of the attempt (``RunContext.attempt``).
            resume_step: Steps finished when this attempt began; values of later steps by earlier attempts are void.
            distributed: Only the first process writes.
            log: Where trouble is reported; the terminal if not given.
            settings: The run's configuration, for sinks that show it.

        Raises:
            ConfigError: A sink is configured whose package is not installed, or a function of the user cannot be
                imported or gives no sink.
        """
        sinks: list[Sink] = []
        if (distributed or DistributedContext()).is_main:
            sinks.append(JsonLinesSink(run_directory, attempt=attempt, resume_step=resume_step))
            if config.tensorboard:
                sinks.append(TensorBoardSink(run_directory, resume_step=resume_step))
            if config.wandb:
                sinks.append(WandbSink(run_directory, project=config.wandb_project, settings=settings or {}))
            for number, path in enumerate(config.sinks):
                sinks.append(open_custom_sink(path, f"log.sinks.{number}", run_directory, resume_step, settings or {}))
        log = log or RunLog(None)
        custom = MetricFunctions(config.metrics, kind="metric", key="log.metrics", prefix="custom/", log=log)
        return cls(sinks, log, custom if sinks else None)

    def observe(self, values: Mapping[str, float]) -> None:
        """Keep the values of a step for the next ``log``. May be called from any thread.

        Raises:
            ConfigError: A name is not registered.
        """
        for name, value in values.items():
            metric(name)
            with self._lock:
                self._observed.setdefault(name, []).append(float(value))

    def log(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Write the values of a step, given ones before observed ones, and return what was written.

        Args:
            step: Steps finished.
            values: By registered name.

        Raises:
            ConfigError: A name is not registered.
        """
        for name in values:
            metric(name)
        with self._lock:
            observed, self._observed = self._observed, {}
        written = {name: reduce(name, several) for name, several in observed.items()}
        written.update((name, float(value)) for name, value in values.items())
        if self._custom is not None and values:
            written.update(self._custom(step, dict(written)))
        if written:
            for sink in self._sinks:
                self._try(sink, lambda sink=sink: sink.write(step, written))
        return written

    def flush(self) -> None:
        """Make what was logged durable, before a checkpoint that speaks of the same steps."""
        for sink in self._sinks:
            self._try(sink, sink.flush)

    def close(self) -> None:
        """Close every sink and say what a failing one has lost."""
        for sink in self._sinks:
            self._try(sink, sink.close)
        for name, count in self._failures.items():
            if count > 1:
                self._log.event("sink_failures", f"{name} failed {count} times in all", level="warning", sink=name)
        self._sinks, self._failures = (), {}

    def _try(self, sink: Sink, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever a sink does wrong, the training goes on
            count = self._failures[sink.name] = self._failures.get(sink.name, 0) + 1
            if count == 1:
                text = f"{sink.name} fails ({type(error).__name__}: {error}); training goes on, this is said once"
                self._log.event("sink_failed", text, level="warning", sink=sink.name)


def read_metrics(run_directory: Path, *, last_bytes: int | None = None) -> dict[int, dict[str, float]]:
    """All values that count, by step and name, steps ascending. A run without metrics has none.

    Args:
        run_directory: The run.
        last_bytes: Read only so much of the end of the file.
    """
    steps: dict[int, dict[str, tuple[int, float]]] = {}
    for record in read_lines(RunLayout(run_directory).metrics, last_bytes=last_bytes):
        attempt = record.get("attempt")
        if type(attempt) is not int:
            continue
        resume_step, step, values = record.get("resume_step"), record.get("step"), record.get("values")
        if type(resume_step) is int:
            steps = {known: kept for known, kept in steps.items() if known <= resume_step}
        elif type(step) is int and isinstance(values, dict):
            _merge(steps.setdefault(step, {}), attempt, values)
    return {step: {name: value for name, (_, value) in steps[step].items()} for step in sorted(steps)}


def last_values(run_directory: Path, names: Sequence[str]) -> dict[str, tuple[int, float]]:
    """The newest value of each metric that has one, with its step. Reads no more of the file than it needs."""
    found: dict[str, tuple[int, float]] = {}
    path = RunLayout(run_directory).metrics
    for last_bytes in (1 << 16, 1 << 21, None):
        for step, values in read_metrics(run_directory, last_bytes=last_bytes).items():
            found.update((name, (step, values[name])) for name in names if name in values)
        if len(found) == len(set(names)) or not path.exists() or path.stat().st_size <= (last_bytes or 0):
            break
    return found


def _merge(known: dict[str, tuple[int, float]], attempt: int, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        number = as_number(value)
        if number is not None and attempt >= known.get(name, (0, 0.0))[0]:
            known[name] = (attempt, number)
