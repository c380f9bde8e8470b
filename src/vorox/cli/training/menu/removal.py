"""Manage checkpoints in the menu: details, deletion of checkpoints, runs and orphaned logs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import typer

from vorox.cli.runs.checkpoints import print_checkpoints
from vorox.cli.runs.removal import remove_one
from vorox.cli.runs.runs import head_lines
from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import print_wrapped
from vorox.cli.training.menu.questions import Ask, ask_choice, ask_yes_or_no, print_error, title
from vorox.core.errors import CheckpointError, VoroxError
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import RunLayout
from vorox.experiments.artifacts import (
    RunSummary,
    inspect_run,
    list_checkpoints,
    list_failed_runs,
    list_runs,
    remove_checkpoints,
)
from vorox.records.run_lookup import short_path
from vorox.training.mirror import mirror_uri


def manage_checkpoints(root: Path, ask: Ask) -> None:
    """Show all runs and remove what the user chooses, until the user goes back."""
    while True:
        title("Manage checkpoints")
        runs = sorted(list_runs(root), key=lambda run: -run.changed_at)
        for number, run in enumerate(runs, 1):
            kept = pluralize(len(list_checkpoints(run.directory)), "checkpoint")
            facts = f"{kept} | {humanize.size(run.size_bytes)} | {run.state}"
            print_wrapped([f"{number:>3}  {run.run_id}", f"     {facts}"], indent_columns=5)
        orphans = list_failed_runs(root)
        typer.echo("" if runs else f"  No runs in {short_path(root.absolute())} yet.\n")
        if orphans:
            size = humanize.size(sum(run.size_bytes for run in orphans))
            typer.echo(f"  O  delete the logs of {pluralize(len(orphans), 'run')} without a checkpoint ({size})")
        typer.echo("  B  back to the start\n")
        answer = ask_choice("Choose", ask, number=len(runs), letters="OBQ" if orphans else "BQ", default="B")
        if answer == "B":
            return
        if answer == "O":
            _remove_orphans(orphans, ask)
        else:
            _manage_run(inspect_run(runs[int(answer) - 1].directory), ask)  # it may have stopped meanwhile


def _remove_orphans(orphans: list[RunSummary], ask: Ask) -> None:
    for run in orphans:
        typer.echo(f"  {run.run_id}  ({run.state}, {humanize.size(run.size_bytes)})")
    which = "this run" if len(orphans) == 1 else f"these {len(orphans)} runs"
    if ask_yes_or_no(f"Delete {which}?", ask, default=False):
        for run in orphans:
            _remove_run(run)


def _manage_run(run: RunSummary, ask: Ask) -> None:
    """Show one run, and remove a checkpoint of it or all of it."""
    title("Details")
    print_wrapped(head_lines(run))
    typer.echo("")
    checkpoints = list_checkpoints(run.directory)
    print_checkpoints(checkpoints)
    typer.echo("")
    if run.holder is not None:
        print_wrapped([f"  In use by {run.holder}: nothing of it can be deleted until it stops."])
        return
    for number, checkpoint in enumerate(checkpoints, 1):
        typer.echo(f"{number:>3}  delete {checkpoint.name}")
    typer.echo("  R  delete the whole run")
    typer.echo("  B  back\n")
    answer = ask_choice("Choose", ask, number=len(checkpoints), letters="RB", default="B")
    if answer == "R":
        print_wrapped(_contents(run), indent_columns=5)
        if ask_yes_or_no(f"Delete {run.run_id}?", ask, default=False):
            _remove_run(run)
    elif answer != "B":
        _remove_checkpoint(run, checkpoints[int(answer) - 1].name, ask)


def _contents(run: RunSummary) -> Iterator[str]:
    """Yield what is deleted with a run, and what is kept."""
    layout = RunLayout(run.directory)
    kept = list_checkpoints(run.directory)
    size = humanize.size(sum(checkpoint.size_bytes for checkpoint in kept))
    yield f"  Deleted: {pluralize(len(kept), 'checkpoint')} ({size}), log, metrics and the replay chain"
    others = {"exports": layout.exports, "TensorBoard files": layout.tensorboard, "task results": layout.tasks}
    present = [name for name, path in others.items() if path.exists()]
    if present:
        yield f"  Deleted as well: {', '.join(present)}"
    uri = mirror_uri(run.directory)
    yield f"  Kept: the caches of its data{f', and its mirror {uri}' if uri else ''}"


def _remove_run(run: RunSummary) -> None:
    try:
        remove_one(run, keep_metadata=False, mirror=False)
    except VoroxError as error:
        print_error(error)


def _remove_checkpoint(run: RunSummary, name: str, ask: Ask) -> None:
    if not ask_yes_or_no(f"Delete {name} of {run.run_id}?", ask, default=False):
        return
    try:
        removed = remove_checkpoints(run.directory, [name])
    except CheckpointError as error:
        error.hint = "to delete it as well, delete the whole run (R)"
        print_error(error)
    except VoroxError as error:
        print_error(error)
    else:
        typer.echo(f"Removed {name} ({humanize.size(sum(one.size_bytes for one in removed))}).")
