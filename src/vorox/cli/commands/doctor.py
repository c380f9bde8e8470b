"""The options and the help of ``vorox doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import DEFAULT_ROOT, AsJson, Root

app = typer.Typer(add_completion=False)

TIMEOUT_SECONDS = 120.0


@app.command()
@implemented_in("vorox.cli.checks.doctor")
def doctor(
    network: Annotated[bool, typer.Option("--network", help="Also check the network (huggingface.co).")] = False,
    nodes: Annotated[
        bool,
        typer.Option(
            "--nodes",
            help="Check the ranks of a job and the network between them instead: start it on every machine, under the "
            "launcher of training.",
        ),
    ] = False,
    nproc: Annotated[
        int, typer.Option(min=1, metavar="N", help="With --nodes: number of processes on this machine.")
    ] = 1,
    backend: Annotated[
        str | None,
        typer.Option(metavar="torch|jax", help="With --nodes: the engine to connect with; default: PyTorch, else JAX."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help=f"With --nodes: time that the ranks have to answer; default: {TIMEOUT_SECONDS:g}.",
        ),
    ] = None,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Check this machine and its installation; every problem comes with its remedy.

    Checks Python, PyTorch and JAX (each in a process of its own), driver, compiler, memory, disks and clock. The
    network is used only with --network. Exit code 0 if a run can start, 1 if a check fails; warnings do not count.

    With --nodes, checks the ranks of a job: that all answer, versions, clocks, shared directories, exact all-reduces,
    latency and bandwidth.
    """
