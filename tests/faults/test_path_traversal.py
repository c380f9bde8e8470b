"""What a mirror brings: no name leads out of the run directory, and a disk that refuses is no fault of the mirror."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.files import atomic
from vorox.core.files.atomic import MANIFEST_NAME, FileOperation
from vorox.core.files.staged_directory import StagedDirectory, hash_file
from vorox.data.storage import StoredFile, list_files
from vorox.training.mirror import restore
from vorox.training.mirror.contents import SNAPSHOT_MANIFEST, Contents, MirroredCheckpoint, encode_snapshot
from vorox.training.mirror.restore import fetch_checkpoint, restore_run

HOSTILE = [
    "../outside", "a/../../outside", "..", "{absolute}/outside", "/", "", ".", "..\\outside", "C:\\outside",
    "C:/outside", "a\0b", "a\nb", "\u202eoutside", "./../outside",
]  # fmt: skip


def stored(path: Path) -> StoredFile:
    return list_files(str(path), ("",))[0]


def checkpoint_files(home: Path, name: str) -> dict[str, StoredFile]:
    """A checkpoint whose manifest, valid in itself, names a file in a hostile way."""
    with StagedDirectory(home / "checkpoint") as directory:
        directory.write("payload", b"evil")
        directory.commit({"step": 4, "chain": "x"})
    manifest = home / "checkpoint" / MANIFEST_NAME
    body = json.loads(manifest.read_bytes())
    body.pop("sha256")
    body["files"] = {name: body["files"]["payload"]}
    body["sha256"] = hashlib.sha256(atomic.canonical_json(body)).hexdigest()
    manifest.write_bytes(atomic.pretty_json(body))
    return {MANIFEST_NAME: stored(manifest), name: stored(home / "checkpoint" / "payload")}


def everything(home: Path) -> set[str]:
    return {str(path) for path in home.rglob("*")}


@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    name = name.replace("{absolute}", str(tmp_path))
    files = checkpoint_files(tmp_path / "mirror", name)
    before = everything(tmp_path)
    staged = tmp_path / "run" / "checkpoints" / "staged"
    with pytest.raises(CheckpointError) as refused:
        fetch_checkpoint(files, staged)
    assert refused.value.exit_code == 5
    assert everything(tmp_path) - before <= {str(path) for path in (*staged.parents, staged, staged / MANIFEST_NAME)}


@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_the_files_of_a_run(name: str, tmp_path: Path) -> None:
    name = name.replace("{absolute}", str(tmp_path))
    found = contents(tmp_path / "mirror", name)
    before = everything(tmp_path)
    with pytest.raises(CheckpointError) as refused:
        restore_run(found, tmp_path / "runs" / "run", lambda text, level="info": None)
    assert refused.value.exit_code == 5
    left = {path for path in everything(tmp_path) - before if Path(path).is_file() and Path(path).name != "LOCK"}
    assert left == set()


def contents(mirror: Path, name: str) -> Contents:
    """A mirror whose checkpoint is good and whose record names a file in a hostile way."""
    files = checkpoint_files(mirror, "payload")
    payload = mirror / "checkpoint" / "payload"
    entry = hash_file(payload)
    record = mirror / SNAPSHOT_MANIFEST
    known: dict[str, Any] = {name: {"size_bytes": entry.size_bytes, "xxh3_128": entry.xxh3_128}}
    record.write_bytes(encode_snapshot({"base_step": 0}, known))
    records = {0: {SNAPSHOT_MANIFEST: stored(record), name: stored(payload)}}
    return Contents(str(mirror), [MirroredCheckpoint(4, 1, files, records)], {})


def test_a_good_name_arrives_and_a_link_in_its_way_is_refused(tmp_path: Path) -> None:
    found = contents(tmp_path / "mirror", "tokenizer/tokenizer.json")
    directory = tmp_path / "runs" / "run"
    path = restore_run(found, directory, lambda text, level="info": None)
    assert path is not None
    assert (directory / "tokenizer" / "tokenizer.json").read_bytes() == b"evil"
    outside = tmp_path / "outside"
    (directory / "tokenizer").rename(outside)
    (directory / "tokenizer").symlink_to(outside)
    (outside / "tokenizer.json").write_bytes(b"precious")
    path.rename(tmp_path / "away")
    with pytest.raises(ConfigError) as refused:
        restore_run(found, directory, lambda text, level="info": None)
    assert refused.value.where == str(directory / "tokenizer")
    assert (outside / "tokenizer.json").read_bytes() == b"precious"


def test_a_dangling_link_where_a_checkpoint_belongs_is_set_aside(tmp_path: Path) -> None:
    found = contents(tmp_path / "mirror", "tokenizer/tokenizer.json")
    place = tmp_path / "runs" / "run" / "checkpoints" / "step-00000004"
    place.parent.mkdir(parents=True)
    place.symlink_to(tmp_path / "nowhere")
    assert restore_run(found, tmp_path / "runs" / "run", lambda text, level="info": None) == place
    assert (place / "payload").read_bytes() == b"evil"
    assert not place.is_symlink()
    assert not (tmp_path / "nowhere").exists()


def test_every_name_is_checked_by_one_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The test can fail: without the check, the file arrives outside."""
    monkeypatch.setattr(restore, "_inside", lambda folder, name: folder / name)
    fetch_checkpoint(checkpoint_files(tmp_path / "mirror", "../outside"), tmp_path / "run" / "staged")
    assert (tmp_path / "run" / "outside").read_bytes() == b"evil"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("kind", ["mkdir", "rename"])
def test_a_disk_that_refuses_is_named_and_no_checkpoint_passed_over(number: int, kind: str, tmp_path: Path) -> None:
    found = contents(tmp_path / "mirror", "tokenizer/tokenizer.json")
    directory = tmp_path / "runs" / "run"
    said: list[str] = []

    def refuse(operation: FileOperation) -> None:
        if operation.kind == kind:
            raise OSError(number, os.strerror(number), str(operation.path))

    with atomic.observe(refuse), pytest.raises(CheckpointError) as refused:
        restore_run(found, directory, lambda text, level="info": said.append(text))
    assert refused.value.exit_code == 5
    assert str(tmp_path / "runs") in refused.value.where
    assert "same command again" in refused.value.hint
    assert said == []
    assert restore_run(found, directory, lambda text, level="info": None) is not None
