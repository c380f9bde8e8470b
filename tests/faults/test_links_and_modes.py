"""Symbolic links in a run directory and lax umasks: nothing outside is written or removed, nothing is left writable."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiny_runs import configuration, run, use_numpy_engine
from vorox.cli import main
from vorox.core.errors import ConfigError, DataError
from vorox.core.files import atomic
from vorox.core.files.file_holder import FileLock
from vorox.core.run_layout import RunLayout, step_directories
from vorox.data.cache.upkeep.gc import find_caches, find_garbage, remove_cache
from vorox.experiments.artifacts import list_checkpoints, remove_checkpoints, remove_run
from vorox.records.run_context import recorded_config
from vorox.training.checkpoints.store import latest_valid, request_save

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege, modes do not exist")


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def lax_umask() -> Iterator[None]:
    previous = os.umask(0)
    try:
        yield
    finally:
        os.umask(previous)


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def two_runs(tmp_path: Path) -> tuple[Path, Path]:
    """A run, and another one whose newest checkpoint is a link to a checkpoint of the first."""
    first = run(configuration(tmp_path / "first")).run_directory
    second = run(configuration(tmp_path / "second", ["train.num_steps=8"])).run_directory
    RunLayout(second).checkpoint(12).symlink_to(RunLayout(first).checkpoint(12))
    return first, second


def test_retention_lets_a_link_go_and_not_what_it_points_to(tmp_path: Path) -> None:
    first, second = two_runs(tmp_path)
    RunLayout(second).checkpoint(12).unlink()
    RunLayout(second).checkpoint(4).rename(tmp_path / "four")
    RunLayout(second).checkpoint(4).symlink_to(RunLayout(first).checkpoint(4))
    before = content(first)
    longer = recorded_config(second, ["train.num_steps=20", "checkpoint.keep_last=1"])
    run(longer, resume_from=second)
    assert list(step_directories(second)) == [20]
    assert content(first) == before


def test_putting_aside_renames_the_link(tmp_path: Path) -> None:
    first, second = two_runs(tmp_path)
    before = content(first)
    longer = recorded_config(second, ["train.num_steps=10"])
    run(longer, resume_from=RunLayout(second).checkpoint(8))  # step 12 is abandoned with that
    assert RunLayout(second).checkpoint(12).with_name("step-00000012.replaced-1").is_symlink()
    assert content(first) == before


def test_removing_checkpoints_removes_the_link(tmp_path: Path) -> None:
    first, second = two_runs(tmp_path)
    before = content(first)
    assert [entry.step for entry in list_checkpoints(second)] == [4, 8, 12]
    remove_checkpoints(second, ["12"])
    assert list(step_directories(second)) == [4, 8]
    assert content(first) == before
    assert remove_run(second) > 0
    assert content(first) == before


@pytest.mark.parametrize("name", ["checkpoints", "tokenizer", "control", "chain.jsonl", "log.txt", "LOCK"])
def test_a_link_out_of_the_run_directory_is_refused(name: str, tmp_path: Path) -> None:
    directory = run(configuration(tmp_path)).run_directory
    outside = tmp_path / "outside"
    (directory / name).rename(outside)
    (directory / name).symlink_to(outside)
    before = content(tmp_path)
    with pytest.raises(ConfigError) as refused:
        run(recorded_config(directory, ["train.num_steps=16"]), resume_from=directory)
    assert refused.value.exit_code == 2
    assert refused.value.where == str(directory / name)
    assert "run.directory" in refused.value.hint
    if name == "checkpoints":
        with pytest.raises(ConfigError):
            remove_checkpoints(directory, ["4"])
    if name == "control":
        with pytest.raises(ConfigError):
            request_save(directory)
    assert content(tmp_path) == before


@pytest.mark.parametrize("target", ["nonfinite", "nowhere", "metrics.jsonl"])
def test_a_link_that_leads_to_no_directory_is_refused(target: str, tmp_path: Path) -> None:
    """To itself, to nothing, and to a file, which would be opened through the link."""
    directory = run(configuration(tmp_path)).run_directory
    (directory / "nonfinite").symlink_to(target)
    with pytest.raises(ConfigError) as refused:
        run(recorded_config(directory, ["train.num_steps=16"]), resume_from=directory)
    assert refused.value.exit_code == 2
    assert refused.value.where == str(directory / "nonfinite")


def test_no_file_is_opened_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"precious")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "outside")
    for action in (
        lambda: atomic.append(link, b"x", sync=False),
        lambda: atomic.truncate(link, 1),
        lambda: atomic.create(link),
        lambda: FileLock(link).acquire(),
    ):
        with pytest.raises(OSError, match=r"link|exists"):
            action()
    atomic.write_file(link, b"new")  # takes the link's place
    assert (tmp_path / "outside").read_bytes() == b"precious"
    assert not link.is_symlink()


def test_sweeping_and_collecting_stay_inside(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "chunks").mkdir(parents=True)
    (outside / "RECIPE.json").write_text("{}")
    before = content(outside)
    caches = tmp_path / "caches"
    caches.mkdir()
    name = f".tmp-{os.uname().nodename}-999999999-0123abcd-step-00000020"
    (caches / name).symlink_to(outside)
    (caches / "text-train-0").symlink_to(outside)
    atomic.sweep_temporary(caches)
    assert find_garbage(caches) == []
    assert find_caches(caches, tmp_path / "runs") == []
    remove_cache(caches / "text-train-0")
    assert content(outside) == before


@pytest.mark.usefixtures("lax_umask")
def test_no_file_of_a_run_is_writable_for_others(tmp_path: Path) -> None:
    directory = run(configuration(tmp_path)).run_directory
    (directory / "plan.jsonl").unlink()
    with pytest.raises(DataError):
        run(recorded_config(directory), resume_from=directory)
    lax = [path for path in directory.rglob("*") if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)]
    assert lax == []
    assert stat.S_IMODE((directory / "failure.json").stat().st_mode) == 0o600
    assert latest_valid(directory) is not None


@pytest.mark.usefixtures("lax_umask")
def test_what_other_libraries_write_under_a_command_is_not_writable_for_others(tmp_path: Path) -> None:
    """As TensorBoard does; a stricter umask stays."""
    for umask, mode in ((0, 0o644), (0o002, 0o644), (0o077, 0o600)):
        os.umask(umask)
        assert main(["--version"]) == 0
        file = tmp_path / f"{umask}"
        file.write_bytes(b"")
        assert stat.S_IMODE(file.stat().st_mode) == mode
