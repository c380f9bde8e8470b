"""A sweep on disk: its identity, its trials, and which trial runs next.

``<run.directory>/sweeps/NAME-<digest>/`` belongs to one configuration, search space, seed and early stopping, so the
same command finds the same sweep. The number of trials is not part of it: more trials continue the sweep. Each trial is
an ordinary run in ``run.directory``; ``trials/N.yaml`` is its configuration.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vorox.core.config import digest_values, dump_yaml, flat_values, model_label, slug
from vorox.core.config.yaml.reader import Json
from vorox.core.config.yaml.writer import write_scalar
from vorox.core.errors import ConfigError, DoesNotFitError, NumericalError
from vorox.core.files import atomic
from vorox.core.files.file_holder import FileLock
from vorox.core.redaction import redact_arguments
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.core.version import __version__
from vorox.records.run_context import expected_directory
from vorox.sweeps.search import suggest
from vorox.sweeps.search_space import Parameter, extreme_combinations, overrides_of
from vorox.sweeps.trial_log import Trial, TrialLog

SWEEP_FORMAT = "vorox-sweep/1"
_MAX_NAME_LENGTH = 60
ConfigLoader = Callable[[Sequence[str]], RunConfig]
"""Loads the configuration of the sweep with further overrides."""


@dataclass(frozen=True, slots=True)
class Asha:
    """Asynchronous successive halving (Li et al., arXiv 1810.05934): compare trials at shares of their length.

    Attributes:
        grace_percent: The first comparison, in percent of a trial's steps.
        reduction_factor: A trial continues if it is among the best 1/factor so far; the next comparison is at this
            multiple of the share.
    """

    grace_percent: float = 10.0
    reduction_factor: float = 3.0


@dataclass(frozen=True, slots=True)
class Resources:
    """What runs at a time.

    Attributes:
        num_trials: Length of the sweep.
        num_concurrent: Trials at a time.
        num_processes: Processes of a trial; each has a GPU, if Ray has GPUs and the device is not the CPU.
        num_cpus: CPUs that Ray reserves for a trial.
    """

    num_trials: int
    num_concurrent: int = 1
    num_processes: int = 1
    num_cpus: int = 1


class Sweep:
    """An open sweep.

    Args:
        space: The search space.
        load: Loads the configuration with further overrides.
        seed: Seed of the search.
        asha: Early stopping; ``None`` trains every trial to its end.
        name: Name of the sweep and prefix of its runs; default: that of the configuration.

    Raises:
        ConfigError: A combination of settings is invalid, or trials would have no validation losses to compare.

    Attributes:
        directory: Its directory, absolute.
        asha: Early stopping.
    """

    def __init__(
        self, space: Sequence[Parameter], load: ConfigLoader, *, seed: int, asha: Asha | None, name: str | None = None
    ) -> None:
        self._space, self._load, self._seed, self.asha = space, load, seed, asha
        self.config = load([])
        check_space(self.config, space, load, asha)
        readable = slug(name or f"{self.config.run.name or model_label(self.config)}-sweep")[:_MAX_NAME_LENGTH]
        self._record = {
            "format": SWEEP_FORMAT,
            "config_digest": _digest(self.config),
            "space": {parameter.key: str(parameter) for parameter in space},
            "seed": seed,
            "asha": None if asha is None else asdict(asha),
        }
        digest = hashlib.sha256(atomic.canonical_json(self._record)).hexdigest()
        self.directory = (Path(self.config.run.directory) / "sweeps" / f"{readable}-{digest[:8]}").absolute()
        self._run_name = f"{readable}-{digest[:4]}"  # another sweep never shares a run: its validation may differ
        self._log = TrialLog(self.directory / "trials.jsonl")

    @contextlib.contextmanager
    def opened(self, argv: Sequence[str]) -> Generator[None]:
        """Inside the block, this process runs the sweep. Creates it, or reads its trials.

        Args:
            argv: The command, recorded in ``sweep.json``.

        Raises:
            ConfigError: Another process runs it.
        """
        atomic.make_directory(self.directory / "trials")
        with FileLock(RunLayout(self.directory).lock, blocking=False, purpose=f"sweep {self.directory.name}"):
            record = {**self._record, "command": redact_arguments(argv), "version": __version__}
            atomic.write_file(self.directory / "sweep.json", atomic.pretty_json(record))
            self._log = TrialLog(self.directory / "trials.jsonl")
            yield

    @property
    def trials(self) -> Sequence[Trial]:
        """All trials by number."""
        return self._log.trials

    def is_complete(self, num_trials: int) -> bool:
        """Whether every trial has ended, and there is none left to start."""
        if any(trial.outcome is None for trial in self.trials):
            return False
        return len(self.trials) >= num_trials or suggest(self._space, self.trials, self._seed) is None

    def next_trial(self, num_trials: int, running: Collection[int]) -> Trial | None:
        """Return the trial to run next: an unfinished one, else a new one, recorded first; ``None`` if all are taken.

        Args:
            num_trials: Length of the sweep.
            running: Numbers of the trials that run.
        """
        for trial in self.trials:
            if trial.outcome is None and trial.number not in running:
                return trial
        while len(self.trials) < num_trials:
            settings = suggest(self._space, self.trials, self._seed)
            if settings is None:
                return None
            number = len(self.trials)
            name = f"run.name={write_scalar(f'{self._run_name}-{number:03d}')}"
            try:
                config = self._load([*overrides_of(settings), name])
            except ConfigError as error:  # the extremes are valid, but not everything between them
                self._log.start(settings, "")
                self._log.end(number, "refused", None, None, str(error))
                continue
            directory, _ = expected_directory(config, "auto")
            atomic.write_file(self.trial_config(number), dump_yaml(config).encode())
            return self._log.start(settings, str(directory))
        return None

    def trial_config(self, number: int) -> Path:
        """Return the path of a trial's configuration."""
        return self.directory / "trials" / f"{number:03d}.yaml"

    def trial_output(self, number: int) -> Path:
        """Return the path of what a trial's command has printed."""
        return self.directory / "trials" / f"{number:03d}.txt"

    def end_trial(self, number: int, exit_code: int | None, step: int | None, loss: float | None) -> Trial | None:
        """Record how a trial ended; ``None`` if that says nothing about its settings, and it has to run again.

        Args:
            number: The trial.
            exit_code: Of its run; ``None`` if it was stopped early.
            step: Step of its last validation.
            loss: Loss of its last validation.
        """
        is_finite = loss is not None and math.isfinite(loss)
        if exit_code == NumericalError.exit_code or (exit_code in (0, None) and not is_finite):
            return self._log.end(number, "diverged", step, None)
        if exit_code == DoesNotFitError.exit_code:
            return self._log.end(number, "refused", step, None, "does not fit into memory")
        if exit_code is not None and exit_code != 0:
            return None
        return self._log.end(number, "finished" if exit_code == 0 else "stopped", step, loss)

    def ranked(self) -> list[Trial]:
        """Return the ended trials, the best first: finished ones by loss, then those that trained longest."""
        order = {"finished": 0, "stopped": 1, "diverged": 2, "refused": 3}

        def rank(trial: Trial) -> tuple[float, ...]:
            assert trial.outcome is not None
            loss = math.inf if trial.loss is None else trial.loss
            reached = -(trial.step or 0) if trial.outcome == "stopped" else 0
            return order[trial.outcome], reached, loss, trial.number

        return sorted((trial for trial in self.trials if trial.outcome is not None), key=rank)


def compared_settings(config: RunConfig) -> dict[str, Json]:
    """Return the settings that decide the results of runs that are compared: those of a run, and of its validation."""
    validation = {key: value for key, value in flat_values(config).items() if key.startswith("eval.")}
    return {**digest_values(config), **validation}


def _digest(config: RunConfig) -> str:
    return hashlib.sha256(atomic.canonical_json(compared_settings(config))).hexdigest()


def check_space(config: RunConfig, space: Sequence[Parameter], load: ConfigLoader, asha: Asha | None) -> None:
    """Check a search space against the configuration.

    Raises:
        ConfigError: There is nothing to search or to compare, or a combination of extreme values is invalid.
    """
    keys = [parameter.key for parameter in space]
    if not keys:
        raise ConfigError(
            "No setting is searched", where="vorox tune",
            hint="give a distribution, as in 'optimizer.lr=loguniform(1e-4, 1e-2)', or a file with --space",
        )  # fmt: skip
    repeated = next((key for key in keys if keys.count(key) > 1), None)
    if repeated is not None:
        raise ConfigError(f"{repeated} has two distributions", where=repeated, hint="remove one of them")
    if not config.eval.at_end:
        raise ConfigError(
            "Trials are compared by the validation loss at their end", where="eval.at_end", hint="set eval.at_end=true"
        )
    if asha is not None and config.eval.every_steps is None:
        raise ConfigError(
            "ASHA compares trials during training, but eval.every_steps=null validates only at the end",
            where="eval.every_steps", hint="set eval.every_steps, or add --no-asha",
        )  # fmt: skip
    for settings in extreme_combinations(space):
        load(overrides_of(settings))
