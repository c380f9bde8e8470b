"""Comparison of runs: settings that differ, equal steps, recorded verdicts, last and best metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vorox.core.config import differences
from vorox.core.errors import VoroxError
from vorox.dashboard.metrics.series import MetricSeries
from vorox.dashboard.pages.run_pages import definition
from vorox.dashboard.runs.run_index import environment_of
from vorox.experiments.comparison import COMMON_METRICS, compare_metrics
from vorox.experiments.verdicts import read_verdicts
from vorox.records.replay_chain import number, read_chain
from vorox.records.run_context import recorded_config
from vorox.training.replay import compare_chains


def compare(runs: Sequence[tuple[str, Path, MetricSeries]]) -> dict[str, Any]:
    """Compare the first run with each other one.

    Args:
        runs: Id, directory and metrics of each run, the baseline first.
    """
    (first_id, first, first_series), *others = runs
    return {
        "baseline": first_id,
        "verdicts": [
            {"id": run_id, **asdict(verdict)} for run_id, directory, _ in runs for verdict in read_verdicts(directory)
        ],
        "others": [
            {
                "id": run_id,
                "settings": _settings(first, directory),
                "chain": compare_chains(first, directory),
                "parity": _parity(first, directory),
                "metrics": [
                    asdict(row) | definition(row.name)
                    for row in _in_order(compare_metrics(_common(first_series), _common(series)))
                ],
            }
            for run_id, directory, series in others
        ],
    }


def _settings(first: Path, second: Path) -> dict[str, Any]:
    try:
        found = differences(recorded_config(first), recorded_config(second))
    except VoroxError as error:
        return {"problem": str(error), "differences": []}
    rows = [{"key": item.key, "values": [_text(item.before), _text(item.after)]} for item in found]
    return {"problem": "", "differences": rows}


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _parity(first: Path, second: Path) -> dict[str, Any] | None:
    """Return how closely two backends agree on the same batches; ``None`` if both runs use one backend."""
    engines = [environment_of(directory).get("engine") for directory in (first, second)]
    if None in engines or engines[0] == engines[1]:
        return None
    try:
        chains = read_chain(first), read_chain(second)
    except VoroxError:
        return None
    shared = sorted(set(chains[0]) & set(chains[1]))
    same = [step for step in shared if chains[0][step].batch == chains[1][step].batch]
    gaps = [abs(number(chains[0][step].loss) - number(chains[1][step].loss)) for step in same]
    worst = max(range(len(gaps)), key=gaps.__getitem__, default=None)
    return {
        "engines": engines,
        "shared_steps": len(shared),
        "equal_batches": len(same),
        "largest_loss_gap": None if worst is None else gaps[worst],
        "largest_gap_step": None if worst is None else same[worst],
    }


def _common(series: MetricSeries) -> Mapping[int, Mapping[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for name in COMMON_METRICS:
        steps, values = series.points(name)
        for step, value in zip(steps.tolist(), values.tolist(), strict=True):
            found.setdefault(step, {})[name] = value
    return found


def _in_order(rows: list[Any]) -> list[Any]:
    return sorted(rows, key=lambda row: COMMON_METRICS.index(row.name))
