"""The options and the help of ``vorox fork``."""

from __future__ import annotations

from typing import Annotated

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import DEFAULT_ROOT, Root, RunName, TrustCode

app = typer.Typer(add_completion=False)


@app.command()
@implemented_in("vorox.cli.training.fork")
def fork(
    run: RunName,
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, help="The state to begin with, as in RUN@STEP; 0: the initial weights."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[a.b=v ...]", help="Settings of the fork, as at a resume.", show_default=False),
    ] = None,
    without_document: Annotated[
        list[str] | None,
        typer.Option(
            "--without-document",
            metavar="FILE:RECORD",
            help="Mask a document from here on: filler tokens in its place, no targets. May be given several times.",
        ),
    ] = None,
    without_source: Annotated[
        list[str] | None,
        typer.Option(
            "--without-source",
            metavar="NAME",
            help="Sample no more rows of a source; the others take its share. May be given several times.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the fork. Default: that of the run, and the step.")] = None,
    nproc: Annotated[int, typer.Option(min=1, metavar="N", help="Number of processes; should equal the run's.")] = 1,
    train: Annotated[bool, typer.Option("--train/--no-train", help="Train it to its end, or only create it.")] = True,
    plan: Annotated[bool, typer.Option("--plan", help="Print the cost and what would change, and do nothing.")] = False,
    root: Root = DEFAULT_ROOT,
    _: TrustCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; progress goes to standard error.")] = False,
) -> None:
    """Continue from any state of a run as a run of its own, with one thing changed.

    Rows, order, dropout and all else stay what they were, so every difference
    from the parent is an effect of the change; without one, the fork computes
    the same bits. Compare them with `vorox runs compare --paired RUN FORK`.
    """
