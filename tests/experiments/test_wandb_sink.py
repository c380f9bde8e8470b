"""The Weights & Biases sink with the real client, offline; and with clients that hang, fail and start slowly."""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eventually import PATIENCE_SECONDS, wait_until, wait_until_blocked
from vorox.core.errors import ConfigError
from vorox.core.schema import LogConfig
from vorox.experiments.tracking import Tracker
from vorox.experiments.wandb_sink import WandbSink
from vorox.records.log import RunLog

STEPS = 200


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))


def client(
    monkeypatch: pytest.MonkeyPatch, log: Callable[..., object], may_start: Callable[[], object] = bool
) -> list[str]:
    """A stand-in for the package; returns what it was asked to do."""
    done: list[str] = []

    def init(**arguments: Any) -> SimpleNamespace:
        may_start()
        done.append(f"init {arguments['mode']} {arguments['id']}")
        return SimpleNamespace(log=log, finish=lambda: done.append("finish"))

    module = SimpleNamespace(init=init, Settings=lambda **_: None, __spec__=SimpleNamespace(name="wandb"))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return done


def records_of(file: bytes) -> Iterator[bytes]:
    """The records of the client's file: LevelDB's log format (blocks of 32 KiB) behind a header of 7 bytes."""
    place, partial = 7, b""
    while place + 7 <= len(file):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", file, place + 4)
        if kind == 0:
            return
        partial += file[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # full, last
            yield partial
            partial = b""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_real_client_records_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value is in the file that the client writes, which its own reader opens."""
    pytest.importorskip("wandb")
    monkeypatch.setattr("vorox.experiments.background_sink.CLOSE_SECONDS", 10 * PATIENCE_SECONDS)
    run = tmp_path / "a-run"
    run.mkdir()
    sink = WandbSink(run, project="tests", settings={"model.num_layers": 2})
    assert sink.mode == "offline"
    for step in range(1, STEPS + 1):
        sink.write(step, {"loss": 1 / step, "activation/0/after_mlp/std": float(step)})
    sink.close()
    (file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    from wandb.proto import wandb_internal_pb2

    def records() -> list[Any]:
        return [wandb_internal_pb2.Record.FromString(data) for data in records_of(file.read_bytes())]

    # The client's own process writes on for a moment after the client has finished; its last record is `exit`.
    wait_until(lambda: "exit" in {record.WhichOneof("record_type") for record in records()})
    found: dict[int, float] = {}
    for record in records():
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            found[int(items["_step"])] = float(items["loss"])
    assert found == {step: pytest.approx(1 / step) for step in range(1, STEPS + 1)}


def test_no_step_waits_for_a_client_that_starts_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    started = threading.Event()
    done = client(monkeypatch, lambda values, step: seen.append(step), started.wait)
    sink = WandbSink(tmp_path / "slow", project="tests", settings={})
    for step in range(1000):
        sink.write(step, {"loss": 1.0})
    assert done == [], "it starts still"
    started.set()
    sink.close()
    assert seen == list(range(1000))
    assert done == ["init offline slow", "finish"]


def test_a_client_that_fails_is_reported_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(values: Any, step: int) -> None:
        raise ConnectionError("the server is gone")

    client(monkeypatch, fail)
    said: list[str] = []
    log = RunLog(None, echo=lambda text, *_: said.append(str(text)))
    tracker = Tracker.open(tmp_path, LogConfig(wandb=True), log=log, settings={"a": 1})
    for step in range(1, 20):
        tracker.log(step, {"loss": 1.0})
        wait_until(lambda: "vorox-wandb" not in {thread.name for thread in threading.enumerate()})
    tracker.close()
    assert sum("the server is gone" in text for text in said) == 1
    assert (tmp_path / "metrics.jsonl").read_text().count('"loss"') == 19


def test_a_client_that_hangs_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, goes_on = threading.Event(), threading.Event()
    client(monkeypatch, lambda values, step: taken.set() or goes_on.wait())
    monkeypatch.setattr("vorox.experiments.background_sink.CLOSE_SECONDS", 0.2)
    monkeypatch.setattr("vorox.experiments.background_sink.QUEUE_STEPS", 3)
    sink = WandbSink(tmp_path, project="tests", settings={})
    sink.write(0, {"loss": 1.0})
    assert taken.wait(PATIENCE_SECONDS)
    for step in range(1, 4):
        sink.write(step, {"loss": 1.0})
    with pytest.raises(RuntimeError, match="steps were dropped"):
        sink.write(4, {"loss": 1.0})
    with pytest.raises(TimeoutError):
        sink.close()
    goes_on.set()
    sink._queue.put(None)
    sink._thread.join()


def test_a_client_that_catches_up_while_closing_gets_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is full when the sink closes, and is sent within the time for closing."""
    taken, goes_on, seen = threading.Event(), threading.Event(), []
    done = client(monkeypatch, lambda values, step: seen.append(step) or taken.set() or goes_on.wait())
    monkeypatch.setattr("vorox.experiments.background_sink.CLOSE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr("vorox.experiments.background_sink.QUEUE_STEPS", 2)
    sink = WandbSink(tmp_path / "full", project="tests", settings={})
    sink.write(0, {"loss": 1.0})
    assert taken.wait(PATIENCE_SECONDS)
    for step in (1, 2):
        sink.write(step, {"loss": 1.0})
    assert sink._queue.full()
    closing = threading.Thread(target=sink.close)
    closing.start()
    wait_until_blocked(closing)
    goes_on.set()
    closing.join(PATIENCE_SECONDS)
    assert (seen, done[-1]) == ([0, 1, 2], "finish")
    assert not sink._thread.is_alive()


@pytest.mark.parametrize(
    ("variable", "value", "mode"), [("WANDB_API_KEY", "x" * 40, "online"), ("WANDB_MODE", "disabled", "disabled")]
)
def test_the_mode_follows_the_environment(
    variable: str, value: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = client(monkeypatch, lambda values, step: None)
    monkeypatch.setenv(variable, value)
    sink = WandbSink(tmp_path, project="tests", settings={})
    sink.close()
    assert done[0].startswith(f"init {mode} ")


def test_without_the_package_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the wandb package"):
        WandbSink(tmp_path, project="tests", settings={})
