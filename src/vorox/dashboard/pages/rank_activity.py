"""What every rank does now and did in the last two minutes, and the stalls of a run with their stacks.

Heartbeats (``runtime/heartbeat.py``) and the records of the watchdog go in; plain JSON values come out. A heartbeat has
no clock: a rank is idle since the first reading that found its counter as it is now.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vorox.core.files.json_reader import read_json
from vorox.core.run_layout import RunLayout
from vorox.runtime.heartbeat import Beat, Phase, read_beat
from vorox.runtime.watchdog import PHASE_ORDER, Condition, condition_of, place

HISTORY_READINGS = 120
"""Readings kept per rank; the page takes one per second."""
_MIN_READING_SECONDS = 0.5
_ACTIVITIES: Final[dict[Phase, str]] = {
    "start": "start", "compile": "start", "data": "data", "step": "compute", "settle": "compute", "sync": "wait",
    "save": "save", "validation": "eval", "end": "ended",
}  # fmt: skip
"""The activity that a phase counts as: ``start`` includes compilation, ``wait`` is a wait for the other ranks."""


@dataclass(slots=True)
class _Known:
    """A rank at the last reading."""

    count: int
    moved_at: float
    read_at: float = 0.0
    history: deque[str] = field(default_factory=lambda: deque(maxlen=HISTORY_READINGS))


class RankActivity:
    """Reads the heartbeats of runs. Thread-safe.

    Args:
        clock: Seconds, which only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._known: dict[tuple[Path, int, int], _Known] = {}

    def read(self, directory: Path) -> dict[str, Any]:
        """Return the ranks of the newest attempt, and the one that the others wait for; ``None`` if there is none."""
        paths = sorted(RunLayout(directory).watchdog.glob("rank-*.beat"))
        beats = [beat for path in paths if (beat := read_beat(path))]
        newest = max((beat.attempt for beat in beats), default=0)
        found: list[tuple[Beat, Condition]] = [
            (beat, condition_of(beat.process)) for beat in beats if beat.attempt == newest
        ]
        with self._lock:
            ranks = [self._rank(directory, beat, condition) for beat, condition in found]
            for key in [key for key in self._known if key[0] == directory and key[2] != newest]:
                del self._known[key]
        return {"ranks": ranks, "slowest": _slowest(found), "seconds": HISTORY_READINGS}

    def _rank(self, directory: Path, beat: Beat, condition: Condition) -> dict[str, Any]:
        now, activity = self._clock(), "dead" if condition == "dead" else _ACTIVITIES[beat.phase]
        known = self._known.setdefault((directory, beat.rank, beat.attempt), _Known(beat.count, now))
        if known.count != beat.count:
            known.count, known.moved_at = beat.count, now
        if not known.history or now - known.read_at >= _MIN_READING_SECONDS:  # several pages may be open
            known.history.append(activity)
            known.read_at = now
        return {
            "rank": beat.rank, "host": beat.process.host, "process": beat.process.process_id, "step": beat.step,
            "phase": beat.phase, "activity": activity, "condition": condition, "queue_depth": beat.queue_depth,
            "is_waiting_for_store": beat.is_waiting, "idle_seconds": now - known.moved_at,
            "history": list(known.history),
        }  # fmt: skip


def _slowest(found: list[tuple[Beat, Condition]]) -> int | None:
    """Return the rank that is least advanced within a step; ``None`` if all are equally far."""
    places = {beat.rank: place(beat) for beat, _ in found if beat.phase in PHASE_ORDER}
    if len(set(places.values())) < 2:
        return None
    return min(places, key=lambda rank: places[rank])


def stalls(directory: Path) -> list[dict[str, Any]]:
    """Return the stalls that ended attempts of a run, the newest first, each with the stacks of all ranks."""
    found: list[dict[str, Any]] = []
    for path in sorted(RunLayout(directory).watchdog.glob("stall-*.json"), reverse=True):
        try:
            record = read_json(path)
            found.append({key: record[key] for key in ("attempt", "at", "what", "where", "traceback")})
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not complete yet
    return found
