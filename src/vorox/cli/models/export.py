"""``vorox export``: convert a checkpoint to a format that other programs load."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path

import typer

from vorox.api.checkpoints import FoundCheckpoint, find_checkpoint, holds_derived
from vorox.api.model import create_engine, is_pretrained, open_engine, pretrained_config
from vorox.cli.markdown.model_card import model_card
from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import print_json
from vorox.cli.terminal.state_notices import PrintedNotices
from vorox.core.errors import ConfigError
from vorox.core.run_layout import RunLayout
from vorox.core.schema.runtime import NumberFormat
from vorox.core.schema.train import Weights
from vorox.planned_run import resolve_model
from vorox.records.run_lookup import split_step
from vorox.training.export.checkpoint import Companions, Export, Target, export_passport
from vorox.training.export.checkpoint import export as write
from vorox.training.export.derived import AVERAGED, PRUNED
from vorox.training.export.gguf import GGUF_NAME, stores_tokenizer
from vorox.training.origin.model_origin import model_files
from vorox.training.passport.description import Files, Passport, describe
from vorox.training.passport.documents import CARD_NAME, DOCUMENT_NAMES, documents, require_libraries
from vorox.training.passport.model_signature import check_signing_key, sign_model

_CHECKED_IN_FP32 = ["precision.dtype=fp32", "precision.matmul=ieee", "runtime.compile=false", "runtime.device=cpu"]


def export(
    run: str,
    to: Target | None,
    output: Path | None,
    dtype: NumberFormat,
    weights: Weights,
    check: bool,
    step: int | None,
    passport: bool,
    facts: Path | None,
    key: Path | None,
    root: str,
    as_json: bool,
) -> None:
    _refuse_unused(to, dtype, weights, facts, check=check, passport=passport)
    if passport:
        require_libraries()
    if key is not None:
        check_signing_key(key)
    model, named_step = split_step(root, run, step)
    if is_pretrained(model):
        _check_pretrained(run, output, named_step, weights, passport=passport)
        assert output is not None
        done = _export_pretrained(model, root, output, to or "hf", dtype, check=check)
        _report(done, to or "hf", run=None, signature=_signed(done.path, key), as_json=as_json)
        return
    if output is None and holds_derived(model):
        raise _needs_output(run)
    found = find_checkpoint(run, step, root, PrintedNotices())
    checkpoint, name = found.checkpoint, (found.run or found.checkpoint.path).name
    described = _describe(found, facts, weights) if passport else None
    exports = RunLayout(found.run or Path()).exports
    if described is not None and to is None:
        target = output or exports / f"passport-step-{checkpoint.step:08d}"
        existed = export_passport(checkpoint, target, _companions(described, None))
        _report_passport(described, target, _signed(target, key), run=name, existed=existed, as_json=as_json)
        return
    to = to or "hf"
    kind = "-".join([to, dtype, *([weights] if weights != "model" else []), *(["passport"] if passport else [])])
    target = output or exports / f"{kind}-step-{checkpoint.step:08d}"
    merges = to == "hf" and "adapter" in checkpoint.metadata.get("spec", {})
    engine = open_engine(found.config(_CHECKED_IN_FP32), checkpoint) if check or merges else None
    companions = None if described is None else _companions(described, to)
    done = write(
        checkpoint.path, target, to=to, dtype=dtype, weights=weights, engine=engine, check=check, companions=companions
    )
    _report(done, to, run=name, described=described, signature=_signed(target, key), as_json=as_json)


def _check_pretrained(name: str, output: Path | None, step: int | None, weights: Weights, *, passport: bool) -> None:
    if output is None:
        raise _needs_output(name)
    if step is not None or weights != "model" or passport:
        what = "A pretrained model has no steps, no average and no passport"
        raise ConfigError(what, where=name, hint="leave them out")


def _needs_output(name: str) -> ConfigError:
    return ConfigError("The model belongs to no run", where=name, hint="add --output DIRECTORY")


def _refuse_unused(
    to: Target | None, dtype: NumberFormat, weights: Weights, facts: Path | None, *, check: bool, passport: bool
) -> None:
    if facts is not None and not passport:
        raise ConfigError("Facts belong to a passport", where="--facts", hint="add --passport")
    if passport and to is None and (check or dtype != "fp32" or weights != "model"):
        raise ConfigError(
            "A passport by itself has no weights to check, round or average", where="vorox export --passport",
            hint="add --to hf, gguf or peft, or leave out --check, --dtype and --weights", saved="nothing was written",
        )  # fmt: skip


def _describe(found: FoundCheckpoint, facts: Path | None, weights: Weights) -> Passport:
    """Describe a checkpoint of a run, or one that a re-execution wrote; only these have a step and its records."""
    if found.data_run is None or {AVERAGED, PRUNED} & found.checkpoint.metadata.keys():
        raise ConfigError(
            "A passport is of a checkpoint of a run, and this is none", where=str(found.checkpoint.path),
            hint="name the run, with --step N", saved="nothing was written",
        )  # fmt: skip
    return describe(found.data_run, found.checkpoint, facts, weights)


def _companions(passport: Passport, to: Target | None) -> Companions:
    def write(files: Files) -> dict[str, bytes]:
        return {CARD_NAME: model_card(passport, files, to), **documents(passport, files)}

    return Companions(passport.digest, write)


def _signed(directory: Path, key: Path | None) -> Path | None:
    return None if key is None else sign_model(directory, key)


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


def _report(
    done: Export,
    to: str,
    *,
    run: str | None,
    described: Passport | None = None,
    signature: Path | None,
    as_json: bool,
) -> None:
    names = [] if described is None else [CARD_NAME, *DOCUMENT_NAMES]
    if as_json:
        written = {"passport": names, "signature": None if signature is None else str(signature)}
        print_json({**asdict(done), "path": str(done.path), "run": run, **written})
        return
    _print_export(done, to)
    if described is not None:
        typer.echo(f"Passport: {', '.join(names)}")
    _print_signature(done.path, signature)


def _report_passport(
    passport: Passport, target: Path, signature: Path | None, *, run: str, existed: bool, as_json: bool
) -> None:
    names = [CARD_NAME, *DOCUMENT_NAMES]
    if as_json:
        print_json(
            {
                "path": str(target), "run": run, "step": passport.step, "existed": existed, "passport": names,
                "signature": None if signature is None else str(signature),
            }
        )  # fmt: skip
        return
    state = "already exists" if existed else "written"
    typer.echo(f"{target}: passport of step {passport.step:,}, {', '.join(names)}, {state}")
    _print_signature(target, signature)


def _print_signature(directory: Path, signature: Path | None) -> None:
    if signature is not None:
        place = shlex.quote(str(directory))
        typer.echo(
            f"Signed. Verify it with: model_signing verify key {place} --signature {shlex.quote(str(signature))} "
            "--public_key PUBLIC"
        )


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
