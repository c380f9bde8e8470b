"""What a release publishes: wheel and source archive hold the same files, and the installed wheel works by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import vorox

ROOT = Path(__file__).parents[2]


def run(*words: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(kind: str, source: Path, target: Path) -> Path:
    """Build as pip does, but with the setuptools of this environment."""
    target.mkdir()
    run("-c", f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})", cwd=source)
    (built,) = target.iterdir()
    return built


@pytest.mark.slow
def test_wheel_and_source_archive(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if name.startswith("src/") or "/" not in name:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    version = vorox.__version__
    archive, wheel = build("sdist", tree, tmp_path / "sdist"), build("wheel", tree, tmp_path / "wheel")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path / "extracted", filter="data")
    from_archive = build("wheel", tmp_path / "extracted" / f"vorox-{version}", tmp_path / "wheel-of-archive")
    packaged = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("vorox/")}
    assert packaged == {name for name in zipfile.ZipFile(from_archive).namelist() if name.startswith("vorox/")}
    assert packaged == {name.removeprefix("src/") for name in files.split("\0") if name.startswith("src/vorox/")}
    run("-m", "pip", "--quiet", "install", "--no-deps", "--target", tmp_path / "installed", wheel, cwd=tmp_path)
    installed = {"PYTHONPATH": str(tmp_path / "installed"), "VOROX_CACHE": str(tmp_path / "cache")}
    assert run("-c", "import vorox; print(vorox.__file__)", cwd=tmp_path, **installed).startswith(str(tmp_path))
    assert run("-m", "vorox", "--version", cwd=tmp_path, **installed) == f"vorox {version}\n"
    assert "hidden_size" in run("-m", "vorox", "config", "show", "quickstart", cwd=tmp_path, **installed)


def test_files_of_the_repository_name_what_there_is() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    steps = [step["run"] for step in workflow["jobs"]["publish"]["steps"] if "run" in step]
    assert "make matrix ARGS=tests/contract/test_release.py" in steps
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert {"name", "description", "body"} <= yaml.safe_load(form.read_text()).keys()
    docker = (ROOT / "Dockerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = [line.split("[")[1].split("]")[0] for line in docker.splitlines() if "'.[" in line]
    assert set(named.split(",")) <= extras.keys()
    copied = [word for line in docker.splitlines() if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in (ROOT / ".dockerignore").read_text().splitlines(), name
