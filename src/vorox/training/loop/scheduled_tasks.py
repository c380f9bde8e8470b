"""Evaluate lm-evaluation-harness tasks while a run trains (``eval.tasks``).

In: loaded tasks and the engine after a step whose checkpoint is committed. Out: the results in ``tasks/step-N.json``,
as ``vorox eval`` records them, and as metrics of the step. Every rank answers the same requests, because the engine's
forward pass may be a collective; before each batch the ranks agree to continue. Only a device error, which a rank
cannot report while the others wait inside a collective, ends the run; its checkpoint is complete.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from vorox.core.batch import Progress
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import RunLayout
from vorox.core.schema import EvalConfig, RunConfig
from vorox.experiments.task_results import checkpoint_sha256, record_task_results, recorded_steps
from vorox.records.log import RunLog
from vorox.training.evaluation.task_evaluation import (
    OutOfTime,
    TaskResult,
    check_completions,
    evaluate_tasks,
    records_of,
)
from vorox.training.evaluation.task_loading import find_tasks, load_tasks
from vorox.training.inference.language_model import LanguageModel
from vorox.training.loop.startup import TrainingSetup
from vorox.training.steps.stop import Stop

_FAILED, _STOPPED, _OUT_OF_TIME = "failed", "stopped", "out of time"


@dataclass(frozen=True, slots=True)
class TasksReport:
    """One evaluation of the tasks.

    Attributes:
        results: Results by task, as recorded.
        unfinished: Tasks without a result, because the time budget ended.
        failure: The error that ended the evaluation; empty without one.
    """

    results: Mapping[str, Mapping[str, Any]]
    unfinished: tuple[str, ...] = ()
    failure: str = ""


class _Ended(Exception):
    """Ends an evaluation that was stopped, or failed on another rank."""


class ScheduledTasks:
    """The task evaluations of a running process: due and finished ones.

    Args:
        run_directory: The run.
        config: Which tasks are evaluated, and when.
        tasks: The tasks, from ``open_tasks``.
        total_steps: Length of the run.
        progress: The state that the process starts from.
        distributed: This process's rank. The main rank decides and writes.
        model_after: Returns the model after a step.

    Raises:
        ConfigError: A task requests completions that are longer than the model's positions.
    """

    def __init__(
        self,
        run_directory: Path,
        config: EvalConfig,
        tasks: Mapping[str, Any],
        total_steps: int,
        progress: Progress,
        distributed: DistributedContext,
        model_after: Callable[[int], LanguageModel],
    ) -> None:
        self._run_directory, self._config, self._tasks = run_directory, config, tasks
        self._total_steps, self._dist, self._model_after = total_steps, distributed, model_after
        recorded: list[int] = distributed.decide("tasks", lambda: recorded_steps(run_directory)) if tasks else []
        check_completions(tasks, model_after(progress.step))
        self._evaluated = {step for step in recorded if step <= progress.step}

    @classmethod
    def of(cls, setup: TrainingSetup, tasks: Mapping[str, Any]) -> ScheduledTasks:
        """Return the tasks of a run, evaluated with its engine."""
        workload, state = setup.workload, setup.state
        config, tokenizer, spec = workload.config, workload.corpus.tokenizer, workload.spec
        return cls(
            setup.run.directory, config.eval, tasks, state.horizon.total_steps, state.progress, workload.distributed,
            lambda step: LanguageModel(workload.engine, tokenizer, config, spec, step),
        )  # fmt: skip

    def due(self, progress: Progress) -> bool:
        """Whether the tasks are due after this step and not evaluated yet."""
        if not self._tasks or progress.step == 0 or progress.step in self._evaluated:
            return False
        every = self._config.tasks_every_steps
        at_end = self._config.at_end and progress.step >= self._total_steps
        return at_end or (every is not None and progress.step % every == 0)

    def run(
        self, progress: Progress, stop: Stop, report: Callable[[TasksReport], None],
        progressed: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Evaluate the tasks, and record and report the results.

        Nothing is evaluated if the step has no checkpoint, because it was postponed after a non-finite step. Nothing is
        recorded if a stop is requested meanwhile: the evaluation is repeated after the resume. ``progressed`` is called
        before every batch.
        """
        checkpoint = RunLayout(self._run_directory).checkpoint(progress.step)
        if not self._dist.decide("tasks", checkpoint.is_dir):
            return
        agreement = _Agreement(self._dist, stop, time.monotonic() + self._config.tasks_max_seconds, progressed)
        done: list[TaskResult] = []
        unfinished: list[str] = []
        try:
            model = self._model_after(progress.step)
            with _without_progress_bars():
                _, unfinished = evaluate_tasks(
                    model,
                    self._tasks,
                    check=agreement.check,
                    limit=self._config.num_task_documents,
                    on_result=done.append,
                )
            if not unfinished:
                agreement.check(is_done=True)  # another rank may have failed after its last batch
        except Exception as error:  # the harness and its metrics raise any exception; none may end the training
            agreement.report(error)
        if agreement.decision == _STOPPED:
            return
        self._evaluated.add(progress.step)
        results = records_of(done, self._config.num_task_documents, self._config.weights)
        if self._dist.is_main and (results or not agreement.failure):
            record_task_results(self._run_directory, progress.step, checkpoint_sha256(checkpoint), results)
        report(TasksReport(results, tuple(unfinished), agreement.failure))


@contextlib.contextmanager
def _without_progress_bars() -> Generator[None]:
    """Disable the bars of the harness, which would break up the display of the run."""
    bars: Any = import_module("tqdm").tqdm
    original = bars.__init__

    def without_bar(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **{**options, "disable": True})

    bars.__init__ = without_bar
    try:
        yield
    finally:
        bars.__init__ = original


class _Agreement:
    """The ranks' common decision, before each batch, to continue an evaluation."""

    def __init__(self, dist: DistributedContext, stop: Stop, deadline: float, progressed: Callable[[], None]) -> None:
        self._dist, self._stop, self._deadline, self._progressed = dist, stop, deadline, progressed
        self.decision, self.failure = "", ""

    def check(self, *, is_done: bool = False, failure: str = "") -> None:
        """Agree to continue.

        Raises:
            OutOfTime: The time budget ended on the main rank.
            _Ended: A stop was requested there, or a rank failed.
        """

        def decide(reports: list[str]) -> list[str]:
            failures = [report for report in reports if report]
            if failures:
                return [_FAILED, failures[0]]
            if self._stop.requested and not is_done:
                return [_STOPPED, ""]
            return [_OUT_OF_TIME, ""] if time.monotonic() >= self._deadline and not is_done else ["", ""]

        self._progressed()
        self.decision, self.failure = self._dist.agree("tasks", failure, decide)
        if self.decision == _OUT_OF_TIME:
            raise OutOfTime
        if self.decision:
            raise _Ended

    def report(self, error: Exception) -> None:
        """Report an error of this rank to the others, unless they know that the evaluation ended."""
        if self.decision:
            return
        try:
            self.check(failure=f"{type(error).__name__}: {error}")
        except (_Ended, OutOfTime):
            return


def open_tasks(config: RunConfig) -> dict[str, Any]:
    """Load the tasks of ``eval.tasks``, before anything is built; empty without any.

    Raises:
        ConfigError: The harness is not installed, or a task is unknown or cannot be loaded.
    """
    return load_tasks(*_names(config), "eval.tasks") if config.eval.tasks else {}


def check_tasks(config: RunConfig) -> None:
    """Check that the tasks of ``eval.tasks`` are known; no dataset is read.

    Raises:
        ConfigError: The harness is not installed, or a task is unknown.
    """
    find_tasks(*_names(config), "eval.tasks")


def _names(config: RunConfig) -> tuple[tuple[str, ...], Path | None]:
    path = config.eval.task_path
    return config.eval.tasks, None if path is None else Path(path)


def log_report(report: TasksReport, progress: Progress, seconds: float, log: RunLog) -> None:
    """Log an evaluation: its results, tasks without one, and a failure."""
    values = [
        f"{name} {metric} {value:.4g}"
        for name, result in report.results.items()
        for metric, value in result["metrics"].items()
        if "_stderr" not in metric
    ]
    if values:
        text = f"Tasks at step {progress.step:,}: {', '.join(values)} ({seconds:.1f} s)"
        log.event("tasks", text, step=progress.step, seconds=seconds)
    if report.unfinished:
        text = (
            f"No result at step {progress.step:,} for {', '.join(report.unfinished)}: "
            "the time budget (eval.tasks_max_seconds) ended"
        )
        log.event("tasks_unfinished", text, level="warning", step=progress.step)
    if report.failure:
        text = f"Task evaluation at step {progress.step:,} failed ({report.failure}); training continues"
        log.event("tasks_failed", text, level="warning", step=progress.step)
