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
        Literal["hf", "gguf", "peft"] | None,
        typer.Option(
            "--to",
            help="hf (default): a directory that transformers loads; adapters are merged. gguf: one with a file for "
            "llama.cpp. peft: an adapter by itself.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="New directory. Default: in the run directory.")
    ] = None,
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="Number format of the weights.")] = "fp32",
    weights: WeightsOption = "model",
    check: Annotated[
        bool, typer.Option("--check", help="Load the export with transformers; compare logits and greedy tokens.")
    ] = False,
    step: StepOption = None,
    passport: Annotated[
        bool,
        typer.Option(
            "--passport",
            help="Write what the checkpoint is and was trained on: model card, CycloneDX, Croissant, SPDX. With --to "
            "beside the model, else by themselves.",
        ),
    ] = False,
    facts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="For the passport, YAML file with what no run knows: provider, licences, ..."
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Sign the directory for `model_signing verify`: private ECDSA P-256 key (PEM)."
        ),
    ] = None,
    root: Root = DEFAULT_ROOT,
    _: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Export a model to Hugging Face format, GGUF or a peft adapter, or its passport. Files are never overwritten."""
