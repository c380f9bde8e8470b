"""``vorox export``: a checkpoint in a form that other programs load. Parsing and printing only."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from vorox.cli import humanize
from vorox.cli.output import DEFAULT_ROOT, AsJson, Root, RunName, print_json

_CHECKED_IN_FP32 = ["precision.dtype=fp32", "precision.matmul=ieee", "runtime.compile=false", "runtime.device=cpu"]


def export(
    run: RunName,
    to: Annotated[Literal["hf"], typer.Option("--to", help="hf: a directory for transformers.")] = "hf",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Directory to make; below the run.")] = None,
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="Type of the stored weights.")] = "fp32",
    check: Annotated[
        bool, typer.Option("--check", help="Load it with transformers and compare tokens and logits.")
    ] = False,
    step: Annotated[int | None, typer.Option("--step", help="Checkpoint to export; the newest valid one.")] = None,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in Hugging Face form. Nothing is ever overwritten."""
    from vorox.api.model import find_checkpoint, open_engine
    from vorox.cli.generate import passed_over
    from vorox.core.atomic import make_directory
    from vorox.core.run_context import recorded_config
    from vorox.core.run_layout import RunLayout
    from vorox.core.run_lookup import find_run
    from vorox.training.export import export as write

    directory = find_run(root, run)
    checkpoint = find_checkpoint(directory, step, on_corrupt=passed_over)
    target = output or RunLayout(directory).exports / f"{to}-{dtype}-step-{checkpoint.step:08d}"
    make_directory(target.absolute().parent)
    engine = open_engine(recorded_config(directory, _CHECKED_IN_FP32), checkpoint) if check else None
    done = write(checkpoint.path, target, dtype=dtype, engine=engine)
    if as_json:
        print_json({**asdict(done), "path": str(done.path), "run": directory.name})
        return
    there = "was there already" if done.existed else "written"
    typer.echo(
        f"{done.path}: step {done.step:,}, {humanize.count(done.num_parameters)} parameters, {done.dtype}, "
        f"{humanize.size(done.size_bytes)}, {there}"
    )
    found = done.comparison
    if found is not None:
        typer.echo(
            f"checked: transformers agrees on {found.num_texts} texts and on {found.num_tokens:,} positions, largest "
            f"difference of a logit {found.max_difference:.1e} (allowed {found.tolerance:.1e})"
        )
        if found.rounding_difference:
            typer.echo(f"storing in {done.dtype} moved logits by up to {found.rounding_difference:.1e}")
    if not done.has_tokenizer:
        typer.echo(
            "no tokenizer: the run was trained on token ids (tokenizer.kind=none), so AutoTokenizer finds none here"
        )
    typer.echo(f'load it: transformers.AutoModelForCausalLM.from_pretrained("{done.path}")')
