"""The checkpoints of the menu: the newest of each run, and how to continue from one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import print_wrapped
from vorox.cli.training.menu.questions import Ask, ask_choice, ask_number, title
from vorox.core.files.file_holder import lock_holder
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import RunLayout
from vorox.experiments.artifacts import CheckpointSummary, RunSummary, list_checkpoints, list_runs
from vorox.experiments.tracking import read_metrics
from vorox.records.run_lookup import run_argument, short_path

_MAX_LISTED, _MIN_LISTED = 9, 3
_OTHER_LINES = 10
"""Lines of the screen besides the checkpoints, which have two each: title, choices, question."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint.

    Attributes:
        run: Its run.
        checkpoint: The checkpoint.
        loss: Training loss of the newest logged step up to it.
        is_newest: Whether the run has no later one.
    """

    run: RunSummary
    checkpoint: CheckpointSummary
    loss: float | None
    is_newest: bool


@dataclass(frozen=True, slots=True)
class Resumption:
    """How to continue: the value of ``--resume``, and the step at which the run was finished, if it was."""

    resume: str
    finished_step: int | None


def list_entries(root: Path) -> list[Entry]:
    """Return all checkpoints that can be resumed: the newest of each run first, each group by time, latest first."""
    found: list[Entry] = []
    for run in list_runs(root):
        usable = [one for one in list_checkpoints(run.directory) if one.state == "unverified"]
        metrics = read_metrics(run.directory) if usable else {}
        for checkpoint in usable:
            losses = [
                values["loss"] for step, values in metrics.items() if step <= checkpoint.step and "loss" in values
            ]
            loss = losses[-1] if losses else checkpoint.eval_loss
            found.append(Entry(run, checkpoint, loss, checkpoint is usable[-1]))
    return sorted(found, key=lambda entry: (not entry.is_newest, -(entry.checkpoint.saved_at or 0)))


def print_entries(entries: Sequence[Entry], root: Path, *, shows_all: bool = False) -> None:
    """Print the numbered checkpoints and the other choices."""
    title("Checkpoints")
    if not entries:
        typer.echo(f"  None in {short_path(root.absolute())} yet.\n")
    for number, entry in enumerate(entries[: _num_shown(entries, shows_all=shows_all)], 1):
        print_wrapped([f"{number:>3}  {entry.run.run_id}", f"     {_facts(entry)}"], indent_columns=5)
    hidden = len(entries) - _num_shown(entries, shows_all=shows_all)
    if entries:
        typer.echo("")
    if hidden:
        typer.echo(f"  A  show {pluralize(hidden, 'older one')} as well")
    typer.echo("  N  start a new training")
    typer.echo("  X  manage checkpoints: details, delete")
    typer.echo("  Q  quit\n")


def _num_shown(entries: Sequence[Entry], *, shows_all: bool) -> int:
    """Return how many entries fit on the screen, of those that are the newest of a run, or of all."""
    if shows_all:
        return len(entries)
    lines = shutil.get_terminal_size((80, _OTHER_LINES + 2 * _MAX_LISTED)).lines
    fitting = min(_MAX_LISTED, max(_MIN_LISTED, (lines - _OTHER_LINES) // 2))
    return min(fitting, sum(entry.is_newest for entry in entries))


def _facts(entry: Entry) -> str:
    total = "" if entry.run.total_steps is None else f" of {entry.run.total_steps:,}"
    state = f" | {entry.run.state}" if entry.is_newest else ""
    return (
        f"Step {entry.checkpoint.step:,}{total} | Loss {humanize.number(entry.loss, 4)} | "
        f"{format_time(entry.checkpoint.saved_at)}{state}"
    )


def format_time(seconds: float | None) -> str:
    """Format a local time: 2025-08-29 02:36."""
    return humanize.UNKNOWN if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def choose_checkpoint(entries: Sequence[Entry], root: Path, ask: Ask) -> Resumption | str:
    """Ask for a checkpoint; return how to resume it, or ``N`` or ``X``.

    A checkpoint of a run in use is refused.
    """
    number = _num_shown(entries, shows_all=False)
    while True:
        older = "A" if number < len(entries) else ""
        answer = ask_choice("Choose", ask, number=number, letters=f"{older}NXQ", default="" if entries else "N")
        if answer == "A":
            number = len(entries)
            print_entries(entries, root, shows_all=True)
        elif answer in {"N", "X"}:
            return answer
        else:
            entry = entries[int(answer) - 1]
            holder = lock_holder(RunLayout(entry.run.directory).lock)  # of now: it may have stopped meanwhile
            if holder is None:
                return _resume(entry)
            print_wrapped([f"  {entry.run.run_id} is in use by {holder}; stop it first, or choose another."])


def _resume(entry: Entry) -> Resumption:
    step, total = entry.checkpoint.step, entry.run.total_steps
    if not entry.is_newest:
        typer.echo(f"  Steps after {step:,} are trained again; the newer checkpoints are renamed and kept.")
    resume = run_argument(entry.run.directory) if entry.is_newest else short_path(entry.checkpoint.path.absolute())
    return Resumption(resume, None if total is None or step < total else step)


def ask_for_length(finished_step: int, ask: Ask) -> int:
    """Ask for the new length of a finished run, in steps."""
    typer.echo(f"  This run is finished after {finished_step:,} steps.")
    return ask_number("Train until step", ask, default=2 * finished_step, smallest=finished_step + 1)
