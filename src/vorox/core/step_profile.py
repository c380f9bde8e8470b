"""A profile of steps: what an engine records, shares of the time, and the table of both.

In: phases of the loop and the activity of the device as intervals. Out: seconds by use, which add up to the whole time,
and a table as text. ``StepRecording`` is implemented by engines with a profiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

PHASE_PREFIX = "vorox: "
"""Prefix of the phases of the loop in a trace, such as ``vorox: data``."""
BETWEEN_STEPS = ("save", "validation")
"""Phases that are no part of a step."""
_MAX_OPERATORS = 25

Interval = tuple[float, float]
"""Start and end in seconds, of any clock that all intervals of a profile share."""


class Phase(NamedTuple):
    """A phase of the training loop, such as ``data`` (``runtime/heartbeat.py``)."""

    name: str
    interval: Interval


class Operator(NamedTuple):
    """All calls of one operator.

    Attributes:
        name: As the framework names it.
        num_calls: Calls in the profile.
        host_seconds: Time on the host, without operators that it calls.
        device_seconds: Time of its kernels on the device; 0 if the device is the host.
    """

    name: str
    num_calls: int
    host_seconds: float
    device_seconds: float


@dataclass(frozen=True, slots=True)
class Activity:
    """What an engine recorded.

    Attributes:
        phases: Phases of the loop, in order, without overlap.
        compute: When the device computed; ``None`` if the engine does not measure it.
        communication: When collectives ran.
        operators: Operators of the steps, without saves and validations; in any order.
    """

    phases: Sequence[Phase]
    compute: Sequence[Interval] | None = None
    communication: Sequence[Interval] = ()
    operators: Sequence[Operator] = ()


class StepRecording(Protocol):
    """A running profiler of one process. All methods are called by the thread that trains."""

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """Return a context that marks the time inside with a name."""
        ...

    def close(self) -> None:
        """Stop the profiler; idempotent."""
        ...

    def save(self) -> Activity:
        """Write the trace of a stopped profiler and return what it contains."""
        ...


def seconds_by_use(activity: Activity) -> dict[str, float]:
    """Return the seconds of a profile by use; they add up to the time of its phases.

    Time in which several uses overlap counts once, for the first of: save and validation, compute, communication (what
    compute does not hide), waiting for data. The rest is the host: Python, and launching kernels.
    """
    phases: dict[str, list[Interval]] = {}
    for phase in activity.phases:
        phases.setdefault(phase.name, []).append(phase.interval)
    uses: dict[str, Iterable[Interval]] = {name: phases[name] for name in BETWEEN_STEPS if name in phases}
    if activity.compute is not None:
        uses["compute"] = activity.compute
    uses["communication"] = [*activity.communication, *phases.get("sync", ())]
    uses["data"] = phases.get("data", ())
    uses["host" if activity.compute is not None else "compute and host"] = [phase.interval for phase in activity.phases]
    whole = _union(phase.interval for phase in activity.phases)
    seconds: dict[str, float] = {}
    counted: list[Interval] = []
    for use, intervals in uses.items():
        before = _length(counted)
        counted = _union([*counted, *_clip(intervals, whole)])
        seconds[use] = _length(counted) - before
    return seconds


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same time as ascending intervals without overlap."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _clip(intervals: Iterable[Interval], bounds: Sequence[Interval]) -> list[Interval]:
    """Return the parts of intervals within bounds, which are ascending and do not overlap."""
    clipped: list[Interval] = []
    first = 0
    for start, end in _union(intervals):
        while first < len(bounds) and bounds[first][1] <= start:
            first += 1
        for low, high in bounds[first:]:
            if low >= end:
                break
            clipped.append((max(start, low), min(end, high)))
    return clipped


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def profile_table(title: str, activity: Activity) -> str:
    """Return the shares of the time and the most expensive operators as text."""
    seconds = seconds_by_use(activity)
    total = sum(seconds.values())
    lines = [f"{title}: {1e3 * total:,.1f} ms", "", f"{'share of the time':<24}{'':>8}{'ms':>12}"]
    lines += [
        f"  {use:<22}{spent / total if total else 0:>8.1%}{1e3 * spent:>12,.1f}" for use, spent in seconds.items()
    ]
    on_device = any(operator.device_seconds for operator in activity.operators)
    ranked = sorted(
        activity.operators, key=lambda operator: operator.device_seconds if on_device else operator.host_seconds,
        reverse=True,
    )  # fmt: skip
    if ranked:
        lines += ["", f"{'operator (self time)':<58}{'calls':>8}{'host ms':>12}{'device ms':>12}"]
    for name, num_calls, host_seconds, device_seconds in ranked[:_MAX_OPERATORS]:
        lines.append(f"  {name[:55]:<56}{num_calls:>8,}{1e3 * host_seconds:>12,.2f}{1e3 * device_seconds:>12,.2f}")
    return "\n".join(lines) + "\n"
