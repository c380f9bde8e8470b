"""The page Estimate against actual: parts with a name, and no ratio of quantities that differ."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

import tiny_runs
from vorox.dashboard.metrics.series import MetricSeries
from vorox.dashboard.pages.resource_page import plan_and_actual
from vorox.planning.memory_estimate import PART_NAMES, MemoryEstimate


def test_every_part_of_the_estimate_has_a_name() -> None:
    """The parts of a checkpoint on disk are no memory; those on a device add up to the whole."""
    names = [field.name for field in fields(MemoryEstimate)]
    assert set(PART_NAMES) == set(names) - {"saved_moment_bytes"}
    estimate = MemoryEstimate(**{name: 1 << bit for bit, name in enumerate(names)})
    for kind, unused in (("cpu", set()), ("cuda", {"checkpoint copy"})):
        parts = estimate.parts_on(kind)
        assert set(parts) == set(PART_NAMES.values()) - unused
        assert sum(parts.values()) == estimate.total_bytes_on(kind)


def test_a_plan_of_tensors_has_no_ratio_to_the_memory_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    directory = tiny_runs.run(tiny_runs.configuration(tmp_path)).run_directory
    series = MetricSeries(directory)
    series.refresh()
    found = plan_and_actual(directory, series)
    rows = {row["name"]: row for row in found["rows"]}
    memory = rows["Memory, peak"]
    assert memory["planned"]
    assert memory["actual"]
    assert memory["ratio"] is None
    assert "framework" in memory["note"]
    assert rows["Tokens"]["ratio"] == 1
    parts = {part["name"]: part["bytes"] for part in found["memory_parts"]}
    assert all(parts)
    assert sum(parts.values()) == memory["planned"]


HELD = {"memory/parameter_bytes": 4000.0, "memory/gradient_bytes": 3000.0, "memory/optimizer_bytes": 8000.0}


@pytest.mark.parametrize(
    ("stats", "settings", "gradients", "beyond"),
    [
        (HELD | {"memory/step_peak_bytes": 500.0}, [], 3000.0, 500.0),
        (HELD, [], 3000.0, None),
        ({key: value for key, value in HELD.items() if "gradient" not in key}, [], None, None),
        ({}, [], None, None),
    ],
    ids=["cuda", "cpu", "jax", "another engine"],
)
def test_the_parts_of_the_memory_are_compared(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stats: dict[str, float],
    settings: list[str],
    gradients: float | None,
    beyond: float | None,
) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    monkeypatch.setattr(tiny_runs.NumpyEngine, "device_stats", lambda _: stats)
    config = tiny_runs.configuration(tmp_path, settings)
    directory = tiny_runs.run(config).run_directory
    series = MetricSeries(directory)
    series.refresh()
    rows = {row["name"]: row for row in plan_and_actual(directory, series)["rows"]}
    assert rows["Memory, parameters"]["planned"] == rows["Memory, gradients"]["planned"] > 0
    assert rows["Memory, optimizer state"]["planned"] == 2 * rows["Memory, gradients"]["planned"]
    assert rows["Memory, parameters"]["actual"] == stats.get("memory/parameter_bytes")
    assert rows["Memory, gradients"]["actual"] == gradients
    assert rows["Memory, peak beyond these"]["actual"] == beyond
    for name, value in (("Memory, gradients", gradients), ("Memory, peak beyond these", beyond)):
        assert (rows[name]["ratio"] is None) == (value is None)
        assert ("Not measured" in rows[name]["note"]) == (value is None)
