"""Provenance queries say what became of a step, and find the steps of a whole file in one pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tiny_runs import configuration, run, use_numpy_engine, write_text
from vorox.cli import app
from vorox.dashboard.pages.data_pages import DataPages
from vorox.data.cache.reader import CacheReader
from vorox.data.order.plan import DataPlan
from vorox.data.provenance import queries as provenance_queries
from vorox.data.provenance.queries import when, where
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.training.reports.document_search import DocumentQuery, search_runs


@pytest.fixture(name="directory")
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_numpy_engine(monkeypatch)
    write_text(tmp_path / "text", documents=400)
    return run(configuration(tmp_path, ["train.num_steps=6", "checkpoint.every_steps=6"])).run_directory


def query(*words: str) -> Any:
    found = CliRunner().invoke(app, list(words))
    assert found.exit_code == 0, found.output
    return found.output


def test_a_step_after_the_end_is_named_as_such(directory: Path) -> None:
    with RunDataIndex.open(directory) as data:
        assert {row.state for row in where(data, 6)} == {"kept"}
        assert {row.state for row in where(data, 20)} == {"beyond"}
    text = query("data", "where", str(directory), "--step", "20", "--slot", "0")
    assert text.startswith("Step 20 is after the end of the run and was never executed.")
    assert "never executed" not in query("data", "where", str(directory), "--step", "6")
    for step, state in ((6, "kept"), (20, "beyond")):
        rows = json.loads(query("data", "where", str(directory), "--step", str(step), "--json"))
        assert {row["state"] for row in rows} == {state}


def test_the_dashboard_lists_no_step_after_the_end_and_says_what_became_of_one(directory: Path) -> None:
    pages = DataPages()
    assert pages.documents(directory, 6)["state"] == "kept"
    assert pages.documents(directory, 20)["state"] == "beyond"
    for ordinal in (None, *range(40)):
        found = pages.steps(directory, "text.jsonl", ordinal)
        assert all(1 <= one["step"] <= 6 for one in found["steps"])
        assert found["total"] == len(found["steps"])
    pages.close()


def test_the_steps_of_a_file_are_those_of_its_rows(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pass over the executed positions; the inverse of the plan, row by row, is the oracle."""
    with RunDataIndex.open(directory) as data:
        monkeypatch.setattr(provenance_queries, "_MAX_INVERTED_ROWS", 1 << 40)
        expected = [one for one in when(data, "text.jsonl") if one.state != "beyond"]
        assert len(expected) == 6 * 4
        monkeypatch.setattr(provenance_queries, "_MAX_INVERTED_ROWS", 0)
        inverted: list[int] = []
        original = DataPlan.positions_of
        monkeypatch.setattr(DataPlan, "positions_of", lambda self, *words: inverted.append(1) or original(self, *words))
        assert list(when(data, "text.jsonl")) == expected
        assert inverted == []
        located: list[int] = []
        locate = DataPlan.locate
        monkeypatch.setattr(
            DataPlan, "locate", lambda self, positions: located.append(len(positions)) or locate(self, positions)
        )
        when(data, "text.jsonl")
        assert sum(located) <= 2 * 6 * 4  # the executed positions, and those found for their epochs
        assert data.plan.num_positions > 200


def test_all_runs_open_each_cache_once(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directories = [directory, *(run(configuration(tmp_path, [f"run.name=r{n}"])).run_directory for n in range(3))]
    opened: list[Path] = []
    original = CacheReader.open.__func__  # type: ignore[attr-defined]

    def open_counted(cls: Any, place: Path, *words: Any, **options: Any) -> CacheReader:
        opened.append(place)
        return original(cls, place, *words, **options)

    monkeypatch.setattr(CacheReader, "open", classmethod(open_counted))
    progress: list[tuple[int, int]] = []
    findings = search_runs(directories, DocumentQuery("text.jsonl", None, 3), lambda *words: progress.append(words))
    assert len(opened) == len(set(opened)) == 1
    assert progress == [(number, 4) for number in range(1, 5)]
    with RunDataIndex.open(directories[1]) as data:
        expected = {one.step for one in when(data, "text.jsonl", ordinal=3)}
    assert {one.step for one in findings[1].occurrences} == expected
    assert np.all([finding.problem == "" for finding in findings])
