"""Growing and streamed rows under several ranks: whole runs, the ranks as threads that read every row each.

The oracle is the run of one process: the same plan, batches and chain. What ranks of their own rows do is in
``ranks``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import vorox.run
from rank_threads import RANK, ThreadBackend, run_ranks
from tiny_runs import configuration, run, write_text
from vorox.core.batch import Batch
from vorox.core.errors import DataError, Preempted
from vorox.core.files.json_lines import read_lines
from vorox.core.run_layout import step_directories
from vorox.core.schema import RunConfig
from vorox.data.corpus import cache_opener
from vorox.data.corpus.corpus import prepare
from vorox.data.order import loader
from vorox.records.replay_chain import read_chain
from vorox.training.loop.display import NoDisplay
from vorox.training.steps.stop import StopRequest

STRICT = ["data.growth.mode=strict", "data.growth.first_segment_units=2", "data.growth.horizon_steps=2"]
LIMIT_BYTES = 24_000
STREAMED = [
    *STRICT, "data.growth.max_segment_units=2", "data.growth.later_passes=segments", "data.mode=streaming",
    f"data.streaming.retention_bytes={LIMIT_BYTES}",
]  # fmt: skip
STEPS = ["train.num_steps=40", "data.cache.unit_bytes=1500", "checkpoint.every_steps=null", "eval.every_steps=null"]


@pytest.fixture(autouse=True)
def _backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vorox.run.backends, "load", lambda name: ThreadBackend())
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def configured(directory: Path, overrides: Sequence[str]) -> RunConfig:
    write_text(directory / "text", documents=80)
    return configuration(directory, [*STEPS, *overrides])


def records(directory: Path) -> tuple[Any, ...]:
    (found,) = [path for path in (directory / "runs").iterdir() if path.is_dir()]
    chain = {step: entry.chain for step, entry in read_chain(found).items()}
    return chain, [{**event, "time": None} for event in read_lines(found / "plan.jsonl")]


@pytest.mark.parametrize("overrides", [STRICT, STREAMED], ids=["growing", "streamed"])
def test_ranks_train_on_the_rows_of_one_process(tmp_path: Path, overrides: list[str]) -> None:
    run(configured(tmp_path / "one", overrides))
    outcomes = run_ranks(3, configured(tmp_path / "three", overrides))
    assert [outcome.progress.step for outcome in outcomes] == [40, 40, 40]
    assert len({outcome.progress.cursor for outcome in outcomes}) == 1, "every rank has the same plan"
    assert records(tmp_path / "three") == records(tmp_path / "one")
    assert len(records(tmp_path / "one")[1]) > 3, "the plan grew"
    chunks = [path.stat().st_size for path in (tmp_path / "three").glob("cache/streams/*/chunks/*/*")]
    assert sum(chunks) <= LIMIT_BYTES
    assert bool(chunks) == (overrides is STREAMED)


def break_batch(patch: pytest.MonkeyPatch, rank: int, step: int, error: Exception) -> None:
    """Rank ``rank`` cannot read the batch of a step (from 1)."""
    original = loader._BatchReader.read
    readers = dict[int, int]()

    def read(self: Any, number: int) -> Batch:
        if number + 1 == step and readers[id(self)] == rank:
            raise error
        return original(self, number)

    created = loader._BatchReader.__init__

    def create(self: Any, *arguments: Any) -> None:
        created(self, *arguments)
        readers[id(self)] = RANK.dist.rank

    patch.setattr(loader._BatchReader, "__init__", create)
    patch.setattr(loader._BatchReader, "read", read)


@pytest.mark.parametrize("threads", [0, 2])
def test_a_batch_that_one_rank_cannot_read_loses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """All ranks end with its error, after a common checkpoint of the last common step; the run goes on from there."""
    overrides = ["train.num_steps=12", f"data.loader.num_threads={threads}"]
    run(configured(tmp_path / "one", overrides))
    config = configured(tmp_path / "two", overrides)
    with monkeypatch.context() as patch:
        break_batch(patch, 1, 8, DataError("Chunk is damaged", where="u7", hint="repair it"))
        errors = run_ranks(2, config)
    assert [type(error) for error in errors] == [DataError, DataError]
    assert errors[1].what == "Chunk is damaged"
    assert errors[0].what == "rank 1: Chunk is damaged"
    assert errors[0].hint == "repair it"
    (directory,) = (tmp_path / "two" / "runs").iterdir()
    assert list(step_directories(directory)) == [7]
    run_ranks(2, config)
    assert records(tmp_path / "two") == records(tmp_path / "one")


def test_a_first_batch_that_cannot_be_read_ends_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_batch(monkeypatch, 1, 1, DataError("Chunk is damaged"))
    errors = run_ranks(3, configured(tmp_path, []))
    assert [error.what.removeprefix("rank 1: ") for error in errors] == ["Chunk is damaged"] * 3


class NoBuild:
    """Builds nothing in the background, or fails to."""

    is_running = True
    error: Exception | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None: ...


def assert_all_preempted(errors: list[Any], directory: Path) -> None:
    assert [type(error) for error in errors] == [Preempted] * len(errors)
    (found,) = (directory / "runs").iterdir()
    assert all(f"topped after step {max(step_directories(found))} of 40" in error.what for error in errors), errors


def test_all_ranks_stop_where_rows_are_missing_and_continue_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path / "two", [*STRICT, "data.growth.on_starve=stop"])
    with monkeypatch.context() as patch:
        patch.setattr(cache_opener, "build_in_background", NoBuild)
        assert_all_preempted(run_ranks(2, config), tmp_path / "two")
    prepare(configured(tmp_path / "two", []))
    assert [outcome.progress.step for outcome in run_ranks(3, config)] == [40] * 3
    run(configured(tmp_path / "one", STRICT))
    assert records(tmp_path / "two") == records(tmp_path / "one")


def test_a_signal_to_one_rank_ends_the_wait_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stops = dict[int, StopRequest]()

    class Stop(StopRequest):
        def __init__(self) -> None:
            super().__init__()
            stops[RANK.dist.rank] = self

    class Shown(NoDisplay):
        def waiting(self, text: str | None) -> None:
            if text is not None:  # of any rank: the ranks are threads of one process, which shows its oldest wait
                stops[1].requested = "SIGTERM"

    monkeypatch.setattr(vorox.run, "StopRequest", Stop)
    monkeypatch.setattr(vorox.run, "NoDisplay", Shown)
    monkeypatch.setattr(cache_opener, "build_in_background", NoBuild)
    assert_all_preempted(run_ranks(3, configured(tmp_path, STRICT)), tmp_path)


def test_a_build_that_fails_on_the_main_rank_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(NoBuild):
        error = DataError("A record is broken", where="text.jsonl")

    monkeypatch.setattr(cache_opener, "build_in_background", Failing)
    errors = run_ranks(2, configured(tmp_path, STRICT))
    assert [(type(error), error.what) for error in errors] == [
        (DataError, "A record is broken"), (DataError, "rank 0: A record is broken")
    ]  # fmt: skip


def test_one_rank_of_a_machine_builds_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[int]()
    original = cache_opener.build_in_background

    def build_in_background(*arguments: Any) -> Any:
        started.append(RANK.dist.rank)
        return original(*arguments)

    monkeypatch.setattr(cache_opener, "build_in_background", build_in_background)
    run_ranks(3, configured(tmp_path, STRICT))
    assert started == [0]
