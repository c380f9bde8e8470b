"""The exchange of a step: whole runs, the ranks as threads, with an engine whose steps depend on the exchange."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vorox.run
from numpy_engine import NumpyEngine
from rank_threads import RANK, ThreadBackend, run_ranks, together
from tiny_runs import before_step, configuration, run, use_clock
from vorox.core.batch import Batch, DataCursor, DataShard, Progress
from vorox.core.errors import DataError, NumericalError, Preempted
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import step_directories
from vorox.data.order import loader
from vorox.records.replay_chain import ReplayChain, read_chain
from vorox.runtime.heartbeat import Heartbeat, Phase
from vorox.training.loop.rank_statistics import RankStatistics
from vorox.training.loop.step_sync import Exchange, NextBatch, RankRows, StepDecision, StepSync
from vorox.training.steps.stop import StopRequest

LIMIT_SECONDS = 120.0


@pytest.fixture(autouse=True)
def _backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vorox.run.backends, "load", lambda name: ThreadBackend())


def wait_for_decision(step: int) -> None:
    decision = RANK.dist.channel.get(f"vorox/0/step/{step}/decision", LIMIT_SECONDS)
    assert decision is not None, f"step {step} ran, and the ranks did not decide what follows it"


def reports_of(patch: pytest.MonkeyPatch) -> list[Sequence[Any]]:
    """The reports of all ranks by step, as the main rank receives them."""
    found: list[Sequence[Any]] = []
    original = RankStatistics.receive

    def receive(self: RankStatistics, reports: Sequence[Any]) -> None:
        found.append(reports)
        original(self, reports)

    patch.setattr(RankStatistics, "receive", receive)
    return found


def chain(directory: Path) -> list[str]:
    (found,) = (directory / "runs").iterdir()
    return [entry.chain for entry in read_chain(found).values()]


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_decide_while_they_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """No step ends before its decision is there; the run is that of one process.

    The clock of a rank goes on by 1 s in each of its steps, and is otherwise still.
    """
    now = Counter[int]()

    def step(number: int) -> None:
        wait_for_decision(number)
        now[RANK.dist.rank] += 1

    run(configuration(tmp_path / "one"))
    with monkeypatch.context() as patch:
        before_step(patch, step)
        use_clock(patch, lambda: float(now[RANK.dist.rank]))
        reports = reports_of(patch)
        outcomes = run_ranks(count, configuration(tmp_path / "ranks"))
    assert [outcome.progress.step for outcome in outcomes] == [12] * count
    assert chain(tmp_path / "ranks") == chain(tmp_path / "one")
    assert len(reports) == 12
    times = {(report["waited_seconds"], report["compute_seconds"]) for step in reports[2:] for report in step}
    assert times == {(0.0, 1.0)}, "batches came during the steps"
    assert [outcome.speed.seconds["data"] for outcome in outcomes] == [0.0] * count


def test_a_batch_that_takes_longer_than_the_step_is_a_wait_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on only while rank 1 waits for its batch of step 6, and rank 0 for rank 1."""
    slow, now, read_seconds = list[Any](), [0.0], 0.5
    waits = {rank: threading.Event() for rank in (0, 1)}
    original_read, original_init = loader._BatchReader.read, loader._BatchReader.__init__
    original_finish, original_enter = StepSync.finish, Heartbeat.enter

    def create(self: Any, *arguments: Any) -> None:
        original_init(self, *arguments)
        if RANK.dist.rank == 1:
            slow.append(self)

    def read(self: Any, number: int) -> Any:
        if number + 1 == 6 and self in slow:
            assert all(event.wait(LIMIT_SECONDS) for event in waits.values())
            now[0] += read_seconds
        return original_read(self, number)

    def finish(self: StepSync, exchange: Exchange) -> StepDecision:
        """Rank 0 computes until its batch is there."""
        if exchange.progress.step == 5 and RANK.dist.rank == 0:
            assert exchange.is_batch_known.wait(LIMIT_SECONDS)
        return original_finish(self, exchange)

    def enter(self: Heartbeat, phase: Phase, step: int | None = None) -> None:
        original_enter(self, phase, step)
        if (RANK.dist.rank, phase, step) in {(0, "sync", 5), (1, "data", 6)}:
            waits[RANK.dist.rank].set()

    monkeypatch.setattr(loader._BatchReader, "__init__", create)
    monkeypatch.setattr(loader._BatchReader, "read", read)
    monkeypatch.setattr(StepSync, "finish", finish)
    monkeypatch.setattr(Heartbeat, "enter", enter)
    use_clock(monkeypatch, lambda: now[0])
    reports = reports_of(monkeypatch)
    outcomes = run_ranks(2, configuration(tmp_path, ["data.loader.num_threads=0", "eval.every_steps=null"]))
    waited = [[report["waited_seconds"] for report in step] for step in reports[2:]]
    assert waited == [[0.0, read_seconds if step == 6 else 0.0] for step in range(3, 13)], "reported with step 6"
    assert [outcome.speed.seconds["data"] for outcome in outcomes] == [0.0, read_seconds]


def test_a_step_that_fails_on_one_rank_ends_all_and_their_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is that of the rank; its next batch, for which a thread waits at that time, never comes."""

    def fail(step: int) -> None:
        if step == 6 and RANK.dist.rank == 1:
            raise NumericalError("Device is broken", hint="replace it")

    before_step(monkeypatch, fail)
    errors = run_ranks(3, configuration(tmp_path))
    assert [(type(error), error.what.removeprefix("rank 1: ")) for error in errors] == [
        (NumericalError, "Device is broken")
    ] * 3
    deadline = time.monotonic() + LIMIT_SECONDS
    while any("vorox-sync" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread outlives its run"
        time.sleep(0.01)


def test_ranks_that_diverged_stop_before_they_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ReplayChain.record

    def record(self: ReplayChain, step: int, *arguments: Any) -> None:
        original(self, step, *arguments)
        if step == 5 and RANK.dist.rank == 2:
            self.head = "0" * 32

    monkeypatch.setattr(ReplayChain, "record", record)
    errors = run_ranks(3, configuration(tmp_path, ["eval.every_steps=null"]))
    assert all(isinstance(error, NumericalError) for error in errors), errors
    assert {error.what.removeprefix("rank 0: ") for error in errors} == {
        "Ranks diverged: rank 2 recorded other numbers than rank 0"
    }
    (directory,) = (tmp_path / "runs").iterdir()
    assert max(step_directories(directory)) == 4


def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal during a step is reported with the next one: no report is changed after it was sent."""
    stops = dict[int, StopRequest]()

    class Stop(StopRequest):
        def __init__(self) -> None:
            super().__init__()
            stops[RANK.dist.rank] = self

    def signal(step: int) -> None:
        wait_for_decision(step)
        if step == 5 and RANK.dist.rank == 1:
            stops[1].requested = "SIGTERM"

    monkeypatch.setattr(vorox.run, "StopRequest", Stop)
    before_step(monkeypatch, signal)
    errors = run_ranks(3, configuration(tmp_path))
    assert [type(error) for error in errors] == [Preempted] * 3
    assert {error.what for error in errors[1:]} == {errors[0].what} == {"SIGTERM: stopped after step 6 of 12"}, errors


def test_a_failure_of_a_rank_decides_over_a_wait_of_another() -> None:
    """Rank 0 waits for rows that are not built yet, rank 1 cannot read its own: the run has failed, not paused."""
    next_batch = NextBatch(DistributedContext(), StopRequest(), Heartbeat(Path()))
    waits, fails = {"rank": 0, "is_awaited": True}, {"rank": 1, "is_awaited": False}
    for reports in ([waits, fails], [fails, waits], [None, waits, fails]):
        assert next_batch.find(reports) == fails
    assert next_batch.find([None, waits]) == waits
    assert next_batch.find([None, None]) is None


def rows_of(step: int, tokens: Sequence[int], slots: Sequence[int]) -> Batch:
    """A batch of one micro-batch, with a row of one token per slot; rows without a slot pad it."""
    rows = np.array(tokens, np.int32).reshape(1, -1, 1)
    found = Batch(
        step, rows, rows, None, None, np.ones(rows.shape[:2], np.uint64), len(tokens), DataCursor("", 0, 1, 1, 0)
    )
    return found.with_lanes(np.array(slots, np.int64))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_batch_digest_of_ranks_that_share_rows(replicas: int) -> None:
    """Pieces of context parallelism and parts of layers read whole rows; each row counts once."""
    parts = [rows_of(3, [1, 2], [0, 1]), rows_of(3, [3, 4], [2, 3]), rows_of(3, [5, 0], [4])]

    def program(dist: DistributedContext) -> list[str]:
        index = dist.rank // replicas
        rows = RankRows(dist, DataShard(index, len(parts)))
        return [rows.digest(parts[index]) for _ in range(2)]

    results, _ = together(len(parts) * replicas, program)
    assert results == [[rows_of(3, [1, 2, 3, 4, 5], range(5)).digest()] * 2] * len(results)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_that_share_rows_and_read_different_ones_stop(rank: int) -> None:
    def program(dist: DistributedContext) -> str:
        rows = RankRows(dist, DataShard(dist.rank // 3, 2))
        return rows.digest(rows_of(3, [1 + (dist.rank == rank)], [dist.rank // 3]))

    errors, _ = together(6, program)
    assert {type(error) for error in errors} == {DataError}
    assert {(error.what.removeprefix("rank 0: "), error.where) for error in errors} == {
        ("Ranks that train on the same rows read different ones", "step 4")
    }


def test_the_first_rank_that_diverged_is_named_among_many(tmp_path: Path) -> None:
    """Of 20: rank 3 and another below it in the tree, and two that differ in other ways."""
    log: Any = None

    def program(dist: DistributedContext) -> StepDecision:
        chain = ReplayChain(tmp_path, Progress(0, 0, DataCursor("", 0, 0, 0, 0)), writes=False)
        chain.head = {18: "c", 3: "b", 10: "b", 9: "d"}.get(dist.rank, "a")
        heartbeat = Heartbeat(tmp_path)
        statistics = RankStatistics(NumpyEngine(10), heartbeat.seconds, log, lambda step: False)
        stop = StopRequest()
        with StepSync(
            dist, DataShard(dist.rank, 20), stop, lambda _: False, chain, NextBatch(dist, stop, heartbeat), statistics
        ) as sync:
            return sync.finish(
                sync.start(Progress(5, 0, DataCursor("", 0, 0, 0, 0)), rows_of(4, [1], [dist.rank]), None)
            )

    errors, _ = together(20, program)
    assert {error.what.removeprefix("rank 0: ") for error in errors} == {
        "Ranks diverged: rank 3 recorded other numbers than rank 0"
    }
