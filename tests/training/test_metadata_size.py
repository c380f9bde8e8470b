"""10^12 tokens of provenance: a run of that size, acted out, leaves less than a megabyte in its database.

240,000 steps of 2,048 rows of 2,048 tokens, the plan growing by strict segments, a checkpoint every
500 steps, a crash every 2,000 steps on average, all exported as in a real run.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import pytest

from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_events import GrowthRule, PlanSource, PlanStart, Segment, UnitRange
from vorox.experiments.metadata import BackgroundExporter, MetadataCache, Replacement
from vorox.records.attempts import AttemptRecord, intervals, read_attempts
from vorox.training.loop.metadata_export import RunExport

TOKENS = 10**12
ROW_TOKENS = 2048
BATCH = 2048
STEPS = -(-TOKENS // (ROW_TOKENS * BATCH))
UNIT_ROWS = (16 << 20) // ROW_TOKENS
MOST_SEGMENT_UNITS = 64
MEGABYTE = 10**6


def grown_plan(path: Path) -> DataPlan:
    """What strict growth writes: segments that double up to 64 units, as many as the tokens take."""
    source = PlanSource("fineweb-edu", Fraction(1), "ab" * 32, ROW_TOKENS + 1)
    plan = DataPlan.create(path, PlanStart(1234, True, BATCH, (source,), GrowthRule("strict")), [None])
    unit, draw, size, segments = 0, 0, 1, []
    while draw < STEPS * BATCH:
        rows = size * UNIT_ROWS
        segments.append(Segment(source.name, draw, 0, 1, (UnitRange(unit, unit + size, rows),), f"{unit:064x}"))
        unit, draw, size = unit + size, draw + rows, min(2 * size, MOST_SEGMENT_UNITS)
    plan.add(segments)
    return plan


@pytest.mark.parametrize("seed", [1])
def test_a_trillion_tokens_of_provenance_stay_under_a_megabyte(tmp_path: Path, seed: int) -> None:
    plan, chooser = grown_plan(tmp_path / "plan.jsonl"), random.Random(seed)
    assert plan.num_positions * ROW_TOKENS >= TOKENS
    database, state, number = tmp_path / "metadata.sqlite", 0, 0

    reported: list[str] = []
    exporter = BackgroundExporter(
        lambda: RunExport(database, tmp_path, plan, (None,)), report=lambda *event: reported.append(str(event)),
        interval_seconds=0.01,
    )  # fmt: skip
    while state < STEPS:
        number += 1
        length = int(chooser.expovariate(1 / 2000)) + 1
        last = min(state + length, STEPS)
        saved = last if last == STEPS else max(state, last // 500 * 500)
        with AttemptRecord(tmp_path, number, state, state * BATCH) as attempt:
            attempt.record_started(last)
            attempt.record_saved(saved)
        state = saved
    exporter.close()
    assert reported == []
    assert number > 80
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes["metadata.sqlite"] < MEGABYTE
    assert sizes["attempts.bin"] + sizes["metadata.sqlite"] < MEGABYTE
    expected = [
        (part.attempt, part.first_step, part.last_step, part.outcome) for part in intervals(read_attempts(tmp_path))
    ]
    with sqlite3.connect(database) as connection:
        found = connection.execute("SELECT attempt, first_step, last_step, outcome FROM consumed ORDER BY 1, 2")
        assert found.fetchall() == expected
        kept = "SELECT SUM(end_position - first_position) FROM consumed WHERE outcome = 'kept'"
        assert connection.execute(kept).fetchone() == (STEPS * BATCH,)
    connection.close()


def test_an_update_writes_only_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = grown_plan(tmp_path / "plan.jsonl")
    with AttemptRecord(tmp_path, 1, 0, 0) as attempt:
        attempt.record_started(5)
    written: list[str] = []

    def replace(cache: MetadataCache, run_id: str, replacements: Iterable[Replacement]) -> None:
        written.extend(replacement.table for replacement in replacements)

    with RunExport(tmp_path / "metadata.sqlite", tmp_path, plan, (None,)) as export:
        export.update()
        monkeypatch.setattr(MetadataCache, "replace", replace)
        export.update()
        assert written == []
        with AttemptRecord(tmp_path, 2, 5, 5 * BATCH) as attempt:
            attempt.record_started(7)
        export.update()
        assert written == ["attempt"]
