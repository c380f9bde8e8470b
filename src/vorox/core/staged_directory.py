"""Directories that appear whole or not at all, with a hash of every byte: checkpoints and exports.

Every file is hashed while it is written and fsynced, or, where another library wrote it, hashed and fsynced afterwards;
``MANIFEST.json`` goes last; then the directory is renamed and its parent fsynced. ``verify_directory`` holds what lies
there to the manifest.

Invariant: a directory with a valid manifest holds exactly the files that it names, byte for byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from vorox.core import atomic
from vorox.core.atomic import MANIFEST_NAME, Buffer
from vorox.core.errors import CheckpointError, UnreadableCheckpointError


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and content hash (xxh3-128, hex) of one committed file."""

    size_bytes: int
    xxh3_128: str


class HashingWriter:
    """A file being written inside a staged directory; counts and hashes what passes."""

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


class StagedDirectory:
    """A directory under construction. Nobody sees it until ``commit``; leaving without one removes it.

    Args:
        target: Where it will appear. Must not exist at commit.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = atomic.temporary_name(target)
        self._entries: dict[str, FileEntry] = {}
        self._committed = False

    def __enter__(self) -> StagedDirectory:
        atomic.make_directory(self.path)
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._committed:
            shutil.rmtree(self.path, ignore_errors=True)

    @contextlib.contextmanager
    def open(self, name: str) -> Generator[HashingWriter]:
        """Write one file. ``name`` may hold ``/`` for sub-directories."""
        path = self.path / name
        if path.parent != self.path:
            atomic.make_directory(path.parent)
        with atomic.create(path) as file:
            writer = HashingWriter(file, path)
            yield writer
            atomic.sync_file(file, path)
        self._entries[name] = writer.entry()

    def write(self, name: str, data: Buffer) -> None:
        with self.open(name) as writer:
            writer.write(data)

    def adopt(self, folder: str) -> None:
        """Take in what another library wrote below ``folder``: all of it is fsynced, hashed and in the manifest.

        Other libraries create files by the umask alone; they get the modes of our own.
        """
        for directory, _, names in os.walk(self.path / folder):
            Path(directory).chmod(Path(directory).stat().st_mode & atomic.DIRECTORY_MODE)
            for name in names:
                (Path(directory) / name).chmod((Path(directory) / name).stat().st_mode & atomic.FILE_MODE)
        for path in sorted(path for path in (self.path / folder).rglob("*") if path.is_file()):
            atomic.sync_path(path)
            self._entries[path.relative_to(self.path).as_posix()] = hash_file(path)

    def commit(self, metadata: Mapping[str, Any]) -> Path:
        """Write the manifest, make everything durable and let the directory appear under its name."""
        body: dict[str, Any] = {
            "format": "vorox-directory/1",
            "files": {
                name: {"size_bytes": entry.size_bytes, "xxh3_128": entry.xxh3_128}
                for name, entry in self._entries.items()
            },
            "metadata": dict(metadata),
        }
        body["sha256"] = hashlib.sha256(atomic.canonical_json(body)).hexdigest()
        path = self.path / MANIFEST_NAME
        with atomic.create(path) as file:
            atomic.write(file, path, atomic.pretty_json(body))
            atomic.sync_file(file, path)
        inner = {parent for name in self._entries for parent in Path(name).parents}
        for directory in sorted(inner, reverse=True):  # what is inside goes before what holds it
            atomic.sync_directory(self.path / directory)
        atomic.rename(self.path, self.target)
        self._committed = True
        return self.target


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read a committed directory's manifest and check the manifest itself.

    Returns:
        The ``metadata`` and ``files`` mappings as committed.

    Raises:
        CheckpointError: There is none, or any byte of it changed.
        UnreadableCheckpointError: The disk did not deliver it.
    """
    path = directory / MANIFEST_NAME
    try:
        raw = path.read_bytes()
        body = json.loads(raw)
        digest = body.pop("sha256")
        intact = digest == hashlib.sha256(atomic.canonical_json(body)).hexdigest()
        intact = intact and raw == atomic.pretty_json({**body, "sha256": digest})
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise CheckpointError(f"no readable manifest: {error.strerror}", where=str(path)) from error
    except OSError as error:
        raise unreadable_error(error, path) from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError("the manifest is not valid", where=str(path)) from error
    if not intact or body.get("format") != "vorox-directory/1":
        raise CheckpointError("the manifest does not match its own hash", where=str(path))
    return body


def unreadable_error(error: OSError, path: Path) -> UnreadableCheckpointError:
    """What to say when a checkpoint cannot be read: the disk, not the checkpoint, is at fault."""
    return UnreadableCheckpointError(
        f"a checkpoint cannot be read: {error.strerror or error}; this says nothing about its content",
        where=str(error.filename or path),
        hint="check the disk or the network share, then run the same command again; nothing was set aside",
    )


def verify_directory(directory: Path, *, extra_files: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Check every file of a committed directory against its manifest, and that nothing else lies in it.

    Args:
        directory: The directory.
        extra_files: Names of files that may lie in it though the manifest does not know them.

    Returns:
        The manifest's ``metadata``.

    Raises:
        CheckpointError: A file is missing, has another size or other content, or is not in the manifest; a folder in
            it is a link.
        UnreadableCheckpointError: The disk did not deliver a file.
    """
    body = read_manifest(directory)
    expected: dict[str, dict[str, Any]] = body["files"]
    present = _files_below(directory)
    for name in sorted(present - set(expected) - {MANIFEST_NAME} - extra_files):
        raise CheckpointError("a file that the manifest does not know", where=str(directory / name))
    for name, entry in sorted(expected.items()):
        path = directory / name
        if name not in present:
            raise CheckpointError("a file of the manifest is missing", where=str(path))
        try:
            actual = hash_file(path)
        except FileNotFoundError as error:
            raise CheckpointError("a file of the manifest is missing", where=str(path)) from error
        except OSError as error:
            raise unreadable_error(error, path) from error
        if actual.size_bytes != entry["size_bytes"]:
            raise CheckpointError(
                f"the file has {actual.size_bytes:,} bytes, the manifest says {entry['size_bytes']:,}", where=str(path)
            )
        if actual.xxh3_128 != entry["xxh3_128"]:
            raise CheckpointError("the content does not match the hash in the manifest", where=str(path))
    return body["metadata"]


def _files_below(directory: Path) -> set[str]:
    """Names of all files and of links to folders, which are not entered."""

    def fail(error: OSError) -> None:
        raise unreadable_error(error, directory) from error

    found: set[str] = set()
    for folder, inner, names in os.walk(directory, onerror=fail):
        links = [name for name in inner if (Path(folder) / name).is_symlink()]
        found.update((Path(folder) / name).relative_to(directory).as_posix() for name in (*names, *links))
    return found


def hash_file(path: Path) -> FileEntry:
    """Size and xxh3-128 of a file, read in pieces."""
    digest = xxhash.xxh3_128()
    size_bytes = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            size_bytes += len(piece)
    return FileEntry(size_bytes, digest.hexdigest())
