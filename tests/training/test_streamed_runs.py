"""Runs whose text is streamed: step by step what they are over a cache, however often interrupted."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disk_usage import bytes_at_one_instant
from tiny_runs import at_step, configuration, run, use_numpy_engine, write_text
from vorox.core.errors import ConfigError, DataError
from vorox.data.cache.build import BuildOptions
from vorox.data.corpus.corpus import prepare
from vorox.data.dataset.iterable_dataset import RemoteIterableDataset
from vorox.records.replay_chain import read_chain
from vorox.run import Outcome, make_workload
from vorox.training.replay import replay

STEPS = 80
GROWTH = [
    f"train.num_steps={STEPS}",
    "checkpoint.every_steps=10",
    "eval.every_steps=null",
    "train.global_batch_sequences=8",
    "data.cache.unit_bytes=1500",
    "data.growth.mode=strict",
    "data.growth.later_passes=segments",
    "data.growth.max_segment_units=2",
]
LIMIT_BYTES = 24_000
STREAMED = [*GROWTH, "data.mode=streaming", f"data.streaming.retention_bytes={LIMIT_BYTES}"]


class Killed(BaseException):
    """Ends a run in the middle, as far as that is possible without ending the process."""


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nobody cuts the power here
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before, "a thread was left behind"


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the uninterrupted run over a cache that stays comes to: more than one pass."""
    directory = tmp_path_factory.mktemp("cached")
    with pytest.MonkeyPatch.context() as patch:
        use_numpy_engine(patch)
        outcome = run(configured(directory, GROWTH))
    rows = sum(path.stat().st_size for path in (directory / "cache").rglob("*-train-*/chunks/*/*.psc"))
    assert rows > 1.3 * LIMIT_BYTES, "the corpus must not fit"
    return result(outcome)


def configured(directory: Path, overrides: list[str]) -> Any:
    write_text(directory / "text", documents=60)
    return configuration(directory, overrides)


def result(outcome: Outcome) -> dict[str, Any]:
    entries = read_chain(outcome.run_directory).values()
    return {"chain": [entry.chain for entry in entries], "fingerprint": outcome.fingerprint}


def kill() -> None:
    raise Killed


@contextlib.contextmanager
def watched(directory: Path) -> Iterator[list[int]]:
    """The most bytes that chunks of streams took on disk meanwhile."""
    most, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            most[0] = max(most[0], bytes_at_one_instant(directory, "cache/streams/*/chunks/*/*"))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        ended.set()
        watcher.join()


def test_streamed_is_cached_within_its_room(tmp_path: Path, cached: dict[str, Any]) -> None:
    with watched(tmp_path) as most:
        outcome = run(configured(tmp_path, STREAMED))
    assert result(outcome) == cached
    assert 0 < most[0] <= LIMIT_BYTES
    (stream,) = (tmp_path / "cache" / "streams").iterdir()
    assert (stream / "CACHE").exists()
    report = replay(outcome.run_directory, lambda config: make_workload(config, _dist(), _log(), None, build=False))
    assert report.is_exact
    assert report.num_steps == STEPS


def _dist() -> Any:
    from vorox.core.ranks.distributed_context import DistributedContext

    return DistributedContext()


def _log() -> Any:
    from vorox.records.log import RunLog

    return RunLog(None)


@pytest.mark.parametrize("seed", range(4))
def test_killed_twice_at_any_step(
    seed: int, tmp_path: Path, cached: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chooser = random.Random(seed)
    first, second = sorted(chooser.sample(range(1, STEPS + 1), 2))
    threads = chooser.choice([0, 1, 3])
    config = configured(tmp_path, [*STREAMED, f"data.loader.num_threads={threads}"])
    for step in (first, second):
        with monkeypatch.context() as patch:
            at_step(patch, step, kill)
            with pytest.raises(Killed):
                run(config)
        if chooser.random() < 0.5:
            for path in tmp_path.glob("cache/streams/*/chunks/*/u*.psc"):
                path.unlink()
    assert result(run(config)) == cached


def test_text_that_changed_after_its_chunks_were_removed_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local file that changes under a run is found when it is read again; its old rows are not to be had."""
    config = configured(tmp_path, STREAMED)
    text = tmp_path / "text" / "text.jsonl"

    def tamper() -> None:
        raw = text.read_bytes()
        text.write_bytes(raw.replace(b"the", b"teh", 1))
        for path in tmp_path.glob("cache/streams/*/chunks/*/u*.psc"):
            path.unlink(missing_ok=True)

    at_step(monkeypatch, 40, tamper)
    with pytest.raises(DataError) as caught:
        run(config)
    assert "changed" in caught.value.what
    assert caught.value.exit_code == 4


def test_a_run_goes_on_streamed_where_it_was_cached_and_back(
    tmp_path: Path, cached: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, overrides in ((30, GROWTH), (60, STREAMED)):
        with monkeypatch.context() as patch:
            at_step(patch, step, kill)
            with pytest.raises(Killed):
                run(configured(tmp_path, overrides))
    assert result(run(configured(tmp_path, GROWTH))) == cached
    assert len(list((tmp_path / "runs").glob("*/"))) == 1


def test_the_dataset_of_a_configuration_gives_the_rows_of_its_run(tmp_path: Path) -> None:
    from vorox.core.batch import DataShard
    from vorox.data.order.loader import first_cursor
    from vorox.training.steps.dataloading import training_batches
    from vorox.training.steps.run_plan import update_plan
    from vorox.training.steps.schedule import Horizon

    config = configured(tmp_path, GROWTH)
    with contextlib.closing(prepare(config)) as corpus:
        plan, events = update_plan(None, tmp_path / "plan.jsonl", config, corpus, Horizon(12, 3, 64))
        plan.add(events)
        cursor = first_cursor(plan, config.run.seed)
        with training_batches(config, corpus, plan, DataShard(), cursor, total_steps=12) as batches:
            expected = np.concatenate([next(batches).tokens_ABT.reshape(-1, 16) for _ in range(12)])
    samples = iter(RemoteIterableDataset(config, retention_bytes=LIMIT_BYTES))
    found = np.stack([next(samples)["input_ids"] for _ in range(len(expected))])
    samples.close()  # type: ignore[attr-defined]
    assert np.array_equal(found, expected)
    staged = configured(tmp_path, ["data.stages=[{start_tokens: 1000, weights: {text: 1}}]"])
    with pytest.raises(ConfigError, match="one constant mixture of whole sources"):
        RemoteIterableDataset(staged)


def test_only_segments_can_be_streamed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keeps only some segments on disk"):
        configured(tmp_path, [*STREAMED, "data.growth.later_passes=whole"])
    with pytest.raises(ConfigError, match="each process builds what it reads"):
        configured(tmp_path, [*STREAMED, "data.growth.build=false"])
    with pytest.raises(ConfigError, match="cannot be built in advance"):
        prepare(configured(tmp_path, STREAMED), options=BuildOptions(wait_for="complete"))
    settled = configured(tmp_path, ["data.mode=streaming"])
    assert (settled.data.growth.mode, settled.data.growth.later_passes) == ("strict", "segments")
