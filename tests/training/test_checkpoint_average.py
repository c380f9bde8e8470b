"""Averages of checkpoints: against numpy over the stored files, and what reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import tiny_runs
import vorox
from vorox.cli import main
from vorox.core.errors import CheckpointError, ConfigError
from vorox.training.checkpoints.store import Checkpoint
from vorox.training.export.average import average_checkpoints
from vorox.training.export.derived import recorded_run

pytestmark = pytest.mark.torch
PROMPT = np.arange(5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 4, 8 and 12."""
    overrides = ["checkpoint.keep_last=5", "model.family=llama"]
    return tiny_runs.run(tiny_runs.configuration(tmp_path_factory.mktemp("run"), overrides)).run_directory


def stored(path: Path) -> dict[str, np.ndarray]:
    return load_file(path / "model.safetensors")


def test_the_mean_of_the_newest(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoints", "average", str(run), "--last", "2", "--to", "mean"]) == 0
    parts = [stored(run / "checkpoints" / f"step-{step:08d}") for step in (8, 12)]
    found = stored(Path("mean"))
    assert found.keys() == parts[0].keys()
    for name, array in found.items():
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, (parts[0][name].astype(float) + parts[1][name]) / 2, rtol=1e-7, err_msg=name)
    assert any(not np.array_equal(array, parts[1][name]) for name, array in found.items())

    model = vorox.load_model("mean", device="cpu")
    weights = dict(model.engine.export_weights())
    np.testing.assert_array_equal(weights["embedding.weight"], found["model.embed_tokens.weight"])
    config = tiny_runs.configuration(run.parent.parent, ["train.from_weights=mean", "train.num_steps=1"])
    assert tiny_runs.run(config).progress.step == 1
    assert main(["export", "mean", "--output", "exported"]) == 0
    exported = stored(Path("exported"))
    assert all(np.array_equal(exported[name], array) for name, array in found.items())
    assert main(["generate", "mean", "-p", "the", "--tokens", "3"]) == 0
    for ignored in ({"step": 4}, {"weights": "ema"}):
        with pytest.raises((ConfigError, CheckpointError), match=r"of one step|no moving average"):
            vorox.load_model("mean", **ignored)  # type: ignore[arg-type]


def test_named_steps(run: Path, tmp_path: Path) -> None:
    arguments = ["checkpoints", "average", str(run), "--to", str(tmp_path / "mean")]
    assert main([*arguments, "4", "8", "12"]) == 0
    parts = [stored(run / "checkpoints" / f"step-{step:08d}") for step in (4, 8, 12)]
    for name, array in stored(tmp_path / "mean").items():
        expected = np.mean([part[name].astype(float) for part in parts], axis=0)
        np.testing.assert_allclose(array, expected, rtol=1e-6, atol=1e-9, err_msg=name)
    assert main([*arguments, "4", "8"]) == 2, "the target is not overwritten"
    assert main([*arguments[:-1], str(tmp_path / "other"), "--last", "4"]) == 2
    assert main([*arguments[:-1], str(tmp_path / "other")]) == 2


def test_what_cannot_be_averaged_is_refused(run: Path, tmp_path: Path) -> None:
    paths = [run / "checkpoints" / f"step-{step:08d}" for step in (4, 8)]
    with pytest.raises(ConfigError, match="at least two"):
        average_checkpoints(paths[:1], tmp_path / "mean")
    other = tiny_runs.run(
        tiny_runs.configuration(tmp_path, ["model.num_layers=2", "train.num_steps=1", "model.family=llama"])
    ).run_directory
    with pytest.raises(CheckpointError, match="different model: num_layers"):
        average_checkpoints([paths[0], other / "checkpoints" / "step-00000001"], tmp_path / "mean")
    damaged = bytearray((paths[1] / "model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (paths[1] / "model.safetensors").write_bytes(damaged)
    with pytest.raises(CheckpointError):
        average_checkpoints(paths, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize("recorded", [None, "", 5, "/nowhere"])
def test_weights_without_a_run_take_no_other_directory_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: object
) -> None:
    """Not even the working directory, where a configuration may have the name of a run's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("preset: quickstart\n")
    assert recorded_run(Checkpoint(tmp_path, {"run": recorded})) is None
    assert recorded_run(Checkpoint(tmp_path, {"run": str(tmp_path)})) == tmp_path
