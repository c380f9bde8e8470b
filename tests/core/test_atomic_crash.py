"""Power cuts during a commit, enumerated for the weakest disk that POSIX allows.

``Disk`` keeps two states: what programs see, and what survives a power cut. Bytes survive after an fsync of their file;
names (new, renamed, removed) after an fsync of their directory. Anything else may or may not have reached the disk,
independently for bytes and names, so four states are created and read back for every prefix of the operations. The
model is independent of the code under test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from vorox.core.errors import CheckpointError
from vorox.core.files import atomic, staged_directory
from vorox.core.files.atomic import FileOperation
from vorox.core.files.chained_log import HashChainedLog
from vorox.core.files.staged_directory import StagedDirectory


@dataclass
class File:
    seen: bytes = b""
    durable: bytes = b""


@dataclass
class Directory:
    seen: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)


Node = File | Directory


def load(path: Path) -> Node:
    if path.is_file():
        return File(path.read_bytes(), path.read_bytes())
    entries = {child.name: load(child) for child in path.iterdir()}
    return Directory(dict(entries), dict(entries))


class Disk:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = load(root)

    def _at(self, path: Path) -> Node:
        node = self.tree
        for part in path.relative_to(self.root).parts:
            assert isinstance(node, Directory)
            node = node.seen[part]
        return node

    def _file(self, path: Path) -> File:
        node = self._at(path)
        assert isinstance(node, File)
        return node

    def _directory(self, path: Path) -> Directory:
        node = self._at(path)
        assert isinstance(node, Directory)
        return node

    def apply(self, operation: FileOperation) -> None:
        path, parent = operation.path, operation.path.parent
        match operation.kind:
            case "mkdir":
                self._directory(parent).seen[path.name] = Directory()
            case "create":
                self._directory(parent).seen[path.name] = File()
            case "write":
                self._file(path).seen += operation.data
            case "truncate":
                self._file(path).seen = self._file(path).seen[: int(operation.data)]
            case "fsync":
                self._file(path).durable = self._file(path).seen
            case "rename":
                assert operation.target is not None
                node = self._directory(parent).seen.pop(path.name)
                self._directory(operation.target.parent).seen[operation.target.name] = node
            case "remove":
                self._directory(parent).seen.pop(path.name)
            case "fsync_directory":
                self._directory(path).durable = dict(self._directory(path).seen)
            case other:
                raise AssertionError(other)

    def survive(self, target: Path, *, bytes_arrived: bool, names_arrived: bool) -> None:
        def write(node: Node, path: Path) -> None:
            if isinstance(node, File):
                path.write_bytes(node.seen if bytes_arrived else node.durable)
                return
            path.mkdir(exist_ok=True)
            for name, child in (node.seen if names_arrived else node.durable).items():
                write(child, path / name)

        write(self.tree, target)


def power_cuts(directory: Path, action: Callable[[], object], scratch: Path) -> Iterator[tuple[int, int, Path]]:
    """(operations done, operations in all, what is on the disk then) for every prefix and state."""
    disk = Disk(directory)
    operations: list[FileOperation] = []
    with atomic.observe(operations.append):
        action()
    for count in range(len(operations) + 1):
        if count:
            disk.apply(operations[count - 1])
        for number, (data, names) in enumerate(itertools.product((False, True), repeat=2)):
            survived = scratch / f"{count}-{number}"
            disk.survive(survived, bytes_arrived=data, names_arrived=names)
            yield count, len(operations), survived


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "place"
    path.mkdir()
    return path


def test_the_model_itself_notices_a_missing_fsync(place: Path, tmp_path: Path) -> None:
    """Negative control: rename without fsync, as many programs do it, is seen to tear."""

    def careless() -> None:
        atomic._perform("create", place / "t", lambda: None)
        atomic._perform("write", place / "t", lambda: None, data=b"new")
        atomic._perform("rename", place / "t", lambda: None, target=place / "a")
        atomic._perform("fsync_directory", place, lambda: None)

    (place / "a").write_bytes(b"old")
    contents = {(cut / "a").read_bytes() for _, _, cut in power_cuts(place, careless, tmp_path)}
    assert contents == {b"old", b"", b"new"}


def test_a_written_file_is_old_or_new_and_durable_on_return(place: Path, tmp_path: Path) -> None:
    target = place / "a"
    target.write_bytes(b"old")
    for done, total, cut in power_cuts(place, lambda: atomic.write_file(target, b"new"), tmp_path):
        content = (cut / "a").read_bytes()
        assert content == b"new" if done == total else content in (b"old", b"new")


def test_a_new_file_is_absent_or_whole(place: Path, tmp_path: Path) -> None:
    for done, total, cut in power_cuts(place, lambda: atomic.write_file(place / "a", b"new"), tmp_path):
        path = cut / "a"
        assert path.read_bytes() == b"new" if path.exists() else done < total


def commit(target: Path) -> None:
    with StagedDirectory(target) as staged:
        staged.write("model.bin", b"m" * 100)
        staged.write("deep/er/state.json", b"{}")
        staged.commit({"step": 3})


@pytest.mark.parametrize("parent", ["", "checkpoints", "runs/x/checkpoints"])
def test_a_staged_directory_is_absent_or_verifies(place: Path, tmp_path: Path, parent: str) -> None:
    target = place / parent / "step-3"
    for done, total, cut in power_cuts(place, lambda: commit(target), tmp_path):
        survived = cut / parent / "step-3"
        if survived.exists():
            assert staged_directory.verify_directory(survived) == {"step": 3}
        else:
            assert done < total


def test_what_another_library_wrote_is_durable_before_the_manifest_names_it(place: Path) -> None:
    """Its writes are not observed, so the order of fsyncs is what can be seen."""
    operations: list[FileOperation] = []
    with atomic.observe(operations.append), StagedDirectory(place / "step-3") as staged:
        (staged.path / "arrays" / "deep").mkdir(parents=True)
        foreign = [staged.path / "arrays" / name for name in ("a.bin", "deep/b.bin")]
        for path in foreign:
            path.write_bytes(b"x" * 100)
        staged.adopt("arrays")
        staged.commit({"step": 3})
    kinds = [(operation.kind, operation.path) for operation in operations]
    committed = next(index for index, (kind, _) in enumerate(kinds) if kind == "rename")
    for path in foreign:
        assert ("fsync", path) in kinds[:committed]
    assert staged_directory.verify_directory(place / "step-3") == {"step": 3}


def test_a_removed_directory_is_complete_or_recognisably_removed(place: Path, tmp_path: Path) -> None:
    commit(place / "step-3")
    for done, total, cut in power_cuts(place, lambda: atomic.remove_directory(place / "step-3"), tmp_path):
        survived = cut / "step-3"
        if not survived.exists():
            continue
        assert done < total
        try:
            staged_directory.read_manifest(survived)
        except CheckpointError:
            continue
        assert staged_directory.verify_directory(survived) == {"step": 3}


def test_appends_to_a_chained_log_keep_every_earlier_entry(place: Path, tmp_path: Path) -> None:
    log = HashChainedLog(place / "log")
    bodies = [{"n": n} for n in range(4)]

    def append() -> None:
        for body in bodies:
            log.append([body])

    sizes: set[int] = set()
    for done, total, cut in power_cuts(place, append, tmp_path):
        read, _ = HashChainedLog(cut / "log").read()
        assert read == bodies[: len(read)]
        assert len(read) == 4 or done < total
        sizes.add(len(read))
    assert sizes == {0, 1, 2, 3, 4}


def test_truncating_a_torn_tail_keeps_every_earlier_entry(place: Path, tmp_path: Path) -> None:
    log = HashChainedLog(place / "log")
    log.append([{"n": 0}, {"n": 1}])
    log.path.write_bytes(log.path.read_bytes()[:-3])
    for done, total, cut in power_cuts(place, lambda: log.append([{"n": 2}]), tmp_path):
        read, _ = HashChainedLog(cut / "log").read()
        assert read in ([{"n": 0}], [{"n": 0}, {"n": 2}])
        assert done < total or read == [{"n": 0}, {"n": 2}]


def test_a_directory_that_was_made_stays(place: Path, tmp_path: Path) -> None:
    target = place / "a" / "b" / "c"
    for done, total, cut in power_cuts(place, lambda: atomic.make_directory(target), tmp_path):
        assert (cut / "a" / "b" / "c").is_dir() or done < total
