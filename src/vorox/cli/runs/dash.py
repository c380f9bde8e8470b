"""``vorox dash``: a local web page on runs, live; or the same page as one file."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vorox.core.errors import ConfigError
from vorox.core.files import atomic
from vorox.core.platform.installation import install_command
from vorox.core.pluralize import pluralize
from vorox.dashboard.runs.run_index import RunIndex
from vorox.records.run_lookup import find_run

if TYPE_CHECKING:
    from vorox.web.access import Access


def dash(target: str, host: str, port: int, token: str | None, no_token: bool, export: Path | None) -> None:
    try:
        from vorox.web.listener import check_token, listen  # starlette is optional
    except ImportError as error:
        raise ConfigError(
            f"The dashboard needs the package {error.name}", where="vorox dash", hint=install_command("dash")
        ) from error
    check_token(host, token, no_token)
    index = RunIndex(_directory(target))
    if export is not None:
        _export(index, export)
        return
    listener, access = listen(host, port, token, no_token, command="vorox dash", has_pages=True)
    _serve(index, access, listener)


def _directory(target: str) -> Path:
    """Return the folder of runs, or the run directory, that an argument names."""
    if Path(target).is_dir():
        return Path(target)
    if target == "runs":
        raise ConfigError(
            f"No runs in {Path(target).resolve()}", where="runs",
            hint="name the folder of runs, or start a run with `vorox train quickstart`",
        )  # fmt: skip
    return find_run("runs", target)


def _export(index: RunIndex, path: Path) -> None:
    from vorox.dashboard.server import Answers  # starlette is optional

    runs = index.directories()
    if not runs:
        raise ConfigError(f"No runs in {index.root.resolve()}", where=str(index.root), hint="name a folder of runs")
    atomic.write_file(path, Answers(index).export().encode())
    typer.echo(f"{path}: {pluralize(len(runs), 'run')}, {path.stat().st_size / 1e6:.1f} MB")


def _serve(index: RunIndex, access: Access, listener: socket.socket) -> None:
    from vorox.dashboard.server import application  # starlette is optional
    from vorox.web.running import server_of  # and uvicorn

    typer.echo(f"Dashboard of {index.root.resolve()}\n\n  {access.url()}\n\nCtrl-C stops it; runs are not affected.")
    app = application(index, access, is_stopping=lambda: server.should_exit)
    server = server_of(app, stop_seconds=2)
    server.run(sockets=[listener])
