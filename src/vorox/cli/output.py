"""What the reading verbs share: naming a run, printing a table, printing JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

RunName = Annotated[str, typer.Argument(metavar="RUN", help="Id, the beginning of one, a path, or 'latest'.")]
Root = Annotated[str, typer.Option("--root", help="Where run directories are (run.directory).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

DEFAULT_ROOT = "runs"


def print_json(value: Any) -> None:
    """Print a value as JSON that every parser reads: no NaN, nothing but ASCII."""
    from vorox.core.json_lines import encode

    typer.echo(json.dumps(json.loads(encode({"value": value}))["value"], indent=2))


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> None:
    """Print columns as wide as they need to be.

    Args:
        titles: Heads of the columns; those that stand in ``right``, separated by blanks, are aligned to the right.
        rows: Cells.
        right: See ``titles``.
    """
    widths = [max(len(cell) for cell in column) for column in zip(titles, *rows, strict=True)]
    aligned_right = [title in right.split() for title in titles]
    for row in (titles, *rows):
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, aligned_right, strict=True)
        ]
        typer.echo("  ".join(cells).rstrip())


def confirm(question: str, *, yes: bool) -> None:
    """Ask on a terminal; without one, or if the answer is no, refuse.

    Raises:
        ConfigError: Nobody can be asked.
        typer.Exit: The answer was no.
    """
    import sys

    from vorox.core.errors import ConfigError

    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(
            f"nobody can be asked on this input: {question}", hint="add --yes to do it", saved="nothing was removed"
        )
    if not typer.confirm(question):
        typer.echo("Nothing was removed.")
        raise typer.Exit(0)
