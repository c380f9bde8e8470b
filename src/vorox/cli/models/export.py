"""``vorox export``: convert a checkpoint to a format that other programs load."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from vorox.api.checkpoints import find_checkpoint, holds_derived
from vorox.api.model import create_engine, is_pretrained, open_engine, pretrained_config
from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import print_json
from vorox.cli.terminal.state_notices import PrintedNotices
from vorox.core.errors import ConfigError
from vorox.core.run_layout import RunLayout
from vorox.core.schema.runtime import NumberFormat
from vorox.core.schema.train import Weights
from vorox.planned_run import resolve_model
from vorox.records.run_lookup import split_step
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
    model, named_step = split_step(root, run, step)
    if is_pretrained(model):
        _check_pretrained(run, output, named_step, weights)
        assert output is not None
        _report(_export_pretrained(model, root, output, to, dtype, check=check), to, run=None, as_json=as_json)
        return
    if output is None and holds_derived(model):
        raise _needs_output(run)
    found = find_checkpoint(run, step, root, PrintedNotices())
    checkpoint = found.checkpoint
    kind = f"{to}-{dtype}" if weights == "model" else f"{to}-{dtype}-{weights}"
    target = output or RunLayout(found.run or Path()).exports / f"{kind}-step-{checkpoint.step:08d}"
    merges = to == "hf" and "adapter" in checkpoint.metadata.get("spec", {})
    engine = None
    if check or merges:
        engine = open_engine(found.config(_CHECKED_IN_FP32), checkpoint)
    done = write(checkpoint.path, target, to=to, dtype=dtype, weights=weights, engine=engine, check=check)
    _report(done, to, run=(found.run or checkpoint.path).name, as_json=as_json)


def _check_pretrained(name: str, output: Path | None, step: int | None, weights: Weights) -> None:
    if output is None:
        raise _needs_output(name)
    if step is not None or weights != "model":
        raise ConfigError("A pretrained model has no steps and no average", where=name, hint="leave them out")


def _needs_output(name: str) -> ConfigError:
    return ConfigError("The model belongs to no run", where=name, hint="add --output DIRECTORY")


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
