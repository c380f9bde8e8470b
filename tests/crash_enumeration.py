"""What a crash can leave on disk: every prefix of a recorded sequence of file operations, made real.

``record`` runs something under ``core.files.atomic.observe`` and returns its operations; ``crash_states`` replays
prefixes of them onto copies of the directory as it was before. Three kinds of crash:

- between two operations,
- inside a write (nothing, one byte, half, or all but one byte of it arrived),
- a power cut: as between two operations, but what was written to a file and not yet fsynced is gone.

This is written against POSIX, not against the code under test.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from vorox.core.files import atomic
from vorox.core.files.atomic import FileOperation


def record(action: Callable[[], object]) -> list[FileOperation]:
    operations: list[FileOperation] = []
    with atomic.observe(operations.append):
        action()
    return operations


class Disk:
    """A copy of a directory onto which operations recorded elsewhere are applied."""

    def __init__(self, before: Path, recorded_in: Path, copy: Path) -> None:
        shutil.copytree(before, copy)
        self.root, self._recorded_in = copy, recorded_in
        self._durable_bytes: dict[Path, int] = {}

    def _here(self, path: Path) -> Path:
        return self.root / path.relative_to(self._recorded_in)

    def apply(self, operation: FileOperation, written_bytes: int | None = None) -> None:
        path = self._here(operation.path)
        if operation.kind == "mkdir":
            path.mkdir(exist_ok=True)
        elif operation.kind == "create":
            path.touch()
            self._durable_bytes[path] = 0
        elif operation.kind == "write":
            self._durable_bytes.setdefault(path, path.stat().st_size if path.exists() else 0)
            with path.open("ab") as file:
                file.write(operation.data[:written_bytes])
        elif operation.kind == "truncate":
            with path.open("r+b") as file:
                file.truncate(int(operation.data))
        elif operation.kind == "fsync":
            self._durable_bytes.pop(path, None)
        elif operation.kind == "rename":
            assert operation.target is not None
            target = self._here(operation.target)
            path.replace(target)
            moved = {p: n for p, n in self._durable_bytes.items() if p == path or path in p.parents}
            for old, count in moved.items():
                del self._durable_bytes[old]
                self._durable_bytes[target / old.relative_to(path) if old != path else target] = count
        elif operation.kind == "remove":
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
            self._durable_bytes.pop(path, None)
        else:
            assert operation.kind == "fsync_directory", operation.kind

    def cut_power(self) -> None:
        for path, count in self._durable_bytes.items():
            if path.exists():
                with path.open("r+b") as file:
                    file.truncate(count)


def crash_states(
    before: Path, recorded_in: Path, operations: list[FileOperation], scratch: Path
) -> Iterator[tuple[str, Path]]:
    """Every state that a crash can leave, each in a fresh directory that is removed after use, with a name for it."""
    for count in range(len(operations) + 1):
        last = operations[count] if count < len(operations) else None
        variants: list[tuple[str, int | None, bool]] = [("between", None, False), ("power", None, True)]
        if last is not None and last.kind == "write":
            size = len(last.data)
            variants += [(f"torn at {n}", n, False) for n in sorted({0, 1, size // 2, size - 1}) if 0 <= n < size]
        for name, torn_bytes, power in variants:
            copy = scratch / "crashed"
            disk = Disk(before, recorded_in, copy)
            for operation in operations[:count]:
                disk.apply(operation)
            if torn_bytes is not None and last is not None:
                disk.apply(last, torn_bytes)
            if power:
                disk.cut_power()
            yield f"{name} after {count} of {len(operations)} operations", copy
            shutil.rmtree(copy)
