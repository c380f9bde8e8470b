"""A job: the run that a scheduler starts, its machines, and the time that it needs to save.

A command line goes in. A ``Job`` comes out, which each scheduler's module turns into a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vorox.cli.terminal import humanize
from vorox.core.config import model_label, slug
from vorox.core.errors import ConfigError, Preempted
from vorox.core.redaction import redact_arguments
from vorox.core.schema import RunConfig
from vorox.planned_run import planned_model
from vorox.planning.disk_space import checkpoint_bytes
from vorox.records.run_context import run_id
from vorox.records.run_lookup import latest_run
from vorox.training.checkpoints.preemption_notice import MeasuredTimes

SAVED_EXIT_CODE = Preempted.exit_code
"""The run saved and stopped on request: start it again, as often as it happens."""
PORT = 29500
START_TIMEOUT_SECONDS = 1800
"""Time that the machines of a restarted job may take to arrive; Kubernetes delays restarts by up to six minutes."""
_ASSUMED_BYTES_PER_SECOND = 200e6
_ASSUMED_STEP_SECONDS = 60.0
_SPARE_SECONDS = 60.0
_UNKNOWN_SAVE_SECONDS = 300.0
_NAME_CHARACTERS = 50
"""Kubernetes allows 63 for the name of a pod, which has the number of the machine as a suffix."""


@dataclass(frozen=True, slots=True)
class Notice:
    """The time between a scheduler's SIGTERM and its SIGKILL.

    Attributes:
        seconds: The time.
        reason: How it was computed, for a comment.
    """

    seconds: int
    reason: str


@dataclass(frozen=True, slots=True)
class Job:
    """A run, as a scheduler starts it.

    Attributes:
        config: Its configuration.
        source: The configuration's name in the command; empty if the command has only settings.
        settings: The settings of the command.
        num_nodes: Number of machines.
        devices_per_node: Devices of each; every device has one rank.
        cpus_per_node: CPUs of each.
        max_restarts: Restarts after crashes; restarts after a stop on request are not counted.
        shared: Directory on shared storage for runs and caches; empty: as configured.
        secrets: Environment variables whose values the scheduler must provide.
        notice: Time for a save.
    """

    config: RunConfig
    source: str
    settings: tuple[str, ...]
    num_nodes: int
    devices_per_node: int
    cpus_per_node: int
    max_restarts: int
    shared: str
    secrets: tuple[str, ...]
    notice: Notice

    @property
    def name(self) -> str:
        """A DNS label for the job and its service, from the run's name."""
        text = slug(self.config.run.name or model_label(self.config)).lower()
        label = re.sub(r"[^a-z0-9]+", "-", text)[:_NAME_CHARACTERS].strip("-")
        return label if label[:1].isalpha() else f"run-{label}".rstrip("-")

    @property
    def uses_gpus(self) -> bool:
        """Whether the scheduler must provide GPUs."""
        return self.config.runtime.device in {"auto", "cuda"}

    def command(self, source: str | None = None) -> list[str]:
        """Return the command of each machine.

        Args:
            source: The configuration, if it is somewhere else in the job.
        """
        words = ["vorox", "train", *([self.source] if self.source else []), *self.settings]
        if source is not None:
            words = ["vorox", "train", source]
        return words if self.devices_per_node == 1 else [*words, "--nproc", str(self.devices_per_node)]


def shared_settings(shared: str) -> list[str]:
    """Return the settings that place runs and caches in a directory."""
    return [f"run.directory={shared}/runs", f"data.cache.directory={shared}/cache"] if shared else []


def check_devices(config: RunConfig, num_devices: int) -> None:
    """Check that the sizes of ``parallel`` fit the devices of a job.

    Raises:
        ConfigError: They do not.
    """
    least = config.parallel.num_devices
    if num_devices % least or (config.parallel.data_parallel_size != "auto" and num_devices != least):
        raise ConfigError(
            f"The job has {num_devices:,} devices; the sizes of parallel need {least:,}", where="--nodes, --devices",
            hint="change --nodes or --devices, or set parallel.data_parallel_size=auto and a parallel.fsdp_size that "
            "divides them",
        )  # fmt: skip


def check_shared(config: RunConfig) -> None:
    """Check that the run directory is outside of the machines' own folders.

    Raises:
        ConfigError: It is a relative path.
    """
    if not config.run.directory.startswith("/"):
        raise ConfigError(
            f"Run directory {config.run.directory} is in a folder that each machine has for itself", where="--shared",
            hint="add --shared DIRECTORY, on storage that all machines share",
        )  # fmt: skip


def check_secrets(arguments: Sequence[str], secrets: Sequence[str]) -> None:
    """Check that no secret would be written into the job file.

    Raises:
        ConfigError: The command contains one, or ``--secret`` has a value instead of a name.
    """
    for word, redacted in zip(arguments, redact_arguments(arguments), strict=True):
        if word != redacted:
            raise ConfigError(
                "The command contains a password or token, which would be written into the job file", where=redacted,
                hint="put it into an environment variable, and name that variable with the option --secret",
            )  # fmt: skip
    for name in secrets:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(
                "--secret takes the name of an environment variable, not its value", where="--secret",
                hint="name a variable, such as HF_TOKEN",
            )  # fmt: skip


def estimate_notice(config: RunConfig) -> Notice:
    """Estimate the time that a run needs from SIGTERM to its end: the rest of a step, and two writes.

    Two, because the write of an earlier checkpoint may just have started. Measured by the newest run of the
    configuration if there is one, else estimated from the size of a checkpoint.
    """
    step_seconds, save_seconds = _measured(config)
    if save_seconds is not None:
        reason = f"measured: a save takes {humanize.duration(save_seconds)}"
    elif (size_bytes := _checkpoint_bytes(config)) is not None:
        save_seconds = size_bytes / _ASSUMED_BYTES_PER_SECOND
        reason = f"estimated: {humanize.size(size_bytes)} for each checkpoint, written at an assumed 200 MB/s"
    else:
        save_seconds, reason = _UNKNOWN_SAVE_SECONDS, "assumed: the size of a checkpoint is not known in advance"
    known_step = _ASSUMED_STEP_SECONDS if step_seconds is None else step_seconds
    seconds = known_step + 2 * save_seconds + _SPARE_SECONDS
    return Notice(math.ceil(seconds / 60) * 60, f"{reason}; twice that, a step and a minute")


def _measured(config: RunConfig) -> tuple[float | None, float | None]:
    """Return the longest step and save of the newest run of a configuration, in seconds."""
    directory = latest_run(Path(config.run.directory), run_id(config))
    times = MeasuredTimes() if directory is None else MeasuredTimes.of_run(directory)
    return times.step_seconds, times.save_seconds


def _checkpoint_bytes(config: RunConfig) -> int | None:
    try:
        return checkpoint_bytes(config, planned_model(config))
    except ConfigError:  # the vocabulary needs the text
        return None
