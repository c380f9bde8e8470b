"""The options and the help of ``vorox serve``."""

from __future__ import annotations

from typing import Annotated

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import (
    DEFAULT_ROOT,
    DeviceOption,
    ModelName,
    Root,
    StepOption,
    TrustCode,
    WeightsOption,
)

app = typer.Typer(add_completion=False)

DEFAULT_PORT = 8000


@app.command()
@implemented_in("vorox.cli.models.serve")
def serve(
    run: ModelName,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: a free one.")] = DEFAULT_PORT,
    token: Annotated[
        str | None,
        typer.Option("--token", envvar="VOROX_TOKEN", help="API key. Default: a new random one.",
                     show_default=False),
    ] = None,
    no_token: Annotated[bool, typer.Option("--no-token", help="Require none; only on this machine's address.")] = False,
    name: Annotated[
        str | None, typer.Option("--name", help="Model in requests. Default: the run's directory.", show_default=False)
    ] = None,
    step: StepOption = None,
    weights: WeightsOption = "model",
    device: DeviceOption = None,
    root: Root = DEFAULT_ROOT,
    _: TrustCode = False,
) -> None:  # fmt: skip
    """Serve a model with an OpenAI-compatible API: completions and chat completions, whole or streamed."""
