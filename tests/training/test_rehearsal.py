"""Rehearsals: no bit of the run changes, and what cannot work fails before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from numpy_engine import NumpyEngine, NumpySnapshot
from tiny_runs import configuration, events, result, run, use_numpy_engine
from vorox.core.errors import CheckpointError, ConfigError, DoesNotFitError
from vorox.core.run_layout import step_directories
from vorox.core.schema import RunConfig
from vorox.records.log import RunLog
from vorox.training.loop.rehearsal import is_due

REHEARSE = ["runtime.rehearsal=true"]


@pytest.fixture
def numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record the calls of the engine: what, and the step of a training step."""
    calls: list[tuple[str, int]] = []
    for name in ("train_step", "eval_step", "decoder", "snapshot"):

        def call(engine: NumpyEngine, *arguments: Any, name: str = name, **kwargs: Any) -> Any:
            calls.append((name, arguments[0].step + 1 if name == "train_step" else 0))
            return original[name](engine, *arguments, **kwargs)

        monkeypatch.setattr(NumpyEngine, name, call)
    return calls


original: dict[str, Callable[..., Any]] = {
    name: getattr(NumpyEngine, name) for name in ("train_step", "eval_step", "decoder", "snapshot")
}


@pytest.mark.usefixtures("numpy_engine")
def test_every_part_runs_once_and_no_bit_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["eval.prompts=[the]", "eval.sample_tokens=3"]
    plain = run(configuration(tmp_path / "plain", settings))
    calls = recorded(monkeypatch)
    rehearsed = run(configuration(tmp_path / "rehearsed", [*settings, *REHEARSE]))
    assert result(rehearsed) == result(plain)
    parts = [("train_step", 1), ("eval_step", 0), ("decoder", 0), ("snapshot", 0)]
    assert calls[: len(parts) + 1] == [*parts, ("train_step", 1)]
    assert calls.count(("train_step", 1)) == 2
    validations, saves, fingerprints = 2 * (3 + 1), 3, 1
    assert len(calls) == len(parts) + 12 + validations + saves + fingerprints
    (text,) = events(rehearsed.run_directory, "rehearsal")
    assert text.startswith("Rehearsal: step, validation, sample and save work")
    names = {path.name for path in (rehearsed.run_directory / "checkpoints").iterdir()}
    assert names == {path.name for path in step_directories(rehearsed.run_directory).values()}


@pytest.mark.usefixtures("numpy_engine")
@pytest.mark.parametrize(
    ("part", "owner", "name"),
    [
        ("step", NumpyEngine, "train_step"),
        ("validation", NumpyEngine, "eval_step"),
        ("sample", NumpyEngine, "decoder"),
        ("save", NumpySnapshot, "write_part"),
    ],
)
def test_what_cannot_work_fails_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, owner: type, name: str
) -> None:
    steps: list[float | None] = []
    logged: list[str] = []
    event = RunLog.event
    train_step = NumpyEngine.train_step

    def counted(engine: NumpyEngine, batch: Any, **kwargs: Any) -> Any:
        steps.append(kwargs["max_loss"])
        return train_step(engine, batch, **kwargs)

    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device") if part == "save" else MemoryError

    def remembered(log: RunLog, kind: str, message: str, **more: Any) -> None:
        logged.append(message)
        event(log, kind, message, **more)

    monkeypatch.setattr(RunLog, "event", remembered)
    monkeypatch.setattr(NumpyEngine, "train_step", counted)
    monkeypatch.setattr(owner, name, failing)
    config = configuration(tmp_path, [*REHEARSE, "eval.prompts=[the]", "eval.sample_tokens=3"])
    with pytest.raises(CheckpointError if part == "save" else DoesNotFitError):
        run(config)
    assert steps == ([] if part == "step" else [float("-inf")])
    assert f"Rehearsal failed in its {part}" in logged
    assert not any((tmp_path / "runs").iterdir()), "the directory of a run that never began"


def test_auto_rehearses_long_runs(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    assert (is_due(config, 999), is_due(config, 1000)) == (False, True)
    assert not is_due(configuration(tmp_path, ["runtime.rehearsal=false"]), 1000)
    assert is_due(configuration(tmp_path, REHEARSE), 1)
    with pytest.raises(ConfigError, match=r"runtime\.rehearsal"):
        configuration(tmp_path, [*REHEARSE, "parallel.kind=deepspeed"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["precision.dtype=fp16", "model.dropout_fraction=0.1", "train.ema_decay=0.9"],
        ["backend=jax", "model.dropout_fraction=0.1", "runtime.num_threads=null"],
    ],
    ids=["torch", "jax"],
)
def test_no_bit_of_an_engine_changes(tmp_path: Path, settings: list[str]) -> None:
    """With an average and the loss scale of fp16, which are state as well."""

    def train(name: str, *more: str) -> dict[str, Any]:
        config: RunConfig = configuration(tmp_path / name, [*settings, "train.num_steps=6", *more])
        return result(run(config))

    assert train("rehearsed", *REHEARSE) == train("plain")


@pytest.mark.slow
def test_an_exhausted_device_gives_the_same_advice_in_the_rehearsal_and_in_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from vorox.backends.torch_engine.engine import TorchEngine

    def exhausted(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 7 GiB")

    monkeypatch.setattr(TorchEngine, "_train_micro_batch", exhausted)
    found: list[str] = []
    for name, settings in (("rehearsed", REHEARSE), ("plain", [])):
        with pytest.raises(DoesNotFitError, match="Out of memory while training") as stopped:
            run(configuration(tmp_path / name, settings))
        found.append(stopped.value.hint)
    assert found[0] == found[1]
    assert "train.micro_batch_sequences=1 (more accumulation)" in found[0]


@pytest.mark.usefixtures("numpy_engine")
@pytest.mark.parametrize("body", ["raise RuntimeError('evaluation exploded')", "return 'seven'", "return {'a': None}"])
def test_an_evaluation_function_that_fails_ends_the_run_before_the_first_step(tmp_path: Path, body: str) -> None:
    """Without a rehearsal it is reported once, and the run trains without its values."""
    (tmp_path / "mine.py").write_text(f"def works(model): return 1.0\ndef boom(model): {body}\n")
    functions = f"eval.functions=['{tmp_path}/mine.py:works','{tmp_path}/mine.py:boom']"
    with pytest.raises(ConfigError, match=r"The evaluation boom fails: (RuntimeError|ValueError|TypeError)") as caught:
        run(configuration(tmp_path / "a", [functions, *REHEARSE]))
    assert caught.value.where == "eval.functions: boom"
    assert not [*(tmp_path / "a" / "runs").glob("*/chain.jsonl")]
    directory = run(configuration(tmp_path / "b", [functions, "runtime.rehearsal=false"])).run_directory
    assert len(events(directory, "evaluation_failed")) == 1
