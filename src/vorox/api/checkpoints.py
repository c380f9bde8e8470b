"""The checkpoint that a name means, for every command that takes one: of a run, of a step, or of derived weights.

In: a run by name or path, ``RUN@STEP``, the path of a checkpoint, or of averaged, pruned or materialised weights. Out:
the checkpoint, verified, with its run and configuration. A step that no checkpoint was kept of is computed again.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from vorox.core.config import config_from_record, config_values, load_config
from vorox.core.errors import ConfigError
from vorox.core.files.atomic import MANIFEST_NAME
from vorox.core.files.staged_directory import read_manifest
from vorox.core.run_layout import run_of_checkpoint
from vorox.core.schema import RunConfig
from vorox.records.run_context import recorded_config
from vorox.records.run_lookup import find_run, is_run, run_argument, split_step
from vorox.run import states_of_run
from vorox.training.checkpoints.store import Checkpoint, latest_valid, verify
from vorox.training.export.derived import is_derived, recorded_run
from vorox.training.materialize import StateNotices, cost_line
from vorox.training.re_execution import ReExecution


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A verified checkpoint, and where it is from.

    Attributes:
        checkpoint: The checkpoint.
        run: Its run; ``None`` for derived weights.
    """

    checkpoint: Checkpoint
    run: Path | None

    @property
    def is_kept(self) -> bool:
        """Whether its run keeps it; others are derived from checkpoints, or computed again."""
        return self.run is not None and run_of_checkpoint(self.checkpoint.path) is not None

    @property
    def data_run(self) -> Path | None:
        """The run on whose data it was trained; ``None`` if that is not where it was."""
        return self.run or recorded_run(self.checkpoint)

    def config(self, overrides: Sequence[str] = ()) -> RunConfig:
        """Return the configuration of its run, under overrides."""
        if self.run is not None:
            return recorded_config(self.run, overrides)
        config = config_from_record(self.checkpoint.metadata["settings"])  # ``verify`` has marked the functions
        return load_config(config_values(config), overrides) if overrides else config


class WarningNotices(StateNotices):
    """Reports by Python's warnings."""

    def corrupt(self, path: Path, error: Exception) -> None:
        warnings.warn(f"Skipping corrupt checkpoint {path.name}: {error}", stacklevel=4)

    def computes(self, execution: ReExecution, steps: Collection[int]) -> None:
        warnings.warn(cost_line(execution, steps), stacklevel=4)


def find_checkpoint(name: str, step: int | None, root: str | Path, notices: StateNotices) -> FoundCheckpoint:
    """Return the checkpoint that a name means.

    Args:
        name: A run, ``RUN@STEP``, or the path of a checkpoint or of derived weights.
        step: Its step, unless the name has it. ``None``: the newest valid checkpoint.
        root: Parent directory of runs.
        notices: Gets corrupt checkpoints that are skipped, and what is computed again.

    Raises:
        ConfigError: There is no such run, checkpoint or step.
        CheckpointError: The checkpoint is corrupt.
        VoroxError: As ``states_after``.
    """
    name, step = split_step(root, name, step)
    if holds_derived(name):
        if step is not None:
            raise ConfigError("The weights in this directory are of one step", where=name, hint="leave the step out")
        return FoundCheckpoint(verify(Path(name)), None)
    path = _checkpoint_named(name)
    if path is not None and step is None:
        return FoundCheckpoint(verify(path), path.parent.parent)
    directory = find_run(root, name) if path is None else path.parent.parent
    if step is not None:
        return FoundCheckpoint(states_of_run(directory, [step], notices)[step], directory)
    found = latest_valid(directory, on_corrupt=notices.corrupt)
    if found is None:
        raise ConfigError(
            f"Run {directory.name} has no checkpoint yet", where=str(directory),
            hint=f"while it trains, request one with `vorox checkpoints save {run_argument(directory)}`",
        )  # fmt: skip
    return FoundCheckpoint(found, directory)


def holds_derived(name: str) -> bool:
    """Whether a path is that of averaged, pruned or materialised weights, by its manifest."""
    path = Path(name)
    return (path / MANIFEST_NAME).is_file() and is_derived(read_manifest(path)["metadata"])


def _checkpoint_named(name: str) -> Path | None:
    """Return the path of a checkpoint directory in a run; ``None`` if ``name`` is not one."""
    path = Path(name)
    directory = run_of_checkpoint(path)
    return path if directory is not None and path.is_dir() and is_run(directory) else None
