"""Metric tracking: write metrics to ``metrics.jsonl`` and all other sinks, and read them back.

``observe`` collects values between logged steps; ``log`` writes one step: the collected values, reduced by the metric
registry, and the given ones. Names must be registered. A failing sink is reported once and affects neither the training
nor other sinks.

``metrics.jsonl`` has one line per call (``metrics_lines.py``). A resumed attempt starts with a line
``{"attempt", "resume_step"}``, which voids what earlier attempts wrote for later steps (``core/files/json_lines.py``).
``read_metrics`` skips torn lines, and of several attempts at a step the latest counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vorox.core.files.json_lines import LineFile, as_number, encode, read_lines, read_tails, valid_records
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import RunLayout
from vorox.core.schema import LogConfig
from vorox.core.user_code.extensions import load_function
from vorox.experiments.metrics import MetricFunctions, metric
from vorox.experiments.metrics_lines import encode_metrics, metrics_line
from vorox.experiments.mlflow_sink import MlflowSink, require_mlflow
from vorox.experiments.sinks import Sink, TensorBoardSink, open_custom_sink, require_tensorboard
from vorox.experiments.trackio_sink import TrackioSink, require_trackio
from vorox.experiments.wandb_sink import WandbSink, require_wandb
from vorox.records.log import RunLog


class Tracker:
    """Writes metrics to all sinks.

    Args:
        sinks: The sinks; empty on ranks that do not write.
        log: Reports each failing sink once.
        custom: Metrics computed by user functions from the step and its values; ``None`` without such functions.
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
        """Open the tracker of a run.

        Args:
            run_directory: The run.
            config: Which sinks to open.
            attempt: Number of the attempt (``RunContext.attempt``).
            resume_step: Steps finished when this attempt started; values of later steps by earlier attempts are void.
            distributed: Only rank 0 writes.
            log: Reports failures; the terminal by default.
            settings: The run's configuration, for sinks that show it.

        Raises:
            ConfigError: The package of a sink is not installed, or a user function cannot be imported or does not
                return a sink.
        """
        sinks: list[Sink] = []
        if (distributed or DistributedContext()).is_main:
            sinks.append(JsonLinesSink(run_directory, attempt=attempt, resume_step=resume_step))
            if config.tensorboard:
                sinks.append(TensorBoardSink(run_directory, resume_step=resume_step))
            if config.wandb:
                sinks.append(WandbSink(run_directory, project=config.wandb_project, settings=settings or {}))
            if config.mlflow:
                sinks.append(MlflowSink(run_directory, experiment=config.mlflow_experiment, settings=settings or {}))
            if config.trackio:
                sinks.append(TrackioSink(run_directory, project=config.trackio_project, settings=settings or {}))
            for number, path in enumerate(config.sinks):
                sinks.append(open_custom_sink(path, f"log.sinks.{number}", run_directory, resume_step, settings or {}))
        log = log or RunLog(None)
        return cls(sinks, log, _metric_functions(config, log) if sinks and config.metrics else None)

    def observe(self, values: Mapping[str, float]) -> None:
        """Collect values for the next ``log``. Thread-safe.

        Raises:
            ConfigError: A name is not registered.
        """
        for name, value in values.items():
            metric(name)
            with self._lock:
                self._observed.setdefault(name, []).append(float(value))

    def log(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Write the values of a step and return them; given values override collected ones.

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
        """Make logged values durable, before a checkpoint of the same step."""
        for sink in self._sinks:
            self._try(sink, sink.flush)

    def close(self) -> None:
        """Close every sink, and report how often each one failed."""
        for sink in self._sinks:
            self._try(sink, sink.close)
        for name, count in self._failures.items():
            if count > 1:
                self._log.event(
                    "sink_failures", f"Sink {name} failed {count} times in total", level="warning", sink=name
                )
        self._sinks, self._failures = (), {}

    def _try(self, sink: Sink, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # an error in a sink must not stop the training
            count = self._failures[sink.name] = self._failures.get(sink.name, 0) + 1
            if count == 1:
                text = f"Sink {sink.name} failed ({type(error).__name__}: {error}); training continues; reported once"
                self._log.event("sink_failed", text, level="warning", sink=sink.name)


def reduce(name: str, values: Sequence[float]) -> float:
    """Combine the values of several steps or ranks by the metric's reduction.

    Args:
        name: A registered name.
        values: At least one, in the order of measurement.
    """
    match metric(name).reduction:
        case "mean":
            return sum(values) / len(values)
        case "sum":
            return float(sum(values))
        case "max":
            return max(values)
        case "min":
            return min(values)
        case "last":
            return values[-1]


def check_sinks(config: LogConfig) -> None:
    """Check that the sinks and metrics of a run can be opened, as far as this is known before they are.

    Raises:
        ConfigError: The package of a sink is not installed, or a user function cannot be imported.
    """
    for is_on, require in (
        (config.tensorboard, require_tensorboard), (config.wandb, require_wandb), (config.mlflow, require_mlflow),
        (config.trackio, require_trackio),
    ):  # fmt: skip
        if is_on:
            require()
    for number, path in enumerate(config.sinks):
        load_function(path, kind="sink", where=f"log.sinks.{number}")
    _metric_functions(config, RunLog(None))


def _metric_functions(config: LogConfig, log: RunLog) -> MetricFunctions:
    return MetricFunctions(config.metrics, kind="metric", key="log.metrics", prefix="custom/", log=log)


class JsonLinesSink:
    """Writes ``metrics.jsonl``. Lines that cannot be written are buffered and written with later ones."""

    name = RunLayout.metrics.name

    def __init__(self, run_directory: Path, *, attempt: int, resume_step: int) -> None:
        self._file = LineFile(RunLayout(run_directory).metrics)
        self._attempt = attempt
        self._opening: dict[str, Any] | None = None
        if attempt > 1 or resume_step > 0 or self._file.path.exists():
            self._opening = {"attempt": attempt, "resume_step": resume_step}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        error: OSError | None = None
        if self._opening is not None:
            error, self._opening = self._file.append(encode(self._opening)), None
        error = self._file.append(encode_metrics(step, self._attempt, values)) or error
        if error is not None:
            raise error

    def flush(self) -> None:
        error = self._file.flush(sync=True)
        if error is not None:
            raise error

    def close(self) -> None:
        self.flush()


def read_metrics(run_directory: Path, *, last_bytes: int | None = None) -> dict[int, dict[str, float]]:
    """Return the metrics of a run by step and name, steps ascending; without values that a resume rolled back.

    Args:
        run_directory: The run.
        last_bytes: Read only this many bytes from the end of the file.
    """
    return _by_step(read_lines(RunLayout(run_directory).metrics, last_bytes=last_bytes))


def last_values(run_directory: Path, names: Sequence[str]) -> dict[str, tuple[int, float]]:
    """Return the newest value of each metric, with its step. Reads only as much of the file as needed."""
    found: dict[str, tuple[int, float]] = {}
    for records in read_tails(RunLayout(run_directory).metrics):
        for step, values in _by_step(records).items():
            found.update((name, (step, values[name])) for name in names if name in values)
        if len(found) == len(set(names)):
            break
    return found


def _by_step(records: Iterable[dict[str, Any]]) -> dict[int, dict[str, float]]:
    steps: dict[int, dict[str, tuple[int, float]]] = {}
    for record in valid_records(records):
        if (line := metrics_line(record)) is not None:
            _merge(steps.setdefault(line.step, {}), line.attempt, line.values)
    return {step: {name: value for name, (_, value) in steps[step].items()} for step in sorted(steps)}


def _merge(known: dict[str, tuple[int, float]], attempt: int, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        number = as_number(value)
        if number is not None and attempt >= known.get(name, (0, 0.0))[0]:
            known[name] = (attempt, number)
