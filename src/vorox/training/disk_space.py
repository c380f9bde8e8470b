"""How much disk the checkpoints of a run take, known before its first step.

In: the model, the configuration, the length of the run, and what its directory holds by now. Out: the size of a
checkpoint, how many lie on the disk at once (what retention keeps, and the one that is being written), and whether what
they need more is free.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from vorox.core.errors import DoesNotFitError
from vorox.core.schema import RunConfig
from vorox.models.memory_estimate import planned_memory
from vorox.models.spec import ModelSpec
from vorox.training.checkpoint_store import step_directories

_DESCRIPTION_BYTES = 16 << 10
_BYTES_PER_ARRAY = 256
"""What surrounds the arrays: manifest and state; names and shapes of each."""


@dataclass(frozen=True, slots=True)
class CheckpointSpace:
    """What the checkpoints of a run take.

    Attributes:
        checkpoint_bytes: One of them: weights and optimizer state.
        most: That lie on the disk at once.
        present: That lie there already.
    """

    checkpoint_bytes: int
    most: int
    present: int

    @property
    def total_bytes(self) -> int:
        """All that lie on the disk at once."""
        return self.most * self.checkpoint_bytes

    @property
    def needed_bytes(self) -> int:
        """What has to be free now."""
        return max(0, self.most - self.present) * self.checkpoint_bytes


def checkpoint_space(
    config: RunConfig, spec: ModelSpec, total_steps: int, *, done_steps: int = 0, present: int = 0
) -> CheckpointSpace:
    """What the checkpoints of a run take.

    Args:
        config: What is saved when, and what is kept.
        spec: The model.
        total_steps: Length of the run.
        done_steps: Steps finished.
        present: Checkpoints that lie there already.
    """
    memory = planned_memory(spec, config)
    size_bytes = memory.parameter_bytes + memory.optimizer_bytes
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
    """Refuse a run whose checkpoints have no room where it lies.

    Raises:
        DoesNotFitError: Less is free than they need.
    """
    present = len(step_directories(directory))
    room = checkpoint_space(config, spec, total_steps, done_steps=done_steps, present=present)
    free = free_bytes(directory)
    if free < room.needed_bytes:
        raise too_little_space(room, free, directory)


def too_little_space(room: CheckpointSpace, free: int, directory: Path) -> DoesNotFitError:
    """What to say when less is free than the checkpoints of a run need."""
    return DoesNotFitError(
        f"no room for the checkpoints: up to {room.most:,} at once of {room.checkpoint_bytes:,} bytes each need "
        f"{room.needed_bytes:,} bytes more, {free:,} are free",
        where=str(directory),
        hint="free some space, keep fewer (checkpoint.keep_last, checkpoint.keep_best, checkpoint.keep_every_steps), "
        "or set run.directory to another disk",
    )


def free_bytes(path: Path) -> int:
    """What this user may still write to the file system that a path lies or will lie on."""
    path = path.absolute()
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free
