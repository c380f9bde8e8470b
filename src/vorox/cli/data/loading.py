"""Shared parts of ``vorox data`` commands: loading a configuration, progress, notes, reports as JSON."""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from vorox.cli.settings.arguments import parse_arguments
from vorox.cli.settings.config import configuration_source, source_and_overrides
from vorox.cli.settings.config import load as load_config
from vorox.cli.terminal.build_display import BuildDisplay
from vorox.core.errors import DataError
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.data.cache.building.report import BuildReport
from vorox.data.corpus.cache_location import cache_root
from vorox.data.corpus.cache_opener import NotBuiltError
from vorox.data.corpus.corpus import Corpus, prepare
from vorox.data.corpus.run_views import RunViews
from vorox.data.tokenizers.store import configured_untrained, load_run_tokenizer
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.records.run_context import recorded_config


def load(arguments: list[str], options: tuple[str, ...]) -> RunConfig:
    return load_config(*source_and_overrides(parse_arguments(arguments, options=options, max_positional=1)))


def load_with_tokenizer(arguments: list[str], options: tuple[str, ...]) -> tuple[RunConfig, Tokenizer | None]:
    """Load a configuration; if the arguments name a run, also its tokenizer.

    The caches of the run are built with it; after files were added, training would give another one.
    ``None`` if the arguments change the tokenizer.
    """
    config = load(arguments, options)
    parsed = parse_arguments(arguments, options=options, max_positional=1)
    source = configuration_source(parsed.positional[0]) if parsed.positional and not parsed.data else None
    if not isinstance(source, Path) or recorded_config(source.parent).tokenizer != config.tokenizer:
        return config, None
    kept = load_run_tokenizer(RunLayout(source.parent).tokenizer, config.tokenizer)
    return config, kept or configured_untrained(config.tokenizer)


def recorded_views(arguments: list[str], options: tuple[str, ...], config: RunConfig) -> RunViews | None:
    """Return the views of the run that the arguments name; ``None`` if they name none."""
    parsed = parse_arguments(arguments, options=options, max_positional=1)
    source = configuration_source(parsed.positional[0]) if parsed.positional and not parsed.data else None
    if not isinstance(source, Path):
        return None
    views = RunViews.of_run(source.parent, cache_root(config.data))
    views.register(source.parent)
    return views


def prepare_built(
    arguments: list[str],
    options: tuple[str, ...],
    config: RunConfig,
    tokenizer: Tokenizer | None,
    display: BuildDisplay,
) -> Corpus:
    """Return the corpus of a configuration from caches that are there.

    Raises:
        DataError: One is not built; the message has the command that builds it, with these arguments.
    """
    views = recorded_views(arguments, options, config)
    try:
        return prepare(config, on_progress=display, build=False, tokenizer=tokenizer, views=views)
    except NotBuiltError as error:
        command = shlex.join(["vorox", "data", "build", *arguments])
        raise DataError(error.what, where=error.where, hint=f"build it first: {command}") from error


@contextlib.contextmanager
def progress_display() -> Generator[BuildDisplay]:
    """Show progress; warnings, such as a wait for data, are printed on lines of their own."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            display.message(record.getMessage())

    display, lines, logger = BuildDisplay(), Lines(logging.WARNING), logging.getLogger("vorox")
    logger.addHandler(lines)
    try:
        yield display
    finally:
        logger.removeHandler(lines)
        display.close()


def print_notes(corpus: Corpus) -> None:
    """Print the validation split, and notes on the sources: a fallback, duplicates, empty files."""
    typer.echo(f"validation: {corpus.held_out}", err=True)
    for note in corpus.notes:
        typer.echo(f"note: {note.text}", err=True)


def report_json(report: BuildReport) -> dict[str, Any]:
    return {**asdict(report), "utilisation_fraction": report.utilisation_fraction}
