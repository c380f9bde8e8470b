"""``vorox data sql``: SQL queries on the metadata database of a run."""

from __future__ import annotations

import typer

from vorox.cli.data.provenance import step_range
from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import print_json, print_table
from vorox.experiments.metadata import MetadataCache
from vorox.records.run_lookup import find_run
from vorox.training.reports.metadata_database import existing_target, refresh_database


def sql(
    run: str, words: list[str], samples: str | None, inventory: bool, refresh: bool, root: str, as_json: bool
) -> None:
    statement = " ".join(words)
    directory = find_run(root, run)
    if refresh or inventory or samples is not None:
        steps = None if samples is None else step_range(samples, "--samples")
        refresh_database(directory, inventory=inventory, sample_steps=steps)
    found = MetadataCache.query(existing_target(directory), statement)
    if as_json:
        print_json(found.records())
        return
    if not found.rows:
        typer.echo("No rows")
        return
    cells = [[humanize.UNKNOWN if value is None else str(value) for value in row] for row in found.rows]
    numbers = [index for index in range(len(found.columns)) if isinstance(found.rows[0][index], int | float)]
    print_table(found.columns, cells, right=" ".join(found.columns[index] for index in numbers))
