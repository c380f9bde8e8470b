"""The run that ``vorox train`` names: its arguments, parsed, and its configuration, checked; nothing is built.

It imports little, so that a mistake is reported at once; ``cli/training/run.py`` does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from vorox.cli.commands.train import DEFAULT_PRESET
from vorox.cli.settings.arguments import ParsedArguments, parse_arguments
from vorox.cli.settings.config import load_with_origins, source_and_overrides
from vorox.cli.settings.training_settings import OriginOf
from vorox.cli.terminal.output import echo
from vorox.core.config import ConfigSource, flat_values
from vorox.core.config.layers.overrides import parse_override
from vorox.core.config.layers.synonyms import key_of
from vorox.core.config.yaml.writer import write_scalar
from vorox.core.errors import ConfigError
from vorox.core.run_layout import ResumeFrom, run_of_checkpoint
from vorox.core.schema import RunConfig
from vorox.data.storage import scheme_of
from vorox.records.run_context import recorded_config
from vorox.records.run_lookup import find_run, is_run
from vorox.training.mirror import restore_newer, resume_from_store
from vorox.training.origin.configuration import load_config

GPT_OPTIONS = frozenset({
    "model.n_layer", "model.n_head", "model.n_embd", "model.dropout", "batch_size", "per_device_batch_size", "seq_len",
    "num_tokens", "save_dir", "save_interval", "from_pretrained", "data_dir",
})  # fmt: skip
"""Names of settings in a GPT trainer on token shards: without a configuration, they select its preset."""

_OPTIONS = (
    "--resume",
    "--from-weights",
    "--name",
    "--minutes",
    "--nproc",
    "--max-restarts",
    "--dry-run",
    "--menu",
    "--trust-code",
    "--help",
)


@dataclass(frozen=True, slots=True)
class ChosenRun:
    """The run that a command names.

    Attributes:
        config: Its configuration.
        resume_from: As ``run.train`` takes it.
        named_keys: Settings that the command sets, directly or through the configuration that it names.
        origin: The places that set the values; ``None`` for a recorded configuration.
    """

    config: RunConfig
    resume_from: ResumeFrom
    named_keys: Sequence[str]
    origin: OriginOf | None


def parse_command(arguments: list[str], from_weights: str | None) -> ParsedArguments:
    """Sort the arguments of a command; initial weights become a setting."""
    weights = [] if from_weights is None else ["--from-weights", from_weights]
    return parse_arguments([*arguments, *weights], options=_OPTIONS, max_positional=1)


def choose_run(
    parsed: ParsedArguments, resume: str, name: str | None, *, is_quiet: bool, restores: bool = False
) -> ChosenRun:
    """Return the run that a command names; its settings are checked."""
    source, overrides = source_and_overrides(parsed, is_quiet=is_quiet)
    settings = [*overrides, *([] if name is None else [f"run.name={_quoted(name)}"])]
    if resume == "auto" or resume == "never":
        if source is None and not any(word.removeprefix("--").startswith("preset=") for word in overrides):
            source = _default_preset(overrides)
            if not is_quiet:
                typer.echo(f"Preset: {source} (default)")
        resolved = load_with_origins(source, settings, is_quiet=is_quiet)
        return ChosenRun(resolved.config, resume, _named_keys(parsed, resolved.config), resolved.origin)
    if name is not None:
        raise ConfigError("A resumed run keeps its name", where="--name", hint="remove --name")
    path = _resumed_path(resume, source, settings)
    directory = run_of_checkpoint(path) or path
    if restores and source is None and directory == path:
        _restore_newer(directory, recorded_config(directory, settings))
    if source is None:
        recorded = recorded_config(directory, settings)
        return ChosenRun(recorded, path, _named_keys(parsed, recorded), None)
    resolved = load_with_origins(source, settings, is_quiet=is_quiet)
    return ChosenRun(resolved.config, path, _named_keys(parsed, resolved.config), resolved.origin)


def _named_keys(parsed: ParsedArguments, config: RunConfig) -> list[str]:
    """Return the settings that the command sets, directly or through the configuration that it names."""
    if parsed.positional or parsed.data:
        return list(flat_values(config))
    return [key_of(".".join(map(str, parse_override(word).path))) for word in parsed.overrides]


def _default_preset(overrides: Sequence[str]) -> str:
    """Return the preset of a command without a configuration: that of a GPT trainer if one of its options is used.

    Raises:
        ConfigError: Such options name no token shards, and the default shards do not exist.
    """
    names = {word.removeprefix("--").partition("=")[0] for word in overrides}
    if not names & GPT_OPTIONS:
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
    return write_scalar(text)


def _resumed_path(resume: str, source: ConfigSource | None, overrides: Sequence[str]) -> Path:
    """Return the run or checkpoint that ``--resume`` names."""
    path = Path(resume)
    directory = run_of_checkpoint(path)
    if scheme_of(resume) is None and directory is not None:
        if not path.is_dir() or not is_run(directory):
            raise ConfigError("No such checkpoint", where=resume, hint="list them with `vorox checkpoints list RUN`")
        return path
    root = parent_of_runs(source, overrides)
    if scheme_of(resume) is not None:
        return resume_from_store(resume, root, echo)
    return find_run(root or "runs", resume)


def parent_of_runs(source: ConfigSource | None, overrides: Sequence[str]) -> str | None:
    """Return the ``run.directory`` that a command sets; ``None`` if it sets none."""
    root = None if source is None else load_config(source, overrides).run.directory
    for word in overrides:
        key, _, value = word.removeprefix("--").partition("=")
        root = value if key == "run.directory" else root
    return root


def _restore_newer(directory: Path, config: RunConfig) -> None:
    """Restore a run whose mirror is ahead before its recorded configuration is read, which is then the mirror's."""
    if config.checkpoint.mirror is not None:
        restore_newer(directory, config.checkpoint.mirror, config, echo)
