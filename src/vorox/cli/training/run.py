"""What ``vorox train`` does once its command is checked: the menu, the report of a dry run, and the run itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import typer

from vorox.cli.launch.rank_launcher import is_main_rank
from vorox.cli.planning.dry_run import RunPreview
from vorox.cli.settings.training_settings import training_settings
from vorox.cli.terminal.build_display import BuildDisplay, RunScreen
from vorox.cli.terminal.output import print_wrapped
from vorox.cli.terminal.progress import open_display
from vorox.cli.terminal.state_notices import PrintedNotices
from vorox.cli.training.menu.start_menu import Command, open_menu
from vorox.cli.training.run_choice import ChosenRun, choose_run, parse_command
from vorox.cli.training.summary import summary_lines
from vorox.core.batch_sizes import batch_sizes_of
from vorox.core.config import decides_bits, differences, model_label
from vorox.core.config.config_for_text import expected_ids
from vorox.core.errors import ConfigError
from vorox.core.pluralize import pluralize
from vorox.core.schema import RunConfig
from vorox.records.run_context import expected_directory, recorded_config
from vorox.records.run_lookup import has_checkpoint, run_attempts, run_directories
from vorox.run import prepare_states
from vorox.run import train as train_run
from vorox.training.time_budget import fit_warmup, with_num_steps

_MANY_TOKENS = 1 << 60
"""A dataset of which any fraction is a long warm-up: the size is unknown before the caches are open."""


def choose_in_menu(
    arguments: Sequence[str], given: Mapping[str, str | int | None]
) -> tuple[list[str], str, str | None]:
    """Open the menu; return arguments, ``--resume`` and ``--name`` of the command that it leads to.

    Args:
        arguments: Configuration and settings so far.
        given: Further options by name, ``None`` if they are not given.

    Raises:
        typer.Exit: The user leaves.
    """
    weights = given["--from-weights"]

    def inspect(command: Command) -> RunPreview:
        parsed = parse_command(list(command.arguments), None if weights is None else str(weights))
        return _preview(choose_run(parsed, command.resume, command.name, is_quiet=True))

    options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    chosen = open_menu(Command(tuple(arguments), options=tuple(options)), inspect)
    if chosen is None:
        raise typer.Exit
    return list(chosen.arguments), chosen.resume, chosen.name


def prepare_run(run: ChosenRun) -> None:
    prepare_states(run.config, run.resume_from, PrintedNotices())


def print_preview(run: ChosenRun, restored_to: Path | None) -> None:
    print_wrapped(_preview(run, restored_to).lines(), plain_columns=119, indent_columns=15)


def _preview(run: ChosenRun, restored_to: Path | None = None) -> RunPreview:
    return RunPreview(run.config, run.resume_from, run.named_keys, run.origin, restored_to)


def start_run(run: ChosenRun, minutes: float | None, command: Sequence[str], launched_at: float) -> None:
    if minutes is not None and run.resume_from == "auto":
        run, minutes = _unfinished_run(run, minutes)
    config, resume_from, named_keys = run.config, run.resume_from, run.named_keys
    if not is_main_rank():
        train_run(
            config, resume_from=resume_from, minutes=minutes, argv=command, named_keys=named_keys,
            launched_at=launched_at,
        )  # fmt: skip
        return
    build_display = BuildDisplay()
    display = RunScreen(open_display(), build_display)
    how = training_settings(config, run.origin)
    print_wrapped(filter(None, [_first_line(config), f"Training: {how}", expected_ids(config.tokenizer)]))
    if minutes is None and config.checkpoint.mirror is None:  # with a mirror, the run reports it later
        directory, exists = expected_directory(config, resume_from)
        if exists:  # a new directory is named once it stays: after the first step
            saved = has_checkpoint(directory)
            typer.echo(f"Resuming {directory}" + ("" if saved else ": no checkpoint yet, starts again from step 1"))
    try:
        outcome = train_run(
            config,
            resume_from=resume_from,
            minutes=minutes,
            display=display,
            on_progress=build_display,
            argv=command,
            named_keys=named_keys,
            launched_at=launched_at,
        )
    finally:
        display.close()
    for line in summary_lines(outcome) if outcome.is_main else ():
        typer.echo(line)


def _first_line(config: RunConfig) -> str:
    train, data = config.train, config.data
    length = (
        pluralize(train.num_steps, "step")
        if train.num_steps is not None
        else pluralize(train.num_tokens, "token")
        if train.num_tokens is not None
        else pluralize(train.num_epochs or 0, "epoch")
    )
    sources = ", ".join(source.name for source in data.sources)
    label, name = model_label(config), config.run.name or ""
    model = name if label in name else f"{name}: {label}".removeprefix(": ")
    rows = " to ".join(str(stage.rows) for stage in batch_sizes_of(config).stages)
    batch = f"{rows} x {data.sequence_length_tokens} tokens per step"
    return f"{model} on {sources}, {length}, {batch}"


def _unfinished_run(run: ChosenRun, minutes: float) -> tuple[ChosenRun, float | None]:
    """Return the unfinished run of the same ``--minutes`` command, whose length was measured when it started."""
    for directory in reversed(run_directories(Path(run.config.run.directory))):
        attempts = run_attempts(directory)
        argv = [str(word) for word in attempts[0].get("argv", [])] if attempts else []
        if argv[-2:] != ["--minutes", f"{minutes:g}"] or attempts[-1].get("outcome") == "finished":
            continue
        try:
            recorded = recorded_config(directory)
        except ConfigError:
            continue  # of a version that cannot be read
        if recorded.train.num_steps is None:
            continue
        timed = with_num_steps(run.config, recorded.train.num_steps)
        for same in (timed, fit_warmup(timed, _MANY_TOKENS)[0]):
            changed = (item.key for item in differences(recorded, same))
            if not any(decides_bits(key) or key == "run.name" for key in changed):
                steps = pluralize(recorded.train.num_steps, "step")
                typer.echo(
                    f"Resuming {directory.name} (--minutes {minutes:g}, {steps}). `--resume never` starts a new run."
                )
                return replace(run, config=same, resume_from=directory), None
    return run, minutes
