"""``RUN@STEP`` is the state after that step, of a checkpoint that the run keeps or computed again, or it is refused."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Collection
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

import tiny_runs
from numpy_engine import NumpyEngine
from training.test_materialize import EVERY_STATE, contents
from vorox.api.checkpoints import FoundCheckpoint, find_checkpoint
from vorox.cli import main
from vorox.core.errors import CheckpointError, ConfigError, DataError, NumericalError
from vorox.core.run_layout import RunLayout, step_directories
from vorox.records.run_lookup import find_run, split_step
from vorox.records.step_times import PHASES, read_step_times
from vorox.run import states_of_run
from vorox.training import materialize
from vorox.training.checkpoints import re_execution_times
from vorox.training.checkpoints.materialized_cache import StateNotOnDiskError, folder
from vorox.training.checkpoints.re_execution_times import expected_times
from vorox.training.checkpoints.store import verify
from vorox.training.materialize import StateNotices, open_range
from vorox.training.re_execution import ReExecution, cost_of


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)


class Seen(StateNotices):
    """Keeps what a search reports."""

    def __init__(self) -> None:
        self.computed: list[list[int]] = []
        self.corrupted: list[str] = []
        self.is_open = False

    def corrupt(self, path: Path, error: Exception) -> None:
        self.corrupted.append(path.name)

    def computes(self, execution: ReExecution, steps: Collection[int]) -> None:
        self.computed.append([*steps])
        self.is_open = True

    def ends(self) -> None:
        self.is_open = False


def trained(directory: Path, *overrides: str) -> Path:
    return tiny_runs.run(tiny_runs.configuration(directory, overrides)).run_directory


def found(run: Path, step: int) -> tuple[FoundCheckpoint, Seen]:
    seen = Seen()
    checkpoint = find_checkpoint(f"{run}@{step}", None, run.parent, seen)
    assert not seen.is_open
    return checkpoint, seen


def files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_any_step_is_the_state_that_a_run_which_keeps_all_has(tmp_path: Path) -> None:
    shadow = step_directories(trained(tmp_path / "shadow", *EVERY_STATE))
    run = trained(tmp_path / "sparse")
    before = files(run)
    for step in random.sample(range(1, 13), 6):
        checkpoint, seen = found(run, step)
        assert contents(checkpoint.checkpoint.path) == contents(shadow[step])
        assert checkpoint.run == run
        assert checkpoint.is_kept == (step in step_directories(run)) == (not seen.computed)
        again, seen = found(run, step)
        assert (again, seen.computed) == (checkpoint, []), "it is found again"
    assert files(run) == before


def test_step_0_is_the_initial_weights(tmp_path: Path) -> None:
    run = trained(tmp_path)
    checkpoint, seen = found(run, 0)
    assert (checkpoint.checkpoint.step, seen.computed) == (0, [[0]])
    vocab_size, seed = checkpoint.checkpoint.metadata["spec"]["vocab_size"], checkpoint.config().run.seed
    loaded, fresh = (NumpyEngine(vocab_size, seed=one, width=4) for one in (seed + 1, seed))
    loaded.load(checkpoint.checkpoint.path)
    for name, array in fresh.parameters.items():
        np.testing.assert_array_equal(loaded.parameters[name], array)


def test_step_0_of_other_initial_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path)
    original = tiny_runs.NumpyBackend.create
    monkeypatch.setattr(
        tiny_runs.NumpyBackend, "create", lambda self, config, spec, dist: _scaled(original(self, config, spec, dist))
    )
    with pytest.raises(NumericalError, match="step 1"):
        found(run, 0)
    assert not [*folder(run).glob("step-*")]


def _scaled(engine: NumpyEngine) -> NumpyEngine:
    engine.parameters["output"] *= np.float32(1.5)
    return engine


def test_a_run_or_path_of_exactly_that_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path)
    root = run.parent
    monkeypatch.chdir(tmp_path)
    assert split_step(root, f"{run.name}@3") == (run.name, 3)
    assert split_step(root, f"runs/{run.name}@12") == (f"runs/{run.name}", 12)
    assert split_step(root, "latest@0") == ("latest", 0)
    for name in ("latest", "latest@", "@3", "latest@last", "latest@-1", "hf://owner/name@3", "s3://a/b@3"):
        assert split_step(root, name, 7) == (name, 7)
    shutil.copytree(run, root / "tiny@3")
    assert split_step(root, "tiny@3") == ("tiny@3", None)
    assert split_step("elsewhere", "runs/tiny@3") == ("runs/tiny@3", None)
    assert split_step(root, "tiny@3@5") == ("tiny@3", 5)
    assert split_step(root, "tiny@4") == ("tiny", 4)
    shutil.copytree(run, root / "exp-3-0123abcd")  # of run.name=exp@3
    assert split_step(root, "exp@3") == ("exp@3", None)
    assert find_run(root, "exp@3").name == "exp-3-0123abcd"
    shutil.copytree(run, root / "exp-4567abcd")
    assert split_step(root, "exp@3") == ("exp", 3)


def test_a_step_is_named_once_and_only_where_a_checkpoint_is_meant(tmp_path: Path) -> None:
    run = trained(tmp_path)
    with pytest.raises(ConfigError, match="both name a step"):
        find_checkpoint(f"{run}@3", 4, run.parent, Seen())
    assert find_checkpoint(str(run), 8, run.parent, Seen()) == found(run, 8)[0], "--step is the same"
    for name in (f"{run}@3", "latest@3"):
        with pytest.raises(ConfigError, match="is the state after a step; this needs a run") as refused:
            find_run(run.parent, name)
        assert refused.value.hint == f"name its run: {run}"
    with pytest.raises(ConfigError) as refused:
        find_run(run.parent, "latest@best")
    assert "the number of a step, as in latest@340" in refused.value.hint


def test_a_corrupt_checkpoint_is_computed_again(tmp_path: Path) -> None:
    run = trained(tmp_path)
    whole = contents(step_directories(run)[12])
    damage(step_directories(run)[12])
    checkpoint, seen = found(run, 12)
    assert (seen.corrupted, seen.computed, checkpoint.is_kept) == (["step-00000012"], [[12]], False)
    assert contents(checkpoint.checkpoint.path) == whole


def damage(checkpoint: Path) -> None:
    """Change one byte of the largest file."""
    path = max((path for path in checkpoint.iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1
    path.write_bytes(data)


def test_a_damaged_state_in_the_cache_is_computed_again(tmp_path: Path) -> None:
    run = trained(tmp_path)
    first = contents(found(run, 7)[0].checkpoint.path)
    damage(folder(run) / "step-00000007")
    checkpoint, seen = found(run, 7)
    assert seen.corrupted
    assert seen.computed == [[7]]
    assert contents(checkpoint.checkpoint.path) == first


def test_a_state_of_an_abandoned_history_is_not_used(tmp_path: Path) -> None:
    """After the run went back to step 8 and took other steps, step 10 is another state, and step 12 is void."""
    config = tiny_runs.configuration(tmp_path)
    run = tiny_runs.run(config).run_directory
    old = contents(found(run, 10)[0].checkpoint.path)
    changed = tiny_runs.configuration(tmp_path, ["optimizer.lr=0.02", "train.num_steps=11"])
    outcome = tiny_runs.run(
        changed, resume_from=RunLayout(run).checkpoint(8), named_keys=["optimizer.lr", "train.num_steps"]
    )
    assert outcome.progress.step == 11
    checkpoint, seen = found(run, 10)
    assert seen.computed == [[10]]
    assert contents(checkpoint.checkpoint.path) != old
    with pytest.raises(ConfigError, match="Step 12 was computed, but the run went back; it now has 11 steps on record"):
        found(run, 12)


def test_the_cache_keeps_as_many_states_as_the_run_keeps_checkpoints(tmp_path: Path) -> None:
    run = trained(tmp_path, "checkpoint.keep_last=2")
    place = folder(run)
    assert place.is_relative_to(tmp_path / "cache")
    for step in (1, 2):
        found(run, step)
        os.utime(place / f"step-{step:08d}", (step, step))
    found(run, 1)  # now the one that was used last
    found(run, 3)
    assert sorted(path.name for path in place.glob("step-*")) == ["step-00000001", "step-00000003"]
    together = states_of_run(run, [1, 2, 3, 5], StateNotices())
    assert [verify(state.path).step for state in together.values()] == [1, 2, 3, 5], (
        "those of one command stay together"
    )


@pytest.mark.parametrize("step", [13, 99, 10**14])
def test_a_step_that_never_ran_is_refused(step: int, tmp_path: Path) -> None:
    run = trained(tmp_path)
    with pytest.raises(ConfigError, match=f"has no step {step:,}; it recorded 12 steps"):
        found(run, step)
    assert not folder(run).exists()


def test_a_damaged_range_names_the_step(tmp_path: Path) -> None:
    run = trained(tmp_path)
    lines = RunLayout(run).chain.read_text().splitlines()
    record = json.loads(lines[5])
    record["loss"] = "0" * 16
    lines[5] = json.dumps(record)
    RunLayout(run).chain.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match="Step 6 cannot be compared"):
        found(run, 6)
    assert found(run, 4)[1].computed == [[4]], "the range before it is whole"
    assert found(run, 8)[0].is_kept


def test_without_the_caches_of_the_data_nothing_is_computed(tmp_path: Path) -> None:
    run = trained(tmp_path)
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(DataError, match=r"[Cc]ache"):
        found(run, 3)
    assert found(run, 12)[0].is_kept
    assert not [*folder(run).glob("*step*")]


def test_a_cache_that_cannot_be_written_names_the_way_out(tmp_path: Path) -> None:
    run = trained(tmp_path)
    (tmp_path / "cache" / "materialized").write_text("in the way")
    with pytest.raises(CheckpointError, match="State after step 3 cannot be cached") as refused:
        found(run, 3)
    assert refused.value.hint.endswith("vorox checkpoints materialize " + str(run) + " --step 3 --to DIR")


def test_other_hardware_is_refused_with_the_first_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path)
    tiny_runs.scale_steps(monkeypatch, {3: 1.0000001})
    with pytest.raises(NumericalError, match="differs at step 3"):
        found(run, 6)
    assert not [*folder(run).glob("*step*")]


def test_steps_of_several_processes_are_left_to_as_many(tmp_path: Path) -> None:
    run = trained(tmp_path)
    record = json.loads(RunLayout(run).record.read_text())
    for attempt in record["attempts"]:
        attempt["notes"]["environment"] = {**attempt["notes"].get("environment", {}), "num_processes": 2}
    RunLayout(run).record.write_text(json.dumps(record))
    with pytest.raises(StateNotOnDiskError, match="2 processes have to compute it") as refused:
        found(run, 6)
    assert f"--step 6 --nproc 2 --to {folder(run)}" in refused.value.hint
    assert not folder(run).exists()


def test_the_cost_has_the_start_of_the_last_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path)
    first = cost_of(open_range(run, [7]))
    assert first.start_seconds is not None
    assert first.seconds is not None
    assert first.seconds >= first.start_seconds
    clock = [0.0]
    monkeypatch.setattr(materialize.time, "perf_counter", lambda: clock[0])
    tiny_runs.before_step(monkeypatch, lambda step: clock.__setitem__(0, clock[0] + (5.0 if step == 1 else 0.25)))
    found(run, 7)  # eight steps, the first of them after a start of 4.75 seconds
    cost = cost_of(open_range(run, [11]))
    assert (cost.num_steps, cost.start_seconds) == (4, pytest.approx(4.75))
    assert cost.seconds == pytest.approx(4.75 + 4 * 0.25)
    monkeypatch.setattr(re_execution_times.platform, "node", lambda: "another machine")
    assert cost_of(open_range(run, [7])) == first


def test_the_start_is_that_of_the_shortest_attempt(tmp_path: Path) -> None:
    """Without the time for the data, with the imports of the engine; a rollback starts in a process that has them."""
    run = trained(tmp_path)
    layout = RunLayout(run)
    record = json.loads(layout.record.read_text())
    (attempt,) = record["attempts"]
    began = [datetime.fromisoformat(f"2026-01-01T0{hour}:00:00+00:00").timestamp() for hour in range(3)]
    record["attempts"] = [
        {
            **attempt, "attempt": number, "pid": pid, "started_at": "2026-01-02T00:00:00.000Z",
            "notes": {
                **attempt["notes"], "entered_at": entered, "launched_at": entered - 4,
                "steps": {**attempt["notes"]["steps"], "start_step": start},
            },
        }
        for number, pid, entered, start in ((1, 10, began[0], 0), (2, 11, began[1], 8), (3, 11, began[2], 8))
    ]  # fmt: skip
    layout.record.write_text(json.dumps(record))
    rows = [(1, 1, began[0] + 30), (1, 2, began[0] + 31), (2, 10, began[1] + 12), (2, 12, began[1] + 14),
            (3, 9, began[2] + 1.5)]  # fmt: skip
    lines = [
        json.dumps({"attempt": number, "step": step, "time": at, "values": {"step_seconds": 1.0}})
        for number, step, at in rows
    ]
    layout.metrics.write_text("\n".join(lines) + "\n")
    events = [
        ("data_ready", 1, 5.0),
        ("data_ready", 2, 3.0),
        ("checkpoint_saved", 1, 0.5),
        ("checkpoint_saved", 2, 0.5),
    ]
    layout.events.write_text("".join(
        json.dumps({"kind": kind, "attempt": number, "fields": {"seconds": seconds}}) + "\n"
        for kind, number, seconds in events
    ))  # fmt: skip
    layout.times.unlink()
    cost = cost_of(open_range(run, [7]))
    assert cost.start_seconds == pytest.approx(7.5), "12 to step 10, of which 2 are steps and 3 the data; and a save"
    assert cost.seconds == pytest.approx(7.5 + 8), "eight steps from the initial weights, the last of them the proof"
    for one in record["attempts"]:
        one["notes"]["environment"] = {**one["notes"]["environment"], "num_processes": 2}
    layout.record.write_text(json.dumps(record))
    assert expected_times(run).start_seconds == pytest.approx(11.5), "a rank imports the whole program, too"


def test_the_steps_are_those_of_the_range(tmp_path: Path) -> None:
    """Without saves and validations; a step in which the machine was suspended counts three times the others."""
    run = trained(tmp_path)
    rows = read_step_times(run).copy()
    for row in rows:
        row["seconds"] = 0
        row["seconds"][[PHASES.index("step"), PHASES.index("save")]] = (1.0 if row["step"] < 6 else 2.0), 50.0
    rows["seconds"][rows["step"] == 12, PHASES.index("data")] = 1000
    RunLayout(run).times.write_bytes(rows.tobytes())
    assert expected_times(run, 5, 11).step_seconds == pytest.approx(2.0)
    assert expected_times(run, 5, 12).step_seconds == pytest.approx((6 * 2 + 6) / 7)
    assert expected_times(run, 0, 5).step_seconds == pytest.approx((4 + 6 * 2 + 6) / 11), "too few; all steps but 1"


def test_commands_end_with_the_code_of_the_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path)
    monkeypatch.chdir(tmp_path)
    tried = {
        "generate latest@99 -p x": (2, "has no step 99"),
        "export nobody@3": (2, "nobody not found"),
        "export latest@3 --step 4": (2, "both name a step"),
        "replay latest@3": (2, "this needs a run"),
        "checkpoints list latest@3": (2, "this needs a run"),
        "train tiny.yaml --from-weights latest@99": (2, "has no step 99"),
        "train tiny.yaml --from-weights nobody@9": (2, "No weights at 'nobody@9'"),
    }
    for command, (code, what) in tried.items():
        assert main(command.split()) == code, command
        assert what in capsys.readouterr().err, command
    assert [path.name for path in run.parent.iterdir()] == [run.name]
    assert not folder(run).exists()
