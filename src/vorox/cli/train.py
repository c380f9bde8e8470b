"""``vorox train``: start or resume a run, and print its progress and summary."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from vorox.cli.arguments import ParsedArguments, parse_arguments
from vorox.cli.train_options import (
    DEFAULT_PRESET,
    Configuration,
    DryRun,
    FromWeights,
    MaxRestarts,
    Minutes,
    Name,
    NumProcesses,
    Resume,
)
from vorox.core.pluralize import pluralize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vorox.cli.build_display import BuildDisplay
    from vorox.cli.restarts import Restarts
    from vorox.core.config import ConfigSource
    from vorox.core.schema import RunConfig
    from vorox.training.display import Display, Level, StepView

_OPTIONS = ("--resume", "--from-weights", "--name", "--minutes", "--nproc", "--max-restarts", "--dry-run", "--help")
_ENDED = frozenset({"finished"})


def train(
    arguments: Configuration = None,
    resume: Resume = "auto",
    from_weights: FromWeights = None,
    name: Name = None,
    minutes: Minutes = None,
    nproc: NumProcesses = 1,
    max_restarts: MaxRestarts = 0,
    dry_run: DryRun = False,
) -> None:
    """Train a model, or resume an interrupted run.

    Write settings as section.key=value, with or without dashes:
    model.num_layers=8 --optimizer.lr=6e-4. Common names work too:
    --lr 1e-3 --steps 500 --batch_size 16 --seed 1 --device cpu.
    `vorox config explain KEY` describes a setting.
    """
    parsed = parse_arguments(arguments or [], options=_OPTIONS, max_positional=1)
    overrides = list(parsed.overrides)
    if from_weights is not None:
        overrides.append(f"train.from_weights={_quoted(from_weights)}")
    if dry_run:
        _check_dry_run(resume, nproc, max_restarts)
    _check_restarts(max_restarts, minutes)
    limit = None if minutes is None else parse_minutes(minutes)
    is_quiet = nproc > 1 or max_restarts > 0 or not _is_main_rank()  # rank 0 describes the data
    config, resume_from = _choose(replace(parsed, overrides=tuple(overrides)), resume, name, is_quiet=is_quiet)
    if dry_run:
        from vorox.cli.dry_run import describe
        from vorox.cli.output import print_wrapped

        named_keys = _named_keys(parsed, config)
        print_wrapped(describe(config, resume_from, named_keys), plain_columns=119, indent_columns=15)
        return
    options = [] if from_weights is None else ["--from-weights", from_weights]
    options += [] if name is None else ["--name", name]
    options += [] if limit is None else ["--minutes", f"{limit:g}"]

    def command_of(resume: str) -> list[str]:
        return ["train", *(arguments or []), "--resume", resume, *options]

    if nproc > 1 or max_restarts:
        from vorox.cli.launch import launch

        restarts = _restarts(max_restarts, resume, command_of, config, resume_from)
        raise typer.Exit(launch(nproc, command_of(resume), restarts))
    if limit is not None and resume_from == "auto":
        config, resume_from, limit = _unfinished_run(config, limit)
    _run(config, resume_from, limit, ["vorox", *command_of(resume)], _named_keys(parsed, config))


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
        from vorox.training.weights_source import load_config_with_weights

        return load_config_with_weights(source, settings), resume
    if name is not None:
        raise ConfigError("A resumed run keeps its name", where="--name", hint="remove --name")
    path = _resumed_path(resume, source, settings)
    directory = run_of_checkpoint(path) or path
    return (recorded_config(directory, settings) if source is None else load_config(source, settings)), path


def _is_main_rank() -> bool:
    from vorox.core.distributed_context import membership

    member = membership()
    return member is None or member.rank in (None, 0)


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


def parse_minutes(text: str) -> float:
    """Parse a duration in minutes, or with units: 2, 0.5, 90s, 2m, 1h30m.

    Raises:
        ConfigError: The text is not a duration.
    """
    from vorox.core.errors import ConfigError

    bare = text.strip().lower()
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", bare):
        return float(bare)
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(h|m|s)[a-z]*\s*", bare)
    if not parts or "".join(re.findall(r"\d+(?:\.\d+)?\s*[hms][a-z]*\s*", bare)) != bare:
        raise ConfigError(
            f"--minutes {text} is not a duration", where="--minutes", hint="write --minutes=2, 0.5, 90s or 1h30m"
        )
    return sum(float(number) * {"h": 60.0, "m": 1.0, "s": 1 / 60}[unit] for number, unit in parts)


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


def _unfinished_run(config: RunConfig, minutes: float) -> tuple[RunConfig, Literal["auto"] | Path, float | None]:
    """Return the unfinished run of the same ``--minutes`` command, whose length was measured when it started."""
    from vorox.core.config import differences, in_digest
    from vorox.core.errors import ConfigError
    from vorox.core.run_context import recorded_config
    from vorox.core.run_lookup import run_attempts, run_directories
    from vorox.training.time_budget import with_num_steps

    for directory in reversed(run_directories(Path(config.run.directory))):
        attempts = run_attempts(directory)
        argv = [str(word) for word in attempts[0].get("argv", [])] if attempts else []
        if argv[-2:] != ["--minutes", f"{minutes:g}"] or attempts[-1].get("outcome") in _ENDED:
            continue
        try:
            recorded = recorded_config(directory)
        except ConfigError:
            continue  # of a version that cannot be read
        lengths = {"train.num_steps", "train.num_tokens", "train.num_epochs"}
        changed = {item.key for item in differences(recorded, config) if in_digest(item.key) or item.key == "run.name"}
        if changed <= lengths and recorded.train.num_steps is not None:
            typer.echo(
                f"Resuming {directory.name} (--minutes {minutes:g}, {pluralize(recorded.train.num_steps, 'step')}). "
                "`--resume never` starts a new run."
            )
            return with_num_steps(config, recorded.train.num_steps), directory, None
    return config, "auto", minutes


def _run(
    config: RunConfig,
    resume_from: Literal["auto", "never"] | Path,
    minutes: float | None,
    command: Sequence[str],
    named_keys: Sequence[str],
) -> None:
    from vorox.cli.build_display import BuildDisplay
    from vorox.cli.progress import open_display
    from vorox.cli.summary import summary_lines
    from vorox.core.config.config_for_text import expected_ids
    from vorox.core.distributed_context import membership
    from vorox.core.run_context import expected_directory
    from vorox.run import train as train_run

    member = membership()
    if member is not None and member.rank:  # only rank 0 prints
        train_run(config, resume_from=resume_from, minutes=minutes, argv=command, named_keys=named_keys)
        return
    build_display = BuildDisplay()
    display = _Screen(open_display(), build_display)
    typer.echo(_first_line(config))
    if ids := expected_ids(config.tokenizer):
        typer.echo(ids)
    if minutes is None and config.checkpoint.mirror is None:  # with a mirror, the run reports it later
        directory, exists = expected_directory(config, resume_from)
        typer.echo(f"{'Resuming' if exists else 'Run directory:'} {directory}")
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


class _Screen:
    """The display of a run, which closes the build display before it prints."""

    def __init__(self, display: Display, build_display: BuildDisplay) -> None:
        self._display, self._build_display = display, build_display

    def step(self, view: StepView) -> None:
        self._build_display.close()
        self._display.step(view)

    def message(self, text: str, level: Level = "info") -> None:
        self._build_display.close()
        self._display.message(text, level)

    def sample(self, prompt: str, completion: str) -> None:
        self._display.sample(prompt, completion)

    def waiting(self, text: str | None) -> None:
        self._display.waiting(text)

    def close(self) -> None:
        self._build_display.close()
        self._display.close()


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
    batch = f"{train.global_batch_sequences} x {data.sequence_length_tokens} tokens per step"
    return f"{model} on {sources}, {length}, {batch}"
