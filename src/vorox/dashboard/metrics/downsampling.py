"""Down-sampling and smoothing of long series for a chart.

A chart of a thousand pixels cannot show 100,000 points, and a mean would hide the spikes that people look for. So each
bucket keeps its lowest, its highest and its first non-finite value; first and last point always stay.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
_NEGLIGIBLE_WEIGHT = 1e-20
_SMOOTHED_PARTS = 40


def min_max_indices(positions: npt.NDArray[np.int64], values: Numbers, num_points: int) -> Indices:
    """Return the ascending indices of at most about ``num_points`` points that draw the same curve.

    Args:
        positions: Ascending positions on the x axis.
        values: One value per position; may be NaN or infinite.
        num_points: Desired number of points; all are returned if there are no more than that.
    """
    if len(values) <= max(num_points, 4):
        return np.arange(len(values), dtype=np.int64)
    num_buckets = max(1, num_points // 2)
    edges = np.linspace(float(positions[0]), float(positions[-1]) + 1.0, num_buckets + 1)
    starts = np.searchsorted(positions, edges[:-1], side="left")
    chosen: list[int] = [0, len(values) - 1]
    finite = np.isfinite(values)
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(values)], strict=True):
        if start == end:
            continue
        inside = np.flatnonzero(finite[start:end]) + start
        if inside.size < end - start:
            chosen.append(start + int(np.argmin(finite[start:end])))
        if inside.size:
            chosen += [int(inside[np.argmin(values[inside])]), int(inside[np.argmax(values[inside])])]
    return np.unique(np.array(chosen, np.int64))


def default_smoothing(num_points: int) -> float:
    """Return a weight of the past that averages over about a fortieth of a series, at most ten points.

    A longer past lags: in a short run, it would draw the training loss above the validation loss.
    """
    return min(0.9, max(0.0, 1 - _SMOOTHED_PARTS / max(1, num_points)))


def moving_average(values: Numbers, weight: float) -> Numbers:
    """Return the exponential moving average with bias correction, as TensorBoard draws it; non-finite values are NaN.

    Args:
        values: The series.
        weight: Weight of the past, from 0 (no smoothing) to below 1.
    """
    if weight <= 0:
        return values
    smoothed, finite = np.full_like(values, np.nan), np.isfinite(values)
    totals = (1 - weight) * values[finite]
    distance, factor = 1, weight
    while distance < len(totals) and factor > _NEGLIGIBLE_WEIGHT:  # doubles the length of the past in ``totals``
        totals[distance:] = totals[distance:] + factor * totals[:-distance]
        distance, factor = 2 * distance, factor * factor
    smoothed[finite] = totals / (1 - weight ** np.arange(1.0, len(totals) + 1))
    return smoothed
