"""Loss spikes: the stated limit, one decision for straight, resumed and replayed runs, and the plan's record of it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vorox.run
from numpy_engine import NumpyEngine
from tiny_runs import Killed, at_step, configuration, events, kill, result, run, use_numpy_engine
from vorox.core.engine import StepValues
from vorox.core.errors import NumericalError
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig, TrainConfig
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_events import RollbackEvent
from vorox.data.provenance.queries import RunDataIndex, when, where
from vorox.experiments.metadata import MetadataCache
from vorox.experiments.tracking import read_metrics
from vorox.records.attempts import read_attempts
from vorox.records.log import RunLog
from vorox.training.replay import replay
from vorox.training.steps.loss_spikes import LossSpikes, spike_limit
from vorox.training.steps.workload import Workload

LENGTH = ["train.num_steps=14", "checkpoint.keep_last=9"]
SKIP = ["train.spike_policy=skip", "train.spike_window_steps=4", *LENGTH]
SPIKE = 10
OFF = [*LENGTH, "train.spike_policy=off", "checkpoint.every_steps=3"]
ROLLBACK = [
    *OFF, "train.spike_policy=rollback", "train.spike_window_steps=4", "train.spike_rollback_steps=3"
]  # fmt: skip


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)


class Spike:
    """Multiplies loss and gradients of some steps by 3, as a batch of bad data does."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, max_loss: float | None = None,
        spikes: Container[int] = (SPIKE,), limited: Container[int] = (SPIKE,),
    ) -> None:  # fmt: skip
        step, gradients, self.is_on, now = NumpyEngine.train_step, NumpyEngine._gradients, True, [0]

        def train_step(engine: NumpyEngine, batch: Any, **kwargs: Any) -> Any:
            now[0] = batch.step + 1
            if now[0] in limited and max_loss is not None:
                kwargs["max_loss"] = max_loss
            return step(engine, batch, **kwargs)

        def scaled(engine: NumpyEngine, *arguments: Any) -> Any:
            loss, found = gradients(engine, *arguments)
            factor = 3 if self.is_on and now[0] in spikes else 1
            return factor * loss, {name: np.float32(factor) * array for name, array in found.items()}

        monkeypatch.setattr(NumpyEngine, "train_step", train_step)
        monkeypatch.setattr(NumpyEngine, "_gradients", scaled)


def run_until(step: int, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until a process is killed in the middle of a step."""
    with monkeypatch.context() as patch:
        at_step(patch, step, kill)
        with pytest.raises(Killed):
            run(config)


def make_workload(config: RunConfig) -> Workload:
    return vorox.run.make_workload(config, DistributedContext(), RunLog(None), None, build=False)


def states(directory: Path, step: int) -> set[tuple[str, int | None]]:
    """What ``vorox data when`` says about the documents of a step, at that step."""
    with RunDataIndex.open(directory) as run_data:
        documents = [one for row in where(run_data, step) for one in row.documents]
        found = [one for document in documents for one in when(run_data, document.uri, ordinal=document.ordinal)]
    return {(one.state, one.attempt) for one in found if one.step == step}


def skips(directory: Path, kind: str = "skip") -> list[dict[str, Any]]:
    bodies = [json.loads(line)["body"] for line in (directory / "plan.jsonl").read_bytes().splitlines()]
    return [body for body in bodies if body["kind"] == kind]


def test_the_limit_is_a_robust_deviation_of_the_losses_up_to_the_step_before_the_last() -> None:
    config = TrainConfig(spike_policy="skip", spike_window_steps=8, spike_deviations=5.0)
    losses = np.random.default_rng().normal(3.0, 0.2, 30).tolist()
    losses[4], losses[20] = math.nan, 9.0
    spikes, num_spikes = LossSpikes(config, {}), 0
    for step, loss in enumerate(losses, start=1):
        finite = [known for known in losses[: max(0, step - 2)] if math.isfinite(known)][-8:]
        expected = math.inf
        if len(finite) == 8:
            median = statistics.median(finite)
            deviation = 1.4826 * statistics.median(abs(one - median) for one in finite)
            expected = median + 5 * max(deviation, 0.01 * median)
        limit = spikes.max_loss(step)
        assert limit == pytest.approx(expected, rel=1e-6)
        before = LossSpikes(config, dict(enumerate(losses[: step - 1], start=1)))
        assert before.max_loss(step) == limit, "settled early, or read again at a resume"
        assert spikes.record(step, StepValues(loss, 1.0, math.isfinite(loss), {}), limit) == (loss > limit)
        num_spikes += loss > limit
    assert spikes.num_skipped == num_spikes >= 1


def test_a_spike_is_skipped_by_straight_resumed_and_replayed_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        Spike(patch, max_loss=0.0)
        oracle = run(configuration(tmp_path / "oracle", LENGTH))
    with monkeypatch.context() as patch:
        Spike(patch)
        straight = run(configuration(tmp_path / "straight", SKIP))
        config = configuration(tmp_path / "resumed", SKIP)
        run_until(12, config, patch)  # after the spike has settled; resumed from step 8
        resumed = run(config)
        report = replay(straight.run_directory, make_workload)
        middle = replay(straight.run_directory, make_workload, first_step=8)
    assert straight.fingerprint == oracle.fingerprint
    assert result(resumed) == {**result(straight), "losses": result(resumed)["losses"]}
    assert (report.is_exact, middle.is_exact) == (True, True), (str(report), str(middle))
    for directory in (straight.run_directory, resumed.run_directory):
        (skip,) = skips(directory)
        assert (skip["start_position"], skip["reason"]) == ((SPIKE - 1) * 4, "loss_spike")
        assert skip["loss"] > skip["max_loss"]
        assert len(events(directory, "loss_spike")) >= 1
    assert states(straight.run_directory, SPIKE) == {("skipped", 1)}
    assert states(straight.run_directory, SPIKE - 1) == {("kept", 1)}
    assert states(resumed.run_directory, SPIKE) == {("rolled_back", 1), ("skipped", 2)}
    assert states(oracle.run_directory, SPIKE) == {("kept", 1)}, "only the policy records a skip"
    assert sum(values.get("spike_steps", 0) for values in read_metrics(straight.run_directory).values()) == 1


def test_a_repeated_step_without_the_spike_withdraws_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spike, config = Spike(monkeypatch), configuration(tmp_path, SKIP)
    run_until(12, config, monkeypatch)
    directory = next((tmp_path / "runs").iterdir())
    assert states(directory, SPIKE) == {("skipped", 1)}
    spike.is_on = False
    run(config)
    assert [one["reason"] for one in skips(directory)] == ["loss_spike", "withdrawn"]
    assert states(directory, SPIKE) == {("rolled_back", 1), ("kept", 2)}


@pytest.mark.parametrize("settings", [["train.spike_policy=stop"], ["train.max_spike_steps=0"]])
def test_a_spike_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str]) -> None:
    Spike(monkeypatch)
    config = configuration(tmp_path, [*SKIP, *settings])
    for _ in range(2):  # again after a resume
        with pytest.raises(NumericalError, match="Loss spike") as stopped:
            run(config)
        assert (stopped.value.exit_code, stopped.value.where) == (7, f"step {SPIKE}")
        assert stopped.value.saved == "training state up to step 8 is safe in step-00000008"
    assert skips(next((tmp_path / "runs").iterdir())) == []


@pytest.mark.slow
def test_a_rollback_equals_a_run_that_never_applied_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    window = range(SPIKE - 2, SPIKE + 1)
    with monkeypatch.context() as patch:
        Spike(patch, max_loss=0.0, limited=window)
        oracle = run(configuration(tmp_path / "oracle", OFF))
    with monkeypatch.context() as patch:
        Spike(patch)
        straight = run(configuration(tmp_path / "straight", ROLLBACK))
        report = replay(straight.run_directory, make_workload)
        middle = replay(straight.run_directory, make_workload, first_step=6)
        by_hand = resumed_by_hand(tmp_path / "by_hand", patch)
    assert result(straight) == result(oracle)
    assert result(by_hand) == {**result(straight), "losses": result(by_hand)["losses"]}
    assert (report.is_exact, middle.is_exact) == (True, True), (str(report), str(middle))
    directory = straight.run_directory
    (event,) = skips(directory, "rollback")
    assert (event["start_position"], event["end_position"], event["state_position"]) == (7 * 4, 10 * 4, 6 * 4)
    assert skips(directory) == []
    assert [(one.start_step, one.last_step) for one in read_attempts(directory)] == [(0, SPIKE + 1), (6, 14)]
    for step in window:
        assert states(directory, step) == {("rolled_back", 1), ("skipped", 2)}
    assert states(directory, 7) == {("rolled_back", 1), ("kept", 2)}
    assert states(directory, 6) == {("kept", 1)}
    assert len(events(directory, "loss_spike_rollback")) == 1
    exceptions = "SELECT attempt, kind, first_step, first_position, end_position FROM exception ORDER BY 1, 3"
    assert MetadataCache.query(directory / "metadata.sqlite", exceptions).rows == [
        (attempt, "loss_spike", step, 4 * (step - 1), 4 * step)
        for attempt, step in ((1, SPIKE), *((2, step) for step in window))
    ]
    assert not (directory / "failure.json").exists()
    outcomes = [one["outcome"] for one in json.loads((directory / "run.json").read_bytes())["attempts"]]
    assert outcomes == ["rolled_back", "finished"]


@pytest.mark.slow
def test_a_rollback_across_a_change_of_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 8 to 10 are undone, the last two with twice the rows; killed in between, the end is the same."""
    stages = f"train.batch_stages={json.dumps([{'start_step': SPIKE - 1, 'global_batch_sequences': 8}])}"
    sizes = [4] * (SPIKE - 2) + [8] * 6
    with monkeypatch.context() as patch:
        Spike(patch, max_loss=0.0, limited=range(SPIKE - 2, SPIKE + 1))
        oracle = run(configuration(tmp_path / "oracle", [*OFF, stages]))
    Spike(monkeypatch)
    straight = run(configuration(tmp_path / "straight", [*ROLLBACK, stages]))
    assert result(straight) == result(oracle)
    directory = straight.run_directory
    (event,) = skips(directory, "rollback")
    assert (event["start_position"], event["end_position"]) == (sum(sizes[: SPIKE - 3]), sum(sizes[:SPIKE]))
    assert event["state_position"] == sum(sizes[:6])
    for step in range(SPIKE - 2, SPIKE + 1):
        assert states(directory, step) == {("rolled_back", 1), ("skipped", 2)}
        assert len(where(RunDataIndex.open(directory), step)) == sizes[step - 1]
    for first_step in (0, 6):
        assert replay(directory, make_workload, first_step=first_step).is_exact
    for step in (11, 9, 13):  # before the spike settles; at the change, while its window is skipped; after it
        config = configuration(tmp_path / str(step), [*ROLLBACK, stages])
        with monkeypatch.context() as patch:
            at_attempt(patch, [0], step, 1 if step == 11 else 2)
            with pytest.raises(Killed):
                run(config)
        resumed = run(config)
        assert result(resumed) == {**result(straight), "losses": result(resumed)["losses"]}


def resumed_by_hand(directory: Path, monkeypatch: pytest.MonkeyPatch) -> vorox.run.Outcome:
    """A run without a policy that is killed before the spike; its plan gets the event, and it is resumed."""
    config = configuration(directory, OFF)
    run_until(8, config, monkeypatch)
    plan = DataPlan.open(next((directory / "runs").iterdir()) / "plan.jsonl")
    plan.add([RollbackEvent(7 * 4, 10 * 4, 9.0, 4.0, 6 * 4)])
    return run(config)


@pytest.mark.slow
def test_a_rollback_that_a_kill_interrupts_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Spike(monkeypatch)
    straight = run(configuration(tmp_path / "straight", ROLLBACK))
    for step in (11, 8, 13):  # before the spike settles; while its window is skipped; after it
        directory = tmp_path / str(step)
        config = configuration(directory, ROLLBACK)
        with monkeypatch.context() as patch:
            attempts = [0]
            at_attempt(patch, attempts, step, 1 if step == 11 else 2)
            with pytest.raises(Killed):
                run(config)
        resumed = run(config)
        assert result(resumed) == {**result(straight), "losses": result(resumed)["losses"]}
        assert len(skips(resumed.run_directory, "rollback")) == 1


def at_attempt(monkeypatch: pytest.MonkeyPatch, attempts: list[int], step: int, attempt: int) -> None:
    """Kill the process in the middle of a step of an attempt."""
    train_step, train = NumpyEngine.train_step, vorox.run.loop.train

    def counted(*arguments: Any) -> Any:
        attempts[0] += 1
        return train(*arguments)

    def killed(engine: NumpyEngine, batch: Any, **kwargs: Any) -> Any:
        if (batch.step + 1, attempts[0]) == (step, attempt):
            raise Killed
        return train_step(engine, batch, **kwargs)

    monkeypatch.setattr(vorox.run.loop, "train", counted)
    monkeypatch.setattr(NumpyEngine, "train_step", killed)


@pytest.mark.slow
def test_a_run_without_an_older_checkpoint_returns_to_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Spike(monkeypatch)
    for every, state, first in ((20, 0, 8), (9, 9, 10)):
        settings = [*ROLLBACK, f"checkpoint.every_steps={every}", "checkpoint.keep_last=1"]
        outcome = run(configuration(tmp_path / str(every), settings))
        (event,) = skips(outcome.run_directory, "rollback")
        assert (event["state_position"], event["start_position"]) == (state * 4, (first - 1) * 4)
        assert replay(outcome.run_directory, make_workload).is_exact


@pytest.mark.slow
def test_the_last_rollback_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Spike(monkeypatch, spikes=(8, 12))
    settings = [*ROLLBACK, "train.max_spike_rollbacks=1"]
    config = configuration(tmp_path, settings)
    for _ in range(2):  # again after a resume
        with pytest.raises(NumericalError, match="Loss spike") as stopped:
            run(config)
        assert (stopped.value.exit_code, stopped.value.where) == (7, "step 12")
    directory = next((tmp_path / "runs").iterdir())
    assert len(skips(directory, "rollback")) == 1
    more = run(configuration(tmp_path, [*settings, "train.max_spike_rollbacks=2"]), resume_from=directory)
    assert [one["end_position"] for one in skips(more.run_directory, "rollback")] == [8 * 4, 12 * 4]
    assert replay(more.run_directory, make_workload, first_step=9).is_exact


def test_losses_that_hardly_vary_have_a_deviation_of_a_hundredth() -> None:
    """By hand: median 2, no spread; 4 deviations of 0.01 * 2 above it. A spread above that counts itself."""
    assert spike_limit([2.0] * 9, 4.0) == pytest.approx(2.08)
    assert spike_limit([-2.0] * 9, 4.0) == pytest.approx(-1.92)
    assert spike_limit([1.0, 2.0, 3.0], 4.0) == pytest.approx(2.0 + 4.0 * 1.4826)
