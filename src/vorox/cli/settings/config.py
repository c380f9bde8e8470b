"""``vorox config``: show, explain and compare configurations; print the JSON schema.

A configuration is a preset, a file, or a run, which means the configuration recorded with it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer
from pydantic import ValidationError

from vorox.cli.settings.arguments import ParsedArguments, parse_arguments
from vorox.cli.terminal.output import print_unicode_json, print_wrapped
from vorox.core.config import ConfigSource, ResolvedConfig, config_values, differences, dump_yaml, identifies_run
from vorox.core.config.config_for_text import config_for_text
from vorox.core.config.layers.presets import run_presets
from vorox.core.errors import ConfigError
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.records.run_lookup import find_run
from vorox.training.origin.configuration import load_config, load_resolved


def show(arguments: list[str] | None, origins: bool, as_json: bool) -> None:
    resolved = resolve(arguments or [], options=("--origins", "--json"))
    if as_json:
        print_unicode_json(config_values(resolved.config))
    else:
        typer.echo(dump_yaml(resolved.config, resolved if origins else None), nl=False)


def diff(before: str, after: str, arguments: list[str] | None, as_json: bool) -> None:
    parsed = parse_arguments(arguments or [], options=("--json",), max_positional=0)
    old = resolve([before], options=())
    new = resolve([after, *parsed.overrides], options=())
    found = differences(old.config, new.config)
    if as_json:
        print_unicode_json(
            [
                {"key": item.key, "before": item.before, "after": item.after, "changes_run": identifies_run(item.key)}
                for item in found
            ]
        )
        return
    for item in found:
        typer.echo(f"{'*' if identifies_run(item.key) else ' '} {item}")
    if not found:
        typer.echo("No difference")


def resolve(arguments: list[str], options: tuple[str, ...]) -> ResolvedConfig:
    return load_resolved(*source_and_overrides(parse_arguments(arguments, options=options, max_positional=1)))


def load(source: ConfigSource | None, overrides: Sequence[str], *, is_quiet: bool = False) -> RunConfig:
    """Load a configuration with the model that it starts from, and print what was decided about it."""
    return load_with_origins(source, overrides, is_quiet=is_quiet).config


def load_with_origins(
    source: ConfigSource | None, overrides: Sequence[str], *, is_quiet: bool = False
) -> ResolvedConfig:
    """Load a configuration like ``load``, with the origins of its values."""
    resolved = load_resolved(source, overrides)
    if resolved.pretrained is not None and not is_quiet:
        print_wrapped(resolved.pretrained.notes, err=True)
    return resolved


def source_and_overrides(parsed: ParsedArguments, *, is_quiet: bool = False) -> tuple[ConfigSource | None, list[str]]:
    """Return the source and overrides that ``load_config`` takes.

    ``--data PATH`` alone yields a configuration fitted to the text; with a configuration, it replaces the sources.
    """
    source = configuration_source(parsed.positional[0]) if parsed.positional else None
    overrides = list(parsed.overrides)
    if not parsed.data:
        return source, overrides
    from vorox.data.text.format_detection import detect_source

    prefix = "data.sources.0."
    given = [
        word.removeprefix("--").removeprefix(prefix) for word in overrides if f"{prefix}" in word.partition("=")[0]
    ]
    values = {name: value for name, _, value in (word.partition("=") for word in given)}
    try:
        text = detect_source(parsed.data, values)
    except (ValidationError, LookupError):  # of a name or value in ``given``, which the configuration names exactly
        form = "csv" if "delimiter" in values else "jsonl"
        entry = {"name": "text", "format": form, "paths": [*parsed.data]}
        load_config({"data": {"sources": [entry]}, "train": {"num_steps": 1}}, [f"{prefix}{word}" for word in given])
        raise
    if not is_quiet:
        print_wrapped(text.summary.split("\n"), err=True)
    is_base = any(word.removeprefix("--").startswith("preset=") for word in overrides)
    if source is not None or is_base:
        return source, [f"data.sources={json.dumps([text.source])}", *overrides]
    return config_for_text(
        str(text.source["name"]), text.source, text_bytes=text.text_bytes, repeated_words=text.repeated_words,
        opening=text.opening,
    ), overrides  # fmt: skip


def configuration_source(name: str) -> str | Path:
    """Return what ``load_config`` takes for a name: the preset or file, or the recorded configuration of a run.

    Raises:
        ConfigError: The name is a text file or folder, not a configuration.
    """
    path = Path(name)
    if name in run_presets() or (path.is_file() and path.suffix.lower() in CONFIGURATION_ENDINGS):
        return name
    try:
        layout = RunLayout(find_run("runs", name))
        if not layout.record.is_file():  # whose code would be that of a file which the user has written
            raise ConfigError("run.json of the run is missing", where=str(layout.record), hint="restore it from a copy")
        return layout.config
    except ConfigError:
        from vorox.data.text.format_detection import text_path_error

        refusal = text_path_error(name) if path.exists() else None
        if refusal is not None:
            raise refusal from None
        return name  # load_config reports the alternatives


CONFIGURATION_ENDINGS = frozenset({".yaml", ".yml", ".json", ".toml", ".py"})
