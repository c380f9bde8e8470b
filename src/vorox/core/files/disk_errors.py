"""Translate disk and memory errors to ``VoroxError``s with hints."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator
from pathlib import Path

from vorox.core.errors import CheckpointError, DoesNotFitError
from vorox.core.files.atomic import is_disk_full
from vorox.core.files.failing_disk import is_failing
from vorox.core.platform.environment import free_disk_bytes

_CHECK = "check the disk or the network share, or use another disk"
_MOUNT = "mount the file system so that it can be written, or use another one"


def room_text(needed_bytes: int, directory: Path, error: OSError) -> str:
    """Describe the needed and the free space consistently.

    More may be free now than was needed: the partial file has been removed, and a quota or file size limit fails before
    the disk is full.
    """
    free_bytes = free_disk_bytes(directory)
    if free_bytes < needed_bytes:
        return f"{needed_bytes:,} bytes are needed, {free_bytes:,} are free"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return (
        f"a write was refused ({reason}) with about {needed_bytes:,} bytes remaining; {free_bytes:,} are free now that "
        "the partial file is removed, so a quota, a limit or another program is the cause"
    )


def read_hint(error: OSError) -> str | None:
    """Return what to do about a file that cannot be opened though nothing is wrong with it; ``None`` otherwise."""
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return "raise the limit on open files (ulimit -n 65536), then run the same command again"
    if error.errno == errno.ENOMEM:
        return "free some memory, then run the same command again"
    return f"{_CHECK}; then run the same command again" if is_failing(error) else None


def exhausts_memory(error: BaseException) -> bool:
    """Whether an error means that the operating system gave no more memory, also while a library is loaded."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error)
    is_refused = "Operation not permitted" in text or "static TLS" in text  # a mount without exec; a loader's limit
    return isinstance(error, MemoryError) or (
        isinstance(error, ImportError)
        and not is_refused
        and ("failed to map segment from shared object" in text or "Cannot allocate memory" in text)
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
    elif is_failing(error):
        hint = f"{_MOUNT if error.errno == errno.EROFS else _CHECK}; then run the same command again"
    else:
        return None
    return CheckpointError(f"Disk error: {os.strerror(error.errno or 0)}", where=where, hint=hint)


def memory_error(error: BaseException) -> DoesNotFitError:
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
    except (MemoryError, ImportError) as error:
        if not exhausts_memory(error):
            raise
        raise memory_error(error) from error
    except OSError as error:
        if exhausts_memory(error):
            raise memory_error(error) from error
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
