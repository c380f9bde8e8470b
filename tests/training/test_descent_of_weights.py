"""Runs that start from weights inherit what those saw, wherever the runs and the weights are by now."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
from vorox.cli import main
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.data.provenance.queries import when
from vorox.data.provenance.run_data_index import RunDataIndex

pytestmark = pytest.mark.torch


def configured(directory: Path, name: str, text: str, *overrides: str) -> RunConfig:
    if not (directory / text).exists():
        tiny_runs.write_text(directory / text, documents=60, seed=len(text))
    sources = [{"name": "text", "format": "jsonl", "paths": [str(directory / text)]}]
    settings = [
        f"data.sources={json.dumps(sources)}", f"data.cache.directory={directory.parent / 'cache'}",
        "eval.every_steps=null",
        "data.validation.held_out_fraction=0", "model.family=llama", "checkpoint.keep_last=5", f"run.name={name}",
    ]  # fmt: skip
    return tiny_runs.configuration(directory, [*settings, *overrides])


@pytest.fixture(name="house", scope="module")
def _house(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A project that was moved, with a base whose directory was renamed; a document of step 1, and one after step 4."""
    directory = tmp_path_factory.mktemp("house") / "one"
    directory.mkdir()
    base = tiny_runs.run(configured(directory, "base", "web")).run_directory
    with RunDataIndex.open(base) as run_data:
        first = {
            ordinal: min(one.step for one in when(run_data, "web/text.jsonl", ordinal=ordinal)) for ordinal in range(60)
        }
    early, late = (
        min(first, key=lambda one: first[one]),
        max(first, key=lambda one: first[one] if first[one] <= 12 else 0),
    )
    assert first[early] <= 4 < first[late] <= 12
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert main(["checkpoints", "average", str(base), "8", "12", "--to", "mean"]) == 0
        assert main(["export", str(base), "--output", "hf"]) == 0
        assert main(["export", "mean", "--output", "mean_hf"]) == 0
    origins = {"early": RunLayout(base).checkpoint(4), "mean": "mean", "hf": "hf", "exported": "mean_hf"}
    for name, place in origins.items():
        weights = directory / place
        child = tiny_runs.run(
            configured(directory, name, "other", f"train.from_weights={weights}", "train.num_steps=1")
        ).run_directory
        if name == "mean":
            weights = RunLayout(child).checkpoint(1)
            settings = [f"train.from_weights={weights}", "train.num_steps=1"]
            tiny_runs.run(configured(directory, "grandchild", "other", *settings))
    for name in ("mean", "hf", "mean_hf"):
        shutil.rmtree(directory / name)
    base.rename(base.with_name("renamed"))
    moved = directory.rename(directory.with_name("two"))
    return moved / "runs", str(early), str(late)


def search(root: Path, record: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[dict[str, Any], str]:
    capsys.readouterr()
    words = ["data", "when", "--all-runs", "--root", str(root), "--json", "--source", "web/text.jsonl"]
    assert main([*words, "--record", record]) == code
    printed = capsys.readouterr()
    return {run["run"].partition("-")[0]: run for run in json.loads(printed.out)}, " ".join(printed.err.split())


def test_descent_is_followed_to_where_the_runs_are_now(
    house: tuple[Path, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    root, early, late = house
    for record in (early, late):
        found, _ = search(root, record, capsys)
        saw = {name for name, run in found.items() if run["inherited_from"]}
        assert saw == {"mean", "grandchild", "hf", "exported"} | ({"early"} if record == early else set())
        assert found["mean"]["checkpoints"] == ["step-00000001"]
        assert [run["unknown_weights"] for run in found.values()] == [None] * 6


def test_an_answer_without_the_run_of_the_weights_is_incomplete(
    house: tuple[Path, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, early, _ = house
    for run in root.iterdir():
        if run.name != "renamed":
            shutil.copytree(run, tmp_path / run.name)
    found, error = search(tmp_path, early, capsys, code=4)
    assert all(run["is_incomplete"] and run["unknown_weights"] for run in found.values())
    assert "5 runs of 5 may have inherited it from weights of a run that was not searched" in error


def test_weights_of_no_run_are_named_and_leave_the_answer_complete(
    house: tuple[Path, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, early, _ = house
    (base,) = root.glob("renamed")
    assert main(["export", str(base), "--output", str(tmp_path / "foreign")]) == 0
    (tmp_path / "foreign" / "MANIFEST.json").unlink()  # as of another program
    weights = f"train.from_weights={tmp_path / 'foreign'}"
    (tmp_path / "here").mkdir()
    run = tiny_runs.run(configured(tmp_path / "here", "own", "other", weights, "train.num_steps=1")).run_directory
    found, _ = search(run.parent, early, capsys)
    assert (found["own"]["unknown_weights"], found["own"]["is_incomplete"]) == (str(tmp_path / "foreign"), False)
