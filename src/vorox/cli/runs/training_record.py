"""``vorox runs record``: what a run was trained on, in the EU's template of a public summary."""

from __future__ import annotations

from pathlib import Path

import typer

from vorox.cli.markdown.training_record import markdown
from vorox.cli.terminal.output import print_json
from vorox.core.errors import ConfigError
from vorox.core.files.atomic import pretty_json, write_file
from vorox.core.files.disk_errors import disk_error
from vorox.records.run_lookup import find_run
from vorox.training.reports.training_record import training_record


def record(
    run: str, step: int | None, facts: Path | None, against: list[str] | None, to: Path | None, root: str, as_json: bool
) -> None:
    found = training_record(find_run(root, run), step, facts, against or ())
    if to is None:
        print_json(found) if as_json else typer.echo(markdown(found))
        return
    try:
        write_file(to, pretty_json(found) if as_json else f"{markdown(found)}\n".encode())
    except OSError as error:
        raise disk_error(error, str(to)) or ConfigError(
            f"Record cannot be written: {error.strerror}", where=str(to), hint="choose another file"
        ) from error  # fmt: skip
    typer.echo(f"Wrote the record of {found['run']} up to step {found['step']:,} to {to}")
