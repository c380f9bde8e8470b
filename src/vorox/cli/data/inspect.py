"""``vorox data verify``, ``stats`` and ``peek``: inspect the caches of a configuration. Read only."""

from __future__ import annotations

from dataclasses import asdict

import typer

from vorox.cli.data.loading import load_with_tokenizer, prepare_built, print_notes, progress_display, report_json
from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import print_json, print_table, print_text, print_wrapped
from vorox.core.pluralize import pluralize
from vorox.core.schema.data import Split
from vorox.data.provenance import inspection


def verify(arguments: list[str], as_json: bool) -> None:
    config, tokenizer = load_with_tokenizer(arguments, ("--json",))
    with progress_display() as display:
        corpus = prepare_built(arguments, ("--json",), config, tokenizer, display)
        notes = inspection.verify(corpus, on_progress=display.step)
    print_notes(corpus)
    for note in notes:
        typer.echo(f"note: {note.text}", err=True)
    digests = {name: report.digest for name, report in corpus.reports.items()}
    if as_json:
        print_json({"valid": True, "caches": digests})
        return
    for name, digest in digests.items():
        typer.echo(f"valid  {name}  {digest}")


def stats(arguments: list[str], xz: bool, as_json: bool) -> None:
    config, tokenizer = load_with_tokenizer(arguments, ("--xz", "--json"))
    with progress_display() as display:
        corpus = prepare_built(arguments, ("--xz", "--json"), config, tokenizer, display)
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


def peek(arguments: list[str], num_rows: int, split: Split, as_json: bool) -> None:
    config, tokenizer = load_with_tokenizer(arguments, ("--rows", "--split", "--json"))
    with progress_display() as display:
        corpus = prepare_built(arguments, ("--rows", "--split", "--json"), config, tokenizer, display)
    print_notes(corpus)
    rows = inspection.peek(corpus, num_rows, split=split)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    for cache in corpus.caches:
        if cache.split == split and cache.report.tokens:
            report, share = cache.report, humanize.percent(cache.report.targets / cache.report.tokens, 1)
            name = f"{cache.source.config.name} {split}"
            typer.echo(f"{name}: {report.targets:,} of {report.tokens:,} tokens are trained on ({share})")
    for row in rows:
        typer.echo(f"{row.source} {row.split}, row {row.row:,}, {pluralize(row.padding_tokens, 'padding position')}")
        for segment in row.segments:
            record = f"{segment.uri}, record {segment.ordinal:,}"
            span = f"{record}, bytes {segment.byte_offset:,} to {segment.byte_offset + segment.byte_length:,}"
            tokens = pluralize(segment.num_tokens, "token")
            print_wrapped([f"  {tokens} from {segment.document_token_offset:,} of {span}"])
            print_text(segment.marked_text or segment.text)
