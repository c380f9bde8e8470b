"""Files of the hub on this machine: fetched once, checked against the hub's own hashes, resumed at the byte.

A name (``fineweb10B``) or an ``hf://`` location goes in, files below a directory come out. What arrives lies under a
name that begins with a dot and holds the version, until all of it is there and its hash is right; only then it appears
under its own name. Invariants: a file that is visible is whole and is what the hub listed; nothing is written outside
of the directory, whatever a file of the repository is called.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from vorox.core.atomic import is_disk_full, make_directory, pretty_json, rename, write_file
from vorox.core.errors import ConfigError, DataError, DoesNotFitError
from vorox.core.lock import FileLock
from vorox.data.shard_format import SHORT_HEADER_BYTES, parse_header
from vorox.data.storage import StoredFile, canonical_uri, list_files, open_range, retry_budget
from vorox.data.storage.hub import parse_hub_uri, resolve_commit

NAMED = {
    "fineweb10B": "hf://datasets/kjj0/fineweb10B-gpt2",
    "fineweb100B": "hf://datasets/kjj0/fineweb100B-gpt2",
    "finewebedu10B": "hf://datasets/kjj0/finewebedu10B-gpt2",
}
"""Token shards of GPT-2's vocabulary, 10^8 tokens each, as llm.c and modded-nanogpt read them."""

RECORD_NAME = "DOWNLOAD.json"
_PIECE_BYTES = 1 << 20
_SPARE_BYTES = 64 << 20

DownloadProgress = Callable[[str, int, int], None]
"""Called with (what is fetched, bytes done, bytes)."""


@dataclass(frozen=True, slots=True)
class DownloadedFile:
    """A file that is there.

    Attributes:
        name: Relative to the directory, as in the repository.
        size_bytes: Its length.
        version: What pins its content: ``blob:`` and the SHA-256 of large files, git's hash of small ones.
        fetched_bytes: What came over the network this time: 0 if it was there, less than all if it was resumed.
    """

    name: str
    size_bytes: int
    version: str
    fetched_bytes: int


@dataclass(frozen=True, slots=True)
class DownloadReport:
    """What lies in the directory now."""

    directory: Path
    location: str
    commit: str
    files: tuple[DownloadedFile, ...]


def download(
    name: str, output: Path, *, shards: int | None = None, on_progress: DownloadProgress | None = None
) -> DownloadReport:
    """Fetch files of the hub.

    Args:
        name: One of ``NAMED``, or ``hf://datasets/OWNER/NAME[@REVISION]/PATTERN``.
        output: Directory; made if need be.
        shards: Only so many training shards of a named one (its validation shards come anyway), or only the first so
            many files of a location.
        on_progress: Told while bytes arrive.

    Raises:
        ConfigError: The name says nothing, or somebody else downloads into the directory.
        DoesNotFitError: The disk has too little room.
        DataError: The hub refuses or lacks a file, or what arrives is not what it listed; what arrived is kept.
    """
    location = NAMED.get(name, name)
    if not location.startswith("hf://"):
        raise ConfigError(
            f"there is nothing to download by the name of {name!r}", where=name,
            hint=f"give one of {', '.join(sorted(NAMED))}, or hf://datasets/OWNER/NAME/PATTERN",
        )  # fmt: skip
    output = output.expanduser().absolute()
    commit, files = _listed(location, named=name in NAMED, shards=shards)
    names = [_name(file, commit) for file in files]
    places = [_place(output, name, file) for name, file in zip(names, files, strict=True)]
    try:
        make_directory(output)
        with FileLock(output / ".download.lock", blocking=False, purpose=f"the directory {output}"):
            _refuse_too_little_room(output, files, places)
            report = on_progress or _silent
            fetched = [
                _fetch(file, place, lambda done, name=name, file=file: report(f"fetch {name}", done, file.size_bytes))
                for name, file, place in zip(names, files, places, strict=True)
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
            f"cannot be written{full}: {error.strerror or error}", where=str(error.filename or output),
            hint="make room and give write permission, then run the same command again",
            saved="what arrived is kept; the next run goes on behind it",
        ) from error  # fmt: skip
    return DownloadReport(output, location, commit, done)


def _silent(what: str, done: int, total: int) -> None:
    del what, done, total


def _listed(location: str, *, named: bool, shards: int | None) -> tuple[str, list[StoredFile]]:
    """The commit, and the files that are wanted at it."""
    with retry_budget():
        place = parse_hub_uri(canonical_uri(location))
        commit = resolve_commit(canonical_uri(location))
        root = f"hf://{place.kind}/{place.name}@{commit}/"
        files = list_files(root + ("*.bin" if named else place.path or "**"), ("",))
    if named:
        held_out = [file for file in files if "_val_" in _name(file, commit)]
        training = [file for file in files if file not in held_out]
        return commit, held_out + training[:shards]
    return commit, files[:shards]


def _name(file: StoredFile, commit: str) -> str:
    """The name in the repository."""
    return file.uri.partition(f"@{commit}/")[2]


def _place(output: Path, name: str, file: StoredFile) -> Path:
    """Where a file goes: below the output under its name in the repository, or nowhere."""
    parts = PurePosixPath(name).parts
    strange = re.search(r"[\\:\x00-\x1f]", name) or name.startswith("/") or ".." in parts or not parts
    place = output.joinpath(*parts) if not strange else output
    if strange or parts[0] in {RECORD_NAME, ".download.lock"} or not place.resolve().is_relative_to(output.resolve()):
        raise DataError(
            f"the repository has a file of the name {name!r}, which may not be written below the directory",
            where=file.uri, hint="name the files that you want by a pattern that leaves it out",
        )  # fmt: skip
    return place


def _refuse_too_little_room(output: Path, files: Sequence[StoredFile], places: Sequence[Path]) -> None:
    missing = sum(
        file.size_bytes - (part.stat().st_size if (part := _partial(file, place)).exists() else 0)
        for file, place in zip(files, places, strict=True)
        if not place.exists()
    )
    free = shutil.disk_usage(output).free
    if missing and missing + _SPARE_BYTES > free:
        raise DoesNotFitError(
            f"{missing:,} bytes are still to come, {_SPARE_BYTES:,} have to stay free, {free:,} are free",
            where=str(output),
            hint="make room, name another --output, or take fewer with --shards",
        )  # fmt: skip


def _partial(file: StoredFile, place: Path) -> Path:
    version = hashlib.sha256((file.version or "").encode()).hexdigest()[:16]
    return place.with_name(f".{place.name}.{version}.part")


class _Content:
    """The hash by which the hub knows a file: SHA-256 of large ones, git's of small ones."""

    def __init__(self, file: StoredFile) -> None:
        self._expected = (file.version or "").removeprefix("blob:")
        if re.fullmatch(r"[0-9a-f]{64}", self._expected):
            self._digest: Any = hashlib.sha256()
        else:
            self._digest = hashlib.sha1(b"blob %d\0" % file.size_bytes)  # noqa: S324 - it is how git names content
        self.size_bytes = 0

    def add(self, data: bytes) -> None:
        self._digest.update(data)
        self.size_bytes += len(data)

    def add_file(self, path: Path, most_bytes: int) -> None:
        with path.open("rb") as file:
            while (left := most_bytes - self.size_bytes) > 0 and (piece := file.read(min(_PIECE_BYTES, left))):
                self.add(piece)

    @property
    def is_right(self) -> bool:
        return self._digest.hexdigest() == self._expected


def _fetch(file: StoredFile, place: Path, report: Callable[[int], None]) -> int:
    """Have a file, whole and checked; returns the bytes that came over the network."""
    if place.exists():
        _check_present(file, place)
        report(file.size_bytes)
        return 0
    make_directory(place.parent)
    partial = _partial(file, place)
    content = _Content(file)
    if partial.exists():
        content.add_file(partial, file.size_bytes)
    resumed = content.size_bytes
    with partial.open("r+b" if partial.exists() else "xb", buffering=0) as writer, retry_budget():
        writer.truncate(resumed)
        writer.seek(resumed)
        if resumed < file.size_bytes:
            with open_range(file, resumed) as reader:
                while piece := reader.read(_PIECE_BYTES):
                    _write(writer, piece)
                    content.add(piece)
                    report(content.size_bytes)
        os.fsync(writer.fileno())
    if content.size_bytes != file.size_bytes or not content.is_right:
        partial.unlink()
        raise DataError(
            f"{content.size_bytes:,} bytes arrived whose hash is not the one that the hub lists", where=file.uri,
            hint="run the same command again; it fetches this file anew", saved="files that were complete are kept",
        )  # fmt: skip
    if place.suffix == ".bin":
        with partial.open("rb") as start:
            parse_header(start.read(SHORT_HEADER_BYTES), file.size_bytes, file.uri)
    rename(partial, place)
    return file.size_bytes - resumed


def _write(writer: Any, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[writer.write(rest) :]


def _check_present(file: StoredFile, place: Path) -> None:
    content = _Content(file)
    if place.is_file() and place.stat().st_size == file.size_bytes:
        content.add_file(place, file.size_bytes)
    if content.size_bytes != file.size_bytes or not content.is_right:
        raise DataError(
            "a file of this name is there, with other content than the hub's", where=str(place),
            hint="remove it, or name another --output",
        )  # fmt: skip
