"""The record of an exception in ``failure.json``: what, where, what is saved, what to do; redacted."""

from __future__ import annotations

import traceback

from vorox.core.errors import VoroxError, exit_code_of, saved_of
from vorox.core.redaction import redact

FAILURE_FORMAT = "vorox-failure/1"


def failure_record(error: BaseException) -> dict[str, str | int]:
    """Return the fields of an error, with a traceback if it is unexpected."""
    known = error if isinstance(error, VoroxError) else None
    trace = "" if known else "".join(traceback.format_exception(error))
    return {
        "format": FAILURE_FORMAT,
        "error": type(error).__name__,
        "what": redact(known.what if known else f"{type(error).__name__}: {error}"),
        "where": redact(known.where) if known else "",
        "saved": redact(saved_of(error)),
        "hint": redact(known.hint) if known else "",
        "exit_code": exit_code_of(error),
        "traceback": redact(trace),
    }
