"""What was logged is read back, through crashes, resumes, full disks and broken sinks."""

from __future__ import annotations

import builtins
import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from vorox.core.errors import ConfigError
from vorox.core.files import atomic
from vorox.core.files.json_lines import read_lines
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import LogConfig
from vorox.experiments.sinks import TensorBoardSink
from vorox.experiments.tracking import Tracker, last_values, read_metrics, reduce
from vorox.records.log import RunLog


def open_tracker(directory: Path, attempt: int = 1, resume_step: int = 0) -> Tracker:
    return Tracker.open(directory, LogConfig(), attempt=attempt, resume_step=resume_step, log=RunLog(directory))


def test_what_is_logged_is_read_back(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path)
    tracker.log(10, {"loss": 5.5, "grad_norm": 1})
    tracker.log(10, {"eval/loss": 5.0})
    tracker.log(20, {"loss": math.nan, "grad_norm": math.inf})
    tracker.log(30, {})
    tracker.close()
    values = read_metrics(tmp_path)
    assert list(values) == [10, 20]
    assert values[10] == {"loss": 5.5, "grad_norm": 1.0, "eval/loss": 5.0}
    assert math.isnan(values[20]["loss"])
    assert values[20]["grad_norm"] == math.inf
    first = json.loads((tmp_path / "metrics.jsonl").read_bytes().splitlines()[0])
    assert first.pop("time") > 1.7e9
    assert first == {"step": 10, "attempt": 1, "values": {"loss": 5.5, "grad_norm": 1.0}}


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path)
    with pytest.raises(ConfigError, match="Unknown metric los"):
        tracker.log(1, {"los": 1.0})
    with pytest.raises(ConfigError, match="Unknown metric los"):
        tracker.observe({"los": 1.0})


def test_observed_values_are_reduced_until_the_next_log(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path)
    tracker.observe({"loss": 4.0, "learning_rate": 0.1})
    tracker.observe({"loss": 2.0, "learning_rate": 0.2, "accuracy": 0.5})
    assert tracker.log(2, {"accuracy": 0.25}) == {"loss": 3.0, "learning_rate": 0.2, "accuracy": 0.25}
    assert tracker.log(3, {"loss": 1.0}) == {"loss": 1.0}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loss", 2.0),
        ("nonfinite_steps", 6.0),
        ("learning_rate", 1.0),
        ("memory/host_bytes", 3.0),
        ("memory/host_available_bytes", 1.0),
    ],
)
def test_reductions(name: str, expected: float) -> None:
    assert reduce(name, [3.0, 2.0, 1.0]) == expected


def test_a_later_attempt_is_believed(tmp_path: Path) -> None:
    first = open_tracker(tmp_path)
    for step in range(10, 60, 10):
        first.log(step, {"loss": float(step), "grad_norm": 1.0})
    second = open_tracker(tmp_path, attempt=2, resume_step=20)
    second.log(30, {"loss": -30.0})
    second.log(20, {"eval/loss": 7.0})
    assert read_metrics(tmp_path) == {
        10: {"loss": 10.0, "grad_norm": 1.0},
        20: {"loss": 20.0, "grad_norm": 1.0, "eval/loss": 7.0},
        30: {"loss": -30.0},
    }, "steps 40 and 50 of the first attempt were lost work"


def test_every_prefix_of_the_file_can_be_read_and_gone_on_with(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path)
    for step in range(1, 5):
        tracker.log(step, {"loss": step / 8})
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    for size_bytes in range(len(whole) + 1):
        path.write_bytes(whole[:size_bytes])
        complete = whole[:size_bytes].count(b"\n")
        assert read_metrics(tmp_path) == {step: {"loss": step / 8} for step in range(1, complete + 1)}
        after = open_tracker(tmp_path, attempt=2, resume_step=2)
        after.log(3, {"loss": 9.0})
        expected = {step: {"loss": step / 8} for step in range(1, min(complete, 2) + 1)}
        assert read_metrics(tmp_path) == {**expected, 3: {"loss": 9.0}}
        assert all(line.startswith(b'{"') for line in path.read_bytes().splitlines())


def test_a_resumed_attempt_that_never_logged_changes_nothing(tmp_path: Path) -> None:
    open_tracker(tmp_path).log(10, {"loss": 1.0})
    open_tracker(tmp_path, attempt=2, resume_step=5).close()
    assert read_metrics(tmp_path) == {10: {"loss": 1.0}}


def test_only_the_first_process_writes(tmp_path: Path) -> None:
    tracker = Tracker.open(tmp_path, LogConfig(), distributed=DistributedContext(1, 2))
    assert tracker.log(1, {"loss": 1.0}) == {"loss": 1.0}
    tracker.close()
    assert not list(tmp_path.iterdir())


class BrokenSink:
    name = "broken"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        raise RuntimeError("password=hunter2")

    def flush(self) -> None:
        raise OSError("still broken")

    def close(self) -> None:
        raise ValueError("for ever")


class ListSink:
    name = "list"

    def __init__(self) -> None:
        self.calls: list[object] = []

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append((step, dict(values)))

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


def test_a_failing_sink_is_reported_once_and_stops_nothing(tmp_path: Path) -> None:
    shown: list[str] = []
    good = ListSink()
    tracker = Tracker([BrokenSink(), good], RunLog(tmp_path, echo=lambda text, level: shown.append(text)))
    for step in range(3):
        tracker.log(step, {"loss": 1.0})
    tracker.flush()
    tracker.close()
    tracker.close()
    assert good.calls == [*[(step, {"loss": 1.0}) for step in range(3)], "flush", "close"]
    assert [event["kind"] for event in read_lines(tmp_path / "events.jsonl")] == ["sink_failed", "sink_failures"]
    assert shown[0].startswith("Sink broken failed (RuntimeError: password=[redacted]")
    assert "5 times" in shown[1]


def test_a_full_disk_loses_no_metric(tmp_path: Path) -> None:
    shown: list[str] = []
    log = RunLog(None, echo=lambda text, level: shown.append(text))
    tracker = Tracker.open(tmp_path, LogConfig(), log=log)
    tracker.log(1, {"loss": 1.0})

    def full(operation: atomic.FileOperation) -> None:
        raise OSError(28, "No space left on device")

    with atomic.observe(full):
        tracker.log(2, {"loss": 2.0})
        tracker.log(3, {"loss": 3.0})
    tracker.log(4, {"loss": 4.0})
    assert read_metrics(tmp_path) == {step: {"loss": float(step)} for step in range(1, 5)}
    assert len(shown) == 1


def test_no_file_is_no_metrics(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == {}


def test_foreign_lines_are_skipped(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path)
    tracker.log(1, {"loss": 1.0})
    foreign = [b"[]", b'{"step":"2","attempt":1,"values":{}}', b'{"x":1}', b"\x00\x00"]
    foreign.append(b'{"step":3,"attempt":1,"values":{"loss":"high"}}')
    atomic.append(tmp_path / "metrics.jsonl", b"\n".join(foreign) + b"\n", sync=False)
    assert read_metrics(tmp_path) == {1: {"loss": 1.0}, 3: {}}


def test_tensorboard_reads_what_we_write(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for attempt, resume_step in ((1, 0), (2, 20)):
        config = LogConfig(tensorboard=True)
        tracker = Tracker.open(tmp_path, config, attempt=attempt, resume_step=resume_step, log=RunLog(tmp_path))
        for step in range(resume_step + 10, resume_step + 40, 10):
            tracker.log(step, {"loss": step * attempt / 8, "eval/loss": math.nan})
        tracker.close()
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("loss")] == [
        (10, 1.25),
        (20, 2.5),
        (30, 7.5),
        (40, 10.0),
        (50, 12.5),
    ]
    assert all(math.isnan(event.value) for event in accumulator.Scalars("eval/loss"))
    assert not (tmp_path / "events.jsonl").exists(), "no sink failed"


def test_a_missing_tensorboard_is_refused_before_step_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *arguments: object, **keywords: object) -> object:
        if name.startswith("tensorboard"):
            raise ImportError("No module named 'tensorboard'")
        return original(name, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"log\.tensorboard.*\[tensorboard\]"):
        TensorBoardSink(tmp_path, resume_step=0)


def test_the_newest_values_are_found_without_reading_everything(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path)
    tracker.log(1, {"eval/loss": 9.0})
    for step in range(1, 3001):
        tracker.log(step, {"loss": float(step)})
    assert (tmp_path / "metrics.jsonl").stat().st_size > 1 << 17
    assert last_values(tmp_path, ["loss"]) == {"loss": (3000, 3000.0)}
    assert last_values(tmp_path, ["loss", "eval/loss", "accuracy"]) == {"loss": (3000, 3000.0), "eval/loss": (1, 9.0)}
    open_tracker(tmp_path, attempt=2, resume_step=100).log(101, {"accuracy": 0.5})
    assert last_values(tmp_path, ["loss"]) == {"loss": (100, 100.0)}
    assert last_values(tmp_path / "none", ["loss"]) == {}
