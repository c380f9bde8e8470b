"""The options and the help of ``vorox claim``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import OVERRIDES_CONTEXT

app = typer.Typer(add_completion=False)


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.sweeps.claim")
def claim(
    text: Annotated[
        str,
        typer.Argument(
            metavar="CLAIM",
            show_default=False,
            help="'A beats B on eval loss', or 'eval accuracy', with 'by 1%' for an effect of at least that size. The "
            "names of the files may stand for A and B.",
        ),
    ],
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="A B [a.b=v ...]",
            show_default=False,
            help="Two configurations: presets, YAML or Python files, or runs; then settings of both.",
        ),
    ],
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time of all runs, as 30m or 2h; no pair starts that would exceed it."),
    ] = None,
    pairs: Annotated[int | None, typer.Option(min=1, metavar="N", help="Pairs at most, earlier ones included.")] = None,
    level: Annotated[
        float,
        typer.Option(help="Probability at most that claims on this question are decided though the arms are equal."),
    ] = 0.05,
    again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="Register a claim that is decided, or of another environment, anew, at a stricter level.",
        ),
    ] = False,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Sign the verdict: private key (PEM), Ed25519 or ECDSA P-256.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print the cost and what the budget can see, and do nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; progress goes to standard error.")] = False,
) -> None:
    """Test a claim that one configuration beats another, by pairs of runs until a sequential test decides.

    The claim is registered first; the seeds of its runs follow from its hash.
    Both runs of a pair read the same rows and start from the same weights, as
    far as the configurations agree. The same command continues a claim that
    was interrupted or not decided. `vorox claims verify` checks it.
    """
