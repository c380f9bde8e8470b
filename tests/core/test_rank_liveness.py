"""Waits for other ranks end: with a verdict about a dead, stopped or silent one, never about one that only works."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from eventually import wait_until
from rank_threads import Store
from vorox.core.errors import DataError, LostRankError, StalledError, VoroxError
from vorox.core.files.file_holder import ProcessIdentity, this_process
from vorox.core.ranks import rank_liveness
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.ranks.rank_liveness import Liveness

TIMEOUT_SECONDS = 20.0
ELSEWHERE = replace(this_process(), namespace="elsewhere", host="node7", process_id=41)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def sign(store: Store, rank: int, process: ProcessIdentity, count: int) -> None:
    store.replace(f"vorox/alive/{rank}", json.dumps({**process.to_json(), "count": count}).encode())


def verdict(process: ProcessIdentity | None, seconds: int, gives_signs: bool = False) -> VoroxError | None:
    """What rank 0 says about rank 1 after looking every second."""
    store, clock = Store(), Clock()
    liveness = Liveness(store, 0, TIMEOUT_SECONDS, clock=clock)
    if process is not None:
        sign(store, 1, process, 0)
    for second in range(seconds):
        clock.now += 1.0
        if gives_signs and process is not None:
            sign(store, 1, process, second)
        found = liveness.lost([1])
        if found is not None:
            return found
    return None


@contextmanager
def process() -> Generator[tuple[subprocess.Popen[bytes], ProcessIdentity]]:
    program = "import json, sys; from vorox.core.files.file_holder import this_process\n"
    program += "print(json.dumps(this_process().to_json()), flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        found = ProcessIdentity.parse(child.stdout.readline())
        assert found is not None
        try:
            yield child, found
        finally:
            child.kill()


def test_a_dead_rank_is_named_at_once_and_a_stopped_one_after_the_time() -> None:
    with process() as (child, identity):
        assert verdict(identity, 100) is None, "it is alive, and may hold the interpreter lock for as long as it likes"
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(identity.is_stopped)
        assert verdict(identity, 20) is None
        stopped = verdict(identity, 25)
        assert isinstance(stopped, StalledError)
        assert f"Rank 1, process {child.pid} on {identity.host}, is stopped (SIGSTOP) for 21 seconds" in stopped.what
        child.kill()
        child.wait()
        dead = verdict(identity, 1)
        assert isinstance(dead, LostRankError)
        assert f"Rank 1 has ended: process {child.pid} on" in dead.what


@pytest.mark.parametrize("process", [ELSEWHERE, None])
def test_a_rank_of_another_machine_is_given_up_when_it_is_silent(process: ProcessIdentity | None) -> None:
    assert verdict(process, 20) is None
    found = verdict(process, 25)
    assert isinstance(found, StalledError)
    assert "gives no sign of life for 21 seconds" in found.what
    assert verdict(ELSEWHERE, 500, gives_signs=True) is None, "it builds a cache"


def test_the_time_of_a_suspended_machine_does_not_count() -> None:
    store, clock = Store(), Clock()
    liveness = Liveness(store, 0, TIMEOUT_SECONDS, clock=clock)
    sign(store, 1, ELSEWHERE, 0)
    for _ in range(15):
        clock.now += 1.0
        assert liveness.lost([1]) is None
    clock.now += 3600.0
    assert liveness.lost([1]) is None
    clock.now += 1.0
    assert liveness.lost([1]) is None


def test_signs_are_given_from_a_thread_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_liveness, "RENEW_SECONDS", 0.001)
    store = Store()
    liveness = Liveness(store, 3, TIMEOUT_SECONDS).start()
    wait_until(lambda: json.loads(store.values.get("vorox/alive/3", b"{}")).get("count", 0) > 3)
    liveness.close()
    last = store.values["vorox/alive/3"]
    assert ProcessIdentity.parse(last) == this_process()
    assert threading.active_count() < 50
    assert store.values["vorox/alive/3"] == last


def test_a_wait_ends_with_the_verdict_or_with_what_the_rank_reported() -> None:
    """Rank 1 has died; if it could say why, that is the error."""
    dead = replace(this_process(), start="1" * 8)
    for reports in (False, True):
        store = Store()
        sign(store, 1, dead, 0)
        first = DistributedContext(0, 2, store, liveness=Liveness(store, 0, TIMEOUT_SECONDS))
        if reports:
            with pytest.raises(DataError), DistributedContext(1, 2, store).propagating_failure():
                raise DataError("the disk is gone")
        with pytest.raises(DataError if reports else LostRankError) as caught:
            first.barrier("corpus")
        assert caught.value.what == ("rank 1: the disk is gone" if reports else caught.value.what)


def test_the_next_run_of_a_process_starts_with_new_keys() -> None:
    """Values are written once: of a second run with the same topics, nothing of the first is read."""
    store = Store()

    def twice(rank: int) -> list[object]:
        found: list[object] = []
        dist = DistributedContext(rank, 2, store)
        for run in range(2):
            found.append(dist.agree("sum", 10 * run + rank, sum))
            found.append(dist.broadcast("name", f"run {run}"))
            with pytest.raises(DataError), dist.propagating_failure():
                raise DataError("caught by the program")
            dist = dist.renewed()
        return found

    results = dict[int, list[object]]()
    threads = [threading.Thread(target=lambda rank=rank: results.update({rank: twice(rank)})) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {rank: [1, "run 0", 21, "run 1"] for rank in (0, 1)}
