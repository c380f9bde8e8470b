"""Where the time of a run went: random lives under a virtual clock, and records that are old, damaged or going on."""

from __future__ import annotations

import errno
import json
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tiny_runs import Killed, at_step, before_step, configuration, kill, run, use_numpy_engine
from vorox.cli import app
from vorox.core.errors import DataError
from vorox.core.files import atomic
from vorox.core.run_layout import RunLayout
from vorox.records.attempts import AttemptRecord
from vorox.records.run_lookup import RUN_FORMAT
from vorox.records.step_times import PHASES, ROW, Phase, StepTimes, read_step_times
from vorox.runtime.heartbeat import Heartbeat
from vorox.training.reports.run_time import CLASSES, RunTime, TimeClass, account
from vorox.training.reports.save_intervals import SaveIntervals

START = 1.7e9
CLASS_OF: dict[Phase, TimeClass] = {
    "data": "data", "step": "compute", "sync": "waiting", "settle": "compute", "validation": "evaluation",
    "save": "save",
}  # fmt: skip
_COMPUTING: tuple[Phase, ...] = ("step", "sync")
_AFTER_STEPS: tuple[tuple[Phase, float], ...] = (("save", 0.2), ("validation", 0.1))


class Lives:
    """Writes the records of attempts that end at random moments, and keeps an account of its own."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.chooser, self.now = directory, random.Random(seed), START
        self.attempts: list[dict[str, Any]] = []
        self.spent: list[tuple[int, int, str, float]] = []  # attempt, step, class, seconds
        self.starts: list[int] = []
        self.done: set[tuple[int, int]] = set()
        self.absent = 0.0
        (directory / "config.yaml").touch()

    def spend(self, number: int, step: int, name: str, most: float = 2.0) -> None:
        seconds = min(self.chooser.uniform(0.01, most), max(0.0, self.dies_at - self.now))
        self.now += seconds
        self.spent.append((number, step, name, seconds))
        if self.now >= self.dies_at:
            raise Killed

    def live(self, start_step: int, num_steps: int) -> int:
        """Live one attempt, to its end or to the kill; return its last saved step."""
        number, launched, saved = len(self.attempts) + 1, self.now, start_step
        self.dies_at = self.now + self.chooser.expovariate(1 / 60)
        notes: dict[str, Any] = {"launched_at": launched}
        record = {
            "attempt": number,
            "started_at": stamp(self.now),
            "ended_at": None,
            "outcome": "killed",
            "notes": notes,
        }
        self.attempts.append(record)
        self.starts.append(start_step)
        times = StepTimes(self.directory, number, start_step, clock=lambda: self.now)
        try:
            self.spend(number, 0, "restart", 20.0)
            heartbeat = Heartbeat(self.directory, attempt=number, times=times, clock=lambda: self.now)
            times.open()
            with AttemptRecord(self.directory, number, start_step, 0) as attempt:
                notes["steps"] = {"number": number}
                self.spend(number, 0, "restart", 5.0)
                for step in range(start_step + 1, num_steps + 1):
                    heartbeat.begin_step(step)
                    self.spend(number, step, "data", 0.3)
                    for phase in _COMPUTING:
                        heartbeat.enter(phase)
                        self.spend(number, step, CLASS_OF[phase])
                    attempt.record_started(step)
                    self.done.add((number, step))
                    heartbeat.enter("settle", step)
                    self.spend(number, step, "compute")
                    for phase, often in _AFTER_STEPS:
                        if self.chooser.random() < often:
                            with heartbeat.during(phase):
                                self.spend(number, step, CLASS_OF[phase], 6.0)
                            if phase == "save":
                                attempt.record_saved(step)
                                saved = step
                heartbeat.enter("end")
                attempt.record_saved(num_steps)
                self.spend(number, num_steps, "save")
                heartbeat.enter("end")
                record.update(outcome="finished", ended_at=stamp(self.now))
                return num_steps
        except Killed:
            times.live()  # the thread had just noted that the process was alive
            if not RunLayout(self.directory).times.exists() or read_step_times(self.directory)["attempt"][-1] != number:
                self.spent[-1] = (number, 0, "absent", self.spent[-1][3])  # nothing is on record about this attempt
            return saved

    def pause(self) -> None:
        seconds = self.chooser.uniform(0.1, 50.0)
        self.now, self.absent = self.now + seconds, self.absent + seconds

    def write(self) -> None:
        record = {"format": RUN_FORMAT, "attempts": self.attempts}
        RunLayout(self.directory).record.write_text(json.dumps(record), encoding="utf-8")

    def expected(self) -> dict[str, float]:
        """Seconds by class; a step is lost if a later attempt starts before it."""
        found: dict[str, float] = defaultdict(float, {"absent": self.absent})
        for number, step, name, seconds in self.spent:
            is_lost = step > min([*self.starts[number:], step])
            is_done = (number, step) in self.done  # of a step left half done, its computing was lost
            is_repeated = name in ({"compute", "data", "waiting", "evaluation"} if is_done else {"compute"})
            found["redone" if is_lost and is_repeated else name] += seconds
        return {name: found[name] for name in CLASSES}


def stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


@pytest.mark.parametrize("_", range(20))
def test_every_second_of_random_lives_is_in_its_class(tmp_path: Path, _: int) -> None:
    seed = random.randrange(10**6)
    lives, num_steps = Lives(tmp_path, seed), 60
    step = lives.live(0, num_steps)
    while step < num_steps:
        lives.pause()
        step = lives.live(step, num_steps)
    lives.write()
    found, expected = account(tmp_path), lives.expected()
    for name in CLASSES:
        assert found.seconds[name] == pytest.approx(expected[name], abs=0.05), (seed, name)
    assert found.wall_seconds == pytest.approx(lives.now - START, abs=0.05)
    assert found.goodput_fraction == pytest.approx(expected["compute"] / (lives.now - START), abs=1e-3)
    assert found.notes == ()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in step 7, after its save of step 4, and went on to its end."""
    folder = tmp_path_factory.mktemp("killed")
    with pytest.MonkeyPatch.context() as patch:
        use_numpy_engine(patch)
        at_step(patch, 7, kill)
        with pytest.raises(Killed):
            run(configuration(folder))
        return run(configuration(folder)).run_directory


@pytest.fixture
def copied(killed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / killed.name))


def vorox(*words: str) -> Any:
    return CliRunner().invoke(app, ["runs", "time", *words])


def test_the_command_shows_classes_attempts_and_intervals(killed: Path) -> None:
    done = vorox(str(killed), "--json", "--save-every", "7")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_seconds"])
    assert set(found["seconds"]) == set(CLASSES)
    assert found["seconds"]["unknown"] == 0
    first, second = found["attempts"]
    assert (first["first_step"], first["last_step"], first["num_lost_steps"]) == (1, 6, 2)
    assert (second["first_step"], second["last_step"], second["num_lost_steps"]) == (5, 12, 0)
    assert found["seconds"]["redone"] == first["seconds"]["redone"] > 0
    assert found["save_intervals"]["recorded_steps"] == 4
    assert {4, 7} <= {outcome["every_steps"] for outcome in found["save_intervals"]["outcomes"]}
    text = vorox(str(killed)).output
    assert all(name in text for name in CLASSES if name != "unknown")
    assert "as recorded" in text
    assert "(2)" in text


def test_a_run_of_an_earlier_version_has_unknown_time_and_none_that_is_zero(copied: Path) -> None:
    RunLayout(copied).times.unlink()
    edit_record(copied, lambda attempt: attempt["notes"].pop("launched_at"))
    found = account(copied)
    assert found.seconds["unknown"] == pytest.approx(found.wall_seconds - found.seconds["absent"])
    assert found.goodput_fraction is None
    assert len(found.notes) == 2
    stated = json.loads(vorox(str(copied), "--json").output)["seconds"]
    assert all((seconds is None) == (name not in {"absent", "unknown"}) for name, seconds in stated.items())
    text = vorox(str(copied)).output
    assert "Goodput: unknown" in text
    assert "an earlier version wrote it, or times.bin is lost" in text
    assert "not computed" in text


def test_a_run_without_its_times_does_not_count_its_steps_as_a_restart(copied: Path) -> None:
    RunLayout(copied).times.unlink()
    assert account(copied).seconds["restart"] == 0


@pytest.mark.parametrize("damage", ["torn", "empty row", "not a number", "noise"])
def test_damaged_rows_are_unknown_time(killed: Path, copied: Path, damage: str) -> None:
    whole = account(killed)
    path = RunLayout(copied).times
    raw = np.frombuffer(path.read_bytes(), ROW).copy()
    match damage:
        case "torn":
            path.write_bytes(raw.tobytes()[:-20])
        case "empty row":
            raw[3] = 0
            path.write_bytes(raw.tobytes())
        case "not a number":
            raw["seconds"][5, 3] = np.nan
            path.write_bytes(raw.tobytes())
        case _:
            path.write_bytes(random.Random(1).randbytes(len(raw) * ROW.itemsize))
    found = account(copied)
    assert found.wall_seconds == pytest.approx(whole.wall_seconds, rel=0.02)
    assert sum(found.seconds.values()) == pytest.approx(found.wall_seconds)
    assert found.seconds["unknown"] > 0
    assert vorox(str(copied)).exit_code == 0


def test_an_attempt_killed_before_its_first_step_is_a_restart(copied: Path) -> None:
    record = json.loads(RunLayout(copied).record.read_text())
    last = record["attempts"][-1]
    at = datetime.fromisoformat(last["ended_at"]).timestamp() + 100
    notes = {"launched_at": at}
    record["attempts"].append(
        {**last, "attempt": 3, "started_at": stamp(at + 5), "ended_at": None, "outcome": "killed", "notes": notes}
    )
    RunLayout(copied).record.write_text(json.dumps(record))
    with RunLayout(copied).events.open("a") as events:
        events.write(json.dumps({"time": stamp(at + 40), "attempt": 3, "kind": "engine"}) + "\n")
    found = account(copied)
    assert found.attempts[2].seconds == {"data": 0.0, "restart": pytest.approx(40, abs=0.01)}
    assert found.attempts[2].first_step is None
    assert found.absent_seconds[1] == pytest.approx(100, abs=1.0)


def test_a_clock_that_was_set_back_is_named(copied: Path) -> None:
    def earlier(attempt: dict[str, Any]) -> None:
        if attempt["attempt"] == 2:
            attempt["notes"]["launched_at"] -= 3600

    edit_record(copied, earlier)
    rows = np.frombuffer(RunLayout(copied).times.read_bytes(), ROW).copy()
    rows["entered_at"][rows["attempt"] == 2] -= 3600
    RunLayout(copied).times.write_bytes(rows.tobytes())
    found = account(copied)
    assert any("set back by 3,6" in note and "between the attempts 1 and 2" in note for note in found.notes)
    assert found.absent_seconds[0] == 0
    assert sum(found.seconds.values()) == pytest.approx(found.wall_seconds)


def test_a_live_run_is_counted_up_to_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    config, seen = configuration(tmp_path), list[tuple[float, RunTime, float]]()
    began = time.time()

    def look(step: int) -> None:
        time.sleep(0.05)
        if step == 8:
            (directory,) = (tmp_path / "runs").iterdir()
            seen.append((time.time() - began, account(directory), time.time() - began))

    before_step(monkeypatch, look)
    run(config)
    least, found, most = seen[0]
    assert found.is_running
    assert found.attempts[0].outcome == "running"
    assert least - 0.1 <= found.wall_seconds <= most
    assert 7 * 0.05 <= found.seconds["compute"] + found.seconds["compile"] <= most
    assert found.num_unsaved_steps == 0


def test_steps_that_no_checkpoint_holds_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    at_step(monkeypatch, 7, kill)
    with pytest.raises(Killed):
        run(configuration(tmp_path))
    (directory,) = (tmp_path / "runs").iterdir()
    found = account(directory)
    assert found.num_unsaved_steps == 2
    assert found.seconds["redone"] == 0, "nobody has done them again"
    assert "the last 2 steps" in vorox(str(directory)).output


def test_one_attempt_without_a_save_has_no_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    at_step(monkeypatch, 2, kill)
    with pytest.raises(Killed):
        run(configuration(tmp_path))
    (directory,) = (tmp_path / "runs").iterdir()
    assert "no checkpoint" in SaveIntervals(account(directory)).reason


def test_a_run_without_its_record_is_refused(copied: Path) -> None:
    RunLayout(copied).record.unlink()
    done = vorox(str(copied))
    assert isinstance(done.exception, DataError)
    assert "restore run.json" in done.exception.hint


def test_rows_are_appended_over_blocks_and_a_full_disk_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attempt(number: int, steps: int) -> None:
        times = StepTimes(tmp_path, number, 0)
        times.open()
        for step in range(1, steps + 1):
            times.enter(2, 0.5, 2)
            times.begin_step(step)
        times.close()

    attempt(1, 2500)
    attempt(2, 3)
    rows = read_step_times(tmp_path)
    assert rows["step"].tolist() == [*range(2501), *range(4)]
    assert RunLayout(tmp_path).times.stat().st_size == ROW.itemsize * len(rows)
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "append", raise_full)
        attempt(3, 2000)
    assert len(read_step_times(tmp_path)) == len(rows)


def raise_full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_waiting_inside_collectives_is_taken_from_the_step(tmp_path: Path) -> None:
    now = [START]
    times = StepTimes(tmp_path, 1, 0, clock=lambda: now[0])
    heartbeat = Heartbeat(tmp_path, times=times, clock=lambda: now[0])
    times.open()
    heartbeat.begin_step(1)
    heartbeat.enter("step", 1)
    now[0] += 3.0
    heartbeat.enter("sync", 1)
    heartbeat.wait_for_ranks(2.0)
    heartbeat.wait_for_ranks(5.0)  # more than the step took
    times.close()
    seconds = dict(zip(PHASES, read_step_times(tmp_path)["seconds"][1].tolist(), strict=True))
    assert (seconds["step"], seconds["sync"]) == (0.0, 3.0)


def edit_record(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = RunLayout(directory).record
    record = json.loads(path.read_text())
    for attempt in record["attempts"]:
        edit(attempt)
    path.write_text(json.dumps(record))
