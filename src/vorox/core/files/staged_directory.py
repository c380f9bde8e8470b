"""Atomically committed directories with content hashes: checkpoints and exports.

Every file is hashed while it is written, then fsynced; files written by another library are hashed and fsynced
afterwards. Several ranks can write files of one directory (``StagedPart``); rank 0 commits it. ``MANIFEST.json`` is
written last, then the directory is renamed and its parent fsynced. ``verify_directory`` compares a directory with its
manifest.

Invariant: a directory with a valid manifest holds exactly the files that it names, byte for byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from vorox.core.errors import CheckpointError, UnreadableCheckpointError
from vorox.core.files import atomic
from vorox.core.files.atomic import MANIFEST_NAME, Buffer
from vorox.core.files.json_reader import MalformedJson, open_regular, parse_json

_SHARED = "all ranks need one shared file system that shows new files to every machine without delay"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and content hash (xxh3-128, hex) of one committed file."""

    size_bytes: int
    xxh3_128: str


class HashingWriter:
    """A file being written in a staged directory; counts and hashes its bytes."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file = file
        self._path = path
        self._hash = xxhash.xxh3_128()
        self.size_bytes = 0

    def write(self, data: Buffer) -> int:
        atomic.write(self._file, self._path, data)
        self._hash.update(data)
        size_bytes = memoryview(data).nbytes
        self.size_bytes += size_bytes
        return size_bytes

    def entry(self) -> FileEntry:
        return FileEntry(self.size_bytes, self._hash.hexdigest())


class StagedPart:
    """The files that one rank writes into a directory under construction.

    Args:
        path: The directory, which exists.

    Attributes:
        entries: The finished files by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, FileEntry] = {}

    @contextlib.contextmanager
    def open(self, name: str) -> Generator[HashingWriter]:
        """Open a file for writing. ``name`` may contain ``/`` for sub-directories."""
        path = self.path / name
        if path.parent != self.path:
            atomic.make_directory(path.parent)
        with atomic.create(path) as file:
            writer = HashingWriter(file, path)
            yield writer
            atomic.sync_file(file, path)
        self.entries[name] = writer.entry()

    def write(self, name: str, data: Buffer) -> None:
        with self.open(name) as writer:
            writer.write(data)


class StagedDirectory(StagedPart):
    """A directory under construction, invisible to readers until ``commit``.

    Leaving without a commit removes it, and the parents that were created for it.

    Args:
        target: Its final path, which must not exist at commit.
    """

    def __init__(self, target: Path) -> None:
        super().__init__(atomic.temporary_name(target))
        self.target = target
        self._new: list[Path] = []
        self._committed = False

    def __enter__(self) -> StagedDirectory:
        self._new = atomic.make_directory(self.path)
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._committed:
            shutil.rmtree(self.path, ignore_errors=True)
            atomic.remove_if_empty(self._new[1:])

    def add(self, name: str, entry: FileEntry) -> None:
        """Add a file that another rank wrote, fsynced and hashed.

        Raises:
            CheckpointError: It does not exist here, has another size, or has the name of a different file.
        """
        path = self.path / name
        if name in self.entries:
            raise CheckpointError("Two ranks wrote the same file", where=str(path))
        try:
            size_bytes = path.stat().st_size
        except FileNotFoundError as error:
            raise CheckpointError(
                "A file that another rank wrote is not visible to rank 0", where=str(path), hint=_SHARED
            ) from error
        if size_bytes != entry.size_bytes:
            raise CheckpointError(
                f"A file that another rank wrote has {size_bytes:,} bytes here; that rank wrote {entry.size_bytes:,}",
                where=str(path), hint=_SHARED,
            )  # fmt: skip
        self.entries[name] = entry

    def adopt(self, folder: str) -> None:
        """Add the files that another library wrote below ``folder``: fsync, hash and list them in the manifest.

        Other libraries set modes by the umask alone; the files get our modes.
        """
        for directory, _, names in os.walk(self.path / folder):
            Path(directory).chmod(Path(directory).stat().st_mode & atomic.DIRECTORY_MODE)
            for name in names:
                (Path(directory) / name).chmod((Path(directory) / name).stat().st_mode & atomic.FILE_MODE)
        for path in sorted(path for path in (self.path / folder).rglob("*") if path.is_file()):
            atomic.sync_path(path)
            self.entries[path.relative_to(self.path).as_posix()] = hash_file(path)

    def commit(self, metadata: Mapping[str, Any]) -> Path:
        """Write the manifest, make everything durable and rename the directory to its target.

        Raises:
            CheckpointError: The directory contains a file that is not in the manifest.
        """
        for name in sorted(_list_files(self.path) - set(self.entries)):
            raise CheckpointError("A file in the directory was not written by this save", where=str(self.path / name))
        body: dict[str, Any] = {
            "format": "vorox-directory/1",
            "files": {
                name: {"size_bytes": entry.size_bytes, "xxh3_128": entry.xxh3_128}
                for name, entry in self.entries.items()
            },
            "metadata": dict(metadata),
        }
        body["sha256"] = hashlib.sha256(atomic.canonical_json(body)).hexdigest()
        path = self.path / MANIFEST_NAME
        with atomic.create(path) as file:
            atomic.write(file, path, atomic.pretty_json(body))
            atomic.sync_file(file, path)
        inner = {parent for name in self.entries for parent in Path(name).parents}
        for directory in sorted(inner, reverse=True):  # inner directories first
            atomic.sync_directory(self.path / directory)
        atomic.rename(self.path, self.target)
        self._committed = True
        return self.target


_MANIFEST_TYPES = {
    "files": {...: {"size_bytes": int, "xxh3_128": str}},
    "metadata": {
        "step": int, "chain": str, "fingerprint": str, "config_digest": str, "settings": dict, "environment": dict,
        "spec": (dict, None), "functions": (dict, None),
    },
}  # fmt: skip


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read and check the manifest of a committed directory.

    Returns:
        The manifest, with its ``metadata`` and ``files``.

    Raises:
        CheckpointError: It is missing or damaged.
        UnreadableCheckpointError: A disk error prevents reading it.
    """
    path = directory / MANIFEST_NAME
    try:
        with open_regular(path) as file:
            raw = file.read()
        body = parse_json(raw, path, _MANIFEST_TYPES)
        digest = body.pop("sha256")
        intact = digest == hashlib.sha256(atomic.canonical_json(body)).hexdigest()
        intact = intact and raw == atomic.pretty_json({**body, "sha256": digest})
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise CheckpointError(f"Cannot read the manifest: {error.strerror}", where=str(path)) from error
    except OSError as error:
        raise unreadable_error(error, path) from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError("The manifest is invalid", where=str(path)) from error
    is_whole = {"files", "metadata"} <= body.keys() and all(len(entry) == 2 for entry in body["files"].values())
    if not intact or not is_whole or body.get("format") != "vorox-directory/1":
        raise CheckpointError("The manifest does not match its own hash", where=str(path))
    return body


def has_manifest(directory: Path) -> bool:
    """Whether a directory was committed; one without a manifest is what an interrupted copy or removal left.

    Raises:
        UnreadableCheckpointError: The disk does not tell.
    """
    path = directory / MANIFEST_NAME
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise unreadable_error(error, path) from error
    return True


def hide(directory: Path) -> Path:
    """Rename a committed directory, durably, to a temporary name, and return it; of a symbolic link, nothing is done.

    If its removal is interrupted, ``sweep_temporary`` completes it, and no reader takes the rest for a damaged one.
    """
    if directory.is_symlink():
        return directory
    hidden = atomic.temporary_name(directory)
    atomic.rename(directory, hidden)
    return hidden


def unreadable_error(error: OSError, path: Path) -> UnreadableCheckpointError:
    """Return the error for a checkpoint that the disk fails to read, which says nothing about its content."""
    return UnreadableCheckpointError(
        f"Cannot read a checkpoint: {error.strerror or error}; its content may be intact",
        where=str(error.filename or path),
        hint="check the disk or the network share, then run the same command again; no checkpoint was quarantined",
    )


def verify_directory(
    directory: Path, *, step: int | None = None, extra_files: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Check every file of a committed directory against its manifest, and that there are no other files.

    Args:
        directory: The directory.
        step: The step by its name, if it is a checkpoint.
        extra_files: Names of files that are allowed though the manifest does not list them.

    Returns:
        The manifest's ``metadata``.

    Raises:
        CheckpointError: A file is missing, has a different size or content, or is not in the manifest; a folder is a
            symbolic link; or the checkpoint is of another step.
        UnreadableCheckpointError: A disk error prevents reading a file.
    """
    body = read_manifest(directory)
    expected: dict[str, dict[str, Any]] = body["files"]
    present = _list_files(directory)
    for name in sorted(present - set(expected) - {MANIFEST_NAME} - extra_files):
        raise CheckpointError("A file is not in the manifest", where=str(directory / name))
    for name, entry in sorted(expected.items()):
        path = directory / name
        if name not in present:
            raise CheckpointError("A file of the manifest is missing", where=str(path))
        try:
            with open_regular(path) as file:
                size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes != entry["size_bytes"]:
                raise CheckpointError(
                    f"The file has {size_bytes:,} bytes, but the manifest has {entry['size_bytes']:,}", where=str(path)
                )
            actual = hash_file(path)
        except FileNotFoundError as error:
            raise CheckpointError("A file of the manifest is missing", where=str(path)) from error
        except MalformedJson as error:
            raise CheckpointError("A file of the manifest is not a regular file", where=str(path)) from error
        except OSError as error:
            raise unreadable_error(error, path) from error
        if actual.size_bytes != size_bytes or actual.xxh3_128 != entry["xxh3_128"]:
            raise CheckpointError("The content does not match the hash in the manifest", where=str(path))
    metadata: dict[str, Any] = body["metadata"]
    if step is not None and metadata.get("step") != step:
        raise CheckpointError(f"Directory holds the checkpoint of step {metadata.get('step')}", where=str(directory))
    return metadata


def _list_files(directory: Path) -> set[str]:
    """Return the names of all files and of links to folders, without following the links."""

    def fail(error: OSError) -> None:
        raise unreadable_error(error, directory) from error

    found: set[str] = set()
    for folder, inner, names in os.walk(directory, onerror=fail):
        links = [name for name in inner if (Path(folder) / name).is_symlink()]
        found.update((Path(folder) / name).relative_to(directory).as_posix() for name in (*names, *links))
    return found


def hash_file(path: Path) -> FileEntry:
    """Return size and xxh3-128 of a file, read in blocks."""
    digest = xxhash.xxh3_128()
    size_bytes = 0
    with open_regular(path) as file:
        while block := file.read(1 << 22):
            digest.update(block)
            size_bytes += len(block)
    return FileEntry(size_bytes, digest.hexdigest())
