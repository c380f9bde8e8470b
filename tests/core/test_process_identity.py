"""Telling a process from another one that has its number: PID 1 of a container, and every number used again."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from vorox.core import atomic
from vorox.core.file_holder import ProcessIdentity, lock_holder, machine_identity, this_process
from vorox.data.cache.leases import Leases, is_expired, lease_path
from vorox.data.streaming.read_windows import ReadWindow
from vorox.training.mirror import ownership

OWN = this_process()
EARLIER = replace(OWN, start="0" * 8)
"""What a process of this number recorded before the container was started again."""
NUMBER_ALONE = replace(OWN, start="")
"""What versions recorded that knew no start."""


def test_a_start_tells_processes_of_one_number_apart() -> None:
    assert (OWN.host, OWN.process_id, len(OWN.start)) == (socket.gethostname(), os.getpid(), 8)
    assert not OWN.is_dead()
    assert EARLIER.is_dead()
    assert not NUMBER_ALONE.is_dead()
    assert not replace(EARLIER, host="elsewhere").is_dead()


def test_another_process_finds_the_same_start_and_notices_the_end() -> None:
    program = "import json; from vorox.core.file_holder import *; print(json.dumps(this_process().to_json()))\n"
    wait = f"{program}import sys; sys.stdout.flush(); sys.stdin.readline()"
    with subprocess.Popen(
        [sys.executable, "-c", wait], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        other = ProcessIdentity.from_json(json.loads(child.stdout.readline()))
        assert other is not None
        assert other.process_id == child.pid
        assert not other.is_dead()
        child.stdin.write("\n")
        child.stdin.flush()
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert other.is_dead(), "dead, and still in the table of processes"
    assert other.is_dead()
    assert replace(other, start="").is_dead()


@pytest.mark.parametrize(
    "value", [None, [], {}, {"host": 1, "pid": 1}, {"host": "a"}, {"host": "a", "pid": "1"}, {"host": "a", "pid": True}]
)
def test_what_names_no_process_is_none(value: object) -> None:
    assert ProcessIdentity.from_json(value) is None


@pytest.mark.parametrize("process_id", [-1, 10**30])
def test_a_number_that_no_process_can_have_is_not_believed(process_id: int) -> None:
    assert ProcessIdentity(OWN.host, process_id).is_dead() in (True, False)


def test_everything_that_records_a_process_knows_the_earlier_one_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[ProcessIdentity, Path] = {}
    for process in (OWN, EARLIER):
        monkeypatch.setattr(atomic, "this_process", lambda process=process: process)
        names[process] = atomic.temporary_name(tmp_path / "a-1-0123abcd-b.json")
        names[process].touch()
    old = tmp_path / f".tmp-{OWN.host}-{OWN.process_id}-0123abcd-a.json"
    old.touch()
    assert atomic.sweep_temporary(tmp_path) == [names[EARLIER]]
    assert names[OWN].exists()
    assert old.exists()

    for process, is_dead in ((EARLIER, True), (replace(OWN, process_id=os.getppid(), start=""), False)):
        record = {**process.to_json(), "token": "t", "units": [[3, 5]]}
        lease = lease_path(tmp_path, 7)
        lease.parent.mkdir(exist_ok=True)
        lease.write_text(json.dumps(record))
        assert is_expired(lease) == is_dead
        window = tmp_path / "windows" / "a.json"
        window.parent.mkdir(exist_ok=True)
        window.write_text(json.dumps(record))
        assert ReadWindow(tmp_path).peers().windows == ([] if is_dead else [(3, 5)])
        assert window.exists() != is_dead
        assert ownership._is_dead({**record, "machine": machine_identity()}) == is_dead
        assert not ownership._is_dead({**record, "machine": "another"})

    (tmp_path / "LOCK").write_text(json.dumps(EARLIER.to_json()))
    assert lock_holder(tmp_path / "LOCK") is None
    with Leases(tmp_path) as leases:
        assert not leases.acquire(7), "its process lives"
