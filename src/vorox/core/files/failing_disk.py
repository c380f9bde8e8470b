"""Errors of the system that mean that a disk or share fails, perhaps for a moment, and nothing about what is on it."""

from __future__ import annotations

import errno

_UNREACHABLE = {
    getattr(errno, name)
    for name in ("ENOTCONN", "ETIMEDOUT", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "EREMOTEIO",
                 "ENOLINK", "ENODEV", "ENXIO", "ECONNABORTED", "ECONNRESET", "ESHUTDOWN")
    if hasattr(errno, name)
}  # fmt: skip
"""Errors of a file on a network share, or of a FUSE mount whose server has ended; sockets have some of them too."""


def is_failing(error: OSError) -> bool:
    """Whether an error is one of a failing disk or share; an error of both files and sockets must name a file."""
    if error.errno in _UNREACHABLE:
        return bool(error.filename)
    return error.errno in {errno.EIO, errno.ESTALE, errno.EROFS}
