"""The record of a step that was not finite: which rows and documents, which layer or parameter, which numbers."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numpy_engine import NumpyEngine, NumpyResult
from tiny_runs import configuration, run, use_numpy_engine
from vorox import backends
from vorox.core.engine import StepValues
from vorox.core.errors import NumericalError
from vorox.core.files.json_lines import read_lines
from vorox.data.provenance.queries import RunDataIndex, where
from vorox.experiments.artifacts import remove_run
from vorox.records.replay_chain import read_chain
from vorox.records.run_lookup import run_directories

ENGINES = [
    pytest.param("torch", [], id="torch", marks=pytest.mark.torch),
    pytest.param("torch", ["train.activation_checkpointing=block"], id="torch, recomputing", marks=pytest.mark.torch),
    pytest.param("jax", ["runtime.num_threads=null"], id="jax", marks=pytest.mark.jax),
    pytest.param("jax", ["runtime.num_threads=null", "runtime.scan_layers=true"], id="jax, scanned",
                 marks=pytest.mark.jax),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def poison(
    patch: pytest.MonkeyPatch, backend: str, parameter: str, at_step: int, value: float, *, cleared: str = ""
) -> None:
    """Put a value into a parameter before a step, as a device that fails would; and zeros into another one."""
    engine_class = getattr(backends.load(backend), {"torch": "TorchEngine", "jax": "JaxEngine"}[backend])
    original = engine_class.train_step

    def train_step(engine: Any, batch: Any, **named: float) -> Any:
        if batch.step + 1 == at_step:
            weights = dict(engine.export_weights())
            weights[parameter].reshape(-1)[0] = value
            if cleared:
                weights[cleared][:] = 0
            engine.import_weights(weights.items())
        return original(engine, batch, **named)

    patch.setattr(engine_class, "train_step", train_step)


def only_record(root: Path) -> tuple[Path, dict[str, Any]]:
    (directory,) = run_directories(root)
    (path,) = (directory / "nonfinite").iterdir()
    return path, json.loads(path.read_text())


@pytest.mark.parametrize(("backend", "settings"), ENGINES)
def test_the_first_place_is_named(
    backend: str, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*settings, f"backend={backend}", "model.num_layers=2", "train.max_nonfinite_steps=0"]
    poison(monkeypatch, backend, "blocks.1.mlp.down.weight", 5, np.nan)
    with pytest.raises(NumericalError) as stopped:
        run(configuration(tmp_path, settings))
    path, record = only_record(tmp_path / "runs")
    assert stopped.value.exit_code == 7
    assert str(path) in stopped.value.where
    assert record["step"] == 5
    assert record["loss"] == "NaN"
    assert record["origin"]["micro_batch"] == 0
    assert record["origin"]["activation"] == "layer 1, after_mlp"
    assert record["origin"]["loss"] == "NaN"
    directory = path.parent.parent
    said = [event for event in read_lines(directory / "events.jsonl") if event["kind"] == "nonfinite_record"]
    assert len(said) == 1
    assert path.name in said[0]["message"]
    with RunDataIndex.open(directory) as run_data:
        expected = [(row.slot, row.row, [d.uri for d in row.documents]) for row in where(run_data, 5)]
    found = [(row["slot"], row["row"], [d["uri"] for d in row["documents"]]) for row in record["rows"]]
    assert found == expected
    assert len(found) == 4


@pytest.mark.parametrize(("backend", "settings"), [ENGINES[0], ENGINES[2]])
def test_a_gradient_alone_is_named(
    backend: str, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the GELU go numbers whose square overflows: its value is finite, its slope is 0 times infinity."""
    settings = [*settings, f"backend={backend}", "train.max_nonfinite_steps=0", "model.activation=gelu_tanh"]
    poison(monkeypatch, backend, "blocks.0.mlp.up.weight", 3, 1e21, cleared="blocks.0.mlp.down.weight")
    with pytest.raises(NumericalError):
        run(configuration(tmp_path, settings))
    _, record = only_record(tmp_path / "runs")
    origin = record["origin"]
    assert origin["activation"] == ""
    assert math.isfinite(origin["loss"])
    assert origin["gradient"] == "blocks.0.mlp.up.weight"


def test_looking_changes_nothing_and_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    original = NumpyEngine.train_step
    asked: list[int] = []
    locate = NumpyEngine.locate_nonfinite

    def train_step(engine: NumpyEngine, batch: Any, **named: float) -> NumpyResult:
        if batch.step + 1 in {3, 4, 5, 9}:
            return NumpyResult(StepValues(float("nan"), float("inf"), False, {}))
        return original(engine, batch, **named)

    monkeypatch.setattr(NumpyEngine, "train_step", train_step)
    monkeypatch.setattr(
        NumpyEngine, "locate_nonfinite", lambda engine, batch: asked.append(batch.step + 1) or locate(engine, batch)
    )
    outcome = run(configuration(tmp_path / "seen", ["train.max_nonfinite_steps=5"]))
    assert asked == [3, 9], "the first of every series"
    directory = outcome.run_directory
    assert sorted(path.name for path in (directory / "nonfinite").iterdir()) == [
        "step-00000003.json", "step-00000009.json"
    ]  # fmt: skip
    record = json.loads((directory / "nonfinite" / "step-00000003.json").read_text())
    assert record["origin"] is None
    assert record["origin_unknown_because"]
    monkeypatch.setattr(NumpyEngine, "locate_nonfinite", _broken)
    again = run(configuration(tmp_path / "broken", ["train.max_nonfinite_steps=5"]))
    assert again.fingerprint == outcome.fingerprint
    assert [e.chain for e in read_chain(again.run_directory).values()] == [
        e.chain for e in read_chain(directory).values()
    ]
    assert remove_run(directory) > 0


def _broken(engine: NumpyEngine, batch: Any) -> None:
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize(("backend", "settings"), ENGINES)
def test_a_finite_batch_has_no_origin_and_keeps_its_bits(
    backend: str, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_class = getattr(backends.load(backend), {"torch": "TorchEngine", "jax": "JaxEngine"}[backend])
    original, found = engine_class.train_step, []
    settings = [*settings, f"backend={backend}", "train.num_steps=3", "model.dropout_fraction=0.1"]
    straight = run(configuration(tmp_path / "straight", settings))

    def train_step(engine: Any, batch: Any, **named: float) -> Any:
        found.append(engine.locate_nonfinite(batch))
        return original(engine, batch, **named)

    monkeypatch.setattr(engine_class, "train_step", train_step)
    looked = run(configuration(tmp_path / "looked", settings))
    assert found == [None] * 3
    assert looked.fingerprint == straight.fingerprint
