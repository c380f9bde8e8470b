"""The options and the help of ``vorox claims``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import DEFAULT_ROOT, AsJson, Root, TrustCode

app = typer.Typer(no_args_is_help=True, add_completion=False, help="The register of claims: list and verify.")


@app.command("list")
@implemented_in("vorox.cli.sweeps.claims")
def list_(root: Root = DEFAULT_ROOT, as_json: AsJson = False) -> None:
    """List the registered claims with their verdicts, oldest first."""


@app.command()
@implemented_in("vorox.cli.sweeps.claims")
def verify(
    claim: Annotated[
        str | None, typer.Argument(metavar="[CLAIM]", help="The beginning of its id. Default: the newest one.")
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Also compute every step of every run again, as vorox replay does.")
    ] = False,
    public_key: Annotated[
        Path | None, typer.Option("--public-key", metavar="FILE", help="Also verify the signature by this key (PEM).")
    ] = None,
    root: Root = DEFAULT_ROOT,
    _: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Verify a claim from its register and its runs; exit code 5 unless all agrees.

    The seeds follow from the claim; settings and data are the registered
    ones; chains and checkpoints are intact; every value is computed again.
    """
