"""Runs that are changed, shortened, killed while they begin, or resumed on a damaged record: what is recorded is what
was trained, and a replay of it is exact or names what is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

import vorox.run
from tiny_runs import at_step, configuration, run, use_numpy_engine, write_text
from vorox.core.config import load_config
from vorox.core.engine import Tap
from vorox.core.errors import ConfigError, DataError
from vorox.core.files.json_lines import read_lines
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.core.user_code import trusted_code
from vorox.data.corpus.corpus import prepare
from vorox.data.order.plan import DataPlan
from vorox.experiments.artifacts import inspect_run
from vorox.records.log import RunLog
from vorox.records.replay_chain import read_chain
from vorox.records.run_context import RunContext, recorded_config
from vorox.records.run_lookup import run_attempts
from vorox.training.replay import ReplayReport, replay
from vorox.training.resume import resume, resume_settings
from vorox.training.steps.workload import Workload

KEEP = "checkpoint.keep_last=20"


class Killed(BaseException):
    """Ends a run in the middle, as far as that is possible without ending the process."""


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nobody cuts the power here


def kill(*arguments: object, **options: object) -> None:
    del arguments, options
    raise Killed


def killed_at(config: RunConfig, step: int, resume_from: Path | None = None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, step, kill)
        with pytest.raises(Killed):
            run(config, **({} if resume_from is None else {"resume_from": resume_from}))


def killed_in(name: str, owner: object, config: RunConfig, resume_from: Path) -> None:
    """Run until a function of the beginning is called."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, kill)
        with pytest.raises(Killed):
            run(config, resume_from=resume_from)


def heads(directory: Path) -> list[str]:
    return [entry.chain for entry in read_chain(directory).values()]


def replayed(directory: Path, first_step: int = 0, last_step: int | None = None) -> ReplayReport:
    def make(config: RunConfig) -> Workload:
        return vorox.run.make_workload(config, DistributedContext(), RunLog(None), None, build=False)

    return replay(directory, make, first_step=first_step, last_step=last_step)


def events(directory: Path, kind: str) -> list[str]:
    return [event["message"] for event in read_lines(directory / "events.jsonl") if event["kind"] == kind]


def mixed(directory: Path, weight: float, overrides: Sequence[str] = ()) -> RunConfig:
    for number, name in enumerate(("one", "two")):
        if not (directory / name).exists():
            write_text(directory / name, seed=number)
    sources = [{"name": name, "format": "jsonl", "paths": [str(directory / name)]} for name in ("one", "two")]
    return configuration(
        directory, [f"data.sources={json.dumps(sources)}", f"data.sources.0.weight={weight}", KEEP, *overrides]
    )


# A resume that is killed while it begins


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("quarantine_later_checkpoints", resume), ("add", DataPlan), ("record_config_change", resume_settings),
        ("record_config", RunContext),
    ],
)  # fmt: skip
def test_a_resume_that_is_killed_while_it_begins_changes_nothing(name: str, owner: object, tmp_path: Path) -> None:
    first, other = mixed(tmp_path, 1.0), mixed(tmp_path, 9.0, ["optimizer.lr=0.03", "train.num_steps=16"])
    straight = run(mixed(tmp_path, 1.0, ["run.name=straight"]))
    killed_at(first, 10)
    (directory,) = (path for path in (tmp_path / "runs").iterdir() if path != straight.run_directory)
    killed_in(name, owner, other, RunLayout(directory).checkpoint(4))
    assert replayed(directory, 0, 4).is_exact
    outcome = run(first)
    assert outcome.run_directory == directory
    assert heads(directory) == heads(straight.run_directory)
    assert replayed(directory).is_exact


def test_what_an_abandoned_resume_trained_is_void_before_the_plan_changes(tmp_path: Path) -> None:
    """Steps that were done under the old mixture are never beside a plan with the new one."""
    directory = run(mixed(tmp_path, 1.0)).run_directory
    killed_in("record_config_change", resume_settings, mixed(tmp_path, 9.0), RunLayout(directory).checkpoint(4))
    assert max(read_chain(directory)) == 4
    assert replayed(directory, 0, 4).is_exact
    outcome = run(mixed(tmp_path, 9.0), resume_from=directory)
    assert outcome.start_step == 4
    assert replayed(directory, 4).is_exact


def test_a_refused_resume_leaves_the_plan_alone(tmp_path: Path) -> None:
    directory = run(mixed(tmp_path, 1.0)).run_directory
    before = (directory / "plan.jsonl").read_bytes()
    limited = mixed(tmp_path, 9.0, ["data.sources.0.max_epochs=1", "train.num_steps=5000"])
    with pytest.raises(DataError, match="exhausted"):
        run(limited, resume_from=directory)
    assert (directory / "plan.jsonl").read_bytes() == before
    assert max(read_chain(directory)) == 12


# The length in force at every step


def test_a_length_that_was_tried_and_given_up_is_replayed_as_it_was(tmp_path: Path) -> None:
    killed_at(configuration(tmp_path, [KEEP]), 6)
    (directory,) = (tmp_path / "runs").iterdir()
    killed_at(configuration(tmp_path, [KEEP, "train.num_steps=20"]), 6, directory)
    outcome = run(configuration(tmp_path, [KEEP]), resume_from=directory)
    straight = run(configuration(tmp_path, [KEEP, "run.name=straight"]))
    assert heads(outcome.run_directory) == heads(straight.run_directory)
    for first, last in ((0, 12), (4, 12), (8, 12)):
        assert replayed(directory, first, last).is_exact


def test_back_to_an_earlier_checkpoint_with_the_first_length(tmp_path: Path) -> None:
    killed_at(configuration(tmp_path, [KEEP]), 6)
    (directory,) = (tmp_path / "runs").iterdir()
    killed_at(configuration(tmp_path, [KEEP, "train.num_steps=20"]), 14, directory)
    assert replayed(directory, 4, 12).is_exact
    run(configuration(tmp_path, [KEEP]), resume_from=RunLayout(directory).checkpoint(4))
    assert replayed(directory, 0, 12).is_exact


def test_caches_that_grew_do_not_bend_the_length_of_steps_that_were_done(tmp_path: Path) -> None:
    """A length in epochs, its checkpoints gone, its configuration changed on the way, and more text by now."""
    length = ["train.num_steps=null", "train.num_epochs=0.5", "checkpoint.keep_last=1", "schedule.warmup_steps=null"]
    length += ["schedule.warmup_fraction=0.1", "data.cache.grow=true", "data.validation.held_out_fraction=0"]
    length += ["eval.every_steps=null"]
    killed_at(configuration(tmp_path, length), 14)
    (directory,) = (tmp_path / "runs").iterdir()
    run(configuration(tmp_path, [*length, "optimizer.lr=0.02"]), resume_from=directory)
    assert replayed(directory, 0, 12).is_exact
    (tmp_path / "text" / "zmore.jsonl").write_bytes((write_text(tmp_path / "x", seed=5) / "text.jsonl").read_bytes())
    prepare(configuration(tmp_path, length))
    assert replayed(directory, 0, 12).is_exact


# A run that is finished


def files(directory: Path) -> dict[str, bytes]:
    observations = {"run.json", "failure.json", "LOCK", "log.txt", "events.jsonl", "attempts.bin", "times.bin"}
    found = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name not in observations)
    return {str(path.relative_to(directory)): path.read_bytes() for path in found if "metadata" not in path.name}


def everything(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Every file and folder of a run but its lock, with the time of its last change."""
    found = (path for path in sorted(directory.rglob("*")) if path.name != "LOCK")
    return {
        str(path.relative_to(directory)): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in found
    }


def shown(directory: Path) -> tuple[object, ...]:
    """What `vorox runs list` shows of a run."""
    found = inspect_run(directory)
    return found.state, found.step, found.total_steps, found.attempts, found.changed_at, found.failure


REFUSED = [
    ["model.num_layers=2", "train.num_steps=20"],
    ["log.metrics=[nowhere:function]", "train.num_steps=20"],
    ["log.sinks=[nowhere:function]", "train.num_steps=20"],
    ["eval.functions=[nowhere:function]", "train.num_steps=20"],
    ["schedule.name=nowhere:function", "train.num_steps=20"],
    ["log.metadata=postgres", "log.metadata_dsn_variable=NOT_SET", "train.num_steps=20"],
]


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change[0].partition("=")[0])
def test_a_refused_resume_leaves_every_file_as_it_was(tmp_path: Path, change: list[str]) -> None:
    """Also a corrupt checkpoint, which a resume that goes on would put aside."""
    directory = run(configuration(tmp_path, [KEEP])).run_directory
    (RunLayout(directory).checkpoint(12) / "state.bin").write_bytes(b"torn")
    before, listed = everything(directory), shown(directory)
    with pytest.raises(ConfigError):
        run(recorded_config(directory, change), resume_from=directory)
    assert everything(directory) == before
    assert shown(directory) == listed
    assert listed[0] == "finished"
    run(recorded_config(directory), resume_from=directory)
    assert (directory / "checkpoints" / "step-00000012.corrupt-1").is_dir()
    assert len(events(directory, "checkpoint_corrupt")) == 1


def test_refused_taps_leave_every_file_as_it_was(tmp_path: Path) -> None:
    directory = run(configuration(tmp_path)).run_directory
    before = everything(directory)
    longer = recorded_config(directory, ["train.num_steps=20"])
    with pytest.raises(ConfigError, match="tap"):
        vorox.run.train(longer, resume_from=directory, taps=[Tap("block_input", 9, lambda tensor: None)])
    assert everything(directory) == before


def test_a_refused_restart_of_a_run_without_a_checkpoint_keeps_its_failure(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 2, kill)
        with pytest.raises(Killed):
            run(configuration(tmp_path))
    (directory,) = (tmp_path / "runs").iterdir()
    assert (directory / "failure.json").exists()
    before = everything(directory)
    with pytest.raises(ConfigError, match="another configuration"):
        run(recorded_config(directory, ["run.seed=5"]), resume_from=directory)
    assert everything(directory) == before


def test_an_error_of_the_data_before_the_first_step_is_recorded(tmp_path: Path) -> None:
    directory = run(configuration(tmp_path)).run_directory
    (directory / "plan.jsonl").unlink()
    with pytest.raises(DataError, match="Run has no data plan"):
        run(recorded_config(directory, ["train.num_steps=20"]), resume_from=directory)
    assert shown(directory)[0] == "failed"
    assert [attempt["outcome"] for attempt in run_attempts(directory)] == ["finished", "failed"]
    assert len(events(directory, "error")) == 1


@pytest.mark.parametrize("change", [["train.num_steps=5"], ["train.num_steps=5", "optimizer.lr=0.1"]])
def test_fewer_steps_than_are_done_are_refused_and_rewrite_nothing(tmp_path: Path, change: list[str]) -> None:
    directory = run(configuration(tmp_path, [KEEP])).run_directory
    before, listed = everything(directory), shown(directory)
    with pytest.raises(ConfigError) as refused:
        run(recorded_config(directory, change), resume_from=directory)
    assert (refused.value.exit_code, refused.value.where) == (2, "train.num_steps")
    assert f"vorox train --resume {directory} train.num_steps=" in refused.value.hint
    assert everything(directory) == before
    assert shown(directory) == listed
    assert run(recorded_config(directory, change), resume_from=RunLayout(directory).checkpoint(4)).progress.step == 5


@pytest.mark.parametrize("change", ["log.every_steps=1", "optimizer.lr=0.1", "run.name=other"])
def test_a_finished_run_is_not_rewritten(tmp_path: Path, change: str) -> None:
    directory = run(configuration(tmp_path)).run_directory
    before = files(directory)
    outcome = run(recorded_config(directory, [change]), resume_from=directory)
    assert outcome.progress.step == 12
    assert files(directory) == before
    (said,) = events(directory, "config_kept")
    assert change.partition("=")[0] in said


def test_a_run_may_be_ended_where_it_stands(tmp_path: Path) -> None:
    killed_at(configuration(tmp_path), 6)
    (directory,) = (tmp_path / "runs").iterdir()
    shorter = recorded_config(directory, ["train.num_steps=4"])
    assert run(shorter, resume_from=directory).progress.step == 4
    assert recorded_config(directory) == shorter


# An edited config.yaml


def edit_config(directory: Path, old: str, new: str) -> None:
    path = directory / "config.yaml"
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))


def test_an_edited_configuration_is_refused_until_it_is_said(tmp_path: Path) -> None:
    killed_at(configuration(tmp_path, [KEEP]), 10)
    (directory,) = (tmp_path / "runs").iterdir()
    edit_config(directory, "  lr: 0.01", "  lr: 0.03")
    before = everything(directory)
    with pytest.raises(ConfigError) as refused:
        run(recorded_config(directory), resume_from=directory)
    assert refused.value.exit_code == 2
    assert refused.value.where == str(directory / "config.yaml")
    assert "  optimizer.lr: 0.01 -> 0.03" in refused.value.what
    for value in ("0.01", "0.03"):
        assert f"vorox train --resume {directory} optimizer.lr={value}" in refused.value.hint
    assert everything(directory) == before
    run(recorded_config(directory, ["optimizer.lr=0.03"]), resume_from=directory, named_keys=["optimizer.lr"])
    assert replayed(directory, 8).is_exact
    assert replayed(directory, 0, 8).is_exact, "the first steps are known to have had the other rate"
    assert recorded_config(directory).optimizer.lr == 0.03


@pytest.mark.parametrize("by_file", [False, True])
def test_the_configuration_of_the_checkpoint_takes_an_edit_back(tmp_path: Path, by_file: bool) -> None:
    straight = run(configuration(tmp_path, ["run.name=straight", KEEP]))
    killed_at(configuration(tmp_path, [KEEP]), 10)
    (directory,) = (path for path in (tmp_path / "runs").iterdir() if path != straight.run_directory)
    edit_config(directory, "  lr: 0.01", "  lr: 0.03")
    if by_file:
        run(configuration(tmp_path, [KEEP]))
    else:
        run(recorded_config(directory, ["optimizer.lr=0.01"]), resume_from=directory)
    assert heads(directory) == heads(straight.run_directory)
    assert recorded_config(directory) == configuration(tmp_path, [KEEP])
    assert replayed(directory).is_exact


def test_an_edit_of_what_cannot_change_offers_no_command_that_fails(tmp_path: Path) -> None:
    killed_at(configuration(tmp_path), 6)
    (directory,) = (tmp_path / "runs").iterdir()
    edit_config(directory, "held_out_fraction: 0.1", "held_out_fraction: 0.2")
    with pytest.raises(ConfigError) as refused:
        run(recorded_config(directory), resume_from=directory)
    assert "data.validation.held_out_fraction=0.1" in refused.value.hint
    assert "data.validation.held_out_fraction=0.2" not in refused.value.hint
    run(recorded_config(directory, ["data.validation.held_out_fraction=0.1"]), resume_from=directory)


OUTSIDE = {
    "log.sinks": ["part.py:f"], "log.metrics": ["part.py:f"], "eval.functions": ["part.py:f"],
    "checkpoint.mirror": "s3://bucket/x", "log.webhook": "env:HOME", "run.directory": "elsewhere",
    "data.cache.directory": "elsewhere", "log.wandb": True, "log.tensorboard": True, "log.mlflow": True,
    "checkpoint.keep_last": 1, "eval.every_steps": 1, "log.every_steps": 7, "checkpoint.every_steps": 1,
    "checkpoint.keep_best": 1, "runtime.num_threads": 2,
}  # fmt: skip


@pytest.mark.parametrize("key", OUTSIDE)
def test_an_edit_of_any_key_is_refused_until_it_is_said(
    key: str, killed_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What acts outside of the run decides no bit, and most of all must not change by a file of the run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "part.py").write_text("open('RAN', 'w')\ndef f(*a, **k): return {}\n")
    directory = tmp_path / "runs" / killed_run.name
    shutil.copytree(killed_run, directory)
    values = yaml.safe_load((directory / "config.yaml").read_text())
    *above, last = key.split(".")
    place = values
    for name in above:
        place = place[name]
    if last not in place:
        pytest.skip("this version has no such key")
    earlier, place[last] = place[last], OUTSIDE[key]
    (directory / "config.yaml").write_text(yaml.safe_dump(values))
    before = everything(directory)
    trusted_code.state(values)  # the question here is the edit, not the code
    monkeypatch.setattr(vorox.run, "open_mirror", None)  # nothing outside is reached before the check
    with pytest.raises(ConfigError, match="was edited") as refused:
        run(recorded_config(directory), resume_from=directory)
    assert refused.value.exit_code == 2
    assert f"  {key}: " in refused.value.what
    assert f"{key}=" in refused.value.hint
    assert everything(directory) == before
    assert not (tmp_path / "RAN").exists()
    recorded = load_config(directory / "config.yaml")
    with pytest.raises(TypeError, match="not callable"):  # it comes as far as the mirror
        run(recorded, resume_from=directory, named_keys=[key])
    assert earlier != OUTSIDE[key]


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("killed")
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_numpy_engine(monkeypatch)
        killed_at(configuration(place), 6)
    (directory,) = (place / "runs").iterdir()
    return directory


def test_an_edit_before_the_first_checkpoint_is_refused(tmp_path: Path) -> None:
    killed_at(configuration(tmp_path), 2)
    (directory,) = (tmp_path / "runs").iterdir()
    assert not list(directory.glob("checkpoints/step-*"))
    edit_config(directory, "keep_last: 2", "keep_last: 7")
    with pytest.raises(ConfigError, match="was edited after the run wrote it"):
        run(recorded_config(directory), resume_from=directory)
    edit_config(directory, "keep_last: 7", "keep_last: 2")
    assert run(recorded_config(directory), resume_from=directory).progress.step == 12


def test_a_change_of_what_decides_no_bit_at_a_resume_is_no_edit(tmp_path: Path) -> None:
    """The change is recorded, and the resume killed before its first checkpoint has it."""
    killed_at(configuration(tmp_path), 6)
    (directory,) = (tmp_path / "runs").iterdir()
    killed_at(recorded_config(directory, ["checkpoint.keep_last=7"]), 6, directory)
    killed_at(recorded_config(directory), 10, directory)
    assert run(recorded_config(directory), resume_from=directory).progress.step == 12
    assert recorded_config(directory).checkpoint.keep_last == 7


def test_a_change_at_a_resume_is_no_edit(tmp_path: Path) -> None:
    killed_at(configuration(tmp_path, [KEEP]), 6)
    (directory,) = (tmp_path / "runs").iterdir()
    killed_at(recorded_config(directory, ["optimizer.lr=0.03"]), 6, directory)  # before its first checkpoint
    killed_at(recorded_config(directory), 10, directory)
    assert run(recorded_config(directory), resume_from=directory).progress.step == 12
    assert replayed(directory, 4).is_exact


def test_a_lost_configuration_is_taken_from_the_one_that_began_the_run(tmp_path: Path) -> None:
    straight = run(configuration(tmp_path, ["run.name=straight", KEEP]))
    killed_at(configuration(tmp_path, [KEEP]), 10)
    (directory,) = (path for path in (tmp_path / "runs").iterdir() if path != straight.run_directory)
    (directory / "config.yaml").unlink()
    with pytest.raises(ConfigError) as refused:
        recorded_config(directory)
    assert f"vorox train CONFIG --resume {directory}" in refused.value.hint
    other = configuration(tmp_path, [KEEP, "run.seed=5"])
    before = everything(directory)
    with pytest.raises(ConfigError, match=r"run\.seed: 1234 -> 5"):
        run(other, resume_from=directory, named_keys=["run"])
    assert everything(directory) == before, "no config.yaml of the refused command"
    run(configuration(tmp_path, [KEEP]), resume_from=directory)
    assert heads(directory) == heads(straight.run_directory)
    assert replayed(directory).is_exact


# A chain that was damaged


def without_line(lines: list[bytes]) -> list[bytes]:
    return lines[:2] + lines[3:]


def with_other_digit(lines: list[bytes]) -> list[bytes]:
    record = json.loads(lines[2])
    record["loss"] = f"{int(record['loss'], 16) ^ 1:016x}"
    return [*lines[:2], json.dumps(record).encode() + b"\n", *lines[3:]]


def with_garbage(lines: list[bytes]) -> list[bytes]:
    return [*lines[:2], os.urandom(200).replace(b"\n", b"") + b"\n", *lines[3:]]


@pytest.mark.parametrize(
    ("damage", "first_bad"),
    [
        (without_line, 3), (with_other_digit, 3), (with_garbage, 3), (lambda lines: lines[:6], 7),
        (lambda lines: [], 1), (None, 1),
    ],
)  # fmt: skip
def test_a_damaged_chain_is_said_at_resume_and_named_by_replay(
    tmp_path: Path, damage: Callable[[list[bytes]], list[bytes]] | None, first_bad: int
) -> None:
    straight = run(configuration(tmp_path, ["run.name=straight", KEEP]))
    killed_at(configuration(tmp_path, [KEEP]), 11)
    (directory,) = (path for path in (tmp_path / "runs").iterdir() if path != straight.run_directory)
    path = RunLayout(directory).chain
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(DataError) as refused:
        replayed(directory)
    assert refused.value.exit_code == 4
    assert refused.value.what.startswith(f"Step {first_bad} ")
    assert refused.value.where == str(path)
    outcome = run(configuration(tmp_path, [KEEP]))
    assert (outcome.start_step, outcome.fingerprint) == (8, straight.fingerprint)
    (said,) = events(directory, "chain_damaged")
    assert f"step {first_bad} " in said or f"steps {first_bad} " in said
    with pytest.raises(DataError, match=f"Step {first_bad} ") as refused:
        replayed(directory)
    named = re.findall(r"--from (\d+)(?: --to (\d+))?", refused.value.hint)
    assert named
    for first, last in named:
        assert replayed(directory, int(first), int(last) if last else None).is_exact, "what the message names works"
    assert str(replayed(directory, 8)) == "bit-exact, 4 steps", "the steps since are proven"


def test_a_finished_run_says_it_too(tmp_path: Path) -> None:
    directory = run(configuration(tmp_path)).run_directory
    (RunLayout(directory).chain).unlink()
    run(configuration(tmp_path))
    assert len(events(directory, "chain_damaged")) == 1
    with pytest.raises(DataError, match="Step 1 "):
        replayed(directory)


# Files of another save


def test_a_checkpoint_with_a_file_of_another_save_is_passed_over(tmp_path: Path) -> None:
    straight = run(configuration(tmp_path, ["run.name=straight", KEEP]))
    killed_at(configuration(tmp_path, [KEEP]), 11)
    (directory,) = (path for path in (tmp_path / "runs").iterdir() if path != straight.run_directory)
    newest, before = RunLayout(directory).checkpoint(8), RunLayout(directory).checkpoint(4)
    assert {path.name for path in newest.iterdir()} == {path.name for path in before.iterdir()}
    shutil.copy(before / "state.bin", newest / "state.bin")
    outcome = run(configuration(tmp_path, [KEEP]))
    (said,) = events(directory, "checkpoint_corrupt")
    assert "state.bin" in said
    assert outcome.start_step == 4
    assert outcome.fingerprint == straight.fingerprint
    assert heads(directory) == heads(straight.run_directory)
