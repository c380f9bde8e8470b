"""Run the trials of a sweep with Ray Tune, on this machine or on a cluster.

A Ray actor starts ``vorox train`` for a trial and reports its validations; ASHA decides at which of them the trial is
stopped. Ray keeps no state that matters: ``sweep.py`` records the trials, and ASHA is rebuilt from their runs. All
machines must see the run directory, the caches and the source under the same paths. Ray is imported only here.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import Searcher

from vorox.core.config.yaml.writer import write_inline
from vorox.core.errors import ConfigError, Preempted, VoroxError
from vorox.core.processes.signals import stop_signals
from vorox.core.ranks.ray_cluster import ray_cluster
from vorox.experiments.artifacts import eval_losses, inspect_run, recorded_length
from vorox.records.run_lookup import short_path
from vorox.sweeps.sweep import Asha, Resources, Sweep
from vorox.sweeps.trial_log import Trial
from vorox.sweeps.trial_process import TrialProcess

_LOST_TRIAL_RETRIES = 3
_MAX_FAILURES_IN_A_ROW = 3
_INHERITED = ("VOROX_CACHE", "OMP_NUM_THREADS")
"""Variables that a trial has as its sweep has them; Ray sets the second one."""
_RAY_VARIABLES = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a diverged trial has no loss
}


def run_trials(sweep: Sweep, resources: Resources, report: Callable[[str], None]) -> None:
    """Run trials until the sweep has all of them.

    Connects to the cluster of ``$RAY_ADDRESS``; else starts Ray on this machine for the duration of the sweep.

    Args:
        sweep: The sweep, locked by this process.
        resources: What runs at a time.
        report: Receives a line for every trial that starts or ends.

    Raises:
        ConfigError: The cluster never has room for a trial.
        Preempted: A signal stopped the sweep.
        VoroxError: Trials failed for a reason that is not their settings. The others have ended, unless several failed
            in a row.
    """
    search = _Search(sweep, resources, report)
    storage = sweep.directory / "ray"
    with _quiet_ray(), ray_cluster(ray), _stop_on_signals(search):
        try:
            tune.Tuner(
                tune.with_resources(_TrialActor, _reserved(sweep, resources)),
                tune_config=tune.TuneConfig(
                    search_alg=search,
                    scheduler=None if sweep.asha is None else _asha_scheduler(sweep.asha, sweep.ranked()),
                    num_samples=-1,
                    reuse_actors=True,
                ),
                run_config=tune.RunConfig(
                    name="trials",
                    storage_path=str(storage),
                    stop=_Stopper(search),
                    failure_config=tune.FailureConfig(max_failures=_LOST_TRIAL_RETRIES),
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # the run has its own
                    verbose=0,
                ),
            ).fit()
        finally:
            shutil.rmtree(storage, ignore_errors=True)
    if search.failures:
        raise next(iter(search.failures.values()))
    if search.stopped_by:
        ended = len(sweep.ranked())
        raise Preempted(
            f"{search.stopped_by}: the sweep stopped after {ended} of {resources.num_trials} trials",
            where=short_path(sweep.directory), saved="all ended trials, and checkpoints of those that were running",
            hint="run the same command again to continue",
        )  # fmt: skip


class _TrialActor(tune.Trainable):
    """The actor of one trial after the other."""

    def setup(self, config: dict[str, Any]) -> None:
        self._directory = Path(config["run"])
        self._last: dict[str, Any] = {}
        working_directory = Path(config["working_directory"])
        if not Path(config["output"]).parent.is_dir() or not working_directory.is_dir():
            raise ConfigError(
                "This machine does not see the directory of the sweep", where=config["output"],
                hint="set run.directory to a path that all machines share",
            )  # fmt: skip
        self._process = TrialProcess(
            config["arguments"],
            run_directory=self._directory,
            working_directory=working_directory,
            output=Path(config["output"]),
            environment=config["environment"],
        )

    def step(self) -> dict[str, Any]:
        found = self._process.next_validation()
        while found is not None:
            percent = _percent(found.step, recorded_length(self._directory))
            self._last = {"step": found.step, "loss": found.loss, "percent": percent}
            if percent < 100:  # after the last one, the run has nothing left but to save
                return dict(self._last)
            found = self._process.next_validation()
        return {**self._last, "exit_code": self._process.exit_code, "done": True}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._process.stop()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        self._process.stop()


class _Search(Searcher):
    """Passes the trials of a sweep to Ray, and their results back.

    Attributes:
        failures: Error of each failed trial, by number; the next sweep runs it again.
        stopped_by: The signal that stopped the sweep; empty without one.
    """

    def __init__(self, sweep: Sweep, resources: Resources, report: Callable[[str], None]) -> None:
        super().__init__()
        self._sweep, self._resources, self._report = sweep, resources, report
        self._running: dict[str, Trial] = {}
        self.failures: dict[int, VoroxError] = {}
        self._num_failures_in_a_row = 0
        self.stopped_by = ""

    @property
    def must_stop(self) -> bool:
        return bool(self.stopped_by) or self._num_failures_in_a_row >= _MAX_FAILURES_IN_A_ROW

    def suggest(self, trial_id: str) -> Any:
        if self.must_stop or len(self._running) >= self._resources.num_concurrent:
            return None
        before = len(self._sweep.trials)
        running = {trial.number for trial in self._running.values()}
        trial = self._sweep.next_trial(self._resources.num_trials, running | self.failures.keys())
        for refused in self._sweep.trials[before:]:
            if refused.outcome is not None:
                self._report(f"{_title(refused)}: refused, {refused.reason}")
        if trial is None:
            return Searcher.FINISHED
        self._running[trial_id] = trial
        verb = "started" if len(self._sweep.trials) > before else "continues"
        self._report(f"{_title(trial)}: {verb} as {Path(trial.run).name}")
        return self._task(trial)

    def _task(self, trial: Trial) -> dict[str, Any]:
        """Return what an actor needs to run a trial."""
        processes = self._resources.num_processes
        arguments = ["train", str(self._sweep.trial_config(trial.number))]
        return {
            "arguments": arguments + (["--nproc", str(processes)] if processes > 1 else []),
            "run": str(Path(trial.run).absolute()),
            "output": str(self._sweep.trial_output(trial.number)),
            "working_directory": str(Path.cwd()),
            "environment": {name: os.environ.get(name) for name in _INHERITED},
        }

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        trial = self._running.pop(trial_id, None)
        if trial is None or self.must_stop:
            return
        result = result or {}
        exit_code, step, loss = (result.get(key) for key in ("exit_code", "step", "loss"))
        ended = None if error else self._sweep.end_trial(trial.number, exit_code, step, loss)
        self._num_failures_in_a_row = self._num_failures_in_a_row + 1 if ended is None else 0
        if ended is None:
            failure = self._trial_failure(trial, None if error else exit_code)
            self.failures[trial.number] = failure
            self._report(f"{_title(trial)}: failed. {failure.what}")
        else:
            at = "" if ended.loss is None else f", validation loss {ended.loss:.4f} after step {ended.step:,}"
            self._report(f"{_title(trial)}: {ended.outcome}{at}")

    def _trial_failure(self, trial: Trial, exit_code: int | None) -> VoroxError:
        """Return the error of a run as one of the sweep, with its exit code; ``None``: Ray lost its actor."""
        known = (inspect_run(Path(trial.run)).failure or {}) if exit_code is not None else {}
        what = f"Trial {trial.number} ended with exit code {exit_code}: "
        if exit_code is None:
            what = f"Ray lost trial {trial.number}; its messages are above"
        elif exit_code < 0:
            what += f"it was killed by {signal.Signals(-exit_code).name}"
        else:
            what += known.get("what") or "its output has the reason"
        failure = VoroxError(
            what, where=short_path(self._sweep.trial_output(trial.number)), saved="all ended trials",
            hint=f"{known.get('hint') or 'correct the cause'}; then run the same command again to continue",
        )  # fmt: skip
        failure.exit_code = exit_code if exit_code and exit_code > 0 else VoroxError.exit_code
        return failure

    def save(self, checkpoint_path: str) -> None:
        """Ray saves its searchers; the state of this one is the sweep on disk."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class _Stopper(tune.Stopper):
    """Ends the sweep after a signal, or when no further trial can run."""

    def __init__(self, search: _Search) -> None:
        self._search = search

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        del trial_id, result
        return False

    def stop_all(self) -> bool:
        return self._search.must_stop

    def __getstate__(self) -> dict[str, Any]:
        return {}


def _title(trial: Trial) -> str:
    settings = ", ".join(f"{key}={write_inline(value)}" for key, value in trial.settings.items())
    return f"Trial {trial.number} ({settings})"


def _percent(step: int, num_steps: int | None) -> float:
    return 100.0 if not num_steps else 100.0 * step / num_steps


def _asha_scheduler(asha: Asha, trials: Sequence[Trial]) -> Any:
    """Return a scheduler that knows the validations of earlier trials, in the order of their numbers."""
    grace_percent: Any = asha.grace_percent  # annotated as an integer, but any number works
    scheduler = ASHAScheduler(
        time_attr="percent", metric="loss", mode="min", max_t=100, stop_last_trials=False,
        grace_period=grace_percent, reduction_factor=asha.reduction_factor,
    )  # fmt: skip
    controller: Any = None
    for trial in sorted(trials, key=lambda trial: trial.number):
        if trial.outcome == "refused":
            continue
        stand_in: Any = SimpleNamespace(trial_id=f"earlier-{trial.number}")
        scheduler.on_trial_add(controller, stand_in)
        num_steps = recorded_length(Path(trial.run))
        for step, loss in eval_losses(Path(trial.run)).items():
            if trial.step is not None and step <= trial.step and math.isfinite(loss):
                result = {"percent": _percent(step, num_steps), "loss": loss}
                scheduler.on_trial_result(controller, stand_in, result)
    return scheduler


def _reserved(sweep: Sweep, resources: Resources) -> dict[str, float]:
    """Return what Ray reserves for a trial.

    Raises:
        ConfigError: The cluster has less.
    """
    available = ray.cluster_resources()
    needs_gpu = available.get("GPU", 0) > 0 and sweep.config.runtime.device != "cpu"
    wanted = {"CPU": resources.num_cpus, "GPU": resources.num_processes if needs_gpu else 0}
    for kind, count in wanted.items():
        if count > available.get(kind, 0):
            raise ConfigError(
                f"A trial needs {count} {kind}s, but Ray has {available.get(kind, 0):g}",
                where="--cpus" if kind == "CPU" else "--nproc", hint="choose fewer, or a larger cluster (RAY_ADDRESS)",
            )  # fmt: skip
    return {"cpu": wanted["CPU"], "gpu": wanted["GPU"]}


@contextmanager
def _quiet_ray() -> Generator[None]:
    """Keep Ray's own tables, logs of results, and advice out of the sweep."""
    os.environ.update(_RAY_VARIABLES)
    logger = logging.getLogger("ray.tune")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _stop_on_signals(search: _Search) -> Generator[None]:
    """Let the signals that stop a run stop the sweep; a second one ends the process."""

    def stop(number: int, _frame: object) -> None:
        search.stopped_by = signal.Signals(number).name
        for each, handler in previous.items():
            signal.signal(each, handler)

    previous: dict[int, Any] = {}
    for number in stop_signals():
        previous[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
