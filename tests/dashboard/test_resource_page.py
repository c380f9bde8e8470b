"""The page Plan against actual: parts with a name, and no ratio of quantities that differ."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

import tiny_runs
from vorox.cli.plan import PARTS
from vorox.dashboard.metric_series import MetricSeries
from vorox.dashboard.resource_page import PART_NAMES, plan_and_actual
from vorox.models.memory_estimate import MemoryEstimate


def test_every_part_of_the_estimate_has_a_name() -> None:
    """The parts of a checkpoint on disk are no memory; vorox plan and the page have the same parts."""
    assert set(PART_NAMES) == {field.name for field in fields(MemoryEstimate)} - {"saved_moment_bytes"}
    assert set(PARTS.values()) == set(PART_NAMES) - {"snapshot_bytes"}


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
