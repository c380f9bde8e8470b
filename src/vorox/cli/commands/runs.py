"""The options and the help of ``vorox runs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import DEFAULT_ROOT, AsJson, Root, RunName, TrustCode, Yes

app = typer.Typer(
    name="runs", help="List, show, compare, plot, record and remove runs.", no_args_is_help=True, add_completion=False
)


@app.command("list")
@implemented_in("vorox.cli.runs.runs")
def list_(root: Root = DEFAULT_ROOT, as_json: AsJson = False) -> None:
    """List all runs, the most recently changed last."""


@app.command()
@implemented_in("vorox.cli.runs.runs")
def show(run: RunName, root: Root = DEFAULT_ROOT, as_json: AsJson = False, _: TrustCode = False) -> None:
    """Show the state, attempts, loss curve and checkpoints of a run."""


@app.command()
@implemented_in("vorox.cli.runs.run_time")
def time(
    run: RunName,
    save_every: Annotated[
        list[int] | None,
        typer.Option("--save-every", min=1, help="Also compute the run with a save every so many steps; repeatable."),
    ] = None,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Show where the time of a run went, its goodput, and what another save interval would have gained."""


@app.command()
@implemented_in("vorox.cli.runs.comparison")
def compare(
    run: RunName,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="The run to compare with.")],
    root: Root = DEFAULT_ROOT,
    every: Annotated[bool, typer.Option("--all", help="All metrics, not only the common ones.")] = False,
    paired: Annotated[
        bool,
        typer.Option(
            "--paired",
            help="For a run and its fork: the difference of the loss by step, by source and by document.",
        ),
    ] = False,
    steps: Annotated[
        str | None,
        typer.Option("--steps", metavar="A:B", help="With --paired: steps with the documents. Default: the last 10."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two runs: settings, replay chains and metrics.

    With --paired, the losses of documents are computed under the last
    checkpoint of the same step of each run.
    """


Smoothing = Annotated[
    float | None,
    typer.Option(
        "--smoothing", min=0, max=0.999,
        help="Weight of the moving average of loss and throughput. Default: by the number of points.",
    ),
]  # fmt: skip


@app.command()
@implemented_in("vorox.cli.runs.report")
def plot(
    names: Annotated[
        list[str], typer.Argument(metavar="RUN ...", help="Run ids, names or prefixes, paths, or 'latest'.")
    ],
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="File to write: .png or .svg.")],
    x: Annotated[Literal["steps", "tokens", "seconds"], typer.Option("--x", help="The x axis.")] = "steps",
    smoothing: Smoothing = None,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Plot loss, learning rate, throughput and memory of one or several runs."""


@app.command()
@implemented_in("vorox.cli.runs.report")
def report(
    run: RunName,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="File to write: .html.")],
    smoothing: Smoothing = None,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Write a run as one HTML page to print: results, curves, data, samples, checkpoints, settings."""


@app.command()
@implemented_in("vorox.cli.runs.training_record")
def record(
    run: RunName,
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="Up to this step. Default: the newest checkpoint's.")
    ] = None,
    facts: Annotated[
        Path | None,
        typer.Option("--facts", metavar="FILE.yaml", help="Provider, languages; kind and licence of each source."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option("--against", help="Count the records of this evaluation set that the run saw; repeatable."),
    ] = None,
    to: Annotated[Path | None, typer.Option("--to", metavar="FILE", help="Write it to this file.")] = None,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Write what a run was trained on, by source, licence and share, as Markdown: the EU's public summary."""


@app.command()
@implemented_in("vorox.cli.runs.removal")
def remove(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN ...]", help="Run ids, names or paths, in full, or 'latest'.")
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="All runs that ended without a checkpoint: refused, failed or killed.")
    ] = False,
    root: Root = DEFAULT_ROOT,
    yes: Yes = False,
    keep_metadata: Annotated[
        bool, typer.Option("--keep-metadata", help="Keep the rows of the runs in a shared metadata database.")
    ] = False,
    mirror: Annotated[bool, typer.Option("--mirror", help="Also remove their mirrors.")] = False,
) -> None:
    """Remove runs, their checkpoints and their rows in a shared metadata database. Running ones are refused."""
