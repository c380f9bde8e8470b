"""``vorox data verify``, ``stats`` and ``peek``: inspect the caches of a configuration. Read only."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

import typer

from vorox.cli import humanize
from vorox.cli.data.loading import ConfigArguments, load_with_tokenizer, print_notes, progress_display, report_json
from vorox.cli.output import AsJson, print_json, print_table, print_text, print_wrapped
from vorox.core.pluralize import pluralize


def verify(arguments: ConfigArguments, as_json: AsJson = False) -> None:
    """Verify every byte of source files and caches, and trace a few rows to their documents; exit code 4 on damage."""
    from vorox.data import inspection
    from vorox.data.corpus import prepare

    config, tokenizer = load_with_tokenizer(arguments, ("--json",))
    with progress_display() as display:
        corpus = prepare(config, on_progress=display, build=False, tokenizer=tokenizer)
        inspection.verify(corpus, on_progress=display.step)
    print_notes(corpus)
    digests = {name: report.digest for name, report in corpus.reports.items()}
    if as_json:
        print_json({"valid": True, "caches": digests})
        return
    for name, digest in digests.items():
        typer.echo(f"valid  {name}  {digest}")


def stats(
    arguments: ConfigArguments,
    xz: Annotated[
        bool, typer.Option("--xz", help="Also compress the validation text with xz, as a baseline (slow).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print statistics of the caches: tokens, packing, bytes per token, use of the vocabulary."""
    from vorox.data import inspection
    from vorox.data.corpus import prepare

    config, tokenizer = load_with_tokenizer(arguments, ("--xz", "--json"))
    with progress_display() as display:
        corpus = prepare(config, on_progress=display, build=False, tokenizer=tokenizer)
    print_notes(corpus)
    found = inspection.stats(corpus)
    baseline = inspection.xz_bits_per_byte(corpus) if xz else None
    if as_json:
        caches = [{**asdict(entry), "report": report_json(entry.report)} for entry in found]
        weights = {name: str(weight) for name, weight in zip(corpus.names, corpus.weights, strict=True)}
        vocabulary = corpus.tokenizer.vocab_size
        print_json({"vocab_size": vocabulary, "weights": weights, "caches": caches, "xz_bits_per_byte": baseline})
        return
    vocab_size = corpus.tokenizer.vocab_size
    path = ", fast path" if corpus.tokenizer.is_fast else ""
    typer.echo(f"tokenizer  {config.tokenizer.kind}, {vocab_size:,} tokens{path}")
    for name, weight in zip(corpus.names, corpus.weights, strict=True):
        typer.echo(f"source     {name}, weight {weight} ({humanize.percent(float(weight), 1)})")
    rows = [
        [
            f"{entry.source} {entry.split}",
            f"{entry.report.documents:,}",
            humanize.count(entry.report.tokens),
            f"{entry.report.rows:,}",
            humanize.percent(entry.utilisation_fraction, 2),
            f"{entry.tokens.bytes_per_token:.3f}",
            f"{entry.tokens.entropy_bits:.2f}",
            f"{entry.tokens.largest_token_id:,}",
            humanize.percent(entry.tokens.distinct_tokens / vocab_size, 1),
            humanize.percent(entry.tokens.unknown_fraction, 3),
        ]
        for entry in found
    ]
    titles = [
        "CACHE",
        "DOCUMENTS",
        "TOKENS",
        "ROWS",
        "FULL",
        "BYTES/TOKEN",
        "BITS/TOKEN",
        "MAX-ID",
        "VOCABULARY",
        "UNKNOWN",
    ]
    typer.echo("")
    print_table(titles, rows, right=" ".join(titles[1:]))
    for entry in found:
        typer.echo("")
        warnings = [f"warning: {warning}" for warning in entry.warnings]
        print_wrapped([f"{entry.source} {entry.split}: {humanize.printable(entry.sample)!r}", *warnings])
    if baseline is not None:
        typer.echo(f"\nxz baseline: {baseline:.3f} bits/byte on the validation text")


def peek(
    arguments: ConfigArguments,
    num_rows: Annotated[int, typer.Option("--rows", min=1, help="Number of rows per source.")] = 2,
    split: Annotated[Literal["train", "validation"], typer.Option(help="Split to show.")] = "train",
    as_json: AsJson = False,
) -> None:
    """Show packed rows as text, with their documents; in conversations, brackets mark the trained tokens."""
    from vorox.data import inspection
    from vorox.data.corpus import prepare

    config, tokenizer = load_with_tokenizer(arguments, ("--rows", "--split", "--json"))
    with progress_display() as display:
        corpus = prepare(config, on_progress=display, build=False, tokenizer=tokenizer)
    print_notes(corpus)
    rows = inspection.peek(corpus, num_rows, split=split)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    for row in rows:
        typer.echo(f"{row.source} {row.split}, row {row.row:,}, {pluralize(row.padding_tokens, 'padding position')}")
        for segment in row.segments:
            record = f"{segment.uri}, record {segment.ordinal:,}"
            span = f"{record}, bytes {segment.byte_offset:,} to {segment.byte_offset + segment.byte_length:,}"
            tokens = pluralize(segment.num_tokens, "token")
            print_wrapped([f"  {tokens} from {segment.document_token_offset:,} of {span}"])
            print_text(segment.marked_text or segment.text)
