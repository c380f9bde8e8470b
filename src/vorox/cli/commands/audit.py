"""The options and the help of ``vorox audit``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import DEFAULT_ROOT, AsJson, Root, RunName, TrustCode

app = typer.Typer(add_completion=False)


@app.command()
@implemented_in("vorox.cli.checks.audit")
def audit(
    run: RunName,
    segments: Annotated[
        int, typer.Option("--segments", min=1, metavar="N", help="Segments to compute; all, if the run has fewer.")
    ] = 12,
    challenge: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="What chooses the segments: a number or text that the run's owner could not know. Default: drawn.",
        ),
    ] = None,
    public_key: Annotated[
        Path | None,
        typer.Option("--public-key", metavar="FILE", help="Key of the run's owner (PEM): audit what it has signed."),
    ] = None,
    states: Annotated[
        Path | None,
        typer.Option("--states", metavar="DIR", help="Further states, from `checkpoints materialize --to DIR`."),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option("--cache", metavar="DIR", help="Where the caches are; none is read from elsewhere."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the result as an in-toto statement.")
    ] = None,
    sign_key: Annotated[
        Path | None, typer.Option("--sign-key", metavar="FILE", help="Your private key (PEM): sign the statement.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the sample and its cost, and compute nothing.")] = False,
    nproc: Annotated[int, typer.Option(min=1, metavar="N", help="Number of processes; must equal the run's.")] = 1,
    root: Root = DEFAULT_ROOT,
    _: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Compute a random sample of a run's segments again, and say what that proves.

    A segment lies between two recorded states. Both chains are checked as a
    whole, and the tensors of every kept checkpoint. The exit code is 0 if the
    run passes, 5 if it is not what its records say, and 7 if this machine
    cannot decide.
    """
