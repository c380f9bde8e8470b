"""Lines of ``metrics.jsonl``: what is written is read, by every reader; other lines are not metrics."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from vorox.dashboard.metrics.blocks import decode
from vorox.experiments.metrics_lines import encode_metrics, metrics_line
from vorox.experiments.task_results import write_task_results
from vorox.experiments.tracking import JsonLinesSink, read_metrics


def test_a_line_is_read_as_it_was_written() -> None:
    written = encode_metrics(7, 2, {"loss": 1.5})
    line = metrics_line(json.loads(written))
    assert line is not None
    assert line[:2] == (7, 2)
    assert line.values == {"loss": 1.5}
    assert line.time == pytest.approx(time.time(), abs=60)
    block = decode(written + b"\n")
    assert block is not None
    assert (block.steps.tolist(), block.attempts.tolist(), block.times.tolist()) == ([7], [2], [line.time])


@pytest.mark.parametrize("record", [{"attempt": 2, "resume_step": 5}, {"step": 1, "attempt": 1, "values": 3}, {}])
def test_another_line_has_no_metrics(record: dict[str, object]) -> None:
    assert metrics_line(record) is None


def test_results_of_tasks_are_lines_like_those_of_the_run(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path, attempt=1, resume_step=0)
    sink.write(5, {"loss": 2.0})
    sink.close()
    write_task_results(tmp_path, 5, "0" * 64, {"arc": {"metrics": {"acc": 0.5}}})
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert list(first) == list(second)
    assert read_metrics(tmp_path) == {5: {"loss": 2.0, "eval/tasks/arc/acc": 0.5}}
