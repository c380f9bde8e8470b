"""The command that installs an extra of Vorox, by how Vorox itself was installed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import sys
import urllib.parse
from pathlib import Path


def install_command(extra: str) -> str:
    """Return the command that installs an extra into this environment.

    A checkout is installed from its folder with its pinned versions, an archive from its URL, and a release by name
    from the package index.
    """
    pip = f"{shlex.quote(_short(Path(sys.executable)))} -m pip install"
    folder, url = _origin()
    if folder is not None:
        pins = folder / "constraints.txt"
        target = f"{_short(folder)}[{extra}]"
        target = target if target.startswith((".", "/")) else f"./{target}"
        constraints = f" -c {shlex.quote(_short(pins))}" if pins.is_file() else ""
        return f"{pip} -e {shlex.quote(target)}{constraints}"
    return f"{pip} {shlex.quote(f'vorox[{extra}] @ {url}' if url else f'vorox[{extra}]')}"


def _origin() -> tuple[Path | None, str]:
    """Return the running checkout, if any, and the URL of the installation; it is empty for a package index."""
    checkout = Path(__file__).resolve().parents[4]
    if (checkout / "pyproject.toml").is_file() and (checkout / "src" / "vorox").is_dir():
        return checkout, ""
    try:
        text = importlib.metadata.distribution("vorox").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None, ""
    url = str(json.loads(text).get("url", "")) if text else ""
    folder = Path(urllib.parse.unquote(url.removeprefix("file://"))) if url.startswith("file://") else None
    return (folder, "") if folder is not None and folder.is_dir() else (None, url)


def _short(path: Path) -> str:
    """Return a path relative to the current directory if it is inside, without resolving links."""
    try:
        return os.fspath(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return os.fspath(path)
