"""Disk space for the checkpoints of a run, computed before its first step.

In: the model, the configuration, the length of the run and the checkpoints it has. Out: the size of a checkpoint, the
largest number on disk at any time (those that retention keeps, and the one being written), and whether there is space.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from vorox.core.errors import DoesNotFitError
from vorox.core.schema import RunConfig
from vorox.models.memory_estimate import undivided_memory
from vorox.models.spec import ModelSpec
from vorox.training.checkpoints.store import step_directories

_DESCRIPTION_BYTES = 16 << 10
_BYTES_PER_ARRAY = 256
"""Overhead: manifest and state per checkpoint; name and shape per array."""


@dataclass(frozen=True, slots=True)
class CheckpointSpace:
    """The disk space that the checkpoints of a run need.

    Attributes:
        checkpoint_bytes: Size of one: weights and optimizer state.
        most: Largest number on disk at any time.
        present: Number already on disk.
    """

    checkpoint_bytes: int
    most: int
    present: int

    @property
    def total_bytes(self) -> int:
        """Size of the largest number on disk at any time."""
        return self.most * self.checkpoint_bytes

    @property
    def needed_bytes(self) -> int:
        """Space that must be free now."""
        return max(0, self.most - self.present) * self.checkpoint_bytes


def checkpoint_space(
    config: RunConfig, spec: ModelSpec, total_steps: int, *, done_steps: int = 0, present: int = 0
) -> CheckpointSpace:
    """Compute the disk space that the checkpoints of a run need.

    Args:
        config: The configuration; it has the save schedule and retention.
        spec: The model.
        total_steps: Length of the run.
        done_steps: Finished steps.
        present: Checkpoints already on disk.
    """
    memory = undivided_memory(spec, config)
    size_bytes = memory.parameter_bytes + memory.saved_moment_bytes
    size_bytes += _DESCRIPTION_BYTES + 3 * _BYTES_PER_ARRAY * len(spec.parameters)
    rules = config.checkpoint
    kept = rules.keep_last + rules.keep_best
    if rules.keep_every_steps is not None:
        kept += total_steps // rules.keep_every_steps
    saves = total_steps - done_steps
    if rules.every_seconds is None:
        every = rules.every_steps
        saves = 0 if every is None else total_steps // every - done_steps // every
        saves += int(rules.at_end and done_steps < total_steps and (every is None or total_steps % every > 0))
    return CheckpointSpace(size_bytes, max(present, min(present + saves, kept + 1)), present)


def check_disk_space(directory: Path, config: RunConfig, spec: ModelSpec, total_steps: int, done_steps: int) -> None:
    """Check that the file system of a run has space for its checkpoints.

    Raises:
        DoesNotFitError: It has not.
    """
    present = len(step_directories(directory))
    space = checkpoint_space(config, spec, total_steps, done_steps=done_steps, present=present)
    free = free_bytes(directory)
    if free < space.needed_bytes:
        raise too_little_space(space, free, directory)


def too_little_space(space: CheckpointSpace, free: int, directory: Path) -> DoesNotFitError:
    """Return the error for too little disk space."""
    return DoesNotFitError(
        f"Not enough disk space for checkpoints: up to {space.most:,} of {space.checkpoint_bytes:,} bytes each need "
        f"{space.needed_bytes:,} bytes more, {free:,} are free",
        where=str(directory),
        hint="free some space, keep fewer (checkpoint.keep_last, checkpoint.keep_best, checkpoint.keep_every_steps), "
        "or set run.directory to another disk",
    )


def free_bytes(path: Path) -> int:
    """Return the free space of the file system of an existing or future path, in bytes."""
    path = path.absolute()
    return shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.exists())).free
