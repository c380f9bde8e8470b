"""Downloads from the hub: each file fetched once, resumed at the byte, verified by its hash.

A name (``fineweb10B``) or an ``hf://`` location goes in, files below a directory come out. A partial file has a hidden
name that includes the version, and gets its own name once it is complete and its hash matches. Invariants: a visible
file is complete and the one that the hub listed; no file name of a repository leads outside the directory.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from vorox.core.errors import ConfigError, DataError, DoesNotFitError
from vorox.core.files.atomic import is_disk_full, make_directory, pretty_json, rename, write_file
from vorox.core.files.file_holder import FileLock
from vorox.core.platform.environment import free_disk_bytes
from vorox.data.storage import StoredFile, canonical_uri, list_files, open_range, retry_budget
from vorox.data.storage.hub import parse_hub_uri, resolve_commit
from vorox.data.text.shard_format import SHORT_HEADER_BYTES, parse_header

DATASETS = {
    "fineweb10B": "hf://datasets/kjj0/fineweb10B-gpt2",
    "fineweb100B": "hf://datasets/kjj0/fineweb100B-gpt2",
    "finewebedu10B": "hf://datasets/kjj0/finewebedu10B-gpt2",
}
"""Token shards with the GPT-2 vocabulary, 10^8 tokens each, in the format of llm.c and modded-nanogpt."""

RECORD_NAME = "DOWNLOAD.json"
_READ_BYTES = 1 << 20
_RESERVED_BYTES = 64 << 20

DownloadProgress = Callable[[str, int, int], None]
"""Called with (file, bytes done, total bytes)."""


@dataclass(frozen=True, slots=True)
class DownloadedFile:
    """A downloaded file.

    Attributes:
        name: Relative to the directory, as in the repository.
        size_bytes: Size.
        version: ``blob:`` and the SHA-256 of a large file or git's hash of a small one.
        fetched_bytes: Bytes transferred this time: 0 if the file existed, less than its size if it was resumed.
    """

    name: str
    size_bytes: int
    version: str
    fetched_bytes: int


@dataclass(frozen=True, slots=True)
class DownloadReport:
    """What the directory contains."""

    directory: Path
    location: str
    commit: str
    files: tuple[DownloadedFile, ...]


def download(
    name: str, output: Path, *, shards: int | None = None, on_progress: DownloadProgress | None = None
) -> DownloadReport:
    """Download files of the hub.

    Args:
        name: One of ``DATASETS``, or ``hf://datasets/OWNER/NAME[@REVISION]/PATTERN``.
        output: Directory, created if necessary.
        shards: Number of training shards of a named dataset, besides its validation shards, or number of files of a
            location. ``None`` downloads all.
        on_progress: Called while bytes arrive.

    Raises:
        ConfigError: The name is unknown, or another process downloads into the directory.
        DoesNotFitError: The disk has too little space.
        DataError: The hub refuses or lacks a file, or a file has the wrong hash. Partial files are kept.
    """
    location = DATASETS.get(name, name)
    if not location.startswith("hf://"):
        raise ConfigError(
            f"Download {name!r} is unknown", where=name,
            hint=f"use one of {', '.join(sorted(DATASETS))}, or hf://datasets/OWNER/NAME/PATTERN",
        )  # fmt: skip
    output = output.expanduser().absolute()
    commit, files = _list_files(location, named=name in DATASETS, shards=shards)
    names = [_name(file, commit) for file in files]
    paths = [_target_path(output, name, file) for name, file in zip(names, files, strict=True)]
    try:
        make_directory(output)
        with FileLock(output / ".download.lock", blocking=False, purpose=f"the directory {output}"):
            _check_disk_space(output, files, paths)
            report = on_progress or _ignore
            fetched = [
                _fetch(file, path, lambda done, name=name, file=file: report(f"fetch {name}", done, file.size_bytes))
                for name, file, path in zip(names, files, paths, strict=True)
            ]
            done = tuple(
                DownloadedFile(name, file.size_bytes, file.version or "", fresh)
                for name, file, fresh in zip(names, files, fetched, strict=True)
            )
            record = [{key: value for key, value in asdict(file).items() if key != "fetched_bytes"} for file in done]
            write_file(
                output / RECORD_NAME, pretty_json({"location": location, "commit": commit, "files": record})
            )  # fmt: skip
    except OSError as error:
        full = " (the disk is full)" if is_disk_full(error) else ""
        raise DataError(
            f"The download cannot be written{full}: {error.strerror or error}", where=str(error.filename or output),
            hint="make room and grant write permission, then run the same command again",
            saved="partial files are kept; the next run resumes them",
        ) from error  # fmt: skip
    return DownloadReport(output, location, commit, done)


def _ignore(what: str, done: int, total: int) -> None:
    del what, done, total


def _list_files(location: str, *, named: bool, shards: int | None) -> tuple[str, list[StoredFile]]:
    """Return the commit of a location and its requested files."""
    with retry_budget():
        hub = parse_hub_uri(canonical_uri(location))
        commit = resolve_commit(canonical_uri(location))
        root = f"hf://{hub.kind}/{hub.name}@{commit}/"
        files = list_files(root + ("*.bin" if named else hub.path or "**"), ("",))
    if named:
        held_out = [file for file in files if "_val_" in _name(file, commit)]
        training = [file for file in files if file not in held_out]
        return commit, held_out + training[:shards]
    return commit, files[:shards]


def _name(file: StoredFile, commit: str) -> str:
    """Return the name of a file in its repository."""
    return file.uri.partition(f"@{commit}/")[2]


def _target_path(output: Path, name: str, file: StoredFile) -> Path:
    """Return the path of a file below the output; refuse names that lead outside it."""
    parts = PurePosixPath(name).parts
    is_unsafe = re.search(r"[\\:\x00-\x1f]", name) or name.startswith("/") or ".." in parts or not parts
    path = output.joinpath(*parts) if not is_unsafe else output
    if is_unsafe or parts[0] in {RECORD_NAME, ".download.lock"} or not path.resolve().is_relative_to(output.resolve()):
        raise DataError(
            f"The repository contains a file named {name!r}, which is not a safe name below the output directory",
            where=file.uri, hint="select files by a pattern that excludes it",
        )  # fmt: skip
    return path


def _check_disk_space(output: Path, files: Sequence[StoredFile], paths: Sequence[Path]) -> None:
    missing = sum(
        file.size_bytes - (part.stat().st_size if (part := _partial(file, path)).exists() else 0)
        for file, path in zip(files, paths, strict=True)
        if not path.exists()
    )
    free = free_disk_bytes(output)
    if missing and missing + _RESERVED_BYTES > free:
        raise DoesNotFitError(
            f"The disk has too little space: {missing:,} more bytes are needed and {_RESERVED_BYTES:,} in reserve, but "
            f"{free:,} are free",
            where=str(output),
            hint="make room, choose another --output, or fewer --shards",
        )  # fmt: skip


def _partial(file: StoredFile, path: Path) -> Path:
    version = hashlib.sha256((file.version or "").encode()).hexdigest()[:16]
    return path.with_name(f".{path.name}.{version}.part")


class _ContentHash:
    """The hash by which the hub identifies a file: SHA-256 of large ones, git's of small ones."""

    def __init__(self, file: StoredFile) -> None:
        self._expected = (file.version or "").removeprefix("blob:")
        if re.fullmatch(r"[0-9a-f]{64}", self._expected):
            self._digest: Any = hashlib.sha256()
        else:
            self._digest = hashlib.sha1(b"blob %d\0" % file.size_bytes)  # noqa: S324 - git's hash of a blob
        self.size_bytes = 0

    def add(self, data: bytes) -> None:
        self._digest.update(data)
        self.size_bytes += len(data)

    def add_file(self, path: Path, max_bytes: int) -> None:
        with path.open("rb") as file:
            while (left := max_bytes - self.size_bytes) > 0 and (data := file.read(min(_READ_BYTES, left))):
                self.add(data)

    @property
    def matches(self) -> bool:
        return self._digest.hexdigest() == self._expected


def _fetch(file: StoredFile, path: Path, report: Callable[[int], None]) -> int:
    """Download and verify a file, or verify an existing one; return the bytes transferred."""
    if path.exists():
        _check_existing(file, path)
        report(file.size_bytes)
        return 0
    make_directory(path.parent)
    partial = _partial(file, path)
    content = _ContentHash(file)
    if partial.exists():
        content.add_file(partial, file.size_bytes)
    resumed = content.size_bytes
    with partial.open("r+b" if partial.exists() else "xb", buffering=0) as writer, retry_budget():
        writer.truncate(resumed)
        writer.seek(resumed)
        if resumed < file.size_bytes:
            with open_range(file, resumed) as reader:
                while data := reader.read(_READ_BYTES):
                    _write(writer, data)
                    content.add(data)
                    report(content.size_bytes)
        os.fsync(writer.fileno())
    if content.size_bytes != file.size_bytes or not content.matches:
        partial.unlink()
        raise DataError(
            f"The hash of the {content.size_bytes:,} downloaded bytes is not the one that the hub lists",
            where=file.uri,
            hint="run the same command again; it downloads this file from the start", saved="complete files are kept",
        )  # fmt: skip
    if path.suffix == ".bin":
        with partial.open("rb") as start:
            parse_header(start.read(SHORT_HEADER_BYTES), file.size_bytes, file.uri)
    rename(partial, path)
    return file.size_bytes - resumed


def _write(writer: Any, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[writer.write(rest) :]


def _check_existing(file: StoredFile, path: Path) -> None:
    content = _ContentHash(file)
    if path.is_file() and path.stat().st_size == file.size_bytes:
        content.add_file(path, file.size_bytes)
    if content.size_bytes != file.size_bytes or not content.matches:
        raise DataError(
            "A file with this name exists, with other content than the hub's", where=str(path),
            hint="remove it, or choose another --output",
        )  # fmt: skip
