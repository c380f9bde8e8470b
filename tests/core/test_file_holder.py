"""Locks between real processes, who holds one, and a process told from another one of the same number."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from eventually import wait_until
from vorox.core.errors import ConfigError
from vorox.core.files import atomic, file_holder
from vorox.core.files.file_holder import FileLock, ProcessIdentity, lock_holder, pid_namespace, this_process
from vorox.data.cache.files.leases import Leases, is_expired, lease_path
from vorox.data.streaming.read_windows import ReadWindow
from vorox.training.mirror import ownership

HOLDER = """
import sys, pathlib
from vorox.core.files.file_holder import FileLock
lock = FileLock(pathlib.Path(sys.argv[1])).acquire()
print("locked", flush=True)
sys.stdin.readline()
"""
OWN = this_process()
EARLIER = replace(OWN, start="1" * 8)
"""What a process of this number recorded before the container was started again."""
NUMBER_ALONE = replace(OWN, start="")
"""What a system records that does not give the start of a process."""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until it reads a line."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_process_is_refused_with_the_holder_named(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    with holder(path) as process:
        with pytest.raises(ConfigError) as caught:
            FileLock(path, blocking=False, purpose="the run x").acquire()
        assert caught.value.exit_code == 2
        assert caught.value.what == f"The run x is in use by process {process.pid} on {socket.gethostname()}"
        assert caught.value.where == str(path)


def test_a_file_system_without_locks_is_no_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, blocking: bool) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(file_holder, "_lock", refuse)
    with pytest.raises(ConfigError) as caught:
        FileLock(tmp_path / "LOCK", blocking=False, purpose="the run x").acquire()
    assert caught.value.what == f"The run x cannot be locked: {os.strerror(errno.ENOLCK)}"
    assert "supports file locks" in caught.value.hint


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_death_of_the_holder_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    with holder(path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        with FileLock(path, blocking=False):
            assert json.loads(path.read_bytes()) == this_process().to_json()


def test_release_frees_and_can_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    first = FileLock(path, blocking=False).acquire()
    with pytest.raises(ConfigError):  # also inside one process
        FileLock(path, blocking=False).acquire()
    first.release()
    first.release()
    with FileLock(path, blocking=False):
        pass


def test_an_error_inside_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    with pytest.raises(RuntimeError), FileLock(path, blocking=False):
        raise RuntimeError
    FileLock(path, blocking=False).acquire().release()


def test_a_refused_attempt_does_not_disturb_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    with FileLock(path, blocking=False):
        before = path.read_bytes()
        for _ in range(3):
            with pytest.raises(ConfigError):
                FileLock(path, blocking=False).acquire()
        assert path.read_bytes() == before


def waits_for_a_lock(process: subprocess.Popen[str]) -> bool:
    """Whether the system has it wait; what waits for nothing would go on and end."""
    assert process.poll() is None, "it did not wait"
    waiting = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "-> FLOCK" in line]
    return str(process.pid) in {words[words.index("->") + 4] for words in waiting}


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="the system does not say who waits")
def test_blocking_waits_for_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    waiter = textwrap.dedent(
        """
        import sys, pathlib
        from vorox.core.files.file_holder import FileLock
        print("waiting", flush=True)
        with FileLock(pathlib.Path(sys.argv[1])):
            print("mine", flush=True)
        """
    )
    with holder(path) as first:
        assert first.stdin is not None
        with subprocess.Popen([sys.executable, "-c", waiter, str(path)], stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "waiting\n"
            wait_until(lambda: waits_for_a_lock(second))
            first.stdin.write("\n")
            first.stdin.flush()
            assert second.stdout.readline() == "mine\n"


@pytest.mark.parametrize("content", [b"", b"garbage", b"[]", b'{"pid": 1}'])
def test_an_unreadable_holder_is_called_another_process(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "LOCK"
    with FileLock(path, blocking=False):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="in use by another process"):
            FileLock(path, blocking=False).acquire()


def test_a_folder_that_is_missing_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "missing" / "LOCK").acquire()


# Who holds a lock


def test_a_living_holder_is_named_and_a_dead_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    assert lock_holder(path) is None
    with holder(path) as process:
        before = path.read_bytes()
        for _ in range(3):
            assert lock_holder(path) == f"process {process.pid} on {socket.gethostname()}"
        assert path.read_bytes() == before
        process.send_signal(signal.SIGTERM)
        process.wait()
    assert lock_holder(path) is None
    assert path.read_bytes() == before, "asking changes nothing"


def test_a_number_that_another_process_has_by_now_is_no_holder(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    path.write_text(json.dumps(replace(OWN, process_id=os.getppid(), start="").to_json()))
    assert lock_holder(path) is None


def test_asking_does_not_keep_anybody_out(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    path.write_text(json.dumps(replace(OWN, process_id=os.getppid(), start="").to_json()))
    assert lock_holder(path) is None
    with FileLock(path, blocking=False):
        assert lock_holder(path) == f"process {os.getpid()} on {socket.gethostname()}"


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"pid": "x", "host": 1}'])
def test_no_content_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "LOCK"
    path.write_text(content)
    assert lock_holder(path) is None


# Processes of one number: PID 1 of a container, and every number used again


def test_a_start_tells_processes_of_one_number_apart() -> None:
    assert (OWN.host, OWN.process_id, len(OWN.start)) == (socket.gethostname(), os.getpid(), 8)
    assert not OWN.is_dead()
    assert EARLIER.is_dead()
    assert not NUMBER_ALONE.is_dead()
    assert replace(EARLIER, host="elsewhere").is_dead(), "a host name is a label"
    assert not replace(EARLIER, namespace="elsewhere").is_dead()
    assert not replace(EARLIER, namespace="").is_dead()


def test_another_process_finds_the_same_start_and_notices_the_end() -> None:
    program = "import json; from vorox.core.files.file_holder import *; print(json.dumps(this_process().to_json()))\n"
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
    "value",
    [
        None,
        [],
        {},
        *({**OWN.to_json(), key: value} for key in OWN.to_json() for value in (None, [], True)),
        {"host": "a", "pid": 1},
        {**OWN.to_json(), "pid": "1"},
    ],
)
def test_what_names_no_process_is_none(value: object) -> None:
    assert ProcessIdentity.from_json(value) is None


@pytest.mark.parametrize("process_id", [-1, 10**30])
def test_a_number_that_no_process_can_have_is_not_believed(process_id: int) -> None:
    assert replace(OWN, process_id=process_id).is_dead()


def test_everything_that_records_a_process_knows_the_earlier_one_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[ProcessIdentity, Path] = {}
    for process in (OWN, EARLIER):
        monkeypatch.setattr(atomic, "this_process", lambda process=process: process)
        names[process] = atomic.temporary_name(tmp_path / "a-1-0123abcd-b.json")
        names[process].touch()
    assert atomic.sweep_temporary(tmp_path) == [names[EARLIER]]
    assert names[OWN].exists()

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
        assert ownership._is_dead(record) == is_dead
        assert not ownership._is_dead({**record, "namespace": "another"})

    (tmp_path / "LOCK").write_text(json.dumps(EARLIER.to_json()))
    assert lock_holder(tmp_path / "LOCK") is None
    with Leases(tmp_path) as leases:
        assert not leases.acquire(7), "its process lives"


# Containers and machines that share a host name

HOLDERS = """
import json, pathlib, sys
from vorox.core.files import atomic
from vorox.core.files.file_holder import this_process
from vorox.data.cache.files.leases import Leases
from vorox.data.streaming.read_windows import ReadWindow

here = pathlib.Path(sys.argv[1])
name = atomic.stage_file(here / "a.psc", b"x").name
window = ReadWindow(here)
window.publish([(3, 5)])
with Leases(here) as leases:
    assert leases.acquire(7)
    print(json.dumps([name, this_process().to_json()]), flush=True)
    sys.stdin.readline()
"""
LOOKS = """
import pathlib, sys
from vorox.core.files import atomic
from vorox.core.files.file_holder import ProcessIdentity
from vorox.data.cache.files.leases import Leases, is_expired, lease_path
from vorox.data.streaming.read_windows import ReadWindow
from vorox.runtime.watchdog import condition_of
from vorox.training.mirror import ownership
import json

here, process = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
with Leases(here) as leases:
    leased = leases.acquire(7)
print(json.dumps({
    "swept": [path.name for path in atomic.sweep_temporary(here)],
    "leased": leased,
    "expired": is_expired(lease_path(here, 7)),
    "windows": ReadWindow(here).peers().windows,
    "condition": condition_of(ProcessIdentity.from_json(process)),
    "owner": ownership._is_dead(process),
    "name": ProcessIdentity.from_json(process).host,
}))
"""
NAMESPACES = ["unshare", "--pid", "--fork", "--mount-proc"]


def has_namespaces() -> bool:
    with suppress(OSError):
        return subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode == 0
    return False


@pytest.mark.skipif(not has_namespaces(), reason="PID namespaces need root and unshare(1)")
@pytest.mark.parametrize("same", [False, True])
def test_two_containers_with_one_host_name_take_nothing_from_each_other(tmp_path: Path, same: bool) -> None:
    """Two real PID namespaces; the process of the first lives. Within one namespace it is dead after its kill."""
    with subprocess.Popen(
        [*([] if same else NAMESPACES), sys.executable, "-c", HOLDERS, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as first:  # fmt: skip
        assert first.stdout is not None
        assert first.stdin is not None
        name, process = json.loads(first.stdout.readline())
        if same:
            first.kill()
            first.wait()
        second = subprocess.run(
            [*([] if same else NAMESPACES), sys.executable, "-c", LOOKS, str(tmp_path), json.dumps(process)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        if not same:
            first.stdin.write("\n")
    found = json.loads(second.stdout)
    swept = [*(left for left in found.pop("swept") if "builder" not in left)]
    assert swept == ([name] if same else [])
    assert found == {
        "leased": same, "expired": same, "windows": [] if same else [[3, 5]], "owner": same,
        "condition": "dead" if same else "remote", "name": socket.gethostname(),
    }  # fmt: skip


@pytest.mark.parametrize("part", ["_boot_id", "_machine_id"])
def test_cloned_machines_and_other_boots_are_other_namespaces(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """A machine with the same host name, and a process of the same id and start."""
    file_holder._namespace.cache_clear()
    here = pid_namespace()
    assert here == OWN.namespace
    monkeypatch.setattr(file_holder, part, lambda: "another")
    file_holder._namespace.cache_clear()
    there = pid_namespace()
    assert there not in {here, ""}
    assert not EARLIER.is_dead()
    monkeypatch.undo()
    file_holder._namespace.cache_clear()
    assert EARLIER.is_dead()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_proc_of_another_namespace_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "readlink", lambda path: Path("1" if path.name == "self" else "pid:[1]"))
    file_holder._namespace.cache_clear()
    assert pid_namespace() == ""
    assert not replace(EARLIER, namespace="").is_dead()
    file_holder._namespace.cache_clear()


def test_a_process_that_proc_hides_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """``hidepid=2`` shows a user the processes of no other user, for psutil as if they had ended."""

    def hidden(process_id: int) -> psutil.Process:
        raise psutil.NoSuchProcess(process_id)

    monkeypatch.setattr(psutil, "Process", hidden)
    assert not replace(OWN, process_id=os.getppid(), start="").is_dead()


def test_a_held_lock_tells_where_its_file_was_moved(tmp_path: Path) -> None:
    """Also below a symbolic link, which is no move; nothing is known of a lock that is not held, or was removed."""
    real, link = tmp_path / "real", tmp_path / "link"
    (real / "run").mkdir(parents=True)
    link.symlink_to(real)
    lock = FileLock(link / "run" / "LOCK", blocking=False)
    assert lock.moved_to() is None
    with lock:
        assert lock.moved_to() is None
        (real / "run").rename(tmp_path / "moved")
        assert lock.moved_to() == tmp_path / "moved" / "LOCK"
        (tmp_path / "moved" / "LOCK").unlink()
        assert lock.moved_to() is None
