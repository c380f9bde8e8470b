"""Commands and the API on ``RUN@STEP`` give what they give on the same checkpoint of a run that keeps all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

import tiny_runs
import vorox
from training.test_materialize import EVERY_STATE
from vorox.cli import main
from vorox.core.errors import ConfigError
from vorox.core.run_layout import RunLayout, step_directories
from vorox.core.schema import RunConfig
from vorox.records.run_lookup import notes_of_attempts
from vorox.training.checkpoints.materialized_cache import folder

pytestmark = [pytest.mark.torch, pytest.mark.slow]
STEP = 7


@pytest.fixture(name="house", scope="module")
def _house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with ``runs/sparse-...`` and ``runs/shadow-...``, which took the same steps; only the second kept 7."""
    directory = tmp_path_factory.mktemp("house")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        for name, settings in (("sparse", []), ("shadow", EVERY_STATE)):
            run = tiny_runs.run(configured(directory, name, *settings)).run_directory
            assert (STEP in step_directories(run)) == (name == "shadow")
        yield directory


@pytest.fixture(autouse=True)
def _inside(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(house)
    shutil.rmtree("cache/materialized", ignore_errors=True)


def configured(directory: Path, name: str, *settings: str) -> RunConfig:
    return tiny_runs.configuration(directory, ["model.family=llama", f"run.name={name}", *settings])


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_generated_text_exports_and_averages_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", f"sparse@{STEP}", "-p", "the step", "--tokens", "8"]) == 0
    captured = capsys.readouterr()
    assert "Computing the state after step 7 of run sparse-" in captured.err
    assert captured.out == printed(capsys, "generate", f"shadow@{STEP}", "-p", "the step", "--tokens", "8")
    for name in ("sparse", "shadow"):
        printed(capsys, "export", f"{name}@{STEP}", "--output", f"{name}-hf")
        printed(capsys, "checkpoints", "average", name, "5", str(STEP), "8", "--to", f"{name}-mean")
        printed(capsys, "compress", name, "--step", str(STEP), "--prune", "magnitude:0.5", "--to", f"{name}-pruned")
    for kind in ("hf", "mean", "pruned"):
        first, second = (load_file(f"{name}-{kind}/model.safetensors") for name in ("sparse", "shadow"))
        assert first.keys() == second.keys()
        assert all(np.array_equal(first[name], second[name]) for name in first), kind


def test_the_api_loads_any_step() -> None:
    with pytest.warns(UserWarning, match="Computing the state after step 7"):
        found = vorox.load_model(f"sparse@{STEP}")
    shadow = vorox.load_model("shadow", step=STEP)
    assert (found.step, found.path, found.state) == (STEP, None, "step 7")
    assert found.run_directory.name.startswith("sparse")
    weights = shadow.weights()
    assert all(np.array_equal(array, weights[name]) for name, array in found.weights().items())
    with pytest.warns(UserWarning, match="step 0"):
        initial = vorox.load_model("sparse", step=0)
    fresh = vorox.create_model(vorox.open_run("sparse").config).weights()
    assert initial.state == "step 0"
    assert all(np.array_equal(array, fresh[name]) for name, array in initial.weights().items())


def test_a_run_from_a_step_resumes_without_it_and_replays_with_it(
    house: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = next((house / "runs").glob("sparse-*"))
    length = ("train.num_steps=4", "checkpoint.every_steps=2")
    for name in ("sparse", "shadow"):
        printed(capsys, "train", "tiny.yaml", "--from-weights", f"{name}@{STEP}", f"run.name=of-{name}", *length)
    first, second = (next((house / "runs").glob(f"of-{name}-*")) for name in ("sparse", "shadow"))
    weights = [load_file(RunLayout(run).checkpoint(4) / "model.safetensors") for run in (first, second)]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[1])
    assert yaml.safe_load(RunLayout(first).config.read_text())["train"]["from_weights"] == f"{base}@{STEP}"
    (note,) = [notes for notes in notes_of_attempts(first) if "from_weights" in notes]
    assert note["from_weights"] == f"{base}@{STEP}"
    assert [(one["run"], one["step"]) for one in note["weights_of"]] == [(base.name, STEP)]
    shutil.rmtree("cache/materialized")
    printed(capsys, "train", "--resume", first.name, "train.num_steps=6")
    assert not folder(base).exists(), "a run that has its weights needs no others"
    assert "bit-exact, 6 steps" in printed(capsys, "replay", first.name, "--from", "0")
    assert (folder(base) / f"step-{STEP:08d}").is_dir()


def test_a_teacher_is_found_at_every_start(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("train.distillation.teacher=sparse@6", "run.name=student", "train.num_steps=2", "model.family=llama")
    printed(capsys, "train", "tiny.yaml", *settings)
    shutil.rmtree("cache/materialized")
    (student,) = (house / "runs").glob("student-*")
    printed(capsys, "train", "--resume", student.name, "train.num_steps=3")
    assert (folder(next((house / "runs").glob("sparse-*"))) / "step-00000006").is_dir()


def test_the_base_of_an_adapter_must_be_kept(house: Path) -> None:
    with pytest.raises(ConfigError, match="a base must stay where it is") as refused:
        vorox.load_config("tiny.yaml", [f"train.from_weights=sparse@{STEP}", "adapter.kind=lora"])
    assert f"--step {STEP} --to DIR" in refused.value.hint
    config = vorox.load_config("tiny.yaml", ["train.from_weights=sparse@8", "adapter.kind=lora"])
    (base,) = (house / "runs").glob("sparse-*")
    assert config.model.name_or_path == str(RunLayout(base).checkpoint(8))


@pytest.mark.jax
def test_parity_starts_from_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("--steps", "2", "precision.dtype=fp32", "runtime.num_threads=null", "--json")
    kept, made = (
        json.loads(printed(capsys, "parity", f"runs/{next(Path('runs').glob(f'{name}-*')).name}@{STEP}", *settings))
        for name in ("shadow", "sparse")
    )
    assert made["equal"]
    assert made["steps"] == kept["steps"]
