"""``vorox data where``: the documents and text of a step."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import Any

import typer

from vorox.cli.terminal.output import print_json, print_text, print_wrapped
from vorox.core.errors import ConfigError
from vorox.core.pluralize import pluralize
from vorox.data.provenance import queries as provenance_queries
from vorox.data.provenance.original_text import FoundText, TextFinder
from vorox.data.provenance.queries import DocumentOrigin, RowOrigin
from vorox.records.run_lookup import find_run


def where(run: str, step: int, slot: int | None, text: bool, root: str, as_json: bool) -> None:
    texts: dict[tuple[int, int], FoundText] = {}
    with provenance_queries.RunDataIndex.open(find_run(root, run)) as run_data:
        rows = provenance_queries.where(run_data, step, slot)
        if text:
            with contextlib.closing(TextFinder(run_data)) as finder:
                texts = {
                    (row.position, part): finder.find(row, document)
                    for row in rows
                    for part, document in enumerate(row.documents)
                }
    if as_json:
        print_json([_row_json(row, texts) for row in rows])
        return
    _print_state(step, rows[0].state)
    for row in rows:
        typer.echo(
            f"step {row.step:,}, slot {row.slot}: {row.source}, epoch {row.epoch}, row {row.row:,}, "
            + pluralize(row.num_tokens, "token")
            + (f" and {row.padding_tokens:,} of padding" if row.padding_tokens else "")
        )
        for part, document in enumerate(row.documents):
            print_wrapped([f"  {_document_line(document)}"])
            _print_text(texts.get((row.position, part)))


_STATES = {
    "skipped": "Step {step:,} read these rows, but its update was not applied (a loss spike).",
    "rolled_back": "Step {step:,} was executed by an attempt whose later steps were lost; no weights hold it.",
    "open": "Step {step:,} was executed and is in no checkpoint yet.",
    "planned": "Step {step:,} has not been executed. The data plan has these rows for it:",
    "beyond": "Step {step:,} is after the end of the run and was never executed. The data plan has these rows for it:",
}


def _print_state(step: int, state: str) -> None:
    """Print what became of a step, unless the weights hold it."""
    if state in _STATES:
        typer.echo(_STATES[state].format(step=step))


def _row_json(row: RowOrigin, texts: dict[tuple[int, int], FoundText]) -> dict[str, Any]:
    documents: list[dict[str, Any]] = []
    for part, document in enumerate(row.documents):
        found = texts.get((row.position, part))
        entry = {**asdict(document), "text_xxh3": f"{document.text_xxh3:016x}"}
        if found is not None:
            entry |= {
                "text": found.text,
                "text_origin": found.origin,
                "text_not_from_source_because": found.why or None,
            }
            if found.targets is not None:
                entry |= {"targets": found.targets}
        documents.append(entry)
    return {**asdict(row), "documents": documents}


def _document_line(document: DocumentOrigin) -> str:
    last = document.first_token + document.num_tokens
    whole = "all" if document.num_tokens == document.document_tokens else f"{document.first_token:,} to {last:,} of"
    return (
        f"{document.uri}, record {document.ordinal:,}, bytes {document.byte_offset:,} to "
        f"{document.byte_offset + document.byte_length:,}: {whole} {pluralize(document.document_tokens, 'token')}"
        + (", masked: the run trained on a filler" if document.is_masked else "")
        + (", erased from the cache" if document.is_erased else "")
    )


def _print_text(found: FoundText | None) -> None:
    if found is None:
        return
    if found.origin == "cache":
        typer.echo(f"    (decoded from the cache: {found.why})" if found.text else f"    ({found.why})")
        if not found.text:
            return
    print_text(found.marked_text or found.text)


def chosen_steps(step: int | None, steps: str | None) -> tuple[int, int] | None:
    """Return the range that ``--step N`` or ``--steps A:B`` names; ``None`` without either.

    Raises:
        ConfigError: Both are given, or the range is none.
    """
    if step is not None and steps is not None:
        raise ConfigError("--step and --steps both name steps", where=f"--step {step} --steps {steps}", hint="keep one")
    if step is not None:
        return step, step
    return None if steps is None else step_range(steps, "--steps")


def step_range(text: str, option: str) -> tuple[int, int]:
    """Return first and last step of a range ``A:B``.

    Raises:
        ConfigError: It is not a range of steps.
    """
    first, separator, last = text.replace(",", "").replace("_", "").partition(":")
    if not separator or not first.isdecimal() or not last.isdecimal() or not 1 <= int(first) <= int(last):
        raise ConfigError(f"{text!r} is not a range of steps", where=option, hint="write it as 1:100")
    return int(first), int(last)
