"""``vorox dash``: a local web page on runs, live; or the same page as one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import socket

    from vorox.dashboard.run_index import RunIndex
    from vorox.web.access import Access

DEFAULT_PORT = 7860


def dash(
    target: Annotated[
        str, typer.Argument(metavar="[DIR|RUN]", help="Folder of runs, or one run: id, prefix, path or 'latest'.")
    ] = "runs",
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: a free one.")] = DEFAULT_PORT,
    token: Annotated[
        str | None, typer.Option("--token", help="Secret in the URL. Default: a new random one.", show_default=False)
    ] = None,
    no_token: Annotated[bool, typer.Option("--no-token", help="Require none; only on this machine's address.")] = False,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write one self-contained HTML file and exit.")
    ] = None,
) -> None:
    """Show runs live in the browser: curves, samples, data, health, checkpoints. Needs no account and no network."""
    from vorox.core.errors import ConfigError
    from vorox.core.installation import install_command

    try:
        from vorox.dashboard.run_index import RunIndex
        from vorox.web.listener import check_token, listen
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
    from vorox.core.errors import ConfigError
    from vorox.core.run_lookup import find_run

    if Path(target).is_dir():
        return Path(target)
    if target == "runs":
        raise ConfigError(
            f"No runs in {Path(target).resolve()}", where="runs",
            hint="name the folder of runs, or start a run with `vorox train quickstart`",
        )  # fmt: skip
    return find_run("runs", target)


def _export(index: RunIndex, path: Path) -> None:
    from vorox.core import atomic
    from vorox.core.errors import ConfigError
    from vorox.core.pluralize import pluralize
    from vorox.dashboard.server import Answers

    runs = index.directories()
    if not runs:
        raise ConfigError(f"No runs in {index.root.resolve()}", where=str(index.root), hint="name a folder of runs")
    atomic.write_file(path, Answers(index).export().encode())
    typer.echo(f"{path}: {pluralize(len(runs), 'run')}, {path.stat().st_size / 1e6:.1f} MB")


def _serve(index: RunIndex, access: Access, listener: socket.socket) -> None:
    import uvicorn

    from vorox.dashboard.server import application

    typer.echo(f"Dashboard of {index.root.resolve()}\n\n  {access.url()}\n\nCtrl-C stops it; runs are not affected.")
    app = application(index, access, is_stopping=lambda: server.should_exit)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    server.run(sockets=[listener])
