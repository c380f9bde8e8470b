"""Every step is rebuilt as a run which keeps all states has it: after kills, changes, growth, in every layout."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
from training.test_changed_runs import mixed
from training.test_materialize import OWN, made
from vorox.core.errors import DataError
from vorox.core.files.staged_directory import MANIFEST_NAME, read_manifest
from vorox.core.run_layout import RunLayout, step_directories
from vorox.core.schema import RunConfig
from vorox.data.provenance.queries import when
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.training.checkpoints.store import verify

ALL = ["checkpoint.every_steps=1", "checkpoint.keep_last=999"]


OF_THE_PLAN = {"plan_digest", "plan_events", "dataset_tokens", "dataset_error_fraction"}
"""What a state says of the plan as it was known then: a later plan has more events, and better estimates."""


def contents(checkpoint: Path, *, without: Collection[str] = ()) -> dict[str, bytes]:
    """All files, and the manifest without what says how often the run saves and where the checkpoint is from."""
    found = {
        path.relative_to(checkpoint).as_posix(): path.read_bytes()
        for path in checkpoint.rglob("*")
        if path.is_file() and path.name != MANIFEST_NAME
    }
    metadata = {key: value for key, value in read_manifest(checkpoint)["metadata"].items() if key not in OWN}
    described = {"state": json.loads(found.pop("state.json")), "metadata": metadata}
    return {**found, "described": json.dumps(_pruned(described, without), sort_keys=True).encode()}


def _pruned(value: Any, without: Collection[str]) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _pruned(inner, without) for key, inner in value.items() if key not in without}


def killed(config: RunConfig, steps: Sequence[int], resume_from: Path | None = None) -> Path:
    """Train to the end of a configuration, killed in the middle of these steps."""
    for step in steps:
        with pytest.MonkeyPatch.context() as patch:
            tiny_runs.at_step(patch, step, tiny_runs.kill)
            with pytest.raises(tiny_runs.Killed):
                tiny_runs.run(config, **({} if resume_from is None else {"resume_from": resume_from}))
    return tiny_runs.run(config, **({} if resume_from is None else {"resume_from": resume_from})).run_directory


@pytest.mark.slow
def test_all_200_states_after_kills_and_another_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    chooser, sparse_saves = random.Random(), ["checkpoint.every_steps=17", "checkpoint.keep_last=2"]
    runs: list[Path] = []
    for name, saves in (("shadow", ALL), ("sparse", sparse_saves)):
        settings = [
            *saves,
            "train.num_steps=90",
            "log.every_steps=50",
            "eval.every_steps=null",
            "schedule.name=constant",
        ]
        first = sorted(chooser.sample(range(2, 91), 3)) if name == "sparse" else []
        run = killed(mixed(tmp_path / name, 1.0, settings), first)
        later = sorted(chooser.sample(range(92, 201), 3)) if name == "sparse" else []
        runs.append(killed(mixed(tmp_path / name, 4.0, [*settings, "train.num_steps=200"]), later, run))
    shadow, sparse = runs
    kept = step_directories(shadow)
    assert len(kept) == 200
    assert len(step_directories(sparse)) < 10
    found = made(sparse, [*kept], tmp_path / "made")
    assert [one.step for one in found] == [*range(1, 201)]
    for one in found:
        assert one.fingerprint == verify(kept[one.step]).metadata["fingerprint"], one.step
        expected = contents(kept[one.step], without=OF_THE_PLAN)
        assert contents(one.path, without=OF_THE_PLAN) == expected, one.step
    damage_chain(sparse, 150)
    with pytest.raises(DataError, match="Step 150 cannot be compared"):
        made(sparse, [149, 151], tmp_path / "again")
    assert not (tmp_path / "again").exists()


def damage_chain(run: Path, step: int) -> None:
    path = RunLayout(run).chain
    lines = path.read_text().splitlines()
    number = next(number for number, line in enumerate(lines) if json.loads(line).get("step") == step)
    lines[number] = json.dumps({**json.loads(lines[number]), "grad_norm": "0" * 16})
    path.write_text("\n".join(lines) + "\n")


def test_every_state_of_a_run_whose_data_grew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    grows = ["data.growth.mode=strict", "data.growth.horizon_steps=2", "data.growth.first_segment_units=1"]
    grows += ["data.cache.grow=true", "data.validation.held_out_fraction=0", "eval.every_steps=null"]
    runs: list[Path] = []
    for name, saves in (("shadow", ALL), ("sparse", ["checkpoint.every_steps=5", "checkpoint.keep_last=1"])):
        directory = tmp_path / name
        settings = [*grows, *saves]
        tiny_runs.write_text(directory / "text", documents=10)
        run = tiny_runs.run(tiny_runs.configuration(directory, [*settings, "train.num_steps=6"])).run_directory
        more = tiny_runs.write_text(directory / "more", seed=7, documents=200) / "text.jsonl"
        shutil.copy(more, directory / "text" / "zmore.jsonl")
        config = tiny_runs.configuration(directory, [*settings, "train.num_steps=40"])
        runs.append(tiny_runs.run(config, resume_from=run).run_directory)
    shadow, sparse = runs
    with RunDataIndex.open(sparse) as run_data:
        assert {one.step for one in when(run_data, "zmore.jsonl")} & {*range(7, 41)}, "it trained on the new file"
    kept = step_directories(shadow)
    assert len(kept) == 40
    for one in made(sparse, [*kept], tmp_path / "made"):
        assert one.fingerprint == verify(kept[one.step]).metadata["fingerprint"], one.step
        expected = contents(kept[one.step], without=OF_THE_PLAN)
        assert contents(one.path, without=OF_THE_PLAN) == expected, one.step


CASES = {
    "fsdp2": pytest.param(2, ["backend=torch", "parallel.fsdp_size=2"], marks=pytest.mark.torch),
    "lora": pytest.param(1, ["adapter.kind=lora"], marks=pytest.mark.torch),
    "jax": pytest.param(1, ["backend=jax", "runtime.num_threads=null"], marks=pytest.mark.jax),
}


@pytest.mark.slow
@pytest.mark.parametrize(("nproc", "settings"), CASES.values(), ids=CASES)
def test_every_state_in_every_layout(nproc: int, settings: list[str], tmp_path: Path) -> None:
    """Commands in processes of their own: both runs, then all states of the one that kept few."""

    def vorox(*words: str) -> str:
        command = [sys.executable, "-m", "vorox", *words, *(["--nproc", str(nproc)] if nproc > 1 else [])]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    if "adapter.kind=lora" in settings:
        pytest.importorskip("peft")
    tiny_runs.configuration(tmp_path)
    base = ["tiny.yaml", "model.family=llama"]
    if "adapter.kind=lora" in settings:
        vorox("train", *base, "run.name=base", "train.num_steps=4")
        base = ["tiny.yaml", "--from-weights", "base@4"]
    vorox("train", *base, *settings, "run.name=shadow", *ALL)
    vorox("train", *base, *settings, "run.name=sparse", "checkpoint.every_steps=5", "checkpoint.keep_last=1")
    (shadow,) = (tmp_path / "runs").glob("shadow*")
    vorox("checkpoints", "materialize", "sparse", "--every", "1", "--to", "made")
    kept = step_directories(shadow)
    assert len(kept) == 12
    for step, path in kept.items():
        assert contents(tmp_path / "made" / path.name) == contents(path), step
