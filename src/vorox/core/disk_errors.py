"""What a disk that refuses, or a machine without free memory, means to a person: an error with a remedy, no crash."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Generator
from pathlib import Path

from vorox.core.atomic import is_disk_full
from vorox.core.errors import CheckpointError, DoesNotFitError

_CHECK = "check the disk or the network share, or use another disk"
_FAILING = {
    **dict.fromkeys((errno.EIO, errno.ESTALE), _CHECK),
    errno.EROFS: "mount the file system so that it can be written, or use another one",
}


def room_text(needed_bytes: int, directory: Path, error: OSError) -> str:
    """What was needed and what is free, in numbers that do not contradict each other.

    More may be free now than was needed: the unfinished file is removed by then, and a quota or a limit on the size of
    files refuses before the disk is full.
    """
    existing = next(place for place in (directory, *directory.parents) if place.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        return f"{needed_bytes:,} bytes are needed, {free_bytes:,} are free"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return (
        f"a write was refused ({reason}) with about {needed_bytes:,} bytes to go; {free_bytes:,} are free now that "
        "what was unfinished is removed, so a quota, a limit or another program takes the rest"
    )


def disk_error(error: OSError, place: str) -> CheckpointError | None:
    """Return the error to show for a failing, full or read-only disk; ``None`` for any other error.

    Args:
        error: The system's error.
        place: Where it happened, if the error does not name a file.
    """
    where = str(error.filename or place)
    if is_disk_full(error):
        hint = f"make room on the file system of {where}, then run the same command again"
    elif error.errno in _FAILING:
        hint = f"{_FAILING[error.errno]}; then run the same command again"
    else:
        return None
    return CheckpointError(f"the disk refuses: {os.strerror(error.errno or 0)}", where=where, hint=hint)


def memory_error(error: MemoryError) -> DoesNotFitError:
    """The error to show where the machine has no memory left, outside of the engine, which knows more."""
    import psutil

    memory, reason = psutil.virtual_memory(), f" ({error})" if str(error) else ""
    return DoesNotFitError(
        f"out of memory on this machine{reason}: {memory.available / 2**30:,.2f} of {memory.total / 2**30:,.2f} GiB "
        "are free now, and a limit on this process may be lower",
        where="memory of the machine",
        hint="lower train.micro_batch_sequences or data.loader.prefetch_batches, or set checkpoint.asynchronous=false, "
        "which copies no state; then run the same command again",
    )


@contextlib.contextmanager
def explained_machine_errors(place: Path) -> Generator[None]:
    """Turn errors of disk and memory that nothing inside has dealt with into errors for a person.

    Raises:
        CheckpointError: The disk is full, failing or read-only, or a file may not be read or written.
        DoesNotFitError: The machine has no memory left.
    """
    try:
        yield
    except MemoryError as error:
        raise memory_error(error) from error
    except OSError as error:
        explained = disk_error(error, str(place)) or _permission_error(error, str(place))
        if explained is None:
            raise
        raise explained from error


def _permission_error(error: OSError, place: str) -> CheckpointError | None:
    if error.errno not in (errno.EACCES, errno.EPERM):
        return None
    where = str(error.filename or place)
    return CheckpointError(
        f"a file cannot be read or written: {os.strerror(error.errno)}", where=where,
        hint=f"give this user permission to read and write {where}; then run the same command again",
    )  # fmt: skip
