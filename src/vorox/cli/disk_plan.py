"""What a run will take on disk: caches still to be built and checkpoints, against what is free."""

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
    """The lines of a dry run about the disk.

    Args:
        config: The run.
        spec: Its model.
        total_steps: Its length.
        new_tokens: Tokens of the caches that are still to be built.
        directory: Where the run lies or will lie.
        cache_root: Root of the caches.

    Raises:
        DoesNotFitError: Less is free than is needed.
    """
    from vorox.core.errors import DoesNotFitError
    from vorox.training.checkpoint_store import step_directories
    from vorox.training.disk_room import checkpoint_room, free_bytes, too_little_room

    steps = step_directories(directory)
    done_steps = min(total_steps, max(steps, default=0))
    room = checkpoint_room(config, spec, total_steps, done_steps=done_steps, present=len(steps))
    cache_bytes = round(new_tokens * (2 if spec.vocab_size <= 1 << 16 else 4))
    free, cache_free = free_bytes(directory), free_bytes(cache_root)
    is_shared = _device(directory) == _device(cache_root)
    yield (
        f"disk           checkpoints {room.most:,} x {humanize.size(room.checkpoint_bytes)} at once, "
        f"{humanize.size(room.needed_bytes)} to come; {humanize.size(free)} free"
    )
    if cache_bytes:
        at = "" if is_shared else f"; {humanize.size(cache_free)} free"
        yield f"               caches about {humanize.size(cache_bytes)} to come in {cache_root}{at}"
    if free < room.needed_bytes:
        raise too_little_room(room, free, directory)
    needed = cache_bytes + (room.needed_bytes if is_shared else 0)
    if cache_free < needed:
        raise DoesNotFitError(
            f"no room for the caches: about {cache_bytes:,} bytes are to be built"
            + (f" beside {room.needed_bytes:,} bytes of checkpoints" if is_shared else "")
            + f", {cache_free:,} are free",
            where=str(cache_root),
            hint="free some space, set data.cache.directory to another disk, or train with data.mode=streaming",
        )


def _device(path: Path) -> int:
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists()).stat().st_dev
