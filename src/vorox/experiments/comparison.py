"""Comparison of two runs: last and best value of every metric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vorox.core.errors import ConfigError
from vorox.experiments.metrics import metric

COMMON_METRICS = (
    "loss",
    "eval/loss",
    "eval/bits_per_byte",
    "eval/accuracy",
    "grad_norm",
    "learning_rate",
    "tokens_total",
    "tokens_per_second",
    "mfu_fraction",
    "data_wait_fraction",
    "memory/host_peak_bytes",
    "memory/device_peak_bytes",
)
"""The metrics to compare first: quality, then speed, then memory."""

Point = tuple[int, float]
"""A step and a value."""


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """One metric of two runs; ``None`` for a run without it.

    Attributes:
        name: Registered name.
        last: Newest value of each run, with its step.
        best: Best value of each run, with its step, for metrics where lower or higher is better.
    """

    name: str
    last: tuple[Point | None, Point | None]
    best: tuple[Point | None, Point | None]


def compare_metrics(
    first: Mapping[int, Mapping[str, float]], second: Mapping[int, Mapping[str, float]]
) -> list[ComparedMetric]:
    """Compare all metrics of either run, by name, except the thousands of activation statistics."""
    names = sorted({name for run in (first, second) for values in run.values() for name in values})
    return [
        ComparedMetric(name, (_last(first, name), _last(second, name)), (_best(first, name), _best(second, name)))
        for name in names
        if not name.startswith("activation/")
    ]


def _points(run: Mapping[int, Mapping[str, float]], name: str) -> list[Point]:
    return [(step, values[name]) for step, values in sorted(run.items()) if name in values]


def _last(run: Mapping[int, Mapping[str, float]], name: str) -> Point | None:
    points = _points(run, name)
    return points[-1] if points else None


def _best(run: Mapping[int, Mapping[str, float]], name: str) -> Point | None:
    try:
        better = metric(name).better
    except ConfigError:
        return None  # written by another version; only its last value is shown
    points = [point for point in _points(run, name) if point[1] == point[1]]  # NaN is never best
    if better is None or not points:
        return None
    return min(points, key=lambda point: (point[1] if better == "lower" else -point[1], point[0]))
