"""Whole runs with the numpy engine: interrupted anywhere, by anything, they end as the straight run does."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eventually import wait_until
from numpy_engine import NumpyEngine, NumpyResult
from tiny_runs import (
    Killed,
    at_step,
    before_step,
    configuration,
    events,
    kill,
    result,
    run,
    use_clock,
    use_numpy_engine,
)
from vorox.core.engine import StepValues
from vorox.core.errors import ConfigError, NumericalError, Preempted
from vorox.core.files.chained_log import HashChainedLog, LogPosition
from vorox.core.files.json_lines import read_history
from vorox.core.run_layout import step_directories
from vorox.data.order import loader
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.experiments.tracking import read_metrics
from vorox.models.decoder.spec import decoder_spec
from vorox.planning.flops import flops_per_token
from vorox.records.replay_chain import read_chain
from vorox.records.run_context import recorded_config
from vorox.runtime.heartbeat import Heartbeat, Phase
from vorox.runtime.throughput import Throughput
from vorox.training.checkpoints.store import latest_valid, request_save
from vorox.training.checkpoints.writer import CheckpointWriter
from vorox.training.loop.display import NoDisplay

STEPS = 12


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nobody cuts the power here


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the uninterrupted run comes to."""
    with pytest.MonkeyPatch.context() as patch:
        use_numpy_engine(patch)
        return result(run(configuration(tmp_path_factory.mktemp("straight"))))


def test_the_straight_run_does_what_was_asked(straight: dict[str, Any]) -> None:
    assert straight["progress"]["step"] == STEPS
    assert straight["progress"]["num_tokens"] == STEPS * 4 * 16
    assert straight["position"] == STEPS * 4
    assert list(straight["eval_losses"]) == [6, 12]
    assert straight["progress"]["best_eval_loss"] == min(straight["eval_losses"].values())
    assert list(straight["losses"]) == [1, 2, 4, 6, 8, 10, 12]
    assert straight["losses"][1] == pytest.approx(np.log(257), abs=0.05)
    assert straight["losses"][12] < straight["losses"][1]
    assert len(straight["chain"]) == STEPS


def test_flops_of_a_logged_interval_are_those_of_the_rows_trained(tmp_path: Path) -> None:
    """Rows of 4 positions for 7 steps, then of 16: attention costs more per token from then on."""
    stages = [{"start_tokens": 0, "sequence_length_tokens": 4}, {"start_tokens": 7 * 64, "sequence_length_tokens": 16}]
    config = configuration(tmp_path, [f"data.stages={json.dumps(stages)}", "log.matmul_peak=false"])
    spec = decoder_spec(config.model, tokenizer_vocab_size=257, sequence_length_tokens=16)
    short, long = flops_per_token(spec, 4), flops_per_token(spec, 16)
    found = {
        step: values["model_flops_per_second"] / values["tokens_per_second"]
        for step, values in read_metrics(run(config).run_directory).items()
        if "tokens_per_second" in values
    }
    assert [found[2], found[4], found[6]] == pytest.approx([short] * 3)
    assert found[8] == pytest.approx((short + long) / 2), "steps 7 and 8"
    assert [found[10], found[12]] == pytest.approx([long] * 2)


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_killed_in_any_step_and_resumed(
    step: int, straight: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path)
    at_step(monkeypatch, step, kill)
    with pytest.raises(Killed):
        run(config)
    assert result(run(config)) == straight


def test_killed_again_and_again(straight: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path)
    for step in (3, 6, 5, 9, 11, 12):
        with monkeypatch.context() as patch:
            at_step(patch, step, kill)
            with pytest.raises(Killed):
                run(config)
    assert result(run(config)) == straight


@pytest.mark.parametrize(("threads", "prefetch"), [(0, 0), (1, 1), (1, 7), (4, 1), (4, 7)])
def test_reading_ahead_changes_nothing(threads: int, prefetch: int, straight: dict[str, Any], tmp_path: Path) -> None:
    loader = [f"data.loader.num_threads={threads}"]
    if threads:
        loader.append(f"data.loader.prefetch_batches={prefetch}")
    assert result(run(configuration(tmp_path, loader))) == straight


@pytest.mark.parametrize("is_ready", [False, True])
def test_only_reading_that_the_loop_waits_for_is_waiting_for_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ready: bool
) -> None:
    """By a clock that goes on by 1 s in every step, and by 4 s in every read of a batch.

    The loop reads each batch itself, or all are read ahead during step 1, at the end of which the measurement starts.
    """
    now = [0.0]
    use_clock(monkeypatch, lambda: now[0])
    read, numbers = loader._BatchReader.read, list[int]()

    def slow(self: Any, number: int) -> Any:
        now[0] += 4.0 if number < STEPS else 0.0  # the plan of the data is longer than the run
        numbers.append(number)
        return read(self, number)

    def step(number: int) -> None:
        if is_ready and number == 1:
            wait_until(lambda: STEPS - 1 in numbers)
        now[0] += 1.0

    monkeypatch.setattr(loader._BatchReader, "read", slow)
    before_step(monkeypatch, step)
    threads = "data.loader={num_threads: 1, prefetch_batches: 12}" if is_ready else "data.loader.num_threads=0"
    found = run(configuration(tmp_path, [threads]))
    wait_seconds, num_steps = 0.0 if is_ready else 4.0, STEPS - 1
    assert found.speed.seconds == {"compute": num_steps, "data": num_steps * wait_seconds, "save": 0.0, "eval": 0.0}
    metrics = [values for step, values in read_metrics(found.run_directory).items() if step > 1]
    assert {(one["data_wait_seconds"], one["step_seconds"]) for one in metrics} == {(wait_seconds, wait_seconds + 1.0)}


def test_no_speed_is_read_in_the_middle_of_a_wait_a_save_or_a_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its seconds would count in the window that they end in, which may be shorter."""
    phases, read_in = [""], list[tuple[str, str]]()
    enter = Heartbeat.enter

    def entered(self: Heartbeat, phase: Phase, step: int | None = None) -> None:
        enter(self, phase, step)
        phases[0] = phase

    def observed(name: str) -> Callable[..., Any]:
        original = getattr(Throughput, name)

        def call(self: Throughput, *arguments: Any) -> Any:
            read_in.append((name, phases[0]))
            return original(self, *arguments)

        return call

    monkeypatch.setattr(Heartbeat, "enter", entered)
    for name in ("count", "read", "total", "excluded"):
        monkeypatch.setattr(Throughput, name, observed(name))
    settings = ["checkpoint.every_steps=1", "eval.every_steps=2", "log.every_steps=1", "data.loader.num_threads=0"]
    at_step(monkeypatch, 9, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Preempted):
        run(configuration(tmp_path, settings))
    run(configuration(tmp_path, settings))
    assert {name for name, _ in read_in} >= {"count", "read", "total"}
    assert not {phase for _, phase in read_in} & {"data", "save", "validation"}


def test_saving_validating_and_logging_change_nothing(straight: dict[str, Any], tmp_path: Path) -> None:
    other = ["checkpoint.every_steps=1", "eval.every_steps=null", "log.every_steps=1", "checkpoint.keep_last=9"]
    found = result(run(configuration(tmp_path, [*other, "eval.num_sequences=null"])))
    assert found["chain"] == straight["chain"]
    assert found["fingerprint"] == straight["fingerprint"]
    assert list(found["eval_losses"]) == [12]


def test_a_finished_run_stays_as_it_is(
    straight: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path)
    run(config)
    at_step(monkeypatch, 1, kill)
    assert result(run(config)) == straight


@pytest.mark.parametrize("step", [1, 5, 8, 12])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_with_75(
    step: int, number: int, straight: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path)
    before = signal.getsignal(number)
    at_step(monkeypatch, step, lambda: os.kill(os.getpid(), number))
    with pytest.raises(Preempted) as stopped:
        run(config)
    assert stopped.value.exit_code == 75
    assert stopped.value.saved == f"training state up to step {step:,} is safe in step-{step:08d}"
    assert signal.getsignal(number) is before
    found = latest_valid(next((tmp_path / "runs").iterdir()))
    assert found is not None
    assert found.step == step, "the step was finished, and nothing was lost"
    assert result(run(config)) == straight


def test_a_signal_during_validation_is_not_waited_for(
    straight: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path)
    original, seen = NumpyEngine.eval_step, []

    def eval_step(self: NumpyEngine, batch: Any) -> Any:
        seen.append(batch.step)
        if len(seen) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch)

    monkeypatch.setattr(NumpyEngine, "eval_step", eval_step)
    with pytest.raises(Preempted):
        run(config)
    assert seen == [0]
    monkeypatch.setattr(NumpyEngine, "eval_step", original)
    assert result(run(config)) == straight


def test_killed_between_a_save_and_its_validation(
    straight: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path, ["checkpoint.every_steps=6"])
    with monkeypatch.context() as patch:
        patch.setattr(NumpyEngine, "eval_step", lambda self, batch: kill())
        with pytest.raises(Killed):
            run(config)
    directory = next((tmp_path / "runs").iterdir())
    assert list(step_directories(directory)) == [6], "saved before it was validated"
    found = result(run(config))
    assert {**found, "losses": 0} == {**straight, "losses": 0}


def test_resume_reads_the_plan_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path, ["log.metadata=off"])
    with monkeypatch.context() as patch:
        at_step(patch, 6, kill)
        with pytest.raises(Killed):
            run(config)
    whole_reads: list[Path] = []
    read_after = HashChainedLog.read_after

    def counted(self: HashChainedLog, position: LogPosition) -> Any:
        whole_reads.extend([self.path] * (self.path.name == "plan.jsonl" and position == LogPosition()))
        return read_after(self, position)

    monkeypatch.setattr(HashChainedLog, "read_after", counted)
    assert run(config).progress.step == STEPS
    assert len(whole_reads) == 1


def test_save_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path, ["checkpoint.every_steps=null", "checkpoint.keep_last=5"])
    at_step(monkeypatch, 5, lambda: request_save(next((tmp_path / "runs").iterdir())))
    assert list(step_directories(run(config).run_directory)) == [5, 12]


def test_a_request_during_the_last_step_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path, ["checkpoint.every_steps=null", "checkpoint.at_end=false"])
    at_step(monkeypatch, STEPS, lambda: request_save(next((tmp_path / "runs").iterdir())))
    assert list(step_directories(run(config).run_directory)) == [STEPS]


def test_steps_longer_than_the_interval_are_all_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before_step(monkeypatch, lambda number: time.sleep(0.1))
    settings = ["checkpoint.every_steps=null", "checkpoint.every_seconds=0.08", "checkpoint.keep_last=20"]
    config = configuration(tmp_path, [*settings, "checkpoint.asynchronous=false"])
    assert list(step_directories(run(config).run_directory)) == list(range(1, STEPS + 1))


def test_a_step_that_failed_is_not_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path)
    at_step(monkeypatch, 7, kill)
    with pytest.raises(Killed):
        run(config)
    with RunDataIndex.open(next((tmp_path / "runs").iterdir())) as run_data:
        assert run_data.applied_steps().tolist() == [1, 2, 3, 4, 5, 6]


def test_the_age_of_the_newest_checkpoint_is_a_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that saves step 4 and ends with 6, then continues from 4: its metrics from step 5 on are of the second."""
    commit, commit_seconds = CheckpointWriter._commit, 0.2

    def slow(self: CheckpointWriter, *arguments: Any) -> None:
        time.sleep(commit_seconds)
        commit(self, *arguments)

    monkeypatch.setattr(CheckpointWriter, "_commit", slow)
    settings = ["log.every_steps=1", "checkpoint.every_steps=4", "checkpoint.at_end=false", "eval.every_steps=null"]
    began = time.monotonic()
    directory: Path | None = None
    for num_steps, least_seconds in ((6, commit_seconds), (8, 0.0)):
        config = configuration(tmp_path, [*settings, "checkpoint.asynchronous=false", f"train.num_steps={num_steps}"])
        directory = run(config, resume_from=directory).run_directory
        ages = {step: values.get("seconds_since_save") for step, values in read_metrics(directory).items()}
        assert list(ages) == list(range(1, num_steps + 1))
        assert [step for step, age in ages.items() if age is None] == [1, 2, 3, 4], "no kill would go back to one"
        known = [age for age in ages.values() if age is not None]
        assert all(least_seconds < age < time.monotonic() - began for age in known), "the age of what it holds"
        assert known == sorted(known), "no other is committed before the last line"


class Nonfinite:
    """Makes some steps non-finite."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
        original = NumpyEngine.train_step

        def train_step(engine: NumpyEngine, batch: Any, **kwargs: float) -> NumpyResult:
            if batch.step + 1 in steps:
                return NumpyResult(StepValues(float("nan"), float("inf"), False, {}))
            return original(engine, batch, **kwargs)

        monkeypatch.setattr(NumpyEngine, "train_step", train_step)


def test_nonfinite_steps_are_skipped_counted_and_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Nonfinite(monkeypatch, {2, 5, 6, 8, 9, 10})
    config = configuration(tmp_path, ["train.max_nonfinite_steps=2", "log.every_steps=1"])
    with pytest.raises(NumericalError, match="3 times in a row") as stopped:
        run(config)
    assert stopped.value.exit_code == 7
    assert stopped.value.where.startswith("step 10, recorded in ")
    assert stopped.value.saved == "training state up to step 4 is safe in step-00000004", "step 8 was skipped"
    directory = next((tmp_path / "runs").iterdir())
    assert len(events(directory, "nonfinite_step")) == 6
    metrics = read_metrics(directory)
    assert [step for step, values in metrics.items() if values.get("nonfinite_steps")] == [2, 5, 6, 8, 9, 10]
    with pytest.raises(NumericalError, match="3 times in a row"):
        run(config)
    assert latest_valid(directory) is not None


def test_none_is_tolerated_if_none_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Nonfinite(monkeypatch, {3})
    with pytest.raises(NumericalError, match="1 time in a row"):
        run(configuration(tmp_path, ["train.max_nonfinite_steps=0"]))


def test_samples_and_prompts(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []

    class Display(NoDisplay):
        def sample(self, prompt: str, completion: str) -> None:
            seen.append((prompt, completion))

    prompts = ["eval.prompts=['the step', 'a']", "eval.sample_tokens=5"]
    run(configuration(tmp_path, prompts), display=Display())
    assert [prompt for prompt, _ in seen] == ["the step", "a"] * 2
    with pytest.raises(ConfigError, match="more than the 16 positions"):
        run(configuration(tmp_path, ["eval.prompts=['the step of the run, and more']", "eval.sample_tokens=9"]))
    seen.clear()
    for asked in (5, 15):  # 11 bytes of prompt leave 5 of 16 positions
        run(
            configuration(tmp_path / str(asked), ["eval.prompts=['the step of']", f"eval.sample_tokens={asked}"]),
            display=Display(),
        )
    assert len(seen) == 4
    assert seen[:2] == seen[2:]
    nothing = ["data.validation.held_out_fraction=0", "eval.every_steps=null"]
    assert run(configuration(tmp_path, nothing)).eval_losses == {}
    with pytest.raises(ConfigError, match=r"eval\.prompts.* data\.validation\.held_out_fraction=0") as refused:
        run(configuration(tmp_path, [*nothing, "eval.prompts=['a']", "eval.sample_tokens=5"]))
    assert refused.value.exit_code == 2


def test_minutes_become_steps_of_the_recorded_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path, ["train.num_steps=100000", "log.every_steps=1000"])
    monkeypatch.setattr("vorox.training.time_budget.steps_within", lambda seconds, costs, config: 7)
    outcome = run(config, minutes=0.05)
    assert outcome.progress.step == 7
    assert recorded_config(outcome.run_directory).train.num_steps == 7
    with pytest.raises(ConfigError, match="not a valid training time"):
        run(config, minutes=-1)


def test_evaluations_are_on_record(straight: dict[str, Any], tmp_path: Path) -> None:
    outcome = run(configuration(tmp_path))
    found = read_history(outcome.run_directory / "evaluations.jsonl")
    assert {step: record["loss"] for step, record in found.items()} == straight["eval_losses"]
    record = found[12]
    bits = record["loss"] * record["num_target_tokens"] / np.log(2)
    assert record["bits_per_byte"] == pytest.approx(bits / record["num_target_bytes"])
    assert record["num_target_bytes"] <= record["num_target_tokens"], "a byte per target, none for the end of the text"


def test_a_validation_before_the_first_step(
    straight: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path, ["eval.at_start=true"])
    with monkeypatch.context() as patch:
        at_step(patch, 1, kill)
        with pytest.raises(Killed):
            run(config)
    directory = next((tmp_path / "runs").iterdir())
    (begun,) = read_history(directory / "evaluations.jsonl").items()
    outcome = run(config)
    assert begun[0] == 0
    assert outcome.eval_losses == {0: begun[1]["loss"], **straight["eval_losses"]}
    assert begun[1]["loss"] > straight["eval_losses"][6]
    assert read_metrics(directory)[0]["eval/loss"] == begun[1]["loss"]
    assert [entry.chain for entry in read_chain(directory).values()] == straight["chain"]
    assert outcome.fingerprint == straight["fingerprint"]
    assert list(read_history(directory / "evaluations.jsonl")) == [0, 6, 12], "not repeated by the resume"


def test_steps_that_cannot_be_fast_are_announced_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate is measured in a moment, on products of bounded size, and a step is held against it."""
    measured: list[int] = []

    def matmul_seconds(self: NumpyEngine, m: int, k: int, n: int) -> float:
        measured.append(max(m, k, n))
        return 100.0

    def kill() -> None:
        raise Killed

    monkeypatch.setattr(NumpyEngine, "matmul_seconds", matmul_seconds)
    at_step(monkeypatch, 1, kill)
    rows = ["data.sequence_length_tokens=512", "train.global_batch_sequences=512", "train.micro_batch_sequences=512"]
    with pytest.raises(Killed):
        run(configuration(tmp_path, [*rows, "eval.every_steps=null"]))
    (directory,) = (tmp_path / "runs").iterdir()
    assert "Step of 262,144 tokens: at least" in (directory / "log.txt").read_text()
    assert max(measured) == 1 << 15


def test_the_step_in_flight_counts_as_training_while_the_matmul_rate_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes a second, waiting for the device half of one; measuring takes 50, which do not count."""
    now, steps, waits = [0.0], list[int](), list[int]()
    use_clock(monkeypatch, lambda: now[0])

    def begin(step: int) -> None:
        steps.append(step)
        now[0] += 1

    before_step(monkeypatch, begin)

    def matmul_seconds(self: NumpyEngine, m: int, k: int, n: int) -> float:
        now[0] += 50.0
        return 1e-6 if steps else 1e9  # impossibly slow before the first step

    def wait(_: NumpyEngine) -> None:
        waits.append(steps[-1])
        now[0] += 0.5

    monkeypatch.setattr(NumpyEngine, "matmul_seconds", matmul_seconds)
    monkeypatch.setattr(NumpyEngine, "synchronize", wait)
    outcome = run(configuration(tmp_path, ["eval.every_steps=null", "checkpoint.every_steps=null"]))
    metrics = read_metrics(outcome.run_directory)
    seconds = {step: values["step_seconds"] for step, values in metrics.items() if "step_seconds" in values}
    assert waits == [2]
    assert seconds.pop(2) == 1.5, "the step, and half a second of the one in flight"
    assert set(seconds.values()) == {1.0}
