"""Disk space that a run needs for caches and checkpoints, compared with the free space."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vorox.cli import humanize

if TYPE_CHECKING:
    from vorox.core.schema import RunConfig
    from vorox.models.spec import ModelSpec


def disk_lines(
    config: RunConfig, spec: ModelSpec, *, total_steps: int, new_tokens: float, directory: Path, cache_root: Path
) -> Iterator[str]:
    """Yield the lines of a dry run about the disk.

    Args:
        config: The configuration of the run.
        spec: Its model.
        total_steps: Its length.
        new_tokens: Tokens of the caches that are still to be built.
        directory: The run directory.
        cache_root: Root of the caches.

    Raises:
        DoesNotFitError: The free space is not sufficient.
    """
    from vorox.core.errors import DoesNotFitError
    from vorox.training.checkpoints.store import step_directories
    from vorox.training.disk_space import checkpoint_space, free_bytes, too_little_space

    steps = step_directories(directory)
    done_steps = min(total_steps, max(steps, default=0))
    room = checkpoint_space(config, spec, total_steps, done_steps=done_steps, present=len(steps))
    cache_bytes = round(new_tokens * (2 if spec.vocab_size <= 1 << 16 else 4))
    free, cache_free = free_bytes(directory), free_bytes(cache_root)
    is_shared = _device(directory) == _device(cache_root)
    yield (
        f"disk           checkpoints: at most {room.most:,} x {humanize.size(room.checkpoint_bytes)}, "
        f"{humanize.size(room.needed_bytes)} needed; {humanize.size(free)} free"
    )
    if cache_bytes:
        elsewhere = "" if is_shared else f"; {humanize.size(cache_free)} free"
        yield f"               caches: about {humanize.size(cache_bytes)} needed in {cache_root}{elsewhere}"
    if free < room.needed_bytes:
        raise too_little_space(room, free, directory)
    needed = cache_bytes + (room.needed_bytes if is_shared else 0)
    if cache_free < needed:
        raise DoesNotFitError(
            f"Not enough disk space for the caches: about {cache_bytes:,} bytes are needed"
            + (f" in addition to {room.needed_bytes:,} bytes of checkpoints" if is_shared else "")
            + f", {cache_free:,} are free",
            where=str(cache_root),
            hint="free some space, set data.cache.directory to another disk, or train with data.mode=streaming",
        )


def _device(path: Path) -> int:
    path = path.absolute()
    return next(existing for existing in (path, *path.parents) if existing.exists()).stat().st_dev
