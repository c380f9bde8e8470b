"""The record of attempts: exact at kill -9, torn ends ignored, and history told as it was."""

from __future__ import annotations

import mmap
import os
import random
import signal
from pathlib import Path

import pytest

from vorox.core.errors import DataError
from vorox.core.files.atomic import MANIFEST_NAME
from vorox.core.run_layout import RunLayout
from vorox.records.attempts import Attempt, AttemptRecord, intervals, read_attempts
from vorox.records.executed_steps import executed_attempts


def test_no_run_has_no_attempts(tmp_path: Path) -> None:
    assert read_attempts(tmp_path) == ()
    assert intervals(()) == ()


def test_counters_are_seen_by_others_while_they_change(tmp_path: Path) -> None:
    with AttemptRecord(tmp_path, 1, 0, 0) as first:
        assert read_attempts(tmp_path) == (Attempt(1, 0, 0, 0, 0),)
        for step in range(1, 6):
            first.record_started(step)
        first.record_saved(4)
        assert read_attempts(tmp_path) == (Attempt(1, 0, 0, 5, 4),)
    with AttemptRecord(tmp_path, 2, 4, 16) as second:
        second.record_started(7)
    assert read_attempts(tmp_path) == (Attempt(1, 0, 0, 5, 4), Attempt(2, 4, 16, 7, 4))
    assert (RunLayout(tmp_path).attempts).stat().st_size == 128


def test_a_saved_step_is_durable_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durable: list[Attempt] = []

    class Mapped(mmap.mmap):
        def flush(self, *arguments: int) -> None:
            super().flush(*arguments)
            durable.extend(read_attempts(tmp_path))

    monkeypatch.setattr(mmap, "mmap", Mapped)
    with AttemptRecord(tmp_path, 1, 0, 0) as record:
        record.record_started(5)
        assert durable == [], "a step costs no system call"
        record.record_saved(4)
        assert durable == [Attempt(1, 0, 0, 5, 4)]


@pytest.mark.parametrize("step", [3, 5])
def test_a_checkpoint_counts_as_saved_although_the_counter_is_older(tmp_path: Path, step: int) -> None:
    with AttemptRecord(tmp_path, 1, 0, 0) as record:
        record.record_started(5)
        record.record_saved(2)
    checkpoint = RunLayout(tmp_path).checkpoint(step)
    checkpoint.mkdir(parents=True)
    (checkpoint / MANIFEST_NAME).touch()
    assert executed_attempts(tmp_path) == (Attempt(1, 0, 0, 5, step),)


def test_a_checkpoint_beyond_the_recorded_steps_shows_that_some_are_lost(tmp_path: Path) -> None:
    with AttemptRecord(tmp_path, 1, 0, 0) as record:
        record.record_started(5)
    checkpoint = RunLayout(tmp_path).checkpoint(6)
    checkpoint.mkdir(parents=True)
    (checkpoint / MANIFEST_NAME).touch()
    with pytest.raises(DataError, match="other records of the run have step 6"):
        executed_attempts(tmp_path)


def test_a_number_is_never_given_twice(tmp_path: Path) -> None:
    AttemptRecord(tmp_path, 3, 0, 0).close()
    record = AttemptRecord(tmp_path, 1, 0, 0)
    record.close()
    record.close()
    assert record.number == 4
    assert [attempt.number for attempt in read_attempts(tmp_path)] == [3, 4]


@pytest.mark.parametrize("torn", range(1, 64))
def test_a_torn_record_is_ignored_and_cut_off(tmp_path: Path, torn: int) -> None:
    with AttemptRecord(tmp_path, 1, 0, 0) as record:
        record.record_started(9)
    path = RunLayout(tmp_path).attempts
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:torn])
    assert read_attempts(tmp_path) == (Attempt(1, 0, 0, 9, 0),)
    AttemptRecord(tmp_path, 2, 8, 32).close()
    assert read_attempts(tmp_path) == (Attempt(1, 0, 0, 9, 0), Attempt(2, 8, 32, 8, 8))


def test_a_changed_record_counts_no_more(tmp_path: Path) -> None:
    AttemptRecord(tmp_path, 1, 0, 0).close()
    path = RunLayout(tmp_path).attempts
    raw = bytearray(path.read_bytes())
    raw[16] ^= 1
    path.write_bytes(raw)
    assert read_attempts(tmp_path) == ()


@pytest.mark.filterwarnings("ignore:os.fork")  # the child computes nothing
@pytest.mark.filterwarnings("ignore:This process")
def test_kill_9_loses_no_step(tmp_path: Path) -> None:
    for number, last in enumerate((137, 200, 203), start=1):
        child = os.fork()
        if child == 0:
            record = AttemptRecord(tmp_path, number, 100, 400)
            for step in range(101, last + 1):
                record.record_started(step)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
    assert [attempt.last_step for attempt in read_attempts(tmp_path)] == [137, 200, 203]


def told(*attempts: tuple[int, int, int]) -> list[tuple[object, ...]]:
    """Intervals of attempts given as (first state, last step, saved step)."""
    made = [Attempt(number, first, 0, last, saved) for number, (first, last, saved) in enumerate(attempts, 1)]
    return [(i.attempt, i.parent, i.first_step, i.last_step, i.outcome) for i in intervals(made)]


def test_a_finished_run_is_one_interval() -> None:
    assert told((0, 12, 12)) == [(1, None, 1, 12, "kept")]


def test_what_no_checkpoint_holds_is_open() -> None:
    assert told((0, 11, 8)) == [(1, None, 1, 8, "kept"), (1, None, 9, 11, "open")]
    assert told((0, 3, 0)) == [(1, None, 1, 3, "open")]
    assert told((0, 0, 0)) == []


def test_a_crash_rolls_back_what_was_not_saved() -> None:
    assert told((0, 11, 8), (8, 12, 12)) == [
        (1, None, 1, 8, "kept"), (1, None, 9, 11, "rolled_back"), (2, 1, 9, 12, "kept"),
    ]  # fmt: skip


def test_an_older_checkpoint_rolls_back_what_had_been_kept() -> None:
    assert told((0, 11, 8), (8, 20, 16), (4, 6, 4), (4, 30, 30)) == [
        (1, None, 1, 4, "kept"), (1, None, 5, 11, "rolled_back"), (2, 1, 9, 20, "rolled_back"),
        (3, 1, 5, 6, "rolled_back"), (4, 1, 5, 30, "kept"),
    ]  # fmt: skip


def test_every_step_is_kept_once_at_most_and_no_execution_is_lost() -> None:
    """Against a run that is acted out step by step."""
    chooser = random.Random(4)
    for _ in range(300):
        made: list[Attempt] = []
        kept: dict[int, int] = {}  # step -> attempt, as the run stands
        done: list[tuple[int, int]] = []
        states = {0}
        for number in range(1, chooser.randint(2, 7)):
            first = chooser.choice(sorted(states))
            last = first + chooser.randint(0, 9)
            saved = chooser.randint(first, last)
            kept = {step: owner for step, owner in kept.items() if step <= first}
            states = {state for state in states if state <= first} | {saved}
            for step in range(first + 1, last + 1):
                kept[step] = number
                done.append((number, step))
            made.append(Attempt(number, first, 0, last, saved))
        found = {(i.attempt, step): i.outcome for i in intervals(made) for step in range(i.first_step, i.last_step + 1)}
        assert sorted(found) == sorted(done)
        for (number, step), outcome in found.items():
            lost = kept.get(step) != number
            newest = number == len(made)
            expected = "rolled_back" if lost else "open" if newest and step > made[-1].saved_step else "kept"
            assert outcome == expected, (made, number, step)


def test_a_step_costs_next_to_nothing(tmp_path: Path) -> None:
    import time

    with AttemptRecord(tmp_path, 1, 0, 0) as record:
        began = time.process_time()
        for step in range(100_000):
            record.record_started(step)
        assert time.process_time() - began < 1.0, "ten microseconds a step"
