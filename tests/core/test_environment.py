"""The record of code and machine: right, complete enough, and without secrets."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from vorox.core.platform import environment
from vorox.core.platform.environment import code_record, environment_record, git_record, package_versions


def git(directory: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(directory), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "-b", "trunk")
    (tmp_path / "a.txt").write_text("one\n")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_a_clean_repository(repository: Path) -> None:
    (repository / "untracked").touch()
    (repository / "deep").mkdir()
    commit = git(repository, "rev-parse", "HEAD").strip()
    expected = {"commit": commit, "branch": "trunk", "dirty": False, "diff_sha256": ""}
    assert git_record(repository) == expected
    assert git_record(repository / "deep") == expected


def test_changes_are_identified_by_their_hash(repository: Path) -> None:
    (repository / "a.txt").write_text("two\n")
    record = git_record(repository)
    assert record is not None
    assert record["dirty"] is True
    diff = git(repository, "diff", "HEAD")
    assert record["diff_sha256"] == hashlib.sha256(diff.encode()).hexdigest()
    git(repository, "add", "a.txt")
    assert git_record(repository) == record  # staged or not


def test_reading_the_state_does_not_touch_the_repository(repository: Path) -> None:
    index = repository / ".git" / "index"
    (repository / "a.txt").write_text("two\n")
    before = index.read_bytes(), index.stat().st_mtime_ns
    git_record(repository)
    assert (index.read_bytes(), index.stat().st_mtime_ns) == before


def test_remotes_with_passwords_are_not_recorded(repository: Path) -> None:
    git(repository, "remote", "add", "origin", "https://alice:CANARY@example.org/x.git")
    git(repository, "config", "branch.trunk.remote", "origin")
    git(repository, "config", "branch.trunk.merge", "refs/heads/trunk")
    assert "CANARY" not in json.dumps(git_record(repository))


def test_no_repository_and_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_record(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_record(Path(__file__).parent) is None


def test_a_repository_without_commits(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    record = git_record(tmp_path)
    assert record is not None
    assert record["commit"] == "(initial)"


def test_the_code_is_recorded_only_if_it_is_under_version_control(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = repository / "site-packages" / "environment.py"
    installed.parent.mkdir()
    installed.write_text("")
    monkeypatch.setattr(environment, "__file__", str(installed))
    assert code_record() is None
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "second")
    record = code_record()
    assert record is not None
    assert record["commit"] == git(repository, "rev-parse", "HEAD").strip()


def test_versions_come_without_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert package_versions()["numpy"] == numpy.__version__
    program = "import sys; from vorox.core.platform.environment import environment_record; environment_record(); "
    program += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_only_listed_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "DATABASE_URL", "VOROX_ANYTHING"):
        monkeypatch.setenv(name, "CANARY")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    record = environment_record()
    assert record["variables"]["OMP_NUM_THREADS"] == "3"
    assert "CANARY" not in json.dumps(record)
    assert not any("TOKEN" in name or "SECRET" in name for name in environment.RECORDED_VARIABLES if "IZER" not in name)


def test_the_record_is_plain_json() -> None:
    record = environment_record()
    assert json.loads(json.dumps(record)) == record
    assert record["python"]["version"] == sys.version.split()[0]
    assert record["platform"]["logical_cores"] >= 1
    assert record["platform"]["processor"]
