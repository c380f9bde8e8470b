"""Materialised checkpoints are those that the run would have kept, byte for byte, or nothing is written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import tiny_runs
import vorox.run
from vorox.cli import main
from vorox.core.errors import CheckpointError, ConfigError, NumericalError
from vorox.core.files.staged_directory import MANIFEST_NAME, read_manifest
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import step_directories
from vorox.core.schema import RunConfig
from vorox.records.log import RunLog
from vorox.training.checkpoints.store import verify
from vorox.training.materialize import Materialized, materialize, open_range
from vorox.training.steps.workload import Workload

EVERY_STATE = ["checkpoint.every_steps=1", "checkpoint.keep_last=99"]
OWN = {"settings", "config_digest", "materialized", "run"}
CASES: dict[str, list[str]] = {
    "plain": [],
    "stages": ['data.stages=[{"start_tokens":0,"weights":{"text":1}},{"start_tokens":256,"sequence_length_tokens":8}]'],
    "batch sizes": ['train.batch_stages=[{"start_step":5,"global_batch_sequences":8}]'],
    "streaming": ["data.mode=streaming", "data.growth.mode=strict", "data.streaming.retention_bytes=24000"],
    "unshuffled": ["data.packing=concat", "data.shuffle=false"],
}


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)


def make_workload(config: RunConfig) -> Workload:
    return vorox.run.make_workload(config, DistributedContext(), RunLog(None), None, build=False)


def made(directory: Path, steps: list[int], to: Path) -> list[Materialized]:
    return materialize(open_range(directory, steps), make_workload, steps, to, on_step=lambda done, total: None)


def contents(checkpoint: Path) -> dict[str, bytes]:
    """All files, and the manifest without what says how often the run saves and where the checkpoint is from."""
    found = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name != MANIFEST_NAME}
    metadata = read_manifest(checkpoint)["metadata"]
    metadata = {key: value for key, value in metadata.items() if key not in OWN}
    return {**found, "metadata": json.dumps(metadata, sort_keys=True).encode()}


@pytest.mark.parametrize("case", CASES)
def test_every_state_is_the_one_that_a_run_which_keeps_all_has(case: str, tmp_path: Path) -> None:
    shadow = tiny_runs.run(tiny_runs.configuration(tmp_path / "shadow", [*CASES[case], *EVERY_STATE])).run_directory
    sparse = tiny_runs.run(tiny_runs.configuration(tmp_path / "sparse", CASES[case])).run_directory
    kept = step_directories(shadow)
    assert len(kept) == 12 > len(step_directories(sparse))
    found = made(sparse, [*kept], tmp_path / "made")
    assert [one.step for one in found] == [*kept]
    for one in found:
        assert verify(one.path).step == one.step
        assert contents(one.path) == contents(kept[one.step])
    assert {one.step: one.proof for one in found if one.step % 4 == 0} == dict.fromkeys((4, 8, 12), "fingerprint")
    assert {one.proof for one in found if one.step % 4} == {"next step"}


def test_kills_and_resumes_move_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow = tiny_runs.run(tiny_runs.configuration(tmp_path / "shadow", EVERY_STATE)).run_directory
    config = tiny_runs.configuration(tmp_path / "killed")
    with monkeypatch.context() as patch:
        tiny_runs.at_step(patch, 7, tiny_runs.kill)
        with pytest.raises(tiny_runs.Killed):
            tiny_runs.run(config)
    directory = tiny_runs.run(config).run_directory
    (five, six) = made(directory, [5, 6], tmp_path / "made")
    for one in (five, six):
        assert contents(one.path) == contents(step_directories(shadow)[one.step])


def test_a_last_step_without_a_recorded_state_says_so(tmp_path: Path) -> None:
    directory = tiny_runs.run(tiny_runs.configuration(tmp_path)).run_directory
    shutil.rmtree(step_directories(directory)[12])
    (directory / "states.jsonl").unlink()
    assert [one.proof for one in made(directory, [11, 12], tmp_path / "made")] == ["next step", "own step"]


def test_other_bits_are_refused_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_runs.run(tiny_runs.configuration(tmp_path)).run_directory
    tiny_runs.scale_steps(monkeypatch, {7: 1.0000001})
    with pytest.raises(NumericalError, match="step 7"):
        made(directory, [5, 6], tmp_path / "made")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["step-00000005"], "6 has no witness"


def test_another_state_than_the_run_saved_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_runs.run(tiny_runs.configuration(tmp_path)).run_directory
    execution = open_range(directory, [8])
    execution.states[8] = (execution.states[8][0], "0" * 64)
    with pytest.raises(CheckpointError, match="fingerprint"):
        materialize(execution, make_workload, [8], tmp_path / "made", on_step=lambda done, total: None)
    assert not [*(tmp_path / "made").iterdir()]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    directory = tiny_runs.run(tiny_runs.configuration(tmp_path)).run_directory
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="step 3 cannot be written") as caught:
        made(directory, [3], tmp_path / "file" / "made")
    assert caught.value.hint == "choose another --to DIR"


@pytest.mark.parametrize("steps", [[13], [3, 99]])
def test_steps_that_never_ran_are_refused(steps: list[int], tmp_path: Path) -> None:
    directory = tiny_runs.run(tiny_runs.configuration(tmp_path)).run_directory
    with pytest.raises(ConfigError):
        made(directory, steps, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_the_command_prints_costs_then_proofs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tiny_runs.run(tiny_runs.configuration(tmp_path)).run_directory
    monkeypatch.chdir(tmp_path)
    command = ["checkpoints", "materialize", directory.name, "--every", "5"]
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    assert main([*command, "--plan"]) == 0
    assert "2 checkpoints: 11 steps to compute, from step 0 to 11" in capsys.readouterr().out
    assert not Path("materialized").exists()
    assert main(command) == 0
    assert "Step 10 is in materialized" in capsys.readouterr().out
    assert main(command) == 5
    assert "already there" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
    assert main(["checkpoints", "materialize", directory.name]) == 2


@pytest.mark.torch
@pytest.mark.slow
def test_commands_take_a_materialised_checkpoint_as_a_kept_one(tmp_path: Path) -> None:
    """A run in torch: text, exports and a run from its weights are those of the checkpoint that another run keeps."""

    def vorox(*words: str) -> str:
        command = [sys.executable, "-m", "vorox", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    tiny_runs.configuration(tmp_path)
    vorox("train", "tiny.yaml", "run.name=sparse")
    vorox("train", "tiny.yaml", "run.name=shadow", *EVERY_STATE)
    vorox("checkpoints", "materialize", "sparse", "--step", "7", "--to", "made")
    (shadow,) = (tmp_path / "runs").glob("shadow*")
    made_here, kept = "made/step-00000007", str(step_directories(shadow)[7])
    prompt = ("-p", "the step", "--tokens", "8")
    assert vorox("generate", made_here, *prompt) == vorox("generate", kept, *prompt)
    for name, place in (("a", [made_here]), ("b", [shadow.name, "--step", "7"])):
        vorox("export", *place, "--to", "hf", "--output", name)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert {name: array.tobytes() for name, array in first.items()} == {
        name: array.tobytes() for name, array in second.items()
    }
    vorox("train", "tiny.yaml", "run.name=second", f"train.from_weights={made_here}", "train.num_steps=2")
