"""``vorox export``: convert a checkpoint to a format that other programs load."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vorox.cli import humanize
from vorox.cli.output import DEFAULT_ROOT, AsJson, Root, RunName, WeightsOption, print_json

if TYPE_CHECKING:
    from vorox.training.export.checkpoint import Export

_CHECKED_IN_FP32 = ["precision.dtype=fp32", "precision.matmul=ieee", "runtime.compile=false", "runtime.device=cpu"]


def export(
    run: RunName,
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
    step: Annotated[
        int | None, typer.Option("--step", help="Checkpoint to export. Default: the newest valid one.")
    ] = None,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Export a checkpoint to Hugging Face format, GGUF or a peft adapter. Existing files are never overwritten."""
    from vorox.api.model import derived_config, find_checkpoint, find_derived, open_engine
    from vorox.cli.generate import report_skipped
    from vorox.core.config import config_values, load_config
    from vorox.core.errors import ConfigError
    from vorox.core.run_context import recorded_config
    from vorox.core.run_layout import RunLayout
    from vorox.core.run_lookup import find_run
    from vorox.training.export.checkpoint import export as write

    derived = find_derived(run, step)
    directory = find_run(root, run) if derived is None else derived.path
    checkpoint = derived or find_checkpoint(directory, step, on_corrupt=report_skipped)
    kind = f"{to}-{dtype}" if weights == "model" else f"{to}-{dtype}-{weights}"
    if derived is not None and output is None:
        raise ConfigError("Averaged and pruned weights belong to no run", where=str(derived.path), hint="set --output")
    target = output or RunLayout(directory).exports / f"{kind}-step-{checkpoint.step:08d}"
    merges = to == "hf" and "adapter" in checkpoint.metadata.get("spec", {})
    engine = None
    if check or merges:
        recorded = derived_config(derived) if derived else recorded_config(directory)
        engine = open_engine(load_config(config_values(recorded), _CHECKED_IN_FP32), checkpoint)
    done = write(checkpoint.path, target, to=to, dtype=dtype, weights=weights, engine=engine, check=check)
    if as_json:
        print_json({**asdict(done), "path": str(done.path), "run": directory.name})
    else:
        _print_export(done, to)


def _print_export(done: Export, to: str) -> None:
    """Print what was written, how it compares with the checkpoint, and how to load it."""
    state = "already exists" if done.existed else "written"
    typer.echo(
        f"{done.path}: step {done.step:,}, {humanize.count(done.num_parameters)} parameters, {done.dtype}, "
        f"{humanize.size(done.size_bytes)}, {state}"
    )
    found = done.comparison
    if found is not None:
        texts = f"{found.num_texts} texts have equal ids; " if to != "gguf" else ""
        typer.echo(
            f"Checked with transformers: {texts}over {found.num_tokens:,} positions, "
            f"logits differ by at most {found.max_difference:.1e} (tolerance {found.tolerance:.1e}); "
            f"{found.num_greedy_tokens} greedy tokens are equal"
        )
        if found.rounding_difference:
            typer.echo(f"Rounding to {done.dtype} changed logits by up to {found.rounding_difference:.1e}")
    if to == "gguf":
        from vorox.training.export.gguf import GGUF_NAME, stores_tokenizer

        file = done.path / GGUF_NAME
        if not stores_tokenizer(file):
            typer.echo("llama.cpp has no tokenizer like this run's: the file maps ids to ids")
        typer.echo(f"Load it with: llama-cli --model {file}")
        return
    if not done.has_tokenizer:
        typer.echo("No tokenizer: the run was trained on token ids (tokenizer.kind=none), so AutoTokenizer finds none")
    if to == "peft":
        typer.echo(f'Load it with: peft.AutoPeftModelForCausalLM.from_pretrained("{done.path}")')
        return
    typer.echo(f'Load it with: transformers.{done.auto_class}.from_pretrained("{done.path}")')
