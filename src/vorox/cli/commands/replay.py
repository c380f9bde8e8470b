"""The options and the help of ``vorox replay``."""

from __future__ import annotations

from typing import Annotated

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import DEFAULT_ROOT, AsJson, Root, RunName, TrustCode

app = typer.Typer(add_completion=False)


@app.command()
@implemented_in("vorox.cli.checks.replay")
def replay(
    run: RunName,
    first_step: Annotated[
        int, typer.Option("--from", min=0, help="Start from the checkpoint after this many steps.")
    ] = 0,
    last_step: Annotated[
        int | None, typer.Option("--to", min=1, help="Last step to replay. Default: the last recorded one.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=1, help="Replay this step alone.")] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="A:B", help="Replay steps A to B: --from A - 1 --to B.")
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, metavar="N", help="Number of processes; must equal the run's.")] = 1,
    root: Root = DEFAULT_ROOT,
    _: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Recompute recorded steps from a checkpoint and compare every bit.

    The run is not changed; its verdicts.jsonl gets a line. The first difference
    is reported with its step and quantity; the exit code gives its kind: 4
    data, 5 saved state, 7 numbers.
    """
