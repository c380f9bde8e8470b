"""The watchdog: the right rank is named with its stacks, the run ends with exit code 6, and waits are no stalls."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from eventually import wait_until
from vorox.core.errors import LostRankError, NumericalError, VoroxError
from vorox.core.files.file_holder import ProcessIdentity
from vorox.core.run_layout import RunLayout
from vorox.records.failure_record import failure_record
from vorox.runtime import watchdog as module
from vorox.runtime.heartbeat import Beat, Heartbeat, Phase, read_beat, request_end, request_stacks
from vorox.runtime.watchdog import Condition, Watchdog, Watched

TIMEOUT_SECONDS = 2.0
PATIENCE_SECONDS = 90.0
HERE = ProcessIdentity("b", 7, "b", "1")


def beat(rank: int, phase: Phase, step: int = 812, count: int = 1, **values: int) -> Beat:
    return Beat(rank, 1, HERE, count, step, phase, values.get("queue_depth", 0), bool(values.get("is_waiting", 0)))


def verdict(
    tmp_path: Path,
    beats: list[Beat],
    conditions: list[Condition] | None = None,
    looks: int = 4,
    long_seconds: float | None = None,
) -> tuple[list[int], str]:
    """The stalled ranks and the sentence after looks one second apart, under a limit of three."""
    watchdog = Watchdog(RunLayout(tmp_path), 1, 3.0, long_seconds, namespace="b")
    found = {one.rank: (one, state) for one, state in zip(beats, conditions or ["running"] * len(beats), strict=True)}
    for _ in range(looks):
        watchdog.update(found, 1.0)
    stalled = watchdog.stalled()
    return [one.beat.rank for one in stalled], watchdog.stalled_error(stalled).what if stalled else ""


def test_the_least_advanced_rank_is_named(tmp_path: Path) -> None:
    ranks, text = verdict(tmp_path, [beat(0, "sync"), beat(1, "step"), beat(2, "data", 813)])
    assert ranks == [1]
    assert text == (
        "Rank 1 on host b has not finished forward and backward pass of step 812 for 3 s; its data queue is empty"
    )
    assert verdict(tmp_path, [beat(0, "step"), beat(1, "step")])[1].startswith("Rank 0 on host b (so have") is False
    assert verdict(tmp_path, [beat(0, "step"), beat(1, "step")])[0] == [0, 1]
    assert verdict(tmp_path, [beat(0, "sync"), beat(1, "data", 813)])[0] == [1], "rank 0 waits for its report"
    ranks, text = verdict(tmp_path, [beat(0, "data", queue_depth=3)])
    assert text.startswith("Rank 0 on host b has waited for the batch of step 812 for 3 s; its data queue has 3")
    ranks, text = verdict(tmp_path, [beat(0, "step"), beat(1, "step")], ["running", "stopped"])
    assert (ranks, text.endswith("its process is stopped (SIGSTOP)")) == ([1], True)
    ranks, text = verdict(tmp_path, [beat(0, "step"), beat(1, "validation")], ["running", "dead"])
    assert (ranks, "died in step 812" in text) == ([1], True)


@pytest.mark.parametrize("last", ["stopped", "waiting"])
def test_failure_json_keeps_the_likeliest_cause_of_all_machines(tmp_path: Path, last: str) -> None:
    """Machine ``b`` has a stopped rank and ``c`` one that waits for it; both write into the same directory."""
    found: dict[str, tuple[str, Beat, Condition]] = {
        "stopped": ("b", beat(1, "step"), "stopped"),
        "waiting": ("c", beat(0, "sync"), "running"),
    }
    layout = RunLayout(tmp_path)
    layout.watchdog.mkdir()
    for name in sorted(found, key=lambda name: name == last):
        host, one, condition = found[name]
        watchdog = Watchdog(layout, 1, 3.0, namespace=host)
        looked: dict[int, tuple[Beat, Condition]] = {one.rank: (one, condition)}
        watchdog.update(looked, 1.0)
        watchdog.update(looked, 3.0)
        watchdog.record(watchdog.stalled(), stacks=name)
    for path in (layout.failure, layout.stall(1)):
        record = json.loads(path.read_bytes())
        assert "SIGSTOP" in record["what"]
        assert record["traceback"] == "stopped"


@pytest.mark.parametrize(
    ("error", "stays"),
    [(NumericalError("Loss is not finite"), True), (LostRankError("Rank 0 lost the connection"), False)],
)
def test_an_error_before_the_stall_stays_but_not_that_of_a_lost_rank(
    tmp_path: Path, error: VoroxError, stays: bool
) -> None:
    layout = RunLayout(tmp_path)
    layout.failure.write_text(json.dumps(failure_record(error) | {"attempt": 1}))
    watchdog = Watchdog(layout, 1, 3.0, namespace="b")
    for _ in range(4):
        watchdog.update({0: (beat(0, "sync"), "running")}, 1.0)
    watchdog.record(watchdog.stalled())
    assert (json.loads(layout.failure.read_bytes())["error"] == type(error).__name__) == stays
    layout.failure.write_text("[]")
    watchdog.record(watchdog.stalled())
    assert json.loads(layout.failure.read_bytes())["error"] == "StalledError", "what was there is damaged"


def test_of_equal_causes_the_first_stays_with_its_stacks(tmp_path: Path) -> None:
    """A cut network is a stall on both sides."""
    layout = RunLayout(tmp_path)
    layout.watchdog.mkdir()
    watchdogs = [Watchdog(layout, 1, 3.0, namespace=host) for host in ("b", "c")]
    for watchdog in watchdogs:
        for _ in range(4):
            watchdog.update({0: (beat(0, "step"), "running")}, 1.0)
    for stacks in ("", "stacks"):
        for watchdog in watchdogs:
            watchdog.record(watchdog.stalled(), stacks and f"{stacks} of {watchdog.namespace}")
    for path in (layout.failure, layout.stall(1)):
        assert json.loads(path.read_bytes())["traceback"] == "stacks of b"


@pytest.mark.parametrize(
    ("phase", "sentence"),
    [
        ("start", "has not finished the start of the run for 9 s"),
        ("compile", "has not finished step 812, which may compile, for 9 s"),
        ("save", "has not finished the save after step 812 for 9 s"),
        ("validation", "has made no progress in the validation after step 812 for 9 s"),
    ],
)
def test_a_rank_that_hangs_alive_in_a_long_phase_is_named_after_the_long_limit(
    tmp_path: Path, phase: Phase, sentence: str
) -> None:
    """Alone, while another waits for it in the exchange, and inside a collective of the same phase."""
    for others in ([], [beat(0, "sync")], [beat(0, "data", 813)]):
        beats = [*others, beat(len(others), phase)]
        assert verdict(tmp_path, beats, looks=9, long_seconds=9.0) == ([], ""), "the first look starts the clock"
        ranks, text = verdict(tmp_path, beats, looks=10, long_seconds=9.0)
        assert ranks == [len(others)]
        assert sentence in text
    assert verdict(tmp_path, [beat(0, phase), beat(1, phase)], looks=10, long_seconds=9.0)[0] == [0, 1]
    assert verdict(tmp_path, [beat(0, phase, is_waiting=1)], looks=10, long_seconds=9.0) == ([], ""), "a store"
    assert verdict(tmp_path, [beat(0, phase)], looks=10, long_seconds=None) == ([], "")
    assert verdict(tmp_path, [beat(0, "end")], looks=10, long_seconds=9.0) == ([], "")


def test_a_rank_that_makes_progress_in_a_long_phase_excuses_the_others(tmp_path: Path) -> None:
    watchdog = Watchdog(RunLayout(tmp_path), 1, 3.0, 9.0, namespace="b")
    for look in range(40):
        validating = beat(1, "validation", count=look // 8)  # a batch of the validation takes 8 s
        watchdog.update({0: (beat(0, "sync"), "running"), 1: (validating, "running")}, 1.0)
        assert watchdog.stalled() == []
    for _ in range(9):  # the last batch hangs
        watchdog.update({0: (beat(0, "sync"), "running"), 1: (beat(1, "validation", count=4), "running")}, 1.0)
    stalled = watchdog.stalled()
    assert [rank.beat.rank for rank in stalled] == [1]
    assert "runtime.long_stall_timeout_seconds=null" in watchdog.stalled_error(stalled).hint


@pytest.mark.parametrize("phase", ["start", "compile", "save", "validation", "end"])
def test_what_may_take_any_time_is_no_stall(tmp_path: Path, phase: Phase) -> None:
    assert verdict(tmp_path, [beat(0, phase)]) == ([], "")
    assert verdict(tmp_path, [beat(0, "sync"), beat(1, phase)]) == ([], ""), "others wait for it"
    assert verdict(tmp_path, [beat(0, "sync"), beat(1, phase)], ["running", "stopped"])[0] == [1]
    assert verdict(tmp_path, [beat(0, "sync"), beat(1, phase)], ["running", "remote"]) == ([], "")


def test_no_early_alarm(tmp_path: Path) -> None:
    assert verdict(tmp_path, [beat(0, "step")], looks=3) == ([], ""), "the first look starts the clock"
    assert verdict(tmp_path, [beat(0, "data", is_waiting=1)]) == ([], ""), "a store does not answer"
    assert verdict(tmp_path, [beat(0, "step")], ["dead"]) == ([], ""), "nothing is left to end"
    watchdog = Watchdog(RunLayout(tmp_path), 1, 3.0, namespace="b")
    for count in range(9):
        watchdog.update({0: (beat(0, "step", count=count), "running")}, 2.0)
        assert watchdog.stalled() == []


def test_a_heartbeat_is_read_as_it_was_written_and_leaves_nothing(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    with Heartbeat(tmp_path, rank=3, local_rank=1, attempt=5, timeout_seconds=60) as heartbeat:
        heartbeat.compute(8, (1, 2))
        first = read_beat(layout.heartbeat(3))
        heartbeat.compute(9, (1, 2))
        with heartbeat.during("save"):
            saving = read_beat(layout.heartbeat(3))
        last = read_beat(layout.heartbeat(3))
        heartbeat.observe = lambda: (4, True)
        wait_until(lambda: (found := read_beat(layout.heartbeat(3))) is not None and found.queue_depth == 4, 10)
    assert first is not None
    assert saving is not None
    assert last is not None
    assert (first.rank, first.attempt, first.process.process_id, first.step) == (3, 5, os.getpid(), 8)
    assert (first.phase, saving.phase, last.phase, last.step) == ("compile", "save", "step", 9)
    assert first.count < saving.count < last.count
    assert list(layout.watchdog.iterdir()) == []


def test_without_a_time_limit_the_file_follows_from_a_thread_and_no_watchdog_starts(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    children = psutil.Process().children()
    with Heartbeat(tmp_path, rank=1, attempt=2) as heartbeat:
        heartbeat.observe = lambda: (3, False)
        heartbeat.compute(7, (1, 2))
        wait_until(lambda: (found := read_beat(layout.heartbeat(1))) is not None and found.step == 7, 10)
        found = read_beat(layout.heartbeat(1))
        assert psutil.Process().children() == children
    assert found is not None
    assert (found.rank, found.attempt, found.phase, found.queue_depth) == (1, 2, "compile", 3)
    assert not layout.watchdog.exists()
    with Heartbeat(tmp_path / "no folder") as heartbeat:  # a heartbeat that cannot be written stops nothing
        heartbeat.enter("step", 1)
    assert not (tmp_path / "no folder").exists()


def test_the_time_of_every_phase_is_counted_also_if_it_fails_inside_another(tmp_path: Path) -> None:
    now = [100.0]
    heartbeat = Heartbeat(tmp_path, clock=lambda: now[0])
    phases: tuple[tuple[Phase, float], ...] = (("data", 1.0), ("step", 2.0), ("data", 4.0))
    for phase, seconds in phases:
        heartbeat.enter(phase)
        now[0] += seconds

    def validate() -> None:
        with heartbeat.during("validation"):
            now[0] += 8.0
            with heartbeat.during("save"):
                now[0] += 16.0
                raise OSError

    with pytest.raises(OSError):
        validate()
    now[0] += 32.0
    assert heartbeat.seconds["data"] == 5.0, "the phase that has not ended is not counted yet"
    heartbeat.enter("settle")
    counted = {phase: seconds for phase, seconds in heartbeat.seconds.items() if seconds}
    assert counted == {"data": 37.0, "step": 2.0, "validation": 8.0, "save": 16.0}


CHILD = """
import sys, time
from pathlib import Path
from vorox.runtime.heartbeat import Heartbeat
def stuck_in_a_collective():
    time.sleep(600)
rank, directory = int(sys.argv[1]), Path(sys.argv[2])
with Heartbeat(directory, rank=rank, local_rank=rank, attempt=1, timeout_seconds=float(sys.argv[3])) as heartbeat:
    print("ready", flush=True)
    for step in range(1, 10000):
        heartbeat.enter("step", step)
        if (directory / "stuck").exists():
            stuck_in_a_collective()
        time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stopped", "stuck"])
def test_processes_end_with_the_exit_code_of_a_stall(tmp_path: Path, fault: str) -> None:
    """Two ranks; one is stopped by a signal, or both are stuck in a collective."""
    layout = RunLayout(tmp_path)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(rank), str(tmp_path), str(TIMEOUT_SECONDS)], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        if fault == "stuck":
            (tmp_path / "stuck").touch()
        else:
            os.kill(processes[1].pid, signal.SIGSTOP)
            (tmp_path / "stuck").touch()  # rank 0 waits for it in the collective
        assert [process.wait(PATIENCE_SECONDS) for process in processes] == [6, 6]
    finally:
        for process in processes:
            process.kill()
        outputs = [process.communicate()[1] for process in processes]
    assert outputs[0].startswith("x stalled: Rank "), outputs
    wait_until(layout.failure.exists, 10)
    failure = json.loads(layout.failure.read_bytes())
    assert (failure["error"], failure["exit_code"], failure["attempt"]) == ("StalledError", 6, 1)
    assert ("Rank 1 on host" in failure["what"] and "SIGSTOP" in failure["what"]) == (fault == "stopped")
    assert "stuck_in_a_collective" in failure["traceback"]
    assert json.loads(layout.stall(1).read_bytes())["traceback"] == failure["traceback"], "kept after a resume"
    for rank in (0, 1) if fault == "stuck" else (0,):
        assert "stuck_in_a_collective" in layout.stacks(rank).read_text()
    assert layout.stacks(1).stat().st_size > 0, "also of the stopped rank"


BUSY = """
import sys, threading, time
from pathlib import Path
from vorox.runtime.heartbeat import Heartbeat
def busy():
    while True:
        exec(compile("def one(x):\\n  return x\\none(1)", "<text>", "exec"), {})
        time.sleep(0)
for _ in range(8):
    threading.Thread(target=busy, daemon=True).start()
with Heartbeat(Path(sys.argv[1]), rank=1, local_rank=1, attempt=1, timeout_seconds=600.0) as heartbeat:
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_stacks_of_threads_that_run_are_written_without_a_crash(tmp_path: Path) -> None:
    """Faulthandler's handler of a signal crashes in this process within seconds: it reads frames without the lock."""
    layout = RunLayout(tmp_path)
    program = [sys.executable, "-c", BUSY, str(tmp_path)]
    with subprocess.Popen(program, text=True, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            size = 0
            for _ in range(10):
                request_stacks(layout.heartbeat(1))
                wait_until(lambda before=size: layout.stacks(1).stat().st_size > before, PATIENCE_SECONDS)
                size = layout.stacks(1).stat().st_size
            assert process.poll() is None
            assert layout.stacks(1).read_text().count("in busy") >= 8
            request_end(layout.heartbeat(1))
            assert process.wait(PATIENCE_SECONDS) == 6
        finally:
            process.kill()


@pytest.mark.parametrize("phase", ["validation", "save", "start", "compile", "end"])
def test_no_phase_of_another_rank_excuses_one_that_is_stopped_or_dead(tmp_path: Path, phase: Phase) -> None:
    """Rank 0 may take any time, but it will wait for rank 1 in vain."""
    for condition in ("stopped", "dead"):
        beats = [beat(0, phase), beat(1, "data", 813)]
        assert verdict(tmp_path, beats, ["running", condition])[0] == [1]
        assert verdict(tmp_path, beats, ["running", condition], looks=3)[0] == []
        assert verdict(tmp_path, [beat(0, "step", is_waiting=1), beats[1]], ["running", condition])[0] == [1]
    assert verdict(tmp_path, [beat(0, phase), beat(1, phase)], ["stopped", "running"])[0] == [0]
    if phase != "end":
        assert verdict(tmp_path, [beat(0, phase), beat(1, "sync")])[0] == [], "it works"


def test_a_rank_that_was_stopped_for_a_moment_is_no_stall(tmp_path: Path) -> None:
    watchdog = Watchdog(RunLayout(tmp_path), 1, 3.0, namespace="b")
    for look in range(12):
        condition: Condition = "stopped" if look % 3 else "running"
        watchdog.update({0: (beat(0, "validation"), "running"), 1: (beat(1, "step", count=look // 3), condition)}, 1.0)
        assert watchdog.stalled() == []


def test_time_in_which_the_watchdog_did_not_run_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that sleeps for an hour in the middle of a step; by its clock that is an hour, for the rank nothing."""
    now, added = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        now[0] += 3600.0 if len(added) == 2 else seconds

    def update(watchdog: Watchdog, found: object, elapsed_seconds: float) -> None:
        added.append(elapsed_seconds)
        if len(added) < 5:
            watchdog.ranks = {0: Watched(beat(0, "step"))}
        else:
            watchdog.ranks.clear()

    monkeypatch.setattr(module.time, "sleep", sleep)
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Watchdog, "update", update)
    Watchdog(RunLayout(tmp_path), 1, 4.0).run()
    assert added == pytest.approx([0.5, 0.5, 1.0, 0.5, 0.5])


def test_a_dead_rank_is_a_likelier_cause_than_a_stopped_one_and_that_than_a_slow_one(tmp_path: Path) -> None:
    beats = [beat(0, "data", 1), beat(1, "step"), beat(2, "sync", 900)]
    assert verdict(tmp_path, beats, ["running", "stopped", "dead"])[0] == [2]
    assert verdict(tmp_path, beats, ["running", "dead", "stopped"])[0] == [1]
    assert verdict(tmp_path, beats, ["running", "running", "stopped"])[0] == [2]
