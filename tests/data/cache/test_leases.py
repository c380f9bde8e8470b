"""Leases: one holder each, expired when the process is dead or silent, with and without hard links."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from vorox.data.cache.files import leases as module
from vorox.data.cache.files.leases import Leases, is_expired, lease_path, read_holder

TAKE_AND_STAY = """
import sys, time
from pathlib import Path
from vorox.data.cache.files.leases import Leases
leases = Leases(Path(sys.argv[1])).__enter__()
print(leases.acquire(3), leases.acquire(4), flush=True)
time.sleep(60)
"""


@pytest.fixture(params=["links", "no links"])
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no links":

        def refuse(*paths: object) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)


@pytest.mark.usefixtures("disk")
def test_a_unit_has_one_holder_until_it_is_released(tmp_path: Path) -> None:
    with Leases(tmp_path) as first, Leases(tmp_path) as second:
        assert first.acquire(7)
        assert not second.acquire(7)
        assert str(os.getpid()) in str(second.holder(7))
        assert second.acquire(8)
        second.release(7)  # not its own: nothing happens
        assert not second.acquire(7)
        first.release(7)
        assert second.acquire(7)
    assert list((tmp_path / "leases").iterdir()) == []


@pytest.mark.usefixtures("disk")
def test_one_of_many_concurrent_requests_gets_the_lease(tmp_path: Path) -> None:
    taken: list[int] = []
    start = threading.Barrier(8)

    def ask() -> None:
        with Leases(tmp_path) as leases:
            start.wait()
            taken.extend(unit for unit in range(50) if leases.acquire(unit))
            start.wait()

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(50))


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
@pytest.mark.parametrize("reaped", [True, False])
def test_the_leases_of_a_killed_process_expire_immediately(tmp_path: Path, reaped: bool) -> None:
    child = subprocess.Popen([sys.executable, "-c", TAKE_AND_STAY, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == b"True True"
    with Leases(tmp_path) as leases:
        assert not leases.acquire(3)
        child.kill()
        if reaped:
            child.wait()
        else:
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the table of processes
        assert leases.acquire(3)
        assert leases.acquire(4)
    child.communicate()


@pytest.mark.usefixtures("disk")
def test_a_garbage_collected_builder_holds_no_lease(tmp_path: Path) -> None:
    lost = Leases(tmp_path).__enter__()
    assert lost.acquire(1)
    module._LIVE_TOKENS.discard(lost._token)  # what an exception in its process leaves
    with Leases(tmp_path) as leases:
        assert leases.acquire(1)


def foreign(path: Path, age_seconds: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"host": "elsewhere", "pid": 1, "namespace": "1", "start": "", "token": "t"}')
    os.utime(path, (time.time() - age_seconds,) * 2)


def test_another_machine_is_trusted_for_a_minute(tmp_path: Path) -> None:
    foreign(lease_path(tmp_path, 1), 40)
    foreign(lease_path(tmp_path, 2), 80)
    lease_path(tmp_path, 3).write_bytes(b"")  # a builder between the creation of its file and the first byte
    with Leases(tmp_path) as leases:
        assert [leases.acquire(unit) for unit in (1, 2, 3)] == [False, True, False]
    assert str(read_holder(lease_path(tmp_path, 1))) == "process 1 on elsewhere"


def test_a_lease_that_another_builder_took_over_first_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign(lease_path(tmp_path, 1), 80)
    with Leases(tmp_path) as faster, Leases(tmp_path) as slower:
        lock = module.FileLock

        def lock_after_the_other(path: Path) -> module.FileLock:
            monkeypatch.setattr(module, "FileLock", lock)
            assert faster.acquire(1)
            return lock(path)

        monkeypatch.setattr(module, "FileLock", lock_after_the_other)
        assert not slower.acquire(1)
        assert str(os.getpid()) in str(faster.holder(1))
        faster.release(1)
        assert not lease_path(tmp_path, 1).exists()


def test_the_clock_of_the_disk_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk's clock is an hour behind: ages are measured by it."""
    real = os.utime

    def utime(path: Path, times: tuple[float, float] | None = None) -> None:
        real(path, times if times is not None else (time.time() - 3600,) * 2)

    monkeypatch.setattr(os, "utime", utime)
    foreign(lease_path(tmp_path, 1), 3600 + 40)
    foreign(lease_path(tmp_path, 2), 3600 + 80)
    with Leases(tmp_path) as leases:
        assert [leases.acquire(unit) for unit in (1, 2)] == [False, True]


@pytest.mark.usefixtures("disk")
def test_held_leases_are_renewed(tmp_path: Path) -> None:
    with Leases(tmp_path, heartbeat_seconds=0.02) as leases:
        assert leases.acquire(5)
        path = lease_path(tmp_path, 5)
        os.utime(path, (0, 0))
        deadline = time.monotonic() + 10
        while path.stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not is_expired(path)


def test_a_full_disk_leaves_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    with Leases(tmp_path) as leases:
        monkeypatch.setattr(os, "link", refuse)
        monkeypatch.setattr(leases, "_content", "not bytes")
        with pytest.raises(TypeError):
            leases.acquire(1)
        monkeypatch.undo()
