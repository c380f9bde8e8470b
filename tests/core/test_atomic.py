"""Commits: the order of operations, what readers notice, and what is left when a call fails.

Crashes in the middle are enumerated in ``test_atomic_crash.py``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from vorox.core.errors import CheckpointError, DataError
from vorox.core.files import atomic, staged_directory
from vorox.core.files.atomic import FileOperation
from vorox.core.files.chained_log import HashChainedLog, LogPosition
from vorox.core.files.file_holder import this_process
from vorox.core.files.staged_directory import StagedDirectory


def recorded(action: Callable[[], object]) -> list[FileOperation]:
    operations: list[FileOperation] = []
    with atomic.observe(operations.append):
        action()
    return operations


def kinds(operations: list[FileOperation]) -> list[str]:
    return [operation.kind for operation in operations]


class Refusal:
    """Fails the operation with this number, counting from 0."""

    def __init__(self, number: int, error: BaseException) -> None:
        self.left = number
        self.error = error

    def __call__(self, operation: FileOperation) -> None:
        if self.left == 0:
            self.left -= 1
            raise self.error
        self.left -= 1


# Whole files


def test_write_file_goes_temporary_fsync_rename_fsync_of_directory(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    operations = recorded(lambda: atomic.write_file(target, b"new"))
    assert kinds(operations) == ["create", "write", "fsync", "rename", "fsync_directory"]
    create, write, sync, rename, sync_directory = operations
    assert create.path == write.path == sync.path == rename.path
    assert create.path.parent == tmp_path
    assert create.path.name.startswith(".tmp-")
    assert (write.data, rename.target, sync_directory.path) == (b"new", target, tmp_path)
    assert target.read_bytes() == b"new"


def test_write_file_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "a"
    for content in (b"one", b"", b"three" * 100_000):
        atomic.write_file(target, content)
        assert target.read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()], ids=["full", "interrupt"])
def test_a_failing_write_leaves_the_old_file_alone(tmp_path: Path, number: int, error: BaseException) -> None:
    target = tmp_path / "a"
    target.write_bytes(b"old")
    with atomic.observe(Refusal(number, error)), pytest.raises(type(error)):
        atomic.write_file(target, b"new")
    renamed = number == 4  # only the fsync of the directory failed
    assert target.read_bytes() == (b"new" if renamed else b"old")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_short_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may take fewer bytes than it was given."""

    class Stingy:
        def __init__(self, path: Path, *, private: bool) -> None:
            self.file = path.open("xb", buffering=0)

        def write(self, data: memoryview) -> int:
            return self.file.write(data[:7])

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def __enter__(self) -> Stingy:
            return self

        def __exit__(self, *exception: object) -> None:
            self.file.close()

    monkeypatch.setattr(atomic, "create", Stingy)
    content = bytes(range(256)) * 3
    atomic.write_file(tmp_path / "a", content)
    assert (tmp_path / "a").read_bytes() == content


def test_observers_nest_and_end(tmp_path: Path) -> None:
    outer: list[str] = []
    inner: list[str] = []
    with atomic.observe(lambda operation: outer.append(operation.kind)):
        with atomic.observe(lambda operation: inner.append(operation.kind)):
            atomic.append(tmp_path / "x", b"1", sync=False)
        atomic.append(tmp_path / "x", b"2", sync=False)
    atomic.append(tmp_path / "x", b"3", sync=False)
    assert (inner, outer) == (["create", "write"], ["write"])


# Directories


def test_make_directory_makes_every_level_durable_in_its_parent(tmp_path: Path) -> None:
    operations = recorded(lambda: atomic.make_directory(tmp_path / "a" / "b"))
    assert [(operation.kind, operation.path.relative_to(tmp_path).as_posix()) for operation in operations] == [
        ("mkdir", "a"),
        ("fsync_directory", "."),
        ("mkdir", "a/b"),
        ("fsync_directory", "a"),
    ]
    assert recorded(lambda: atomic.make_directory(tmp_path / "a" / "b")) == []


@pytest.mark.parametrize("number", range(4))
def test_make_directory_that_fails_leaves_no_level(tmp_path: Path, number: int) -> None:
    with atomic.observe(Refusal(number, OSError("refused"))), pytest.raises(OSError, match="refused"):
        atomic.make_directory(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_staged_directory_writes_the_manifest_last_and_renames_after_everything_is_durable(tmp_path: Path) -> None:
    target = tmp_path / "step-1"

    def save() -> None:
        with StagedDirectory(target) as staged:
            staged.write("a.bin", b"12")
            with staged.open("deep/b.bin") as writer:
                writer.write(b"3")
                writer.write(memoryview(b"45"))
            staged.commit({"step": 1})

    operations = recorded(save)
    staged = operations[0].path
    steps = [
        (operation.kind, operation.path.relative_to(staged).as_posix())
        if operation.path.is_relative_to(staged)
        else (operation.kind, "parent")
        for operation in operations
    ]
    assert steps == [
        ("mkdir", "."),
        ("fsync_directory", "parent"),
        ("create", "a.bin"),
        ("write", "a.bin"),
        ("fsync", "a.bin"),
        ("mkdir", "deep"),
        ("fsync_directory", "."),
        ("create", "deep/b.bin"),
        ("write", "deep/b.bin"),
        ("write", "deep/b.bin"),
        ("fsync", "deep/b.bin"),
        ("create", "MANIFEST.json"),
        ("write", "MANIFEST.json"),
        ("fsync", "MANIFEST.json"),
        ("fsync_directory", "deep"),
        ("fsync_directory", "."),
        ("rename", "."),
        ("fsync_directory", "parent"),
    ]
    assert operations[-2].target == target


def staged(directory: Path) -> Path:
    with StagedDirectory(directory) as stage:
        stage.write("a.bin", b"0123456789")
        stage.write("deep/b.bin", b"abc")
        stage.write("empty", b"")
        stage.commit({"step": 7, "note": "ü"})
    return directory


def test_a_committed_directory_verifies_and_its_manifest_can_be_checked_by_hand(tmp_path: Path) -> None:
    directory = staged(tmp_path / "c")
    assert staged_directory.verify_directory(directory) == {"step": 7, "note": "ü"}
    body = json.loads((directory / "MANIFEST.json").read_text())
    assert body["files"]["deep/b.bin"] == {
        "size_bytes": 3,
        "xxh3_128": xxhash.xxh3_128(b"abc").hexdigest(),
    }
    claimed = body.pop("sha256")
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    assert claimed == hashlib.sha256(text.encode()).hexdigest()


def test_leaving_without_commit_leaves_nothing(tmp_path: Path) -> None:
    with StagedDirectory(tmp_path / "c") as stage:
        stage.write("a", b"1")

    def break_off() -> None:
        with StagedDirectory(tmp_path / "c") as stage:
            stage.write("a", b"1")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        break_off()
    assert list(tmp_path.iterdir()) == []


def test_an_error_is_reported_where_the_directory_is_gone(tmp_path: Path) -> None:
    def break_off() -> None:
        with StagedDirectory(tmp_path / "c") as stage:
            stage.path.rmdir()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        break_off()


def test_every_flipped_byte_and_every_truncation_is_detected(tmp_path: Path) -> None:
    directory = staged(tmp_path / "c")
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        content = path.read_bytes()
        damaged = [bytes([*content[:at], content[at] ^ 1, *content[at + 1 :]]) for at in range(len(content))]
        damaged += [content[:at] for at in range(len(content))] + [content + b"\n"]
        for version in damaged:
            path.write_bytes(version)
            with pytest.raises(CheckpointError) as caught:
                staged_directory.verify_directory(directory)
            assert caught.value.where == str(path)
            assert caught.value.exit_code == 5
        path.write_bytes(content)
    staged_directory.verify_directory(directory)


def test_missing_and_foreign_files_are_detected(tmp_path: Path) -> None:
    directory = staged(tmp_path / "c")
    (directory / "deep" / "more").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is not in the manifest"):
        staged_directory.verify_directory(directory)
    (directory / "deep" / "more").unlink()
    (directory / "empty").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        staged_directory.verify_directory(directory)
    (directory / "MANIFEST.json").unlink()
    with pytest.raises(CheckpointError, match="Cannot read the manifest"):
        staged_directory.verify_directory(directory)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"\xff", b'{"sha256": 1}', b'{"a": NaN}'])
def test_anything_else_is_not_a_manifest(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "MANIFEST.json").write_bytes(content)
    with pytest.raises(CheckpointError):
        staged_directory.read_manifest(tmp_path)


def test_remove_directory_removes_the_manifest_first(tmp_path: Path) -> None:
    directory = staged(tmp_path / "c")
    operations = recorded(lambda: atomic.remove_directory(directory))
    assert operations[0] == FileOperation("remove", directory / "MANIFEST.json")
    assert (operations[1].kind, operations[1].path) == ("fsync_directory", directory)
    assert (operations[-1].kind, operations[-1].path) == ("fsync_directory", tmp_path)
    assert not directory.exists()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EIO, errno.ENOSPC])
def test_a_file_system_without_sync_of_directories_is_no_error_and_a_failing_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    fails = pytest.raises(OSError) if number in {errno.EIO, errno.ENOSPC} else nullcontext()
    with fails:
        atomic.write_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


# Temporaries


def test_sweep_removes_files_of_dead_writers_and_nothing_else(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    dead = replace(this_process(), process_id=int(finished.stdout), start="")
    names = {
        "dead file": atomic.temporary_name(Path("a.json"), dead).name,
        "dead directory": atomic.temporary_name(Path("step-1"), dead).name,
        "live": atomic.temporary_name(Path("a.json")).name,
        "elsewhere": atomic.temporary_name(Path("a.json"), replace(dead, namespace="12345678")).name,
        "not ours": ".tmp-notes",
        "data": "a.json",
    }
    for what, name in names.items():
        if what.endswith("directory"):
            (tmp_path / name / "deep").mkdir(parents=True)
            (tmp_path / name / "deep" / "x").touch()
        else:
            (tmp_path / name).touch()
    removed = atomic.sweep_temporary(tmp_path)
    assert {path.name for path in removed} == {names["dead file"], names["dead directory"]}
    assert {path.name for path in tmp_path.iterdir()} == {
        names[what] for what in ("live", "elsewhere", "not ours", "data")
    }


def test_our_own_temporary_names_are_recognised(tmp_path: Path) -> None:
    names = {atomic.temporary_name(tmp_path / "a-1-0123abcd-b.json").name for _ in range(50)}
    assert len(names) == 50
    for name in names:
        match = atomic._TEMPORARY.fullmatch(name)
        assert match is not None
        own = this_process()
        found = [match[key] for key in ("host", "pid", "namespace", "start")]
        assert found == [own.host, str(os.getpid()), own.namespace, own.start]


# Logs


def test_append_is_one_write_and_syncs_the_directory_of_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert kinds(recorded(lambda: atomic.append(path, b"1\n", sync=True))) == [
        "create",
        "write",
        "fsync",
        "fsync_directory",
    ]
    assert kinds(recorded(lambda: atomic.append(path, b"2\n", sync=True))) == ["write", "fsync"]
    assert kinds(recorded(lambda: atomic.append(path, b"3\n", sync=False))) == ["write"]
    assert path.read_bytes() == b"1\n2\n3\n"


BODIES = [{"kind": "start", "n": 1}, {"kind": "segment", "name": "ü\n", "f": 0.1}, {"kind": "end", "deep": {"a": [1]}}]


def chained(path: Path) -> HashChainedLog:
    log = HashChainedLog(path)
    log.append(BODIES[:2])
    log.append(BODIES[2:])
    return log


def test_append_returns_the_end_of_the_log(tmp_path: Path) -> None:
    log, end = HashChainedLog(tmp_path / "plan.jsonl"), LogPosition()
    for bodies in (BODIES[:2], [], BODIES[2:]):
        end = log.append(bodies, after=end)
        assert end == log.read_after(LogPosition())[1]
    assert log.read_after(end) == ([], end)


def test_chained_log_reads_back_and_its_lines_can_be_checked_by_hand(tmp_path: Path) -> None:
    log = chained(tmp_path / "plan.jsonl")
    bodies, head = log.read()
    assert bodies == BODIES
    previous = ""
    for line in log.path.read_bytes().splitlines(keepends=True):
        value = json.loads(line)
        checksum = value.pop("xxh3")
        assert value["prev"] == previous
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
        assert checksum == f"{xxhash.xxh3_64_intdigest(text.encode()):016x}"
        previous = hashlib.sha256(line).hexdigest()
    assert head == previous


def test_an_empty_or_missing_log_is_empty(tmp_path: Path) -> None:
    log = HashChainedLog(tmp_path / "plan.jsonl")
    assert log.read() == ([], "")
    assert log.append([]) == LogPosition()
    assert not log.path.exists()
    log.path.touch()
    assert log.read() == ([], "")


def test_every_torn_tail_is_ignored_and_truncated_by_the_next_append(tmp_path: Path) -> None:
    whole = chained(tmp_path / "whole").path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for size in range(len(whole) + 1):
        path = tmp_path / f"log-{size}"
        path.write_bytes(whole[:size])
        complete = next(count for count in range(3, -1, -1) if len(b"".join(lines[:count])) <= size)
        bodies, head = HashChainedLog(path).read()
        assert bodies == BODIES[:complete]
        assert head == (hashlib.sha256(lines[complete - 1]).hexdigest() if complete else "")
        HashChainedLog(path).append(BODIES[complete:])
        assert path.read_bytes() == whole


def test_a_torn_tail_with_a_newline_is_not_an_error(tmp_path: Path) -> None:
    """Sectors of the last write may arrive out of order: garbage that happens to end in a newline."""
    log = chained(tmp_path / "log")
    good = log.path.read_bytes()
    log.path.write_bytes(good + b"\x00" * 30 + b"\n")
    assert log.read()[0] == BODIES
    log.append([{"kind": "more"}])
    assert log.path.read_bytes().startswith(good)
    assert [body["kind"] for body in log.read()[0]] == ["start", "segment", "end", "more"]


def test_every_flipped_byte_before_the_last_line_is_an_error_with_its_line(tmp_path: Path) -> None:
    log = chained(tmp_path / "log")
    whole = log.path.read_bytes()
    lines = whole.splitlines(keepends=True)
    starts = [0, len(lines[0]), len(lines[0]) + len(lines[1]), len(whole)]
    for at in range(starts[2] - 1):
        log.path.write_bytes(bytes([*whole[:at], whole[at] ^ 1, *whole[at + 1 :]]))
        with pytest.raises(DataError) as caught:
            log.read()
        expected = next(number for number in (1, 2) if at < starts[number])
        assert f"Line {expected} " in caught.value.what
        with pytest.raises(DataError):
            log.append([{"kind": "more"}])
    # Damage in the last line (or in the newline before it) looks like a torn append, so the log ends there.
    for at in range(starts[2] - 1, starts[3]):
        log.path.write_bytes(bytes([*whole[:at], whole[at] ^ 1, *whole[at + 1 :]]))
        assert log.read()[0] == BODIES[: 1 if at < starts[2] else 2]


def test_removed_swapped_and_foreign_lines_break_the_chain(tmp_path: Path) -> None:
    log = chained(tmp_path / "log")
    first, second, third = log.path.read_bytes().splitlines(keepends=True)
    other = HashChainedLog(tmp_path / "other")
    other.append([{"kind": "start", "n": 2}])
    foreign = other.path.read_bytes()
    for lines in ([second, third], [first, third, third], [second, first, third], [foreign, second, third]):
        log.path.write_bytes(b"".join(lines))
        with pytest.raises(DataError, match="damaged or out of sequence"):
            log.read()


def test_a_failed_append_is_undone_by_the_next(tmp_path: Path) -> None:
    log = HashChainedLog(tmp_path / "log")
    log.append(BODIES[:1])
    for number in range(2):
        with atomic.observe(Refusal(number, OSError(errno.ENOSPC, "full"))), pytest.raises(OSError):
            log.append(BODIES[1:2])
        bodies, _ = log.read()
        assert bodies in (BODIES[:1], BODIES[:2])
    log.path.write_bytes(log.path.read_bytes()[:-5])
    log.append([{"kind": "more"}])
    assert log.read()[0][-1] == {"kind": "more"}


# Serialisation


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON_VALUES)
def test_canonical_json_is_ascii_and_lossless(value: object) -> None:
    text = atomic.canonical_json(value)
    assert text.isascii()
    assert b"\n" not in text
    assert json.loads(text) == value
    assert atomic.canonical_json(json.loads(text)) == text


def test_canonical_json_does_not_depend_on_the_order_of_keys_and_refuses_nan() -> None:
    assert atomic.canonical_json({"b": 1, "a": [1.0, None]}) == b'{"a":[1.0,null],"b":1}'
    assert atomic.canonical_json({"a": 1, "b": 2}) == atomic.canonical_json({"b": 2, "a": 1})
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError):
            atomic.canonical_json({"a": bad})


def test_is_disk_full() -> None:
    assert atomic.is_disk_full(OSError(errno.ENOSPC, "x"))
    assert atomic.is_disk_full(OSError(errno.EDQUOT, "x"))
    assert not atomic.is_disk_full(OSError(errno.EACCES, "x"))
    assert not atomic.is_disk_full(ValueError("x"))


def test_a_really_full_disk_is_recognised(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(OSError) as caught:
        atomic.append(full, b"x", sync=False)
    assert atomic.is_disk_full(caught.value)


def test_pretty_json_refuses_nan() -> None:
    assert atomic.pretty_json({"b": 1, "a": [0.5]}).startswith(b'{\n  "a": [\n')
    with pytest.raises(ValueError, match="not JSON compliant"):
        atomic.pretty_json({"loss": float("nan")})
