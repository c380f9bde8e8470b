"""``vorox help``: the help of a command."""

from __future__ import annotations

from typing import Annotated

import typer

from vorox.cli import commands

app = typer.Typer(add_completion=False)


@app.command("help")
def show_help(
    command: Annotated[list[str] | None, typer.Argument(metavar="[COMMAND]", show_default=False)] = None,
) -> None:
    """Show the help of a command."""
    commands.app(args=[*(command or []), "--help"], prog_name="vorox", standalone_mode=False)
