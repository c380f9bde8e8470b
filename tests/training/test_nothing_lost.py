"""What fails between two steps loses no step, and what is not finite displaces nothing that is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numpy_engine import NumpyEngine, NumpyResult
from tiny_runs import configuration, run, use_numpy_engine
from vorox.core.batch import Batch
from vorox.core.engine import StepValues
from vorox.core.errors import DataError, DoesNotFitError, NumericalError, Preempted
from vorox.core.files.json_lines import read_lines
from vorox.core.files.staged_directory import StagedDirectory
from vorox.core.run_layout import step_directories
from vorox.data.prefetch import Prefetcher
from vorox.records.replay_chain import read_chain
from vorox.records.run_context import recorded_config
from vorox.records.run_lookup import run_directories
from vorox.run import Outcome
from vorox.training.checkpoints.store import read_state, request_save
from vorox.training.checkpoints.writer import CheckpointWriter
from vorox.training.inference import sampling

SPARSE = ["checkpoint.every_steps=null", "eval.every_steps=5"]


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)


def fail_once(patch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException, *, call: int = 1) -> None:
    original, calls = getattr(owner, name), []

    def failing(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise error
        return original(*arguments, **named)

    patch.setattr(owner, name, failing)


def fail_batch(patch: pytest.MonkeyPatch, error: BaseException, *, call: int) -> None:
    """Fail instead of a batch; other things are prefetched as well."""
    original, calls = Prefetcher.__next__, []

    def failing(prefetcher: Prefetcher[Any]) -> Any:
        found = original(prefetcher)
        if isinstance(found, Batch):
            calls.append(1)
            if len(calls) == call:
                raise error
        return found

    patch.setattr(Prefetcher, "__next__", failing)


def chain(directory: Path) -> list[str]:
    return [entry.chain for entry in read_chain(directory).values()]


SAMPLED = [*SPARSE, "eval.prompts=[the]", "eval.sample_tokens=4"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        use_numpy_engine(patch)
        return run(configuration(tmp_path_factory.mktemp("straight"), SAMPLED))


@pytest.mark.usefixtures("_numpy_engine")
@pytest.mark.parametrize(
    ("place", "error", "asynchronous"),
    [
        ("validation", MemoryError("host"), "true"),
        ("validation", DoesNotFitError("out of memory"), "false"),
        ("validation", KeyboardInterrupt(), "true"),
        ("sample", ZeroDivisionError("a metric of the user"), "true"),
        ("batch", DataError("a chunk is gone"), "false"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value,
)
def test_a_failure_between_steps_is_saved_first(
    place: str, error: BaseException, asynchronous: str, straight: Outcome, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    settings = [*SAMPLED, f"checkpoint.asynchronous={asynchronous}"]
    config, step = configuration(tmp_path / "run", settings), 5
    with monkeypatch.context() as patch:
        if place == "validation":
            fail_once(patch, NumpyEngine, "eval_step", error, call=2)
        elif place == "sample":
            fail_once(patch, sampling, "complete", error)
        else:
            step = 6
            fail_batch(patch, error, call=7)
        with pytest.raises(DoesNotFitError if isinstance(error, MemoryError) else type(error)) as failed:
            run(config)
    (directory,) = run_directories(tmp_path / "run" / "runs")
    assert list(step_directories(directory)) == [step]
    if isinstance(failed.value, DoesNotFitError):
        assert f"step-{step:08d}" in getattr(failed.value, "saved", "")
    outcome = run(config)
    assert outcome.start_step == step
    assert (outcome.fingerprint, chain(directory)) == (straight.fingerprint, chain(straight.run_directory))
    assert outcome.eval_losses == straight.eval_losses


@pytest.mark.usefixtures("_numpy_engine")
def test_several_processes_save_before_a_validation(
    straight: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure on one rank the others cannot take part in a save, so the state is committed before."""
    config = configuration(tmp_path, SAMPLED)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "saves_alone", property(lambda _: False))
        fail_once(patch, NumpyEngine, "eval_step", DataError("a chunk is gone"), call=2)
        with pytest.raises(DataError):
            run(config)
    (directory,) = run_directories(tmp_path / "runs")
    assert list(step_directories(directory)) == [5]
    assert not [event for event in read_lines(directory / "events.jsonl") if event["kind"] == "checkpoint_failed"]
    outcome = run(config)
    assert outcome.start_step == 5
    assert (outcome.fingerprint, chain(directory)) == (straight.fingerprint, chain(straight.run_directory))


@pytest.mark.usefixtures("_numpy_engine")
def test_one_of_several_processes_names_the_steps_that_a_failed_batch_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may be inside a collective, so it must not wait for them to write."""
    monkeypatch.setattr(CheckpointWriter, "saves_alone", property(lambda _: False))
    fail_batch(monkeypatch, DataError("a chunk is gone"), call=5)
    with pytest.raises(DataError):
        run(configuration(tmp_path, SPARSE))
    (directory,) = run_directories(tmp_path / "runs")
    assert list(step_directories(directory)) == []
    (event,) = [event for event in read_lines(directory / "events.jsonl") if event["kind"] == "checkpoint_failed"]
    assert "after step 4 is lost" in event["message"]
    assert event["level"] == "error"


def _no_memory(*arguments: object, **named: object) -> None:
    raise MemoryError


@pytest.mark.usefixtures("_numpy_engine")
@pytest.mark.parametrize("place", ["step", "batch", "copy", "write"])
def test_a_machine_without_free_memory_is_no_crash(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_step = 7 if place == "batch" else 4  # between two steps, so the last one is saved first
    calls = {"step": (NumpyEngine, "train_step", 8), "copy": (NumpyEngine, "snapshot", 2)}
    config, error = configuration(tmp_path), MemoryError("Unable to allocate 3 GiB")
    with monkeypatch.context() as patch:
        if place == "batch":
            fail_batch(patch, error, call=8)
        else:
            owner, name, call = calls.get(place, (StagedDirectory, "commit", 2))
            fail_once(patch, owner, name, error, call=call)
        with pytest.raises(DoesNotFitError) as failed:
            run(config)
    assert failed.value.exit_code == 3
    assert f"step-{saved_step:08d}" in failed.value.saved
    for setting in ("train.micro_batch_sequences", "data.loader.prefetch_batches", "checkpoint.asynchronous=false"):
        assert setting in failed.value.hint
    assert run(config).progress.step == 12


@pytest.mark.parametrize(
    ("backend", "settings"),
    [
        pytest.param("torch", [], marks=pytest.mark.torch),
        pytest.param("jax", ["runtime.num_threads=null", "checkpoint.format=orbax"], marks=pytest.mark.jax),
    ],
)
def test_out_of_memory_in_a_validation_loses_nothing(
    backend: str, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vorox import backends

    settings = [*SPARSE, *settings, f"backend={backend}", "train.num_steps=7"]
    straight = run(configuration(tmp_path / "straight", settings))
    config = configuration(tmp_path / "run", settings)
    engine = getattr(backends.load(backend), {"torch": "TorchEngine", "jax": "JaxEngine"}[backend])
    with monkeypatch.context() as patch:
        fail_once(patch, engine, "eval_step", DoesNotFitError("out of memory"), call=2)
        with pytest.raises(DoesNotFitError) as failed:
            run(config)
    assert "step-00000005" in failed.value.saved
    outcome = run(config)
    assert outcome.start_step == 5
    assert outcome.fingerprint == straight.fingerprint
    assert chain(outcome.run_directory) == chain(straight.run_directory)


@pytest.mark.usefixtures("_numpy_engine")
def test_a_failure_to_save_hides_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path, SPARSE)
    fail_once(monkeypatch, NumpyEngine, "eval_step", DataError("first"))
    fail_once(monkeypatch, NumpyEngine, "snapshot", ZeroDivisionError("second"))
    with pytest.raises(DataError, match="first"):
        run(config)
    (directory,) = run_directories(tmp_path / "runs")
    kinds = [event["kind"] for event in read_lines(directory / "events.jsonl")]
    assert "checkpoint_failed" in kinds


class Nonfinite:
    """Makes some steps non-finite; the engine skips them."""

    def __init__(self, patch: pytest.MonkeyPatch, steps: set[int]) -> None:
        original = NumpyEngine.train_step

        def train_step(engine: NumpyEngine, batch: Any, **named: float) -> NumpyResult:
            if batch.step + 1 in steps:
                return NumpyResult(StepValues(float("nan"), float("inf"), False, {}))
            return original(engine, batch, **named)

        patch.setattr(NumpyEngine, "train_step", train_step)


@pytest.mark.usefixtures("_numpy_engine")
def test_skipped_steps_displace_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["train.max_nonfinite_steps=50", "checkpoint.every_steps=1", "checkpoint.keep_last=2"]
    Nonfinite(monkeypatch, {2, *range(7, 13)})
    outcome = run(configuration(tmp_path, settings))
    assert list(step_directories(outcome.run_directory)) == [5, 6], "what came after is no progress"
    assert all(read_state(path).nonfinite_in_a_row == 0 for path in step_directories(outcome.run_directory).values())
    kinds = [event["kind"] for event in read_lines(outcome.run_directory / "events.jsonl")]
    assert kinds.count("checkpoint_postponed") == 2


@pytest.mark.usefixtures("_numpy_engine")
def test_a_checkpoint_waits_for_the_next_finite_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Nonfinite(monkeypatch, {4, 5, 12})
    settings = ["train.max_nonfinite_steps=5", "checkpoint.keep_last=1", "checkpoint.keep_best=0"]
    directory = run(configuration(tmp_path, settings)).run_directory
    assert list(step_directories(directory)) == [8, 12], "the last one after a finite step stays beside the end"


@pytest.mark.usefixtures("_numpy_engine")
def test_a_request_is_answered_by_a_finite_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(
        tmp_path, ["checkpoint.every_steps=null", "train.max_nonfinite_steps=5", "log.every_steps=1"]
    )
    Nonfinite(monkeypatch, {3, 4})
    original = NumpyEngine.train_step

    def train_step(engine: NumpyEngine, batch: Any, **named: float) -> NumpyResult:
        if batch.step + 1 == 3:
            request_save(run_directories(tmp_path / "runs")[0])
        return original(engine, batch, **named)

    monkeypatch.setattr(NumpyEngine, "train_step", train_step)
    assert list(step_directories(run(config).run_directory)) == [5, 12]


@pytest.mark.usefixtures("_numpy_engine")
def test_stopped_while_steps_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    config = configuration(tmp_path, ["train.max_nonfinite_steps=50"])
    straight = configuration(tmp_path / "straight", ["train.max_nonfinite_steps=50"])
    Nonfinite(monkeypatch, {5, 6, 7})
    expected = run(straight)
    with monkeypatch.context() as patch:
        original = NumpyEngine.train_step

        def train_step(engine: NumpyEngine, batch: Any, **named: float) -> NumpyResult:
            if batch.step + 1 == 6:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(engine, batch, **named)

        patch.setattr(NumpyEngine, "train_step", train_step)
        with pytest.raises(Preempted) as stopped:
            run(config)
    assert "step-00000004" in stopped.value.saved, "what was skipped since costs nothing but time"
    outcome = run(config)
    assert (outcome.fingerprint, chain(outcome.run_directory)) == (expected.fingerprint, chain(expected.run_directory))


@pytest.mark.usefixtures("_numpy_engine")
@pytest.mark.parametrize("asynchronous", ["true", "false"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["weights", "moment"])
def test_a_state_that_is_not_finite_is_never_saved(
    kind: str, value: float, asynchronous: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent damage: every loss stays finite, because the damaged number is of a token that does not occur."""
    original = NumpyEngine.train_step

    def train_step(engine: NumpyEngine, batch: Any, **named: float) -> NumpyResult:
        result = original(engine, batch, **named)
        if batch.step + 1 == 6:
            array = engine.parameters["token"] if kind == "weights" else engine.moments["v"]["token"]
            array[-1, 0] = value
        return result

    settings = [f"checkpoint.asynchronous={asynchronous}", "eval.every_steps=null"]
    with monkeypatch.context() as patch:
        patch.setattr(NumpyEngine, "train_step", train_step)
        with pytest.raises(NumericalError) as stopped:
            run(configuration(tmp_path, settings))
    error = stopped.value
    assert error.exit_code == 7
    assert "token" in error.where
    assert "optimizer.lr" in error.hint
    assert error.saved == "training state up to step 4 is safe in step-00000004"
    (directory,) = run_directories(tmp_path / "runs")
    assert list(step_directories(directory)) == [4]
    assert run(recorded_config(directory), resume_from=directory).progress.step == 12


@pytest.mark.parametrize(
    ("backend", "settings"),
    [
        pytest.param("torch", [], marks=pytest.mark.torch),
        pytest.param("jax", ["runtime.num_threads=null"], marks=pytest.mark.jax),
        pytest.param("jax", ["runtime.num_threads=null", "checkpoint.format=orbax"], marks=pytest.mark.jax),
    ],
)
@pytest.mark.parametrize("detached", [True, False])
def test_both_engines_name_the_array_and_what_takes_memory(
    backend: str, settings: list[str], detached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vorox import backends
    from vorox.core.ranks.distributed_context import DistributedContext
    from vorox.models.decoder.spec import decoder_spec

    config = configuration(tmp_path, [*settings, f"backend={backend}"])
    spec = decoder_spec(config.model, tokenizer_vocab_size=257, sequence_length_tokens=16)
    engine = backends.load(backend).create(config, spec, DistributedContext())
    assert engine.snapshot(detached=detached).nonfinite_array() == ""
    weights = dict(engine.export_weights())
    name = list(weights)[-1]
    weights[name].reshape(-1)[-1] = np.inf
    engine.import_weights(weights.items())
    assert engine.snapshot(detached=detached).nonfinite_array() == name
    copies = {"torch": "torch_engine.checkpoint.state", "jax": "jax_engine.engine.JaxEngine._engine_state"}[backend]
    copies = "jax_engine.engine.OrbaxSnapshot.of" if "checkpoint.format=orbax" in settings else copies
    monkeypatch.setattr(f"vorox.backends.{copies}", _no_memory)
    with pytest.raises(DoesNotFitError) as failed:
        engine.snapshot(detached=detached)
    assert ("checkpoint.asynchronous=false" in failed.value.hint) == detached, "what is not copied cannot be avoided"
    assert detached or "free host memory" in failed.value.hint
