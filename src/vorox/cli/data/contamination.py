"""``vorox data contamination``: evaluation records that a run was trained on, and the steps."""

from __future__ import annotations

from dataclasses import asdict

import typer

from vorox.cli.terminal.output import print_json, print_table
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import RunLayout
from vorox.data.provenance.contamination import MOSTLY_FRACTION, Contamination, SharedDocument, find_contamination
from vorox.data.provenance.evaluation_records import read_evaluation_records
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.data.tokenizers.loading import load
from vorox.records.run_lookup import find_run

_MOST_LINES = 20
_MOST_STEPS = 4


def contamination(run: str, against: list[str], field: str | None, ngram_tokens: int, root: str, as_json: bool) -> None:
    directory = find_run(root, run)
    with RunDataIndex.open(directory) as run_data:
        records = read_evaluation_records(against, load(RunLayout(directory).tokenizer), text_field=field)
        found = find_contamination(run_data, records, ngram_tokens=ngram_tokens)
    if as_json:
        records_json = [{**asdict(record), "fraction": record.fraction} for record in found.records]
        print_json({**asdict(found), "ngram_tokens": ngram_tokens, "records": records_json})
        return
    _print(found, ngram_tokens)


def _print(found: Contamination, ngram_tokens: int) -> None:
    mostly = sum(record.fraction >= MOSTLY_FRACTION for record in found.records)
    typer.echo(
        f"{len(found.records):,} of {pluralize(found.num_records, 'record')} share {ngram_tokens} tokens or more in "
        f"sequence with {pluralize(found.num_rows, 'row')} of {pluralize(found.num_steps, 'step')}; "
        f"{mostly:,} of them by {MOSTLY_FRACTION:.0%} or more of their tokens"
    )
    if found.num_short_records:
        typer.echo(f"{pluralize(found.num_short_records, 'record')} shorter than {ngram_tokens} tokens: not compared")
    if not found.records:
        return
    rows = [
        [
            f"{record.fraction:.0%}",
            f"{record.contaminated_tokens:,}/{record.num_tokens:,}",
            f"{record.uri.rpartition('/')[2]}:{record.ordinal}",
            f"{record.documents[0].uri.rpartition('/')[2]}:{record.documents[0].ordinal}",
            _steps(record.documents[0]),
        ]
        for record in found.records[:_MOST_LINES]
    ]
    print_table(["SHARE", "TOKENS", "RECORD", "DOCUMENT", "STEPS"], rows, right="SHARE TOKENS")
    if len(found.records) > _MOST_LINES:
        typer.echo(f"... and {len(found.records) - _MOST_LINES:,} more; use --json for all, with all documents")


def _steps(document: SharedDocument) -> str:
    shown = ", ".join(f"{step:,}" for step in document.steps[:_MOST_STEPS])
    more = len(document.steps) - _MOST_STEPS
    return f"{shown} and {more:,} more" if more > 0 else shown
