"""Taps of a run: functions attached to its engine from Python, and the record of which they were.

A tap can change what the model computes and is in no configuration. So every attempt notes its taps in ``run.json``,
and a resumed run whose taps have changed says so.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from vorox.core.engine import Engine, Tap, attach_taps
from vorox.core.log import RunLog
from vorox.core.run_context import RunContext
from vorox.core.run_lookup import run_attempts

_NOTE = "taps"


def attach_to_run(taps: Sequence[Tap], engine: Engine, run: RunContext, log: RunLog) -> None:
    """Attach taps, note them in the run's record, and report a change since the previous attempt.

    Raises:
        ConfigError: The engine has no taps, or the model has no such point or layer.
    """
    attach_taps(engine, taps)
    now = [describe(tap) for tap in taps]
    before = (recorded_taps(run.directory) or [[]])[-1]
    if run.attempt > 1 and before != now:
        text = f"Taps have changed since the previous attempt: {_listed(before)} -> {_listed(now)}"
        log.event("taps_changed", text, level="warning", before=before, now=now)
    elif now:
        log.event("taps", f"Taps attached: {_listed(now)}", taps=now)
    run.note(taps=now)


def recorded_taps(run_directory: Path) -> list[list[str]]:
    """Return the taps of every attempt that noted any list of them, oldest first."""
    notes = [cast("dict[str, list[str]]", attempt.get("notes") or {}) for attempt in run_attempts(run_directory)]
    return [note[_NOTE] for note in notes if _NOTE in note]


def describe(tap: Tap) -> str:
    """Return where a tap is, its function, and the beginning of its source's SHA-256 where there is a source."""
    function = tap.function
    name = getattr(function, "__qualname__", type(function).__qualname__)
    text = f"{tap.point} of layer {tap.layer}: {getattr(function, '__module__', '?')}.{name}"
    try:
        source = inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):  # typed into an interpreter, or an object that is called
        return text
    return f"{text} {hashlib.sha256(source.encode()).hexdigest()[:12]}"


def _listed(taps: Sequence[str]) -> str:
    return "; ".join(taps) or "none"
