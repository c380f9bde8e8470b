"""Disk space for the checkpoints and caches of a run, computed before its first step.

In: the model, the configuration, the length of the run, the checkpoints it has and the tokens to be cached. Out: the
size of a checkpoint, the largest number on disk at any time (those that retention keeps, and the one being written),
the size of the caches, and whether there is space.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from vorox.core.errors import DoesNotFitError
from vorox.core.platform.environment import existing_parent, free_disk_bytes
from vorox.core.schema import CheckpointConfig, RunConfig
from vorox.data.images.layout import image_layout
from vorox.data.recipe import stored_token_bytes
from vorox.models.spec import ModelSpec
from vorox.planning.memory_estimate import checkpoint_state_bytes
from vorox.records.step_environments import StepEnvironments

_AUTO_SECONDS = 900.0
"""Most training time that a kill costs a run without ``checkpoint.every_steps``."""
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


def checkpoint_bytes(config: RunConfig, spec: ModelSpec) -> int:
    """Return the size of a checkpoint: weights and optimizer state, with what describes them."""
    description_bytes = _DESCRIPTION_BYTES + 3 * _BYTES_PER_ARRAY * len(spec.parameters)
    return checkpoint_state_bytes(spec, config) + description_bytes


def checkpoint_space(
    config: RunConfig,
    spec: ModelSpec,
    total_steps: int,
    *,
    done_steps: int = 0,
    present: int = 0,
    kept_for_replay: int = 0,
) -> CheckpointSpace:
    """Compute the disk space that the checkpoints of a run need.

    Args:
        config: The configuration; it has the save schedule and retention.
        spec: The model.
        total_steps: Length of the run.
        done_steps: Finished steps.
        present: Checkpoints already on disk.
        kept_for_replay: Those kept because the environment changed there.
    """
    rules = config.checkpoint
    kept = rules.keep_last + rules.keep_best + kept_for_replay
    if rules.keep_every_steps is not None:
        kept += total_steps // rules.keep_every_steps
    saves = total_steps - done_steps
    if save_interval_seconds(rules) is None:
        every = rules.every_steps
        saves = 0 if every is None else total_steps // every - done_steps // every
        saves += int(rules.at_end and done_steps < total_steps and (every is None or total_steps % every > 0))
    return CheckpointSpace(checkpoint_bytes(config, spec), max(present, min(present + saves, kept + 1)), present)


def save_interval_seconds(rules: CheckpointConfig) -> float | None:
    """Return the time between checkpoints; ``None`` if none is saved by time."""
    if rules.every_seconds == "auto":
        return _AUTO_SECONDS if rules.every_steps is None else None
    return rules.every_seconds


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """The disk space that a run still needs, and what is free.

    Attributes:
        checkpoints: The checkpoints.
        directory: The run directory.
        free_bytes: Free space there.
        cache_bytes: Size of the caches that are still to be built.
        cache_root: Root of the caches.
        cache_free_bytes: Free space there.
        is_shared: Whether both are on one file system.
        rules: The save schedule and retention.
    """

    checkpoints: CheckpointSpace
    directory: Path
    free_bytes: int
    cache_bytes: int
    cache_root: Path
    cache_free_bytes: int
    is_shared: bool
    rules: CheckpointConfig

    def check(self) -> None:
        """Check that the free space suffices.

        Raises:
            DoesNotFitError: It does not.
        """
        checkpoints = self.checkpoints
        if self.free_bytes < checkpoints.needed_bytes:
            every = self.rules.every_steps
            less_often = "checkpoint.every_seconds=null: only at the end"
            less_often = less_often if every is None else f"checkpoint.every_steps={2 * every}"
            raise DoesNotFitError(
                f"Not enough disk space for checkpoints: up to {checkpoints.most:,} of "
                f"{checkpoints.checkpoint_bytes:,} bytes each need {checkpoints.needed_bytes:,} bytes more, "
                f"{self.free_bytes:,} are free",
                where=str(self.directory),
                hint="free some space, keep fewer (checkpoint.keep_last, checkpoint.keep_best, "
                f"checkpoint.keep_every_steps), save less often ({less_often}), or set run.directory to another disk",
            )
        beside = checkpoints.needed_bytes if self.is_shared else 0
        if self.cache_free_bytes < self.cache_bytes + beside:
            raise DoesNotFitError(
                f"Not enough disk space for the caches: about {self.cache_bytes:,} bytes are needed"
                + (f" in addition to {beside:,} bytes of checkpoints" if self.is_shared else "")
                + f", {self.cache_free_bytes:,} are free",
                where=str(self.cache_root),
                hint="free some space, set data.cache.directory to another disk, or train with data.mode=streaming",
            )


def plan_disk(
    config: RunConfig,
    spec: ModelSpec,
    directory: Path,
    present_steps: Collection[int],
    *,
    total_steps: int,
    done_steps: int,
    cache_root: Path | None = None,
    new_tokens: float = 0.0,
) -> DiskPlan:
    """Return the disk space that a run still needs, with the free space of its disks.

    Args:
        config: The configuration of the run.
        spec: Its model.
        directory: The run directory.
        present_steps: Steps of the checkpoints in it.
        total_steps: Length of the run.
        done_steps: Finished steps.
        cache_root: Root of the caches; ``None``: none are to be built.
        new_tokens: Tokens of the caches that are still to be built.
    """
    cache_root = cache_root or directory
    checkpoints = checkpoint_space(
        config,
        spec,
        total_steps,
        done_steps=done_steps,
        present=len(present_steps),
        kept_for_replay=len(StepEnvironments.of_run(directory).changes),
    )
    return DiskPlan(
        checkpoints=checkpoints,
        directory=directory,
        free_bytes=free_disk_bytes(directory),
        cache_bytes=round(new_tokens * stored_token_bytes(spec.vocab_size, image_layout(config.model))),
        cache_root=cache_root,
        cache_free_bytes=free_disk_bytes(cache_root),
        is_shared=existing_parent(directory).stat().st_dev == existing_parent(cache_root).stat().st_dev,
        rules=config.checkpoint,
    )
