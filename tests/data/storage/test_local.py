"""Local listings are sorted and complete; ranges come from the listed content or not at all."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vorox.core.errors import DataError
from vorox.data.storage import ContentVersions, content_hash, list_files, listing_root, local_path, open_range
from vorox.data.storage import versions as storage


def names(location: Path | str, *suffixes: str) -> list[str]:
    return [Path(file.uri).name for file in list_files(str(location), suffixes or (".txt",))]


@contextmanager
def unprivileged() -> Iterator[None]:
    """Drop root privileges, with which every file is readable, inside the block."""
    if os.name == "nt":
        pytest.skip("no such permissions")
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def write(path: Path, content: str | bytes = "text\n", *, age_seconds: float = 10) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    then = time.time() - age_seconds
    os.utime(path, (then, then))
    return path


def test_folder_is_searched_recursively_and_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a.txt", "c/deep/er/x.TXT", "note.md", ".hidden.txt", ".git/x.txt"):
        write(tmp_path / name)
    uris = [file.uri for file in list_files(str(tmp_path), (".txt",))]
    assert uris == sorted(uris)
    assert [Path(uri).relative_to(tmp_path).as_posix() for uri in uris] == [
        "a.txt", "a/z.txt", "b.txt", "c/deep/er/x.TXT",
    ]  # fmt: skip


def test_order_does_not_depend_on_creation(tmp_path: Path) -> None:
    for order, folder in ((("x", "y", "z"), "one"), (("z", "x", "y"), "two")):
        for name in order:
            write(tmp_path / folder / f"{name}.txt")
    assert names(tmp_path / "one") == names(tmp_path / "two") == ["x.txt", "y.txt", "z.txt"]


def test_files_and_globs_ignore_suffixes(tmp_path: Path) -> None:
    for name in ("one.md", "two.md", "sub/three.md", "four.rst"):
        write(tmp_path / name)
    assert names(tmp_path / "one.md") == ["one.md"]
    assert names(f"{tmp_path}/*.md") == ["one.md", "two.md"]
    assert names(f"{tmp_path}/**/*.md") == ["one.md", "three.md", "two.md"]


def test_linked_folders_are_entered_once(tmp_path: Path) -> None:
    write(tmp_path / "real" / "a.txt")
    (tmp_path / "real" / "loop").symlink_to(tmp_path / "real")
    assert names(tmp_path / "real") == ["a.txt"]


def test_what_vorox_wrote_into_a_folder_is_no_text_of_it(tmp_path: Path) -> None:
    """Runs, caches and exports in the folder in which one works, and trains on; a path into one is still read."""
    wrote = {
        "runs/a-1": ("run.json", "config.yaml", "log.txt"), "old/runs/b-2": ("run.json", "config.yaml", "log.txt"),
        "cache/views/x": ("RECIPE.json", "x.txt"), "model": ("MANIFEST.json", "config.json", "merges.txt"),
        "mine": ("config.json", "run.txt"),
    }  # fmt: skip
    for folder, names in wrote.items():
        (tmp_path / folder).mkdir(parents=True)
        for name in names:
            (tmp_path / folder / name).write_text("text")
    expected = [str(tmp_path / "mine" / "run.txt")]
    assert [file.uri for file in list_files(str(tmp_path), (".txt",))] == expected
    assert [file.uri for file in list_files(str(tmp_path / "**" / "*.txt"), ())] == expected
    for inside in ("runs/a-1", "runs/a-1/log.txt", "runs/a-1/*.txt"):
        (found,) = list_files(str(tmp_path / inside), (".txt",))
        assert found.uri == str(tmp_path / "runs/a-1/log.txt")
    with pytest.raises(DataError, match="A path is empty"):
        list_files("", (".txt",))


@pytest.mark.parametrize(("name", "what"), [("missing", "No such file"), ("*.nothing", "No such file")])
def test_missing_location_is_reported(tmp_path: Path, name: str, what: str) -> None:
    with pytest.raises(DataError, match=what) as caught:
        list_files(str(tmp_path / name), (".txt",))
    assert str(tmp_path / name) in caught.value.where
    assert caught.value.hint


def test_folder_with_other_suffixes_suggests_a_glob(tmp_path: Path) -> None:
    write(tmp_path / "a.md")
    with pytest.raises(DataError, match=r"no \.txt file; it contains \.md") as caught:
        list_files(str(tmp_path), (".txt",))
    assert "**/*.md" in caught.value.hint
    assert "data.sources" not in caught.value.hint, "only the caller knows which source this is"


def test_dangling_link_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError) as caught:
        list_files(str(tmp_path), (".txt",))
    assert caught.value.where.endswith("gone.txt")


def test_unreadable_file_and_folder_are_reported(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    file = write(tmp_path / "open" / "secret.txt")
    listed = list_files(str(file), (".txt",))[0]
    file.chmod(0)
    with unprivileged(), pytest.raises(DataError, match="Permission denied") as caught, open_range(listed):
        pass
    assert caught.value.where == str(file)
    assert "permission" in caught.value.hint
    file.parent.chmod(0)
    try:
        with unprivileged(), pytest.raises(DataError, match="Permission denied") as caught:
            list_files(str(tmp_path), (".txt",))
    finally:
        file.parent.chmod(0o755)
    assert caught.value.where == str(file.parent)


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=300), start=st.integers(0, 300), length=st.integers(0, 300))
def test_range_is_the_slice(tmp_path_factory: pytest.TempPathFactory, content: bytes, start: int, length: int) -> None:
    path = tmp_path_factory.mktemp("range") / "file"
    path.write_bytes(content)
    (file,) = list_files(str(path), ())
    start, end = min(start, len(content)), min(start + length, len(content))
    with open_range(file, start, end) as reader:
        assert reader.read() == content[start:end]
    with open_range(file, start, end) as reader:
        assert list(reader) == content[start:end].splitlines(keepends=True) or b"\r" in content


@pytest.mark.parametrize("content", [b"other size", b"same size!"])
def test_changed_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "a.txt", b"0123456789")
    (file,) = list_files(str(path), ())
    write(path, content + b"\n" * (content == b"other size"), age_seconds=5)
    with pytest.raises(DataError, match="changed after it was listed") as caught, open_range(file):
        pass
    assert caught.value.where == str(path)


def test_change_during_the_read_is_detected_at_its_end(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"0123456789")
    (file,) = list_files(str(path), ())

    def read_slowly() -> None:
        with open_range(file) as reader:
            reader.read(3)
            write(path, b"9876543210")

    with pytest.raises(DataError, match="changed after it was listed"):
        read_slowly()


def test_content_hash_is_sha256(tmp_path: Path) -> None:
    content = bytes(range(256)) * 40_000
    (file,) = list_files(str(write(tmp_path / "a", content)), ())
    assert content_hash(file) == hashlib.sha256(content).hexdigest()


class TestContentVersions:
    def test_unchanged_file_is_hashed_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = tmp_path / "memory.json"
        monkeypatch.setattr(storage, "_SETTLE_NANOSECONDS", -1)
        (file,) = list_files(str(write(tmp_path / "a.txt")), ())
        first = ContentVersions(memory)
        version = first.version(file)
        first.save()
        hashed: list[str] = []
        monkeypatch.setattr(storage, "content_hash", lambda file: hashed.append(file.uri) or "new")
        assert ContentVersions(memory).version(file) == version
        assert hashed == []

    def test_changed_file_is_hashed_again_even_with_equal_size_and_modification_time(self, tmp_path: Path) -> None:
        path, memory = write(tmp_path / "a.txt", "aaaa"), tmp_path / "memory.json"
        (file,) = list_files(str(path), ())
        versions = ContentVersions(memory)
        versions._known[file.uri] = [file.stat_signature, "old"]
        assert versions.version(file) == "old"
        path.write_text("bbbb")
        os.utime(path, ns=(path.stat().st_atime_ns, int(file.stat_signature.split("-")[1])))
        (changed,) = list_files(str(path), ())
        assert changed.size_bytes == file.size_bytes
        assert versions.version(changed) == hashlib.sha256(b"bbbb").hexdigest()

    def test_a_file_modified_just_now_is_not_remembered(self, tmp_path: Path) -> None:
        """Otherwise a second change within the same clock tick would go undetected."""
        (file,) = list_files(str(write(tmp_path / "a.txt", age_seconds=0)), ())
        versions = ContentVersions(tmp_path / "memory.json")
        versions.version(file)
        versions.save()
        assert not (tmp_path / "memory.json").exists()

    @pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"a": 3}', b"\xff\xfe"])
    def test_damaged_memory_only_costs_hashing(self, tmp_path: Path, damage: bytes) -> None:
        memory = tmp_path / "memory.json"
        memory.write_bytes(damage)
        (file,) = list_files(str(write(tmp_path / "a.txt", "x")), ())
        assert ContentVersions(memory).version(file) == hashlib.sha256(b"x").hexdigest()


def test_standard_library_has_portable_names() -> None:
    files = list_files("stdlib:json", (".py",))
    assert "stdlib:json/decoder.py" in {file.uri for file in files}
    assert local_path("stdlib:json/decoder.py").read_text().startswith('"""Implementation of JSONDecoder')
    program = "import sys; from vorox.data.storage import *; print(len(list_files('stdlib:json', ('.py',))))"
    elsewhere = subprocess.run([sys.executable, "-c", program], cwd="/", capture_output=True, text=True, check=True)
    assert int(elsewhere.stdout) == len(files)


def test_names_are_relative_to_the_listing_root(tmp_path: Path) -> None:
    file = write(tmp_path / "sub" / "a.txt")
    assert listing_root(str(tmp_path)) == str(tmp_path)
    assert listing_root(str(file)) == str(tmp_path / "sub")
    assert listing_root(f"{tmp_path}/*/a.*") == str(tmp_path)
    assert listing_root(f"{tmp_path}/**") == str(tmp_path)
