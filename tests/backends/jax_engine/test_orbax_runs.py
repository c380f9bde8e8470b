"""Whole runs whose checkpoints are Orbax's: stopped, resumed, replayed, damaged, exported, continued by torch."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tiny_runs import configuration, run
from vorox.backends.jax_engine.engine import JaxEngine
from vorox.cli import app
from vorox.core.errors import Preempted
from vorox.core.run_layout import step_directories
from vorox.models.arrays.orbax_arrays import FOLDER
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.stored.engine_state import read_weights
from vorox.records.replay_chain import read_chain
from vorox.training.checkpoints.store import latest_valid

pytestmark = [pytest.mark.jax, pytest.mark.slow]

JAX = ["backend=jax", "runtime.num_threads=null", "checkpoint.format=orbax", "log.matmul_peak=false"]


def test_a_run_with_orbax_is_the_run_with_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"run.directory={tmp_path / 'plain'}"
    straight = run(configuration(tmp_path, [*JAX, "checkpoint.format=safetensors", place]))
    original = JaxEngine.train_step

    def stopping(self: JaxEngine, batch: object, **arguments: float) -> object:
        if getattr(batch, "step") == 6:  # noqa: B009 - the protocol's batch
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch, **arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(JaxEngine, "train_step", stopping)
        with pytest.raises(Preempted):
            run(configuration(tmp_path, JAX))
    directory = next((tmp_path / "runs").iterdir())
    assert list(step_directories(directory)) == [4, 7]
    outcome = run(configuration(tmp_path, JAX))
    assert outcome.fingerprint == straight.fingerprint
    assert read_chain(directory) == read_chain(straight.run_directory)
    newest = latest_valid(directory)
    assert newest is not None
    assert newest.step == 12
    assert (newest.path / FOLDER).is_dir()
    _reads(directory, newest.path, DecoderSpec(**newest.metadata["spec"]), straight.run_directory)


def _reads(directory: Path, newest: Path, spec: DecoderSpec, straight: Path) -> None:
    command = CliRunner()
    verified = command.invoke(app, ["checkpoints", "verify", str(directory), "--json"])
    assert verified.exit_code == 0, verified.output
    assert {entry["state"] for entry in json.loads(verified.stdout)} == {"valid"}
    replayed = command.invoke(app, ["replay", str(directory), "--from", "8", "--json"])
    assert replayed.exit_code == 0, replayed.output
    assert json.loads(replayed.stdout)["difference"] is None
    exports = [directory.parent.parent / name for name in ("of-orbax", "of-safetensors")]
    for source, target in zip((directory, straight), exports, strict=True):
        exported = command.invoke(app, ["export", str(source), "--to", "hf", "--output", str(target)])
        assert exported.exit_code == 0, exported.output
    assert (exports[0] / "model.safetensors").read_bytes() == (exports[1] / "model.safetensors").read_bytes()
    generated = command.invoke(app, ["generate", str(directory), "-p", "the step", "--tokens", "4"])
    assert generated.exit_code == 0, generated.output
    part = next(path for path in sorted((newest / FOLDER).rglob("*")) if path.is_file())
    part.write_bytes(b"")
    found = latest_valid(directory, on_corrupt=lambda path, error: None)
    assert found is not None
    assert found.step == 8
    assert [name for name, _ in read_weights(found.path, spec)] == [row.name for row in spec.parameters]
