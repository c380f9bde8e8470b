"""The options and the help of ``vorox explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import DEFAULT_ROOT, AsJson, Root, RunName, TrustCode

app = typer.Typer(add_completion=False)


@app.command()
@implemented_in("vorox.cli.runs.explain")
def explain(
    run: RunName,
    step: Annotated[int | None, typer.Option("--step", min=1, help="The step, as in RUN@STEP.")] = None,
    by: Annotated[
        Literal["grad_norm", "loss", "next_loss"] | None,
        typer.Option(help="What to explain: its gradient norm (default), its loss, or the loss of the steps after it."),
    ] = None,
    next_steps: Annotated[
        int, typer.Option("--next", min=0, metavar="K", help="Steps after it whose loss is compared.")
    ] = 3,
    limit: Annotated[int, typer.Option(min=1, help="Documents to show.")] = 10,
    nproc: Annotated[int, typer.Option(min=1, metavar="N", help="Number of processes; must equal the run's.")] = 1,
    plan: Annotated[bool, typer.Option("--plan", help="Print the cost, and compute nothing.")] = False,
    state: Annotated[Path | None, typer.Option(hidden=True)] = None,
    root: Root = DEFAULT_ROOT,
    _: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Find the documents that caused a step's gradient norm, loss, or damage.

    The step is computed again without each document, from the same state; all
    else stays, to the bit. "No single document" is an answer. Of a step that
    is not finite, it names the documents without which the step is finite. The
    run is not changed.
    """
