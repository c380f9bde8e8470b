"""The options and the help of ``vorox dash``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vorox.cli.commands.lazy import implemented_in

app = typer.Typer(add_completion=False)

DEFAULT_PORT = 7860


@app.command()
@implemented_in("vorox.cli.runs.dash")
def dash(
    target: Annotated[
        str, typer.Argument(metavar="[DIR|RUN]", help="Folder of runs, or one run: id, name, prefix, path or 'latest'.")
    ] = "runs",
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: a free one.")] = DEFAULT_PORT,
    token: Annotated[
        str | None,
        typer.Option(
            "--token", envvar="VOROX_TOKEN", help="Secret in the URL. Default: a new random one.", show_default=False
        ),
    ] = None,
    no_token: Annotated[bool, typer.Option("--no-token", help="Require none; only on this machine's address.")] = False,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write one self-contained HTML file and exit.")
    ] = None,
) -> None:
    """Show runs live in the browser: curves, samples, data, health, checkpoints. Needs no account and no network."""
