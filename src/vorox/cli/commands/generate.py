"""The options and the help of ``vorox generate``."""

from __future__ import annotations

from typing import Annotated

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import (
    DEFAULT_ROOT,
    AsJson,
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
@implemented_in("vorox.cli.models.generate")
def generate(
    run: ModelName,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT ...]", show_default=False, help="Prompts, the same as -p.")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Prompt; repeatable. Default: eval.prompts."),
    ] = None,
    images: Annotated[
        list[str] | None,
        typer.Option("--image", help="Image of the prompt, which has <image> where it belongs; repeatable."),
    ] = None,
    num_tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Maximum number of tokens per completion.")
    ] = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = 1.0,
    num_samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Completions per prompt.")] = 1,
    seed: SeedOption = None,
    step: StepOption = None,
    weights: WeightsOption = "model",
    device: DeviceOption = None,
    root: Root = DEFAULT_ROOT,
    _: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Complete prompts. The same model, prompt and seed give the same text."""
