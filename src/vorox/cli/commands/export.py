"""The options and the help of ``vorox export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import DEFAULT_ROOT, AsJson, ModelName, Root, StepOption, TrustCode, WeightsOption

app = typer.Typer(add_completion=False)


@app.command()
@implemented_in("vorox.cli.models.export")
def export(
    run: ModelName,
    to: Annotated[
        Literal["hf", "gguf", "peft"],
        typer.Option(
            "--to",
            help="hf: a directory that transformers loads; adapters are merged. gguf: one with a file for llama.cpp. "
            "peft: an adapter by itself.",
        ),
    ] = "hf",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="New directory. Default: in the run directory.")
    ] = None,
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="Number format of the weights.")] = "fp32",
    weights: WeightsOption = "model",
    check: Annotated[
        bool, typer.Option("--check", help="Load the export with transformers; compare logits and greedy tokens.")
    ] = False,
    step: StepOption = None,
    root: Root = DEFAULT_ROOT,
    _: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Export a model to Hugging Face format, GGUF or a peft adapter. Existing files are never overwritten."""
