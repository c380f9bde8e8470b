"""``vorox export``: convert a checkpoint to a format that other programs load."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from vorox.api.model import (
    create_engine,
    derived_config,
    find_checkpoint,
    find_derived,
    is_pretrained,
    open_engine,
    pretrained_config,
)
from vorox.cli.models.generate import report_skipped
from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import print_json
from vorox.core.config import config_values, load_config
from vorox.core.errors import ConfigError
from vorox.core.run_layout import RunLayout
from vorox.core.schema.runtime import NumberFormat
from vorox.core.schema.train import Weights
from vorox.planned_run import resolve_model
from vorox.records.run_context import recorded_config
from vorox.records.run_lookup import find_run
from vorox.training.export.checkpoint import Export, Target
from vorox.training.export.checkpoint import export as write
from vorox.training.export.gguf import GGUF_NAME, stores_tokenizer
from vorox.training.origin.model_origin import model_files

_CHECKED_IN_FP32 = ["precision.dtype=fp32", "precision.matmul=ieee", "runtime.compile=false", "runtime.device=cpu"]


def export(
    run: str,
    to: Target,
    output: Path | None,
    dtype: NumberFormat,
    weights: Weights,
    check: bool,
    step: int | None,
    root: str,
    as_json: bool,
) -> None:
    derived = None if is_pretrained(run) else find_derived(run, step)
    if output is None and (is_pretrained(run) or derived is not None):
        raise ConfigError("The model belongs to no run", where=run, hint="add --output DIRECTORY")
    if output is not None and is_pretrained(run):
        if step is not None or weights != "model":
            raise ConfigError("A pretrained model has no steps and no average", where=run, hint="leave them out")
        done = _export_pretrained(run, root, output, to, dtype, check=check)
        _report(done, to, run=None, as_json=as_json)
        return
    directory = find_run(root, run) if derived is None else derived.path
    checkpoint = derived or find_checkpoint(directory, step, on_corrupt=report_skipped)
    kind = f"{to}-{dtype}" if weights == "model" else f"{to}-{dtype}-{weights}"
    target = output or RunLayout(directory).exports / f"{kind}-step-{checkpoint.step:08d}"
    merges = to == "hf" and "adapter" in checkpoint.metadata.get("spec", {})
    engine = None
    if check or merges:
        recorded = derived_config(derived) if derived else recorded_config(directory)
        engine = open_engine(load_config(config_values(recorded), _CHECKED_IN_FP32), checkpoint)
    done = write(checkpoint.path, target, to=to, dtype=dtype, weights=weights, engine=engine, check=check)
    _report(done, to, run=directory.name, as_json=as_json)


def _export_pretrained(
    name: str,
    root: str,
    target: Path,
    to: Target,
    dtype: NumberFormat,
    *,
    check: bool,
) -> Export:
    """Export a directory of transformers, or a repository of the hub."""
    config = pretrained_config(name, root, _CHECKED_IN_FP32)
    engine = create_engine(config, resolve_model(config, 1)) if check else None
    return write(model_files(config), target, to=to, dtype=dtype, engine=engine, check=check)


def _report(done: Export, to: str, *, run: str | None, as_json: bool) -> None:
    if as_json:
        print_json({**asdict(done), "path": str(done.path), "run": run})
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
