"""Shared parts of ``vorox data`` commands: loading a configuration, progress, notes, reports as JSON."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vorox.cli.arguments import parse_arguments
from vorox.cli.config import configuration_source, source_and_overrides

if TYPE_CHECKING:
    from vorox.cli.build_display import BuildDisplay
    from vorox.core.schema import RunConfig
    from vorox.data.cache.report import BuildReport
    from vorox.data.corpus import Corpus
    from vorox.data.tokenizers.tokenizer import Tokenizer

ConfigArguments = Annotated[
    list[str],
    typer.Argument(metavar="CONFIG [a.b=v ...]", help="A preset, a YAML file or a run; then settings."),
]


def load(arguments: list[str], options: tuple[str, ...]) -> RunConfig:
    from vorox.core.config import load_config

    return load_config(*source_and_overrides(parse_arguments(arguments, options=options, max_positional=1)))


def load_with_tokenizer(arguments: list[str], options: tuple[str, ...]) -> tuple[RunConfig, Tokenizer | None]:
    """Load a configuration; if the arguments name a run, also its trained tokenizer.

    The caches of the run are built with that tokenizer; after files were added, training would give another one.
    ``None`` if the arguments change the tokenizer.
    """
    from vorox.core.config import load_config
    from vorox.core.run_layout import RunLayout
    from vorox.data.tokenizers.store import load_run_tokenizer

    config = load(arguments, options)
    parsed = parse_arguments(arguments, options=options, max_positional=1)
    source = configuration_source(parsed.positional[0]) if parsed.positional and not parsed.data else None
    if not isinstance(source, Path) or load_config(source).tokenizer != config.tokenizer:
        return config, None
    return config, load_run_tokenizer(RunLayout(source.parent).tokenizer, config.tokenizer)


@contextlib.contextmanager
def progress_display() -> Generator[BuildDisplay]:
    """Show progress; warnings, such as a wait for data, are printed on lines of their own."""
    from vorox.cli.build_display import BuildDisplay

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
