"""The options and the help of ``vorox unlearn``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import DEFAULT_ROOT, Root, RunName, TrustCode, Yes

app = typer.Typer(add_completion=False)


@app.command()
@implemented_in("vorox.cli.training.unlearn")
def unlearn(
    run: RunName,
    document: Annotated[
        list[str] | None,
        typer.Option("--document", metavar="FILE:RECORD", help="The document. May be given several times."),
    ] = None,
    listed: Annotated[
        Path | None,
        typer.Option("--list", metavar="FILE", help="A file with one FILE:RECORD per line; # begins a comment."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the new run. Default: RUN-unlearned.")] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="FILE", help="Sign the statement with a private key: Ed25519 or ECDSA P-256."),
    ] = None,
    search: Annotated[
        list[Path] | None,
        typer.Option("--search", metavar="DIR", help="Folder with exports, averages or states of this run, to name."),
    ] = None,
    erase: Annotated[
        bool, typer.Option("--erase", help="Then erase them from the caches: runs that read them cannot repeat that.")
    ] = False,
    nproc: Annotated[int, typer.Option(min=1, metavar="N", help="Number of processes; should equal the run's.")] = 1,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print what it takes and what it cannot undo; do nothing.")
    ] = False,
    yes: Yes = False,
    root: Root = DEFAULT_ROOT,
    _: TrustCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; progress goes to standard error.")] = False,
) -> None:
    """Compute a run again without what it learned from documents.

    It forks the run from the last state before any of them was read, masks
    them, trains to the end, and states that no update read their content: bit
    for bit the run that had masked them from its start. Where they still act,
    as through the borders of rows, is listed. The run itself is not changed.
    The same command continues one that was stopped.
    """
