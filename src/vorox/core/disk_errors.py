"""Translate disk and memory errors to ``VoroxError``s with hints."""

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
    """Describe the needed and the free space consistently.

    More may be free now than was needed: the partial file has been removed, and a quota or file size limit fails before
    the disk is full.
    """
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        return f"{needed_bytes:,} bytes are needed, {free_bytes:,} are free"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return (
        f"a write was refused ({reason}) with about {needed_bytes:,} bytes remaining; {free_bytes:,} are free now that "
        "the partial file is removed, so a quota, a limit or another program is the cause"
    )


def disk_error(error: OSError, default_path: str) -> CheckpointError | None:
    """Return the error to show for a failing, full or read-only disk; ``None`` for any other error.

    Args:
        error: The system's error.
        default_path: The path, if the error does not name a file.
    """
    where = str(error.filename or default_path)
    if is_disk_full(error):
        hint = f"free space on the file system of {where}, then run the same command again"
    elif error.errno in _FAILING:
        hint = f"{_FAILING[error.errno]}; then run the same command again"
    else:
        return None
    return CheckpointError(f"Disk error: {os.strerror(error.errno or 0)}", where=where, hint=hint)


def memory_error(error: MemoryError) -> DoesNotFitError:
    """Return the error for exhausted host memory outside the engine, which reports its own."""
    import psutil

    memory, reason = psutil.virtual_memory(), f" ({error})" if str(error) else ""
    return DoesNotFitError(
        f"Out of memory on this machine{reason}: {memory.available / 2**30:,.2f} of {memory.total / 2**30:,.2f} GiB "
        "are free now; this process may have a lower limit",
        where="host memory",
        hint="lower train.micro_batch_sequences or data.loader.prefetch_batches, or set checkpoint.asynchronous=false "
        "to avoid the copy of the state; then run the same command again",
    )


@contextlib.contextmanager
def translate_machine_errors(default_path: Path) -> Generator[None]:
    """Translate unhandled errors of disk and memory to errors with a hint.

    Raises:
        CheckpointError: The disk is full, failing or read-only, or permission is denied.
        DoesNotFitError: The machine is out of memory.
    """
    try:
        yield
    except MemoryError as error:
        raise memory_error(error) from error
    except OSError as error:
        explained = disk_error(error, str(default_path)) or _permission_error(error, str(default_path))
        if explained is None:
            raise
        raise explained from error


def _permission_error(error: OSError, default_path: str) -> CheckpointError | None:
    if error.errno not in (errno.EACCES, errno.EPERM):
        return None
    where = str(error.filename or default_path)
    return CheckpointError(
        f"File cannot be read or written: {os.strerror(error.errno)}", where=where,
        hint=f"give this user permission to read and write {where}; then run the same command again",
    )  # fmt: skip
