"""What a run that goes on may change, and what is refused before anything is written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from numpy_engine import NumpyEngine
from tiny_runs import Killed, at_step, configuration, events, kill, result, run, use_numpy_engine, write_text
from vorox.core.config.schema_fields import facts_at, leaf_keys
from vorox.core.errors import CheckpointError, ConfigError, DataError
from vorox.core.files.file_holder import FileLock
from vorox.core.files.json_lines import read_lines
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import RunLayout, step_directories
from vorox.core.schema import RunConfig
from vorox.data.order.plan import DataPlan
from vorox.experiments.tracking import read_metrics
from vorox.records.log import RunLog
from vorox.records.run_context import recorded_config
from vorox.run import make_workload
from vorox.training.checkpoints.store import Checkpoint
from vorox.training.replay import replay
from vorox.training.resume import resume
from vorox.training.steps.workload import Workload

CHANGED = {"engine": "numpy", "numpy": "9.9", "blas": "new", "determinism": "bitwise"}


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nobody cuts the power here


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the uninterrupted run comes to."""
    with pytest.MonkeyPatch.context() as patch:
        use_numpy_engine(patch)
        return result(run(configuration(tmp_path_factory.mktemp("straight"))))


def test_another_process_is_refused(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    directory = run(config).run_directory
    with FileLock(directory / "LOCK"), pytest.raises(ConfigError, match="is in use by"):
        run(config)


def test_a_length_below_the_finished_steps_names_the_command_that_continues(tmp_path: Path) -> None:
    """To the run's own length, if it has not reached that yet: another one would end it early or make it longer."""
    config = configuration(tmp_path, ["train.num_steps=12", "checkpoint.every_steps=4", "checkpoint.keep_last=9"])
    directory = run(config).run_directory
    shorter = recorded_config(directory, ["train.num_steps=2"])
    with pytest.raises(ConfigError, match="has finished 12 steps, more than the configured 2") as caught:
        run(shorter, resume_from=directory)
    assert "train.num_steps=24" in caught.value.hint
    for step in (8, 12):
        shutil.rmtree(RunLayout(directory).checkpoint(step))
    with pytest.raises(ConfigError, match="has finished 4 steps") as caught:
        run(shorter, resume_from=directory)
    assert "to its own length, 12 (vorox train --resume " in caught.value.hint
    assert "train.num_steps" not in caught.value.hint


def test_resume_refuses_another_model_or_other_data(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    directory = run(config).run_directory
    files = {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file() and path.name != "LOCK"}
    other = recorded_config(
        directory, ["model.num_layers=2", "data.sequence_length_tokens=8", "run.seed=7", "train.num_steps=20"]
    )
    with pytest.raises(ConfigError, match="3 differences") as refused:
        run(other, resume_from=directory)
    for text in ("model.num_layers: 1 -> 2", "data.sequence_length_tokens: 16 -> 8", "run.seed: 1234 -> 7"):
        assert text in str(refused.value)
    for path, content in files.items():
        assert path.read_bytes() == content, f"{path} was changed by a refused resume"


WITHOUT_BITS = {
    "data.sources.*.metadata_fields": '["author"]',
    "data.sources.*.max_decompressed_bytes": "1000000",
    "data.sources.*.max_decompression_ratio": "50",
    "data.sources.*.max_retries_per_unit": "3",
    "data.sources.*.stall_seconds": "7",
    "data.cache.codec": "zstd",
    "data.cache.block_rows": "2",
}


def test_a_setting_of_the_data_that_decides_no_bit_may_change(
    straight: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = [
        key for key in leaf_keys()
        if key.startswith(("data.sources.*.", "data.cache.")) and facts_at(key).resume == "allowed"
        and key not in {"data.cache.directory", "data.cache.grow"}
    ]  # fmt: skip
    assert sorted(declared) == sorted(WITHOUT_BITS)
    with monkeypatch.context() as patch:
        at_step(patch, 7, kill)
        with pytest.raises(Killed):
            run(configuration(tmp_path))
    changed = [f"{key.replace('*', '0')}={value}" for key, value in WITHOUT_BITS.items()]
    outcome = run(configuration(tmp_path, changed))
    assert outcome.start_step > 0
    assert result(outcome) == straight


def test_resume_refuses_a_changed_argument_of_a_transform(tmp_path: Path) -> None:
    """What a mapping declares holds for its entries, whose keys the schema does not know."""
    overrides = ["data.transforms=[{name: length, args: {min_characters: 1}}]"]
    directory = run(configuration(tmp_path, overrides)).run_directory
    other = recorded_config(directory, ["data.transforms.0.args.min_characters=2"])
    with pytest.raises(ConfigError, match=r"1 difference\):\n  data.transforms.0.args.min_characters: 1 -> 2"):
        run(other, resume_from=directory)


def test_resume_with_another_length_and_pace(tmp_path: Path) -> None:
    directory = run(configuration(tmp_path)).run_directory
    longer = recorded_config(directory, ["train.num_steps=16", "optimizer.lr=0.001", "log.every_steps=1"])
    outcome = run(longer, resume_from=directory)
    assert outcome.run_directory == directory
    assert outcome.progress.step == 16
    assert events(directory, "config_changed") == [
        "Configuration changed: optimizer.lr: 0.01 -> 0.001; train.num_steps: 12 -> 16; log.every_steps: 2 -> 1"
    ]
    assert recorded_config(directory) == longer
    rates = {step: values["learning_rate"] for step, values in read_metrics(directory).items()}
    assert rates[16] == pytest.approx(0.0001)


def test_another_length_survives_a_kill_before_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = run(configuration(tmp_path)).run_directory
    longer = recorded_config(directory, ["train.num_steps=16", "train.max_nonfinite_steps=5"])
    with monkeypatch.context() as patch:
        at_step(patch, 14, kill)
        with pytest.raises(Killed):
            run(longer, resume_from=directory)
    again = run(recorded_config(directory), resume_from=directory)
    assert again.progress.step == 16
    assert run(recorded_config(directory), resume_from=directory).progress.step == 16


def test_resume_from_an_older_checkpoint_abandons_what_came_after(straight: dict[str, Any], tmp_path: Path) -> None:
    config = configuration(tmp_path)
    directory = run(config).run_directory
    found = result(run(config, resume_from=RunLayout(directory).checkpoint(8)))
    assert found == straight
    assert (directory / "checkpoints" / "step-00000012.replaced-1").is_dir()
    assert list(step_directories(directory)) == [8, 12]


def test_a_changed_environment_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path)
    with monkeypatch.context() as patch:
        at_step(patch, 9, kill)
        with pytest.raises(Killed):
            run(config)
    monkeypatch.setattr(NumpyEngine, "environment", lambda self: CHANGED)
    directory = run(config).run_directory
    said = events(directory, "environment_changed")
    assert len(said) == 1
    assert "Not bit-exact from step 8 on" in said[0]
    assert "numpy was" in said[0]
    assert "blas was absent, is new" in said[0]


def test_the_checkpoint_of_another_plan_is_refused(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    directory = run(config).run_directory
    (directory / "plan.jsonl").unlink()
    with pytest.raises(DataError, match="Run has no data plan") as refused:
        run(recorded_config(directory, ["train.num_steps=999"]), resume_from=directory)

    def open_workload(config: RunConfig) -> Workload:
        return make_workload(config, DistributedContext(), RunLog(None), None, build=False)

    for read in (lambda: DataPlan.open(directory / "plan.jsonl"), lambda: replay(directory, open_workload)):
        with pytest.raises(DataError) as again:
            read()
        assert str(again.value) == str(refused.value), "one message, whoever reads the plan"


@pytest.mark.parametrize("is_lost", [False, True])
def test_rewritten_text_changes_no_run_that_has_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    whole = run(configuration(tmp_path / "whole")).run_directory
    config = configuration(tmp_path / "cut")
    with monkeypatch.context() as patch:
        at_step(patch, 6, kill)
        with pytest.raises(Killed):
            run(config)
    (tmp_path / "cut" / "text" / "text.jsonl").write_text('{"text": "something else"}\n' * 200)
    if is_lost:
        shutil.rmtree(tmp_path / "cut" / "cache")
        with pytest.raises(DataError):
            run(config)
    else:
        steps = {
            directory: {line["step"]: (line["batch"], line["loss"]) for line in read_lines(directory / "chain.jsonl")
                        if "batch" in line}
            for directory in (whole, run(config).run_directory)
        }  # fmt: skip
        one, other = steps.values()
        assert len(one) == 12
        assert one == other


def test_a_checkpoint_of_another_model_is_refused_with_the_fields_that_differ(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, {"spec": {"num_layers": 2, "width": 4, "bias": True}})
    with pytest.raises(CheckpointError, match="belongs to a different model") as refused:
        resume.load(NumpyEngine(8), checkpoint, {"num_layers": 3, "width": 4})
    _, _, fields = refused.value.what.partition(": ")
    assert fields == "bias = True, configured is None, num_layers = 2, configured is 3"


def test_a_source_that_was_added_is_one_change(tmp_path: Path) -> None:
    directory = run(configuration(tmp_path)).run_directory
    write_text(tmp_path / "more", seed=3)
    config = configuration(tmp_path, ["train.num_steps=16"])
    more = config.data.sources[0].model_copy(update={"name": "more", "paths": (str(tmp_path / "more"),)})
    data = config.data.model_copy(update={"sources": (*config.data.sources, more)})
    run(config.model_copy(update={"data": data}), resume_from=directory)
    assert events(directory, "config_changed") == [
        "Configuration changed: train.num_steps: 12 -> 16; data.sources.1.name: null -> more"
    ]


def test_a_name_that_is_no_entry_of_a_list_hides_no_other_change(tmp_path: Path) -> None:
    unnamed = configuration(tmp_path, ["run.name=null"])
    directory = run(unnamed).run_directory
    later = {"name": "later", "directory": str(tmp_path / "elsewhere")}
    config = unnamed.model_copy(update={"run": unnamed.run.model_copy(update=later)})
    longer = config.model_copy(update={"train": config.train.model_copy(update={"num_steps": 16})})
    run(longer, resume_from=directory)
    (said,) = events(directory, "config_changed")
    assert "run.name" in said
    assert "run.directory" in said
