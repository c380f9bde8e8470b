"""Down-sampling and incremental reading, against brute force and against the reader of the command line."""

from __future__ import annotations

import json
import math
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vorox.core.errors import DataError
from vorox.core.files.json_lines import LineTail, last_record, read_history
from vorox.core.run_layout import RunLayout
from vorox.dashboard.metrics import series as metric_series
from vorox.dashboard.metrics.blocks import decode
from vorox.dashboard.metrics.downsampling import min_max_indices, moving_average
from vorox.dashboard.metrics.series import MetricSeries
from vorox.experiments.artifacts import eval_losses
from vorox.experiments.tracking import last_values, read_metrics
from vorox.records.executed_steps import last_chain_step


@pytest.mark.parametrize("seed", range(5))
def test_downsampling_keeps_the_extremes_of_every_bucket(seed: int) -> None:
    chooser = np.random.default_rng(seed)
    steps = np.cumsum(chooser.integers(1, 9, 5000))
    values = chooser.normal(size=5000)
    values[chooser.integers(0, 5000, 20)] = np.nan
    values[chooser.integers(0, 5000)] = 1e6  # a spike of one step
    chosen = min_max_indices(steps, values, 400)
    assert len(chosen) <= 2 * 400
    assert chosen[0] == 0
    assert chosen[-1] == 4999
    assert (np.diff(chosen) > 0).all()
    width = (steps[-1] + 1 - steps[0]) / 200
    for bucket in range(200):
        inside = np.flatnonzero((steps >= steps[0] + bucket * width) & (steps < steps[0] + (bucket + 1) * width))
        if inside.size < 2 or np.isnan(values[inside]).all():
            continue
        kept = values[np.intersect1d(inside, chosen)]
        assert np.nanmin(kept) == np.nanmin(values[inside])
        assert np.nanmax(kept) == np.nanmax(values[inside])
        assert np.isnan(kept).any() == np.isnan(values[inside]).any()


def test_short_series_are_not_sampled() -> None:
    steps = np.arange(100)
    assert min_max_indices(steps, steps.astype(float), 100).tolist() == list(range(100))
    assert min_max_indices(steps[:0], np.empty(0), 100).tolist() == []


def test_the_moving_average_is_the_weighted_mean_of_the_past() -> None:
    values = np.random.default_rng(3).normal(size=60)
    smooth = moving_average(values, 0.9)
    for index in range(60):
        weights = 0.9 ** np.arange(index, -1, -1)
        assert math.isclose(smooth[index], float(np.average(values[: index + 1], weights=weights)), rel_tol=1e-9)
    assert np.isnan(moving_average(np.array([1.0, np.nan, 3.0]), 0.5)).tolist() == [False, True, False]


def lines_of_a_run(chooser: random.Random) -> list[str]:
    """Metrics of several attempts, each resuming before the end of the last; some values not finite."""
    lines, step, attempt = [], 0, 1
    for _ in range(60):
        if chooser.random() < 0.12:
            attempt, step = attempt + 1, chooser.randint(0, step)
            lines.append(json.dumps({"resume_step": step, "attempt": attempt}))
        step += chooser.choice((0, 1, 1, 5))
        names = chooser.sample(("loss", "grad_norm", "eval/loss"), chooser.randint(1, 3))
        values = {name: chooser.choice((chooser.random(), "NaN")) for name in names}
        lines.append(json.dumps({"step": step, "attempt": attempt, "time": float(len(lines)), "values": values}))
    return lines


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("is_decoded", [False, True])
def test_incremental_reading_equals_the_reader_of_the_command_line(
    seed: int, is_decoded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file grows by arbitrary bytes: lines are torn and completed later."""
    if is_decoded:  # blocks of a few lines, decoded as columns wherever they are plain
        monkeypatch.setattr(metric_series, "_MIN_DECODED_BYTES", 1)
        monkeypatch.setattr(metric_series, "_BLOCK_BYTES", 150)
    chooser, path = random.Random(seed), RunLayout(tmp_path).metrics
    text = ("\n".join(lines_of_a_run(chooser)) + "\n").encode()
    series, written = MetricSeries(tmp_path), 0
    while written < len(text):
        size = chooser.randint(1, 400)
        with path.open("ab") as file:
            file.write(text[written : written + size])
        written += size
        series.refresh()
        found: dict[int, dict[str, float]] = {}
        for name in series.names:
            for step, value in zip(*(column.tolist() for column in series.points(name)), strict=True):
                found.setdefault(step, {})[name] = value
        expected = {step: values for step, values in read_metrics(tmp_path).items() if values}
        assert repr({step: sorted(found[step].items()) for step in sorted(found)}) == repr(
            {step: sorted(values.items()) for step, values in expected.items()}
        )
        assert series.last_step == max(expected, default=0)


def resumed_lines(chooser: random.Random) -> list[dict[str, Any]]:
    """Records of a run that resumes at earlier steps, with all that any reader of records looks at."""
    lines: list[dict[str, Any]] = []
    step, attempt = 0, 1
    for number in range(chooser.choice((5, 60, 400))):
        if chooser.random() < 0.1:
            step, attempt = chooser.randint(0, step), attempt + 1
            lines.append({"resume_step": step, "attempt": attempt})
        step += 1
        loss = float(number)
        lines.append({"step": step, "attempt": attempt, "time": loss, "loss": loss, "values": {"loss": loss}})
    return lines


def losses_by_replaying(lines: list[dict[str, Any]]) -> dict[int, float]:
    """Every line in turn: a step has its loss, a resume takes back the later steps."""
    losses: dict[int, float] = {}
    for line in lines:
        if "resume_step" in line:
            losses = {step: loss for step, loss in losses.items() if step <= line["resume_step"]}
        else:
            losses[line["step"]] = line["loss"]
    return losses


@pytest.mark.parametrize("seed", range(20))
def test_every_reader_voids_the_same_records(seed: int, tmp_path: Path) -> None:
    lines, layout = resumed_lines(random.Random(seed)), RunLayout(tmp_path)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    for path in (layout.chain, layout.evaluations, layout.metrics):
        path.write_text(text, encoding="utf-8")
    expected = losses_by_replaying(lines)
    assert {step: record["loss"] for step, record in read_history(layout.chain).items()} == expected
    assert {step: values["loss"] for step, values in read_metrics(tmp_path).items()} == expected
    assert eval_losses(tmp_path) == expected
    series = MetricSeries(tmp_path)
    series.refresh()
    assert dict(zip(*(column.tolist() for column in series.points("loss")), strict=True)) == expected
    assert last_chain_step(tmp_path) == max(expected)
    assert last_values(tmp_path, ["loss"]) == {"loss": (max(expected), expected[max(expected)])}
    for limit in (0, 1, *expected):
        known = max((step for step in expected if step <= limit), default=-1)
        assert (last_record(layout.chain, limit) or {}).get("loss") == expected.get(known), limit


@pytest.mark.parametrize("seed", range(5))
def test_a_damaged_line_is_void_exactly_where_its_step_is(seed: int, tmp_path: Path) -> None:
    lines, path = resumed_lines(random.Random(seed))[:80], tmp_path / "history.jsonl"
    for number, line in enumerate(lines):
        if "resume_step" in line:
            continue
        text = [json.dumps(line) for line in lines]
        text[number] = "damaged"
        path.write_text("\n".join(text) + "\n", encoding="utf-8")
        is_void = any(later.get("resume_step", line["step"]) < line["step"] for later in lines[number:])
        if is_void:
            assert read_history(path).keys() == losses_by_replaying(lines).keys()
        else:
            with pytest.raises(DataError, match=f"history.jsonl:{number + 1}"):
                read_history(path)


PLAIN = '{"step":1,"attempt":1,"time":0.1,"values":{"loss":0.30000000000000004,"rate":null}}'
UNUSUAL = {
    "a value that is not finite": '{"step":2,"attempt":1,"time":0.1,"values":{"loss":"NaN"}}',
    "a resume": '{"resume_step":0,"attempt":2}',
    "a damaged line": '{"step":2,"attempt":1,"time":0.1,"values":{"loss":1.5}',
    "two records in a line": PLAIN + PLAIN + "\n",
    "a truth value": '{"step":2,"attempt":1,"time":0.1,"values":{"loss":true}}',
    "a nested value": '{"step":2,"attempt":1,"time":0.1,"values":{"loss":{"a":1}}}',
    "a negative step": '{"step":-2,"attempt":1,"time":0.1,"values":{"loss":1.5}}',
    "a step that a float rounds": '{"step":9007199254740993,"attempt":1,"time":0.1,"values":{"loss":1.5}}',
    "a negative attempt": '{"step":2,"attempt":-1,"time":0.1,"values":{"loss":1.5}}',
    "no values": '{"step":2,"attempt":1,"time":0.1,"values":null}',
    "a step that is a float": '{"step":2.0,"attempt":1,"time":0.1,"values":{"loss":1.5}}',
    "no attempt": '{"step":2,"time":0.1,"values":{"loss":1.5}}',
    "a name that is not ASCII": '{"step":2,"attempt":1,"time":0.1,"values":{"\u00e9":1.5}}',
    "a large number": '{"step":2,"attempt":1,"time":0.1,"values":{"loss":123456789012345678901234}}',
}


@pytest.mark.parametrize("line", UNUSUAL.values(), ids=UNUSUAL.keys())
def test_an_unusual_line_is_read_as_the_command_line_reads_it(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_series, "_MIN_DECODED_BYTES", 1)
    text = f"{PLAIN}\n{line}\n{PLAIN.replace('1,', '7,', 1)}\n"
    RunLayout(tmp_path).metrics.write_text(text, encoding="utf-8")
    series = MetricSeries(tmp_path)
    series.refresh()
    found = [
        (step, name, repr(value))
        for name in series.names
        for step, value in zip(*(column.tolist() for column in series.points(name)), strict=True)
    ]
    expected = [(s, n, repr(float(v))) for s, values in read_metrics(tmp_path).items() for n, v in values.items()]
    assert sorted(found) == sorted(expected)


def test_plain_lines_are_decoded_as_columns() -> None:
    lines = [PLAIN, PLAIN.replace('"loss"', '"grad"'), '{"step":3,"attempt":2,"time":4,"values":{"rate":7}}']
    block = decode(("\n".join(lines) + "\n").encode())
    assert block is not None
    assert (block.steps.tolist(), block.attempts.tolist(), block.times.tolist()) == (
        [1, 1, 3],
        [1, 1, 2],
        [0.1, 0.1, 4],
    )
    values = {name: (rows.tolist(), numbers.tolist()) for name, (rows, numbers) in block.values.items()}
    assert values == {"loss": ([0], [0.1 + 0.2]), "grad": ([1], [0.1 + 0.2]), "rate": ([2], [7.0])}
    assert list(values) == ["loss", "grad", "rate"]


def test_a_torn_line_that_the_next_writer_truncates_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = LineTail(path)

    def read() -> tuple[list[dict[str, int]], bool]:
        records, is_replaced = tail.read()
        return list(records), is_replaced

    assert read() == ([], False)
    path.write_bytes(b'{"a":1}\n{"a":')
    assert read() == ([{"a": 1}], False)
    path.write_bytes(b'{"a":1}\n{"b":2}\ndamaged\n')
    assert read() == ([{"b": 2}], False)
    assert read() == ([], False)
    path.write_bytes(b'{"c":3}\n')
    assert read() == ([{"c": 3}], True)


def test_time_between_attempts_does_not_count(tmp_path: Path) -> None:
    rows = [(1, 1, 100.0), (2, 1, 101.0), (3, 2, 500.0), (4, 2, 502.0)]
    lines = [json.dumps({"step": s, "attempt": a, "time": t, "values": {"loss": 1.0}}) for s, a, t in rows]
    RunLayout(tmp_path).metrics.write_text("\n".join(lines) + "\n", encoding="utf-8")
    series = MetricSeries(tmp_path)
    series.refresh()
    assert series.seconds_at(np.array([1, 2, 3, 4])).tolist() == [0.0, 1.0, 1.0, 3.0]


def test_a_large_run_shows_a_sample_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vorox.dashboard.runs import run_index

    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.yaml").write_text("", encoding="utf-8")
    rows = [*((step, 1) for step in range(1, 5001)), *((step, 2) for step in range(4001, 8001))]
    lines = [json.dumps({"step": s, "attempt": a, "time": 1.0, "values": {"loss": float(s)}}) for s, a in rows]
    lines.insert(5000, json.dumps({"resume_step": 4000, "attempt": 2}))
    RunLayout(directory).metrics.write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.setattr(run_index, "_LARGE_BYTES", 1000)
    held, refresh = threading.Event(), MetricSeries.refresh
    monkeypatch.setattr(MetricSeries, "refresh", lambda series: held.wait(20) and refresh(series))
    index = run_index.RunIndex(tmp_path)
    sample = index.series("run", preview=True)
    steps, losses = sample.points("loss")
    assert sample.is_sample
    assert 800 < len(steps) <= 1500
    assert losses.tolist() == steps.tolist() == sorted(set(steps.tolist()))
    assert steps.min() == 1
    assert steps.max() > 7900
    held.set()
    whole = index.series("run")
    assert not whole.is_sample
    assert whole.points("loss")[0].tolist() == list(range(1, 8001))
