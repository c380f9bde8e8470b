"""Whole runs from a folder of their own with relative paths only, whose working directory changes in mid-run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tiny_runs import configuration, run, use_numpy_engine, write_text
from vorox.cli import main
from vorox.core.config import load_config
from vorox.core.schema import RunConfig
from vorox.records.run_lookup import run_directories
from vorox.training.checkpoints.store import latest_valid
from vorox.training.loop.display import NoDisplay, StepView

ORBAX = ["checkpoint.format=orbax", "runtime.num_threads=null"]
CASES = [
    pytest.param("numpy", [], id="numpy"),
    pytest.param("torch", ["checkpoint.asynchronous=true"], id="torch", marks=pytest.mark.torch),
    pytest.param("jax", ORBAX, id="jax, orbax", marks=pytest.mark.jax),
    pytest.param("jax", [*ORBAX, "checkpoint.asynchronous=false"], id="jax, waiting", marks=pytest.mark.jax),
]


class Wanderer(NoDisplay):
    """Changes the working directory at every step that is shown."""

    def __init__(self, places: list[Path]) -> None:
        self.places = places

    def step(self, view: StepView) -> None:
        os.chdir(self.places[view.step % len(self.places)])


def relative(home: Path, overrides: list[str]) -> RunConfig:
    """The tiny run with every path relative to its folder."""
    configuration(home)
    settings = json.loads((home / "tiny.yaml").read_text())
    settings["data"]["sources"][0]["paths"] = ["text"]
    settings["data"]["cache"]["directory"] = "cache"
    settings["run"]["directory"] = "runs"
    (home / "tiny.yaml").write_text(json.dumps(settings))
    return load_config("tiny.yaml", overrides)


@pytest.mark.parametrize(("backend", "overrides"), CASES)
def test_train_resume_replay_generate_and_export(
    backend: str, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_text(home / "text")
    monkeypatch.chdir(home)
    if backend == "numpy":
        use_numpy_engine(monkeypatch)
    settings = [*overrides, "log.every_steps=1"] + ([] if backend == "numpy" else [f"backend={backend}"])
    first = run(relative(home, [*settings, "train.num_steps=6"]), display=Wanderer([elsewhere, tmp_path]))
    assert list(elsewhere.iterdir()) == []
    assert run_directories(home / "runs") == [first.run_directory]
    os.chdir(home)
    outcome = run(
        load_config("tiny.yaml", settings), resume_from=Path("runs") / first.run_directory.name,
        display=Wanderer([elsewhere]),
    )  # fmt: skip
    assert outcome.progress.step == 12
    assert list(elsewhere.iterdir()) == []
    assert sorted(path.name for path in home.iterdir()) == ["cache", "runs", "text", "tiny.yaml"]
    found = latest_valid(outcome.run_directory)
    assert found is not None
    assert found.metadata["fingerprint"] == outcome.fingerprint
    os.chdir(home)
    assert (home / "runs" / outcome.run_directory.name / "config.yaml").read_text().count(str(home)) == 0
    for command in (["replay", "latest", "--from", "8", "--to", "12"], ["checkpoints", "verify", "latest"]):
        assert main(command) == 0, capsys.readouterr().err
    if backend != "numpy":
        assert main(["generate", "latest", "-p", "the", "--tokens", "3"]) == 0, capsys.readouterr().err
        assert main(["export", "latest", "--to", "hf"]) == 0, capsys.readouterr().err


def test_screens_show_short_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path / "text")
    monkeypatch.chdir(tmp_path)
    use_numpy_engine(monkeypatch)
    relative(tmp_path, [])
    assert main(["train", "tiny.yaml"]) == 0
    assert main(["train", "tiny.yaml", "--resume", "latest", "run.seed=9"]) == 2
    shown = capsys.readouterr()
    lines = [line for line in (shown.out + shown.err).splitlines() if str(tmp_path) in line]
    assert lines == []
