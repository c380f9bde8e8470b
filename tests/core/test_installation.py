"""The command that adds an extra works where Vorox runs, and not only where a package index has it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from vorox.core.platform import installation
from vorox.core.platform.installation import install_command

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "vorox"


def test_every_extra_that_an_error_names_is_one() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    named = {name for text in texts.values() for name in re.findall(r"""install_command\(["'](\w+)""", text)}
    assert named
    assert named <= set(extras)
    assert [path for path, text in texts.items() if "pip install 'vorox" in text or 'pip install "vorox' in text] == []


@pytest.mark.parametrize("inside", [True, False])
def test_in_a_checkout_the_command_names_what_lies_there(
    inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT if inside else tmp_path)
    python, *words = shlex.split(install_command("jax"))
    assert os.access(python, os.X_OK)
    assert words[:4] == ["-m", "pip", "install", "-e"]
    place, flag, pins = words[4:]
    assert place.endswith("[jax]")
    assert (Path(place.removesuffix("[jax]")) / "pyproject.toml").is_file()
    assert flag == "-c"
    assert Path(pins).read_text()
    assert Path(pins).is_absolute() != inside


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        (None, "vorox[s3]"),
        ('{"url": "https://example.org/vorox-1.whl"}', "vorox[s3] @ https://example.org/vorox-1.whl"),
    ],
)
def test_elsewhere_it_names_where_vorox_came_from(
    origin: str | None, requirement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Distribution:
        def read_text(self, name: str) -> str | None:
            return origin

    monkeypatch.setattr(
        installation, "__file__", str(tmp_path / "a" / "b" / "vorox" / "core" / "platform" / "installation.py")
    )
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    assert shlex.split(install_command("s3"))[1:] == ["-m", "pip", "install", requirement]
