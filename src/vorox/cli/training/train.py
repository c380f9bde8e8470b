"""``vorox train``: start or resume a run.

The command is checked before anything that trains is imported (``cli/training/run.py``).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.launch.rank_launcher import is_launcher, is_main_rank, launch_ranks, nproc_option
from vorox.cli.launch.restarts import Restarts
from vorox.cli.settings.arguments import ParsedArguments
from vorox.cli.settings.config import source_and_overrides
from vorox.cli.terminal.output import has_terminal
from vorox.cli.training.run_choice import ChosenRun, choose_run, parent_of_runs, parse_command
from vorox.core.errors import ConfigError
from vorox.core.processes.process_start import process_started_at
from vorox.core.ranks.distributed_context import membership
from vorox.data.storage import scheme_of
from vorox.planning.time_limit import check_minutes, parse_minutes
from vorox.records.run_context import expected_directory
from vorox.training.mirror import preview_from_store


@implemented_in("vorox.cli.training.run")
def start_run(run: ChosenRun, minutes: float | None, command: Sequence[str], launched_at: float) -> None:
    """Train the run that a command names, and print its progress and summary."""


@implemented_in("vorox.cli.training.run")
def prepare_run(run: ChosenRun) -> None:
    """Compute the states that a run starts from, before its ranks start."""


@implemented_in("vorox.cli.training.run")
def print_preview(run: ChosenRun, restored_to: Path | None) -> None:
    """Print the report of a dry run."""


@implemented_in("vorox.cli.training.run")
def choose_in_menu(
    arguments: Sequence[str], given: Mapping[str, str | int | None]
) -> tuple[list[str], str, str | None]:
    """Return arguments, ``--resume`` and ``--name`` of the command that the menu leads to."""
    ...


def train(
    arguments: list[str] | None,
    resume: str,
    from_weights: str | None,
    name: str | None,
    minutes: str | None,
    nproc: int,
    max_restarts: int,
    dry_run: bool,
    menu: bool,
) -> None:
    given = {
        "--from-weights": from_weights, "--minutes": minutes, "--nproc": None if nproc == 1 else nproc,
        "--max-restarts": max_restarts or None,
    }  # fmt: skip
    launched_at = process_started_at()
    if menu or _opens_menu(bool(arguments or name or dry_run or resume != "auto" or any(given.values()))):
        _check_menu(is_alone=resume == "auto" and not name and not dry_run)
        arguments, resume, name = choose_in_menu(arguments or [], given)
        launched_at = time.time()
    parsed = parse_command(arguments or [], from_weights)
    if dry_run:
        _check_dry_run(nproc, max_restarts)
    _check_restarts(max_restarts, minutes)
    limit = None if minutes is None else _minutes(minutes)
    starts_ranks = is_launcher(nproc, max_restarts)
    is_quiet = starts_ranks or not is_main_rank()  # rank 0 describes the data
    if dry_run:
        _print_plan(parsed, resume, name)
        return
    run = choose_run(parsed, resume, name, is_quiet=is_quiet, restores=is_main_rank())
    options = [] if from_weights is None else ["--from-weights", from_weights]
    options += [] if name is None else ["--name", name]
    options += [] if limit is None else ["--minutes", f"{limit:g}"]

    def command_of(resume: str) -> list[str]:
        return ["train", *(arguments or []), "--resume", resume, *options]

    if starts_ranks:
        if any("@" in name for name in (run.config.train.from_weights, run.config.train.distillation.teacher) if name):
            prepare_run(run)
        restarts = _restarts(max_restarts, resume, command_of, run)
        raise typer.Exit(launch_ranks(nproc, command_of(resume), restarts))
    options[:0] = nproc_option().split()  # the launcher's, which this process is not given
    start_run(run, limit, ["vorox", *command_of(resume)], launched_at)


def _opens_menu(has_arguments: bool) -> bool:
    """Whether the menu opens by itself: no argument is given, a person can answer, and there is one process."""
    return not has_arguments and has_terminal() and membership() is None


def _check_menu(*, is_alone: bool) -> None:
    """Check that the menu can open.

    Raises:
        ConfigError: There is no terminal, or an option contradicts the menu.
    """
    if not is_alone:
        raise ConfigError(
            "--menu chooses the run and its name", where="--menu",
            hint="remove --menu, or --resume, --name and --dry-run",
        )  # fmt: skip
    if not has_terminal():
        raise ConfigError(
            "The menu needs a terminal", where="--menu",
            hint="name what to train, as in `vorox train quickstart`, or what to resume, as in "
            "`vorox train --resume latest`",
        )  # fmt: skip


def _print_plan(parsed: ParsedArguments, resume: str, name: str | None) -> None:
    """Print the report of a dry run; what it reads of a mirrored run is in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="vorox-dry-run-") as folder:
        restored_to, target = None, resume
        if scheme_of(resume) is not None:
            root = parent_of_runs(*source_and_overrides(parsed, is_quiet=True))
            path, restored_to = preview_from_store(resume, root, Path(folder))
            target = str(path)
        print_preview(choose_run(parsed, target, name, is_quiet=False), restored_to)


def _restarts(limit: int, resume: str, command_of: Callable[[str], list[str]], run: ChosenRun) -> Restarts | None:
    if not limit:
        return None
    directory, _ = expected_directory(run.config, run.resume_from)
    return Restarts(limit, directory.absolute(), resume, command_of)


def _check_restarts(max_restarts: int, minutes: str | None) -> None:
    """Refuse to restart a run whose length is measured at its start.

    Raises:
        ConfigError: Both options are given.
    """
    if max_restarts and minutes is not None:
        raise ConfigError(
            "A run that is limited by time is not restarted", where="--max-restarts",
            hint="remove --minutes and set train.num_steps, or remove --max-restarts",
        )  # fmt: skip


def _minutes(text: str) -> float:
    """Parse and check ``--minutes``, before a dry run or any rank starts.

    Raises:
        ConfigError: It is no duration, or not positive.
    """
    limit = parse_minutes(text)
    check_minutes(limit)
    return limit


def _check_dry_run(nproc: int, max_restarts: int) -> None:
    """Refuse options that a dry run does not support.

    Raises:
        ConfigError: The run has several processes, or is restarted.
    """
    if nproc > 1:
        raise ConfigError(
            "A dry run uses one process", where="--nproc", hint="remove --nproc; one process plans for all devices"
        )
    if max_restarts:
        raise ConfigError("A dry run does not restart", where="--max-restarts", hint="remove --max-restarts")
