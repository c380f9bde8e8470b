"""The options and the help of ``vorox chat``."""

from __future__ import annotations

from typing import Annotated

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import (
    DEFAULT_ROOT,
    DeviceOption,
    ModelName,
    Root,
    SeedOption,
    StepOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    TrustCode,
    WeightsOption,
)

app = typer.Typer(add_completion=False)


@app.command()
@implemented_in("vorox.cli.models.chat")
def chat(
    run: ModelName,
    system: Annotated[str | None, typer.Option("--system", help="System message.", show_default=False)] = None,
    num_tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Maximum number of tokens per answer.")
    ] = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = 1.0,
    seed: SeedOption = None,
    step: StepOption = None,
    weights: WeightsOption = "model",
    device: DeviceOption = None,
    root: Root = DEFAULT_ROOT,
    _: TrustCode = False,
) -> None:
    """Chat with a model; without a chat template, it continues what you type."""
