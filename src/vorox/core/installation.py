"""How Vorox was installed here, and so the command that installs one of its extras."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import sys
import urllib.parse
from pathlib import Path


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this very environment.

    A checkout is installed from its own folder with its pinned versions, an archive from where it came from; only a
    Vorox that came from a package index is asked of one by name.
    """
    pip = f"{shlex.quote(_shown(Path(sys.executable)))} -m pip install"
    folder, url = _origin()
    if folder is not None:
        pins = folder / "constraints.txt"
        place = f"{_shown(folder)}[{extra}]"
        place = place if place.startswith((".", "/")) else f"./{place}"
        constraints = f" -c {shlex.quote(_shown(pins))}" if pins.is_file() else ""
        return f"{pip} -e {shlex.quote(place)}{constraints}"
    return f"{pip} {shlex.quote(f'vorox[{extra}] @ {url}' if url else f'vorox[{extra}]')}"


def _origin() -> tuple[Path | None, str]:
    """The checkout that runs, if one does; else the address that was installed from, empty for a package index."""
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").is_file() and (checkout / "src" / "vorox").is_dir():
        return checkout, ""
    try:
        text = importlib.metadata.distribution("vorox").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None, ""
    url = str(json.loads(text).get("url", "")) if text else ""
    folder = Path(urllib.parse.unquote(url.removeprefix("file://"))) if url.startswith("file://") else None
    return (folder, "") if folder is not None and folder.is_dir() else (None, url)


def _shown(path: Path) -> str:
    """A path as it is typed in the current directory, if it lies below; links, such as a venv's Python, stay links."""
    try:
        return os.fspath(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return os.fspath(path)
