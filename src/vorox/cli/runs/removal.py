"""``vorox runs remove``: runs, their rows in a shared metadata database, and their mirrors."""

from __future__ import annotations

from pathlib import Path

import typer

from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import confirm
from vorox.core.errors import ConfigError, VoroxError
from vorox.data.cache.upkeep.retention import unregister_run
from vorox.data.corpus.run_views import recorded_views
from vorox.experiments.artifacts import RunSummary, inspect_run, list_failed_runs, remove_run
from vorox.records.run_lookup import find_run
from vorox.training.mirror import mirror_uri, remove_mirror
from vorox.training.reports.metadata_database import forget_run


def remove(names: list[str] | None, failed: bool, root: str, yes: bool, keep_metadata: bool, mirror: bool) -> None:
    if not names and not failed:
        raise ConfigError("No run is named", where="vorox runs remove", hint="name runs, or add --failed")
    chosen = {
        run.directory.resolve(): run for run in (inspect_run(find_run(root, name, exact=True)) for name in names or ())
    }
    if failed:
        chosen |= {run.directory.resolve(): run for run in list_failed_runs(Path(root))}
    if not chosen:
        typer.echo(f"No run in {Path(root).resolve()} ended without a checkpoint.")
        return
    lines: list[str] = []
    for run in chosen.values():
        uri = mirror_uri(run.directory) if mirror else None
        if mirror and uri is None:
            raise ConfigError(f"Run {run.run_id} has no mirror", where="--mirror", hint="remove --mirror")
        what = f"{run.run_id} (step {run.step:,}, {humanize.size(run.size_bytes)})"
        lines.append(what + (f" and its mirror {uri}" if uri else ""))
    if not any(run.state == "running" for run in chosen.values()):  # a running one is refused without a prompt
        confirm(
            f"Remove {lines[0]}?" if len(lines) == 1 else "\n".join([*lines, f"Remove these {len(lines)}?"]), yes=yes
        )
    removed: list[str] = []
    for run in chosen.values():
        try:
            remove_one(run, keep_metadata=keep_metadata, mirror=mirror)
        except VoroxError as error:
            error.saved = f"already removed: {', '.join(removed)}" if removed else error.saved or "nothing was removed"
            raise
        removed.append(run.run_id)


def remove_one(run: RunSummary, *, keep_metadata: bool, mirror: bool) -> None:
    """Remove a run and its rows in a shared metadata database, and print what was removed."""
    notes: list[str] = []

    def first() -> None:
        uri = mirror_uri(run.directory)
        if uri is not None:
            note = f"Its mirror {uri} was kept (use --mirror to remove it)."
            if mirror:
                note = f"Its mirror of {humanize.size(remove_mirror(uri))} was removed as well."
            notes.append(note)
        if not keep_metadata:
            notes.append(forget_run(run.directory))

    views = recorded_views(run.directory)
    size_bytes = remove_run(run.directory, first=first)
    for view in views:
        unregister_run(view, run.directory)
    typer.echo(f"Removed {run.run_id} ({humanize.size(size_bytes)}). {' '.join(filter(None, notes))}".rstrip())
