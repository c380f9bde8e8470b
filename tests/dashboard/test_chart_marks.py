"""Marks of charts: every one at the step where the thing that it marks begins."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
from data_order_pictures import BATCH, addresses, plan, segment
from vorox import open_run
from vorox.dashboard.pages.chart_marks import chart_marks, plan_marks
from vorox.dashboard.pages.run_pages import events


def test_a_run_marks_saves_a_resume_new_settings_and_a_mixture_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    for seed, name in enumerate(("wiki", "code")):
        tiny_runs.write_text(tmp_path / name, seed=seed)
    sources: list[dict[str, Any]] = [
        {"name": name, "format": "jsonl", "paths": [str(tmp_path / name)], "weight": weight}
        for name, weight in (("wiki", 1), ("code", 1))
    ]
    tokens = 6 * 4 * 16  # six steps of four rows
    stages = [{"start_tokens": tokens, "weights": {"wiki": 1}}]
    settings = [
        f"data.sources={json.dumps(sources)}",
        f"data.stages={json.dumps(stages)}",
        "data.validation.split=document",
    ]
    first = tiny_runs.run(tiny_runs.configuration(tmp_path, settings))
    directory = first.run_directory
    more = [*settings, "train.num_steps=16", "log.every_steps=2"]
    tiny_runs.run(tiny_runs.configuration(tmp_path, more), resume_from=directory)
    marks = chart_marks(directory, events(directory))
    steps = {label: sorted(mark["step"] for mark in marks if mark["label"] == label) for label in
             {mark["label"] for mark in marks}}  # fmt: skip
    assert steps["save"] == [4, 8, 12, 16]
    assert steps["resume"] == [12]
    assert steps["settings change"] == [12], "beside the resume"
    assert steps["mixture change"] == [7]
    run = open_run(directory)
    assert {row.source for step in range(1, 7) for row in run.where(step)} == {"wiki", "code"}
    assert {row.source for step in range(7, 17) for row in run.where(step)} == {"wiki"}
    assert chart_marks(tmp_path / "nothing", []) == []


def test_growth_is_marked_at_the_first_step_that_may_read_the_new_rows() -> None:
    state = plan(
        {"web": 3, "books": 1},
        [
            segment("web", 0, 30, num_epochs=1), segment("books", 0, 40),
            segment("web", 30, 24, num_epochs=1, unit=1),
            segment("web", 54, 30, epoch=1, num_epochs=1),  # a second pass over known units
        ],
    )  # fmt: skip
    found = addresses(state, 10 * BATCH)
    is_new = (found.source_index == 0) & (found.unit_start == 1)
    (mark,) = plan_marks(state)
    assert mark == {"step": int(is_new.argmax()) // BATCH + 1, "label": "growth"}
    assert Fraction(mark["step"] * BATCH) > 30 * Fraction(4, 3) - BATCH
