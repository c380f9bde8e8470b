"""How a run begins beside others and again: saves by time, no checkpoint yet, a name that is taken, another length."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tiny_runs import Killed, at_step, configuration, events, kill, run, use_numpy_engine
from vorox.core.config import load_config
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.files.file_holder import FileLock
from vorox.core.run_layout import step_directories
from vorox.core.schema import CheckpointConfig, RunConfig
from vorox.experiments.tracking import read_metrics
from vorox.planning.disk_space import save_interval_seconds
from vorox.records.run_context import recorded_config
from vorox.records.run_lookup import find_run
from vorox.training.checkpoints.writer import CheckpointWriter
from vorox.training.loop import session
from vorox.training.loop.startup import check_resume
from vorox.training.steps.schedule import Horizon, Schedule, holding_overrides

BY_TIME = "checkpoint.every_steps=null"


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_a_run_without_an_interval_saves_by_time() -> None:
    """Default: every 900 s. An interval in steps, or null, is what it says."""
    found = [
        (CheckpointConfig(), 900.0),
        (CheckpointConfig(every_steps=5), None),
        (CheckpointConfig(every_steps=5, every_seconds=60.0), 60.0),
        (CheckpointConfig(every_seconds=None), None),
    ]
    assert [save_interval_seconds(config) for config, _ in found] == [seconds for _, seconds in found]


def test_the_default_saves_after_a_quarter_of_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock takes 100 s; a kill then loses at most the last interval."""
    seconds = itertools.count(step=100.0)
    patched = functools.partial(CheckpointWriter, clock=lambda: next(seconds))
    monkeypatch.setattr(session, "CheckpointWriter", patched)
    at_step(monkeypatch, 12, kill)
    with pytest.raises(Killed):
        run(configuration(tmp_path, [BY_TIME, "checkpoint.asynchronous=false"]))
    directory = find_run(tmp_path / "runs", "tiny")
    saved = list(step_directories(directory))
    assert saved, "each step looks once, so nine steps are a quarter of an hour"
    assert saved[-1] == 9


def test_a_run_without_a_checkpoint_says_that_it_starts_again(tmp_path: Path) -> None:
    config = configuration(tmp_path, [BY_TIME])
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 7, kill)
        with pytest.raises(Killed):
            run(config)
    directory = find_run(tmp_path / "runs", "tiny")
    assert events(directory, "started_again") == []
    assert run(config).start_step == 0
    (text,) = events(directory, "started_again")
    assert text.startswith("No checkpoint yet: starts again from step 1")
    assert events(directory, "resumed") == []


def continued(command: str) -> list[str]:
    """The run and the overrides of a printed command."""
    words = shlex.split(command)
    assert words[:3] == ["vorox", "train", "--resume"]
    return words[3:]


def test_a_name_with_other_settings_says_so_and_its_command_continues(tmp_path: Path) -> None:
    first = run(configuration(tmp_path)).run_directory
    second = run(configuration(tmp_path, ["train.num_steps=14", "optimizer.lr=0.02"])).run_directory
    assert second != first
    (text,) = events(second, "same_name")
    assert first.name in text
    assert "optimizer.lr: 0.01 -> 0.02; train.num_steps: 12 -> 14" in text
    name, *overrides = continued(text.rpartition(": ")[2])
    assert Path(name) == first
    config = load_config(first / "config.yaml", overrides)
    assert (config.optimizer.lr, config.train.num_steps) == (0.02, 14)
    assert run(config, resume_from=Path(name)).start_step == 12


def test_the_command_that_continues_leaves_out_a_warm_up_that_follows_the_length(tmp_path: Path) -> None:
    def of_steps(steps: int, *overrides: str) -> RunConfig:
        configuration(tmp_path)
        file = tmp_path / "tiny.yaml"
        values = json.loads(file.read_text())
        values.pop("schedule", None)
        file.write_text(json.dumps(values))
        return load_config(file, [f"train.num_steps={steps}", *overrides])

    warmups = [of_steps(steps).schedule.warmup_steps for steps in (20, 40)]
    assert warmups == [1, 2], "5% of the run"
    first = run(of_steps(20)).run_directory
    (text,) = events(run(of_steps(40)).run_directory, "same_name")
    name, *overrides = continued(text.rpartition(": ")[2])
    assert overrides == ["train.num_steps=40"]
    config = load_config(first / "config.yaml", overrides)
    assert (config.train.num_steps, config.schedule.warmup_steps) == (40, 1)
    assert run(config, resume_from=Path(name)).start_step == 20
    (text,) = events(run(of_steps(41, "schedule.warmup_steps=30")).run_directory, "same_name")
    assert "schedule.warmup_steps=30" in continued(text.rpartition(": ")[2])


def test_a_name_whose_run_cannot_continue_says_that(tmp_path: Path) -> None:
    first = run(configuration(tmp_path)).run_directory
    second = run(configuration(tmp_path, ["run.seed=5"])).run_directory
    (text,) = events(second, "same_name")
    assert text.endswith(f"that run cannot continue with these settings; with its own: vorox train --resume {first}")
    third = run(configuration(tmp_path, ["run.seed=5"]), resume_from="never").run_directory
    assert events(third, "same_name") == [], "the run before it has these settings"


def test_the_same_command_says_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        assert events(run(configuration(tmp_path)).run_directory, "same_name") == []
    assert events(run(configuration(tmp_path), resume_from="never").run_directory, "same_name") == []


def learning_rates(directory: Path) -> dict[int, float]:
    return {step: values["learning_rate"] for step, values in read_metrics(directory).items()}


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_a_finished_run_is_extended_without_a_jump(tmp_path: Path, schedule: str) -> None:
    """Peak 0.01 and final 0.001: held at 0.001, where the stretched schedule would rise again."""
    settings = [f"schedule.name={schedule}", "log.every_steps=1"]
    directory = run(configuration(tmp_path, settings)).run_directory
    overrides = shlex.split(holding_overrides(recorded_config(directory).schedule, Horizon(12, 3, 1)))
    assert overrides == ["schedule.name=hold"]
    longer = load_config(directory / "config.yaml", ["train.num_steps=24", *overrides])
    run(longer, resume_from=directory)
    rates = learning_rates(directory)
    assert rates[12] == pytest.approx(0.001)
    assert [rates[step] for step in range(13, 25)] == pytest.approx([0.001] * 12)
    assert events(directory, "learning_rate_jump") == []


@pytest.mark.parametrize(("settings", "says"), [([], True), (["optimizer.lr=0.001"], False)])
def test_a_jump_of_the_learning_rate_is_said(tmp_path: Path, settings: Sequence[str], says: bool) -> None:
    directory = run(configuration(tmp_path, ["log.every_steps=1"])).run_directory
    run(load_config(directory / "config.yaml", ["train.num_steps=24", *settings]), resume_from=directory)
    found = events(directory, "learning_rate_jump")
    assert len(found) == says
    if says:
        # by hand: 3 warm-up steps, then a cosine from 0.01 to 0.001 whose 20 intervals have 9 behind them
        assert learning_rates(directory)[13] == pytest.approx(0.001 + 0.0045 * (1 + math.cos(0.45 * math.pi)))
        assert "jumps from 0.001 to 0.0062 after step 12" in found[0]
        assert "schedule.name=hold" in found[0]


def test_a_run_that_ended_in_its_warmup_goes_on_with_it(tmp_path: Path) -> None:
    settings = ["schedule.warmup_steps=20", "log.every_steps=1"]
    directory = run(configuration(tmp_path, settings)).run_directory
    assert holding_overrides(recorded_config(directory).schedule, Horizon(12, 20, 1)) == ""
    run(load_config(directory / "config.yaml", ["train.num_steps=24"]), resume_from=directory)
    assert [learning_rates(directory)[step] for step in range(1, 21)] == pytest.approx(
        [step / 2000 for step in range(1, 21)]
    )
    assert events(directory, "learning_rate_jump") == []


def test_holding_within_the_warmup_says_what_holds_the_rate(tmp_path: Path) -> None:
    settings = ["schedule.warmup_steps=20", "log.every_steps=1"]
    directory = run(configuration(tmp_path, settings)).run_directory
    held = ["train.num_steps=24", "schedule.name=hold"]
    run(load_config(directory / "config.yaml", held), resume_from=directory)
    (said,) = events(directory, "learning_rate_jump")
    assert "jumps from 0.006 to 0.00065 after step 12" in said
    again = run(configuration(tmp_path, settings), resume_from="never").run_directory
    run(load_config(again / "config.yaml", [*held, *re.findall(r"schedule\.\w+=[\d.]+", said)]), resume_from=again)
    assert events(again, "learning_rate_jump") == []
    assert [learning_rates(again)[step] for step in range(13, 25)] == pytest.approx([0.006] * 12)


@pytest.mark.parametrize("kept", [[], [4]])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_hold_refuses_steps_of_another_schedule_whose_checkpoints_are_lost(
    tmp_path: Path, kept: list[int], is_recorded: bool
) -> None:
    """The command that it prints computes them as before; the run that lost nothing is the oracle."""
    settings = ["log.every_steps=1", "checkpoint.every_steps=4", "checkpoint.keep_last=9"]
    held = ["train.num_steps=24", "schedule.name=hold"]
    whole = run(configuration(tmp_path, settings)).run_directory
    directory = run(configuration(tmp_path, settings), resume_from="never").run_directory
    run(load_config(whole / "config.yaml", held), resume_from=whole)
    if is_recorded:
        run(load_config(directory / "config.yaml", held), resume_from=directory)
    for step, path in step_directories(directory).items():
        if step not in kept:
            shutil.rmtree(path)
    longer = load_config(directory / "config.yaml", [] if is_recorded else held)
    first = 1 + max(kept, default=0)
    before = (directory / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match=f"would hold its rate from step {first} on") as refused:
        run(longer, resume_from=directory)
    with pytest.raises(ConfigError, match="would hold its rate"):
        check_resume(longer, directory, None, (), None)
    assert (directory / "config.yaml").read_bytes() == before
    assert refused.value.hint is not None
    command = refused.value.hint.partition("first: ")[2].partition(";")[0]
    words = shlex.split(command)
    again = load_config(directory / "config.yaml", words[4:])
    run(again, resume_from=Path(words[3]), named_keys=[word.partition("=")[0] for word in words[4:]])
    run(load_config(directory / "config.yaml", held), resume_from=directory)
    assert learning_rates(directory) == learning_rates(whole)


def test_settings_of_steps_that_are_lost_are_said(tmp_path: Path) -> None:
    settings = ["checkpoint.every_steps=4", "checkpoint.keep_last=9"]
    directory = run(configuration(tmp_path, settings)).run_directory
    slower = load_config(directory / "config.yaml", ["train.num_steps=24", "optimizer.lr=0.001"])
    run(slower, resume_from=directory)
    assert events(directory, "other_settings") == []
    for step, path in step_directories(directory).items():
        if step != 8:
            shutil.rmtree(path)
    run(load_config(directory / "config.yaml"), resume_from=directory)
    (said,) = events(directory, "other_settings")
    assert said.startswith("Steps 9 to 24 are computed again under other settings: optimizer.lr")


@pytest.mark.parametrize("name", ["constant", "hold"])
def test_schedules_that_do_not_fall_need_nothing(name: Any) -> None:
    config = configuration_of(name, 0.1)
    assert holding_overrides(config.schedule, Horizon(10, 2, 1)) == ""


def configuration_of(name: str, floor: float) -> RunConfig:
    return RunConfig.model_validate(
        {
            "data": {"sources": [{"name": "text", "format": "txt"}]},
            "train": {"num_steps": 1},
            "schedule": {"name": name, "min_lr_fraction": floor},
        }
    )


def test_hold_stays_at_the_final_rate() -> None:
    config = configuration_of("hold", 0.25)
    schedule = Schedule.from_config(config.schedule, config.optimizer, Horizon(10, 2, 1))
    peak = config.optimizer.lr
    assert [schedule.lr(step) for step in range(10)] == pytest.approx([peak / 8, *[peak / 4] * 9])
    assert (
        holding_overrides(configuration_of("linear", 0.0).schedule, Horizon(10, 2, 1))
        == "schedule.name=hold schedule.min_lr_fraction=0.1"
    )


@pytest.mark.parametrize("is_known", [True, False])
def test_a_run_directory_that_is_moved_while_it_trains_says_what_is_saved_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """The printed command continues it: at the end it has the losses of a run that nobody moved."""
    if not is_known:
        monkeypatch.setattr(FileLock, "moved_to", lambda lock: None)
    settings = ["checkpoint.asynchronous=false", "log.every_steps=1"]
    whole = run(configuration(tmp_path, settings)).run_directory
    directory, moved = whole.with_name(f"{whole.name}-2"), tmp_path / "archive" / "paper"
    moved.parent.mkdir()

    def move() -> None:
        directory.rename(moved)

    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 7, move)
        with pytest.raises(CheckpointError, match="while the run trained") as caught:
            run(configuration(tmp_path, settings), resume_from="never")
    assert not directory.exists()
    assert "step 4" in caught.value.saved
    place = moved
    if is_known:
        words = shlex.split(caught.value.hint.partition("there: ")[2].partition(";")[0])
        assert words[:3] == ["vorox", "train", "--resume"]
        place = Path(words[3])
    assert place == moved
    outcome = run(recorded_config(place), resume_from=place)
    assert outcome.start_step == 4
    losses = [{step: values["loss"] for step, values in read_metrics(found).items()} for found in (whole, place)]
    assert losses[0] == losses[1]


def test_a_run_directory_that_is_removed_while_it_trains_is_named(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # moved first: a file that the run writes while its directory is emptied makes the removal fail
        at_step(patch, 7, lambda: shutil.rmtree(find_run(tmp_path / "runs", "tiny").rename(tmp_path / "removed")))
        with pytest.raises(CheckpointError, match="was moved or removed while the run trained"):
            run(configuration(tmp_path, ["checkpoint.asynchronous=false"]))
