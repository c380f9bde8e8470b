"""The options and the help of ``vorox checkpoints``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import DEFAULT_ROOT, AsJson, Root, RunName, TrustCode, Yes

app = typer.Typer(
    name="checkpoints",
    help="List, verify, restore, materialize, sign, remove, average and request checkpoints.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command("list")
@implemented_in("vorox.cli.runs.checkpoints")
def list_(run: RunName, root: Root = DEFAULT_ROOT, as_json: AsJson = False) -> None:
    """List the checkpoints of a run and of its mirror, by their manifests."""


@app.command()
@implemented_in("vorox.cli.runs.checkpoints")
def verify(
    run: RunName,
    step: Annotated[int | None, typer.Option("--step", help="Only the checkpoint of this step.")] = None,
    restore: Annotated[
        bool,
        typer.Option("--restore", help="First restore quarantined checkpoints that verify successfully."),
    ] = False,
    public_key: Annotated[
        Path | None, typer.Option("--public-key", metavar="FILE", help="Also verify signatures by this key (PEM).")
    ] = None,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Verify every byte of the checkpoints against their manifests; exit code 5 unless all in use are valid."""


@app.command()
@implemented_in("vorox.cli.runs.checkpoints")
def sign(
    run: RunName,
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="Private key (PEM): Ed25519 or ECDSA P-256.")],
    step: Annotated[int | None, typer.Option("--step", help="Only the checkpoint of this step.")] = None,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Sign the checkpoints of a run: all their files, and the replay chain up to their steps.

    A signature vouches for bytes and heads. Whether the weights are what the
    chain says, `vorox audit` checks.
    """


@app.command()
@implemented_in("vorox.cli.runs.checkpoints")
def restore(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run id, name, path or 'latest', or the URI of a mirrored run.")
    ] = "latest",
    step: Annotated[
        int | None, typer.Option("--step", help="This step; by default the newest one, if it is ahead of the run.")
    ] = None,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Download a checkpoint of a run's mirror into the run directory, and verify it, without training."""


@app.command()
@implemented_in("vorox.cli.runs.materialize")
def materialize(
    run: RunName,
    steps: Annotated[
        list[int] | None, typer.Option("--step", min=0, help="A step, kept or not; may be given several times.")
    ] = None,
    every: Annotated[int | None, typer.Option("--every", min=1, metavar="K", help="All multiples of K steps.")] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="New checkpoints go here. Default: materialized/RUN.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the cost, and compute nothing.")] = False,
    nproc: Annotated[int, typer.Option(min=1, metavar="N", help="Number of processes; must equal the run's.")] = 1,
    root: Root = DEFAULT_ROOT,
    _: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Compute the exact checkpoint of any step again, from the newest kept one before it.

    Every step on the way must have the recorded bits, and the new state the
    recorded fingerprint, or the next step its recorded bits. The run is not
    changed.
    """


@app.command()
@implemented_in("vorox.cli.runs.checkpoints")
def remove(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id, name or path, in full, or 'latest'.")],
    names: Annotated[list[str], typer.Argument(metavar="STEP ...", help="Steps, or directory names.")],
    force: Annotated[bool, typer.Option("--force", help="Remove even the last valid checkpoint.")] = False,
    root: Root = DEFAULT_ROOT,
    yes: Yes = False,
) -> None:
    """Remove checkpoints of a run that is not running. The last valid one needs --force."""


@app.command()
@implemented_in("vorox.cli.runs.checkpoints")
def average(
    run: RunName,
    to: Annotated[Path, typer.Option("--to", help="New directory.")],
    steps: Annotated[
        list[str] | None, typer.Argument(metavar="[STEP ...]", help="Steps, or directory names.", show_default=False)
    ] = None,
    last: Annotated[int | None, typer.Option("--last", min=2, help="Average this many of the newest.")] = None,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Average the weights of checkpoints into a directory for --from-weights, export and vorox.load_model."""


@app.command()
@implemented_in("vorox.cli.runs.checkpoints")
def save(
    run: RunName,
    wait_seconds: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds to wait for the checkpoint; 0: return immediately.")
    ] = 60.0,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Request a checkpoint from a running process after its current step, and wait for it."""
