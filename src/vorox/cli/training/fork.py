"""``vorox fork``: continue from a state of a run as a run of its own, with one thing changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from vorox.cli.runs.materialize import state_after, step_of
from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import print_json, print_wrapped, printing_to_stderr
from vorox.cli.training.train import train as train_run
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import step_directories
from vorox.data.provenance.named_documents import named_documents
from vorox.data.provenance.queries import when
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.records.run_lookup import find_run, run_argument
from vorox.training.fork import ForkChange, check_change
from vorox.training.fork import fork as create_fork
from vorox.training.materialize import open_range
from vorox.training.re_execution import cost_of


def fork(
    run: str,
    step: int | None,
    overrides: list[str] | None,
    without_document: list[str] | None,
    without_source: list[str] | None,
    name: str | None,
    nproc: int,
    train: bool,
    plan: bool,
    root: str,
    as_json: bool,
) -> None:
    run, step = step_of(root, run, step)
    parent = find_run(root, run)
    with RunDataIndex.open(parent) as run_data:
        documents = named_documents(run_data, without_document or [], "--without-document")
        lines = [_reading(run_data, document, step) for document in without_document or []]
        change = ForkChange(documents, tuple(without_source or []), tuple(overrides or []))
        check_change(run_data, step, change)
    lines += [*(f"without source {source}" for source in change.sources), *change.overrides]
    if plan:
        _print_plan(parent, step, lines, as_json=as_json)
        return
    checkpoint = None if step == 0 else state_after(parent, step, root, nproc)
    directory = create_fork(parent, step, checkpoint, change, name)
    command = f"vorox train --resume {run_argument(directory)}{f' --nproc {nproc}' if nproc > 1 else ''}"
    with printing_to_stderr(is_active=as_json):
        typer.echo(f"Forked {parent.name} at step {step:,}: {directory}")
        print_wrapped(f"  {line}" for line in lines or ["nothing is changed"])
        if train:
            train_to_end(directory, nproc)
    if as_json:
        print_json(
            {
                "run": directory.name, "directory": str(directory), "parent": parent.name, "step": step,
                "change": change.to_json(), "is_trained": train, "train": command,
            }
        )  # fmt: skip
    elif train:
        typer.echo(f"Compare: vorox runs compare --paired {run_argument(parent)} {run_argument(directory)}")
    else:
        typer.echo(f"Train it: {command}")


def train_to_end(directory: Path, nproc: int) -> None:
    """Train a fork with ``nproc`` ranks.

    Raises:
        typer.Exit: The ranks have failed, and said why.
    """
    try:
        train_run(None, str(directory), None, None, None, nproc, 0, dry_run=False, menu=False)
    except typer.Exit as ended:  # of several ranks
        if ended.exit_code:
            raise


def _reading(run_data: RunDataIndex, document: str, step: int) -> str:
    """Say which later steps of the parent read a document."""
    file, _, record = document.rpartition(":")
    found = [one for one in when(run_data, file, ordinal=int(record)) if one.step > step and one.state != "beyond"]
    steps = sorted({one.step for one in found if not one.is_masked})
    if found and not steps:
        return f"without {document}: it is masked already, so nothing will differ"
    if not steps:
        return f"without {document}: no step after {step:,} reads it, so nothing will differ"
    more = "" if len(steps) == 1 else f", {pluralize(len(steps), 'step')} in all"
    return f"without {document}: the first step that differs is {steps[0]:,}{more}"


def _print_plan(parent: Path, step: int, lines: Sequence[str], *, as_json: bool) -> None:
    is_kept = step == 0 or step in step_directories(parent)
    cost = None if is_kept else cost_of(open_range(parent, [step]))
    if as_json:
        num_steps, seconds = (0, 0.0) if cost is None else (cost.num_steps, cost.seconds)
        print_json(
            {"step": step, "is_kept": is_kept, "num_steps": num_steps, "seconds": seconds, "changes": list(lines)}
        )
        return
    seconds = "" if cost is None or cost.seconds is None else f", about {humanize.duration(cost.seconds)}"
    first = "its state is kept" if cost is None else f"{pluralize(cost.num_steps, 'step')} to compute first{seconds}"
    typer.echo(f"Fork of {parent.name} at step {step:,}: {first}; then the steps from {step + 1:,} on")
    print_wrapped(f"  {line}" for line in lines or ["nothing is changed"])
