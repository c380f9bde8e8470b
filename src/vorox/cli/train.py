"""``vorox train``: start or resume a run, and print its progress and summary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from vorox.cli.arguments import ParsedArguments, parse_arguments
from vorox.cli.time_limit import parse_minutes, unfinished_run
from vorox.cli.train_options import (
    DEFAULT_PRESET,
    Configuration,
    DryRun,
    FromWeights,
    MaxRestarts,
    Menu,
    Minutes,
    Name,
    NumProcesses,
    Resume,
)
from vorox.core.batch_sizes import batch_sizes_of
from vorox.core.pluralize import pluralize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vorox.cli.dry_run import RunPreview
    from vorox.cli.menu.start_menu import Command
    from vorox.cli.restarts import Restarts
    from vorox.core.config import ConfigSource
    from vorox.core.schema import RunConfig

_OPTIONS = (
    "--resume",
    "--from-weights",
    "--name",
    "--minutes",
    "--nproc",
    "--max-restarts",
    "--dry-run",
    "--menu",
    "--help",
)


def train(
    arguments: Configuration = None,
    resume: Resume = "auto",
    from_weights: FromWeights = None,
    name: Name = None,
    minutes: Minutes = None,
    nproc: NumProcesses = 1,
    max_restarts: MaxRestarts = 0,
    dry_run: DryRun = False,
    menu: Menu = False,
) -> None:
    """Train a model, or resume an interrupted run.

    Without arguments on a terminal, a menu opens: it lists the checkpoints, and starts or resumes a run.

    Write settings as section.key=value, with or without dashes:
    model.num_layers=8 --optimizer.lr=6e-4. Common names work too:
    --lr 1e-3 --steps 500 --batch_size 16 --seed 1 --device cpu.
    `vorox config explain KEY` describes a setting.
    """
    from vorox.cli.rank_launcher import is_launcher, is_main_rank, launch_ranks

    given = {
        "--from-weights": from_weights, "--minutes": minutes, "--nproc": None if nproc == 1 else nproc,
        "--max-restarts": max_restarts or None,
    }  # fmt: skip
    if menu or _opens_menu(bool(arguments or name or dry_run or resume != "auto" or any(given.values()))):
        chosen = _ask(arguments or [], given, is_alone=resume == "auto" and not name and not dry_run)
        arguments, resume, name = list(chosen.arguments), chosen.resume, chosen.name
    parsed = _parse(arguments or [], from_weights)
    if dry_run:
        _check_dry_run(resume, nproc, max_restarts)
    _check_restarts(max_restarts, minutes)
    limit = None if minutes is None else parse_minutes(minutes)
    starts_ranks = is_launcher(nproc, max_restarts)
    is_quiet = starts_ranks or not is_main_rank()  # rank 0 describes the data
    config, resume_from = _choose(parsed, resume, name, is_quiet=is_quiet)
    if dry_run:
        from vorox.cli.dry_run import RunPreview
        from vorox.cli.output import print_wrapped

        plan = RunPreview(config, resume_from, _named_keys(parsed, config))
        print_wrapped(plan.lines(), plain_columns=119, indent_columns=15)
        return
    options = [] if from_weights is None else ["--from-weights", from_weights]
    options += [] if name is None else ["--name", name]
    options += [] if limit is None else ["--minutes", f"{limit:g}"]

    def command_of(resume: str) -> list[str]:
        return ["train", *(arguments or []), "--resume", resume, *options]

    if starts_ranks:
        restarts = _restarts(max_restarts, resume, command_of, config, resume_from)
        raise typer.Exit(launch_ranks(nproc, command_of(resume), restarts))
    if limit is not None and resume_from == "auto":
        config, resume_from, limit = unfinished_run(config, limit)
    _run(config, resume_from, limit, ["vorox", *command_of(resume)], _named_keys(parsed, config))


def _opens_menu(has_arguments: bool) -> bool:
    """Whether the menu opens by itself: no argument is given, a person can answer, and there is one process."""
    if has_arguments:
        return False  # before the menu is imported
    from vorox.cli.menu.start_menu import has_terminal
    from vorox.core.distributed_context import membership

    return has_terminal() and membership() is None


def _ask(arguments: list[str], given: dict[str, str | int | None], *, is_alone: bool) -> Command:
    """Open the menu, and return the command that it leads to.

    Raises:
        ConfigError: There is no terminal, or an option contradicts the menu.
        typer.Exit: The user leaves.
    """
    from vorox.cli.dry_run import RunPreview
    from vorox.cli.menu.start_menu import Command, has_terminal, open_menu
    from vorox.core.errors import ConfigError

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
    weights = given["--from-weights"]

    def inspect(command: Command) -> RunPreview:
        parsed = _parse(list(command.arguments), None if weights is None else str(weights))
        config, resume_from = _choose(parsed, command.resume, command.name, is_quiet=True)
        return RunPreview(config, resume_from, _named_keys(parsed, config))

    options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    chosen = open_menu(Command(tuple(arguments), options=tuple(options)), inspect)
    if chosen is None:
        raise typer.Exit
    return chosen


def _parse(arguments: list[str], from_weights: str | None) -> ParsedArguments:
    """Sort the arguments of a command; initial weights become a setting."""
    parsed = parse_arguments(arguments, options=_OPTIONS, max_positional=1)
    if from_weights is None:
        return parsed
    return replace(parsed, overrides=(*parsed.overrides, f"train.from_weights={_quoted(from_weights)}"))


def _restarts(
    limit: int,
    resume: str,
    command_of: Callable[[str], list[str]],
    config: RunConfig,
    resume_from: Literal["auto", "never"] | Path,
) -> Restarts | None:
    from vorox.cli.restarts import Restarts
    from vorox.core.run_context import expected_directory

    if not limit:
        return None
    directory, _ = expected_directory(config, resume_from)
    return Restarts(limit, directory.absolute(), resume, command_of)


def _check_restarts(max_restarts: int, minutes: str | None) -> None:
    """Refuse to restart a run whose length is measured at its start.

    Raises:
        ConfigError: Both options are given.
    """
    from vorox.core.errors import ConfigError

    if max_restarts and minutes is not None:
        raise ConfigError(
            "A run that is limited by time is not restarted", where="--max-restarts",
            hint="remove --minutes and set train.num_steps, or remove --max-restarts",
        )  # fmt: skip


def _check_dry_run(resume: str, nproc: int, max_restarts: int) -> None:
    """Refuse options that a dry run does not support.

    Raises:
        ConfigError: The run is in an object store, or has several processes.
    """
    from vorox.core.errors import ConfigError

    if "://" in resume:
        raise ConfigError(
            "A dry run writes nothing, but resuming from a store downloads the run", where="--resume",
            hint="remove --dry-run",
        )  # fmt: skip
    if nproc > 1:
        raise ConfigError(
            "A dry run uses one process", where="--nproc", hint="remove --nproc; one process plans for all devices"
        )
    if max_restarts:
        raise ConfigError("A dry run does not restart", where="--max-restarts", hint="remove --max-restarts")


def _named_keys(parsed: ParsedArguments, config: RunConfig) -> list[str]:
    """Return the settings that the command sets, directly or through the configuration that it names."""
    from vorox.core.config import flat_values
    from vorox.core.config.overrides import parse_override
    from vorox.core.config.synonyms import key_of

    if parsed.positional or parsed.data:
        return list(flat_values(config))
    return [key_of(".".join(map(str, parse_override(word).path))) for word in parsed.overrides]


def _choose(
    parsed: ParsedArguments, resume: str, name: str | None, *, is_quiet: bool
) -> tuple[RunConfig, Literal["auto", "never"] | Path]:
    """Return the configuration, and the run or checkpoint to resume from."""
    from vorox.cli.config import source_and_overrides
    from vorox.core.config import load_config
    from vorox.core.errors import ConfigError
    from vorox.core.run_context import recorded_config
    from vorox.core.run_layout import run_of_checkpoint

    source, overrides = source_and_overrides(parsed, is_quiet=is_quiet)
    settings = [*overrides, *([] if name is None else [f"run.name={_quoted(name)}"])]
    if resume == "auto" or resume == "never":
        if source is None and not any(word.removeprefix("--").startswith("preset=") for word in overrides):
            source = _default_preset(overrides)
            if not is_quiet:
                typer.echo(f"Preset: {source} (default)")
        from vorox.training.checkpoints.weights_source import load_config_with_weights

        return load_config_with_weights(source, settings), resume
    if name is not None:
        raise ConfigError("A resumed run keeps its name", where="--name", hint="remove --name")
    path = _resumed_path(resume, source, settings)
    directory = run_of_checkpoint(path) or path
    return (recorded_config(directory, settings) if source is None else load_config(source, settings)), path


def _default_preset(overrides: Sequence[str]) -> str:
    """Return the preset of a command without a configuration: that of a GPT trainer if one of its options is used.

    Raises:
        ConfigError: Such options name no token shards, and the default shards do not exist.
    """
    from vorox.core.config.synonyms import GPT_SYNONYMS
    from vorox.core.errors import ConfigError

    names = {word.removeprefix("--").partition("=")[0] for word in overrides}
    if not names & GPT_SYNONYMS.keys():
        return DEFAULT_PRESET
    says_which_text = any(name == "data_dir" or name.startswith("data.source") for name in names)
    if not says_which_text and not Path("fineweb100B").exists():
        raise ConfigError(
            "No token shards are named, and the folder fineweb100B does not exist", where=" ".join(overrides),
            hint="add --data_dir DIR, or download them with `vorox data download fineweb100B`; to train on other text, "
            f"use `vorox train {DEFAULT_PRESET} ...` or --data PATH",
        )  # fmt: skip
    return "gpt2-shards"


def _quoted(text: str) -> str:
    """Quote a text as the value of an override, so that it is not parsed as a number or a list."""
    from vorox.core.config.yaml_writer import write_scalar

    return write_scalar(text)


def _resumed_path(resume: str, source: ConfigSource | None, overrides: Sequence[str]) -> Path:
    """Return the run or checkpoint that ``--resume`` names."""
    from vorox.core.config import load_config
    from vorox.core.errors import ConfigError
    from vorox.core.run_layout import run_of_checkpoint
    from vorox.core.run_lookup import find_run, is_run
    from vorox.data.storage import scheme_of

    path = Path(resume)
    directory = run_of_checkpoint(path)
    if scheme_of(resume) is None and directory is not None:
        if not path.is_dir() or not is_run(directory):
            raise ConfigError("No such checkpoint", where=resume, hint="list them with `vorox checkpoints list RUN`")
        return path
    root = None
    if source is not None:
        root = load_config(source, overrides).run.directory
    for word in overrides:
        key, _, value = word.removeprefix("--").partition("=")
        root = value if key == "run.directory" else root
    if scheme_of(resume) is not None:
        from vorox.training.mirror import resume_from_store

        return resume_from_store(resume, root, lambda text, level="info": typer.echo(text, err=level != "info"))
    return find_run(root or "runs", resume)


def _run(
    config: RunConfig,
    resume_from: Literal["auto", "never"] | Path,
    minutes: float | None,
    command: Sequence[str],
    named_keys: Sequence[str],
) -> None:
    from vorox.cli.build_display import BuildDisplay, RunScreen
    from vorox.cli.output import print_wrapped
    from vorox.cli.progress import open_display
    from vorox.cli.rank_launcher import is_main_rank
    from vorox.cli.summary import summary_lines
    from vorox.core.config.config_for_text import expected_ids
    from vorox.core.run_context import expected_directory
    from vorox.run import train as train_run

    if not is_main_rank():
        train_run(config, resume_from=resume_from, minutes=minutes, argv=command, named_keys=named_keys)
        return
    build_display = BuildDisplay()
    display = RunScreen(open_display(), build_display)
    print_wrapped(filter(None, [_first_line(config), expected_ids(config.tokenizer)]))
    if minutes is None and config.checkpoint.mirror is None:  # with a mirror, the run reports it later
        directory, exists = expected_directory(config, resume_from)
        if exists:  # a new directory is named once it stays: after the first step
            typer.echo(f"Resuming {directory}")
    try:
        outcome = train_run(
            config,
            resume_from=resume_from,
            minutes=minutes,
            display=display,
            on_progress=build_display,
            argv=command,
            named_keys=named_keys,
        )
    finally:
        display.close()
    for line in summary_lines(outcome) if outcome.is_main else ():
        typer.echo(line)


def _first_line(config: RunConfig) -> str:
    from vorox.core.config import model_label

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
