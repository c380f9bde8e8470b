"""``vorox data when``: the steps, checkpoints and runs that were trained on a file, a document or a text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
import xxhash

from vorox.cli.terminal import humanize
from vorox.cli.terminal.build_display import BuildDisplay
from vorox.cli.terminal.output import print_json, print_table, print_wrapped
from vorox.core.errors import ConfigError, DataError
from vorox.core.pluralize import pluralize
from vorox.data.provenance import queries as provenance_queries
from vorox.data.provenance.queries import Occurrence
from vorox.records.run_lookup import find_run, run_directories
from vorox.training.reports.document_search import DocumentQuery, Finding, finding_of, search_runs

_MOST_LINES = 40
_MOST_CHECKPOINTS = 6


def when(
    run: str | None,
    source: str | None,
    byte: int | None,
    record: int | None,
    text_file: Path | None,
    text_hash: str | None,
    all_runs: bool,
    root: str,
    as_json: bool,
) -> None:
    query = _query(source, byte, record, text_file, text_hash)
    if all_runs:
        if run is not None:
            raise ConfigError("A run and --all-runs exclude each other", where=run, hint="use --root for the folder")
        display = BuildDisplay()
        try:
            findings = search_runs(
                run_directories(Path(root)), query, lambda done, total: display.step("searching", done, total)
            )
        finally:
            display.close()
        _print_findings(findings, as_json)
        return
    if run is None:
        raise ConfigError("No run is named", where="vorox data when", hint="name a run, or use --all-runs")
    directory = find_run(root, run)
    with provenance_queries.RunDataIndex.open(directory) as run_data:
        found = query.occurrences(run_data, strict=True)
        is_held_out = not found and source is not None and provenance_queries.is_held_out(run_data, source)
    if as_json:
        print_json([asdict(one) for one in found])
        return
    _print_run(found, byte, is_held_out=is_held_out)
    finding = finding_of(directory, found)
    if finding.checkpoints:
        print_wrapped([f"Checkpoints that saw it: {_checkpoints(finding)}."])


def _query(
    source: str | None, byte: int | None, record: int | None, text_file: Path | None, text_hash: str | None
) -> DocumentQuery:
    """Return the document that the options name."""
    if sum(option is not None for option in (source, text_file, text_hash)) != 1:
        raise ConfigError(
            "No document is named, or several are", where="vorox data when",
            hint="use one of --source, --text-file and --text-hash",
        )  # fmt: skip
    if source is not None:
        return DocumentQuery(source, byte, record)
    if byte is not None or record is not None:
        raise ConfigError("A text has no byte or record", where="vorox data when", hint="use them with --source")
    if text_file is not None:
        try:
            text = text_file.read_bytes()
        except OSError as error:
            raise ConfigError(f"Text cannot be read: {error.strerror}", where=str(text_file)) from error
        texts = {text, text.removesuffix(b"\n"), text.removesuffix(b"\r\n")}
        return DocumentQuery(text_hashes=tuple(sorted(map(xxhash.xxh3_64_intdigest, texts))))
    if not re.fullmatch("[0-9a-fA-F]{16}", text_hash or ""):
        raise ConfigError(f"{text_hash!r} is no hash", where="--text-hash", hint="give 16 hexadecimal digits")
    return DocumentQuery(text_hashes=(int(str(text_hash), 16),))


def _print_findings(findings: Sequence[Finding], as_json: bool) -> None:
    """Print what each run saw.

    Raises:
        DataError: Runs, or those that they descend from, could not be searched.
    """
    if as_json:
        print_json([_finding_json(finding) for finding in findings])
    elif not findings:
        typer.echo("No runs.")
    else:
        rows = [
            [
                finding.directory.name,
                humanize.UNKNOWN if finding.problem else f"{_num_steps(finding):,}",
                humanize.UNKNOWN if finding.first_step is None else f"{finding.first_step:,}",
                _checkpoints(finding) or humanize.UNKNOWN,
            ]
            for finding in findings
        ]
        print_table(["RUN", "STEPS", "FIRST", "CHECKPOINTS"], rows, right="STEPS FIRST")
        print_wrapped(line for finding in findings for line in _notes(finding))
    lost = [finding for finding in findings if finding.problem]
    if lost:
        raise DataError(
            f"{pluralize(len(lost), 'run')} of {len(findings):,} could not be searched: {lost[0].problem}",
            where=", ".join(finding.directory.name for finding in lost),
            hint="restore what is missing and search again: the answer is incomplete",
        )
    unsearched = [finding for finding in findings if finding.is_incomplete]
    if unsearched:
        raise DataError(
            f"{pluralize(len(unsearched), 'run')} of {len(findings):,} may have inherited it from weights of a run "
            f"that was not searched: {unsearched[0].unknown_weights}",
            where=", ".join(finding.directory.name for finding in unsearched),
            hint="search that run as well (--root FOLDER has all runs of a folder): the answer is incomplete",
        )


def _notes(finding: Finding) -> list[str]:
    name = finding.directory.name
    if finding.inherited_from:
        return [f"{name} started from {finding.inherited_from}, which saw it: so did all of its checkpoints."]
    if finding.unknown_weights:
        return [f"{name} descends from {finding.unknown_weights}, which was not searched."]
    return []


def _num_steps(finding: Finding) -> int:
    return len({one.step for one in finding.occurrences if one.state in {"kept", "open"}})


def _checkpoints(finding: Finding) -> str:
    shown = ", ".join(finding.checkpoints[:_MOST_CHECKPOINTS])
    more = len(finding.checkpoints) - _MOST_CHECKPOINTS
    return f"{shown} and {more:,} more" if more > 0 else shown


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "run": finding.directory.name,
        "directory": str(finding.directory),
        "first_step": finding.first_step,
        "checkpoints": list(finding.checkpoints),
        "inherited_from": finding.inherited_from or None,
        "unknown_weights": finding.unknown_weights or None,
        "is_incomplete": finding.is_incomplete,
        "problem": finding.problem or None,
        "occurrences": [asdict(one) for one in finding.occurrences],
    }


def _print_run(found: Sequence[Occurrence], byte: int | None, *, is_held_out: bool) -> None:
    shown = [one for one in found if one.state != "beyond"]
    if shown:
        _print_occurrences(shown)
    elif is_held_out:
        typer.echo("No step: the file is held out for validation (data.validation.sources).")
    else:
        typer.echo(
            "No step: no row of this run's training caches contains it. It is held out for validation, was filtered "
            "or quarantined, is between records, or its file joined the source after the last pass of the run began."
            if not found
            else "No step of this run."
        )
    if byte is not None and shown:
        typer.echo(_granularity(byte, {one.granularity for one in shown}))
    if len(found) > len(shown):
        beyond = len(found) - len(shown)
        typer.echo(f"The data plan has it {beyond:,} more time{'s' * (beyond > 1)} after the run's last step.")


def _granularity(byte: int, known: set[str]) -> str:
    """Describe the granularity of the result."""
    if known == {"byte"}:
        return f"Each of these rows contains byte {byte:,}."
    if "row group" in known:
        return (
            f"In Parquet, byte {byte:,} means its row group: these are the rows of all its records. Use --record N for "
            "one record."
        )
    return (
        f"These are all rows of the record with byte {byte:,}. Its text differs from its bytes (jsonl, csv, a "
        "transform), so the row with this byte cannot be determined."
    )


def _print_occurrences(found: Sequence[Occurrence]) -> None:
    rows = [
        [
            f"{one.step:,}",
            f"{one.slot}",
            f"{one.epoch}",
            one.source,
            f"{one.row:,}",
            one.state.replace("_", " ") + (", masked" if one.is_masked else ""),
            humanize.UNKNOWN if one.attempt is None else f"{one.attempt}",
        ]
        for one in found[:_MOST_LINES]
    ]
    uris = sorted({one.uri for one in found})
    typer.echo("\n".join(uris))
    print_table(
        ["STEP", "SLOT", "EPOCH", "SOURCE", "ROW", "STATE", "ATTEMPT"], rows, right="STEP SLOT EPOCH ROW ATTEMPT"
    )
    if len(found) > _MOST_LINES:
        typer.echo(f"... and {len(found) - _MOST_LINES:,} more; use --json for all")
