"""``vorox data``: build, verify, count and look at the token caches of a configuration. Parsing and printing only."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vorox.cli import quantities
from vorox.cli.arguments import OVERRIDES_CONTEXT, sort_words
from vorox.cli.config import configuration_source
from vorox.cli.output import AsJson, print_json, print_table

if TYPE_CHECKING:
    from vorox.cli.preparation import PreparationDisplay
    from vorox.core.schema import RunConfig
    from vorox.data.cache.report import BuildReport

app = typer.Typer(
    name="data", help="Build, verify, count and look at token caches.", no_args_is_help=True, add_completion=False
)

Words = Annotated[
    list[str],
    typer.Argument(metavar="CONFIG [a.b=v ...]", help="A preset, a YAML file or a run; then overrides."),
]


@app.command(context_settings=OVERRIDES_CONTEXT)
def build(
    words: Words,
    repair: Annotated[
        bool, typer.Option("--repair", help="Check every chunk first, build damaged ones again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make the tokenizer and the caches that a run of this configuration reads."""
    from vorox.data.dataset import prepare

    config = _load(words, ("--repair", "--json"))
    with _showing() as display:
        corpus = prepare(config, on_progress=display, repair=repair)
    if as_json:
        print_json(
            {"root": str(corpus.root), "caches": {name: _json(report) for name, report in corpus.reports.items()}}
        )
        return
    rows = [
        [
            name,
            f"{report.documents:,}",
            quantities.size(report.text_bytes),
            quantities.count(report.tokens),
            f"{report.rows:,}",
            quantities.percent(report.utilisation_fraction, 2),
            quantities.size(report.compressed_bytes),
            quantities.percent(report.ratio_to_uint16),
            f"{report.units_built:,}/{report.units:,}",
            f"{report.quarantined:,}",
        ]
        for name, report in corpus.reports.items()
    ]
    titles = ["CACHE", "DOCUMENTS", "TEXT", "TOKENS", "ROWS", "FULL", "SIZE", "OF-UINT16", "BUILT", "BAD"]
    print_table(titles, rows, right=" ".join(titles[1:]))
    seconds = sum(report.seconds for report in corpus.reports.values())
    built_bytes = sum(report.built_text_bytes for report in corpus.reports.values())
    speed = f", {built_bytes / 1e6 / seconds:.1f} MB/s" if built_bytes and seconds > 0 else ""
    typer.echo(f"\nready in {corpus.root}: {quantities.duration(seconds)} of building{speed}")


@app.command(context_settings=OVERRIDES_CONTEXT)
def verify(words: Words, as_json: AsJson = False) -> None:
    """Check every byte of files and caches, and a few rows back to their documents; exit code 4 if anything is off."""
    from vorox.data import inspection
    from vorox.data.dataset import prepare

    config = _load(words, ("--json",))
    with _showing() as display:
        corpus = prepare(config, on_progress=display, build=False)
        inspection.verify(corpus, on_progress=display.step)
    digests = {name: report.digest for name, report in corpus.reports.items()}
    if as_json:
        print_json({"valid": True, "caches": digests})
        return
    for name, digest in digests.items():
        typer.echo(f"valid  {name}  {digest}")


@app.command(context_settings=OVERRIDES_CONTEXT)
def stats(
    words: Words,
    xz: Annotated[bool, typer.Option("--xz", help="Also what xz makes of the validation text (slow).")] = False,
    as_json: AsJson = False,
) -> None:
    """Count what the caches hold: tokens, packing, bytes per token, use of the vocabulary."""
    from vorox.data import inspection
    from vorox.data.dataset import prepare

    config = _load(words, ("--xz", "--json"))
    with _showing() as display:
        corpus = prepare(config, on_progress=display, build=False)
    found = inspection.stats(corpus)
    baseline = inspection.xz_bits_per_byte(corpus) if xz else None
    if as_json:
        caches = [{**asdict(entry), "report": _json(entry.report)} for entry in found]
        weights = {name: str(weight) for name, weight in zip(corpus.names, corpus.weights, strict=True)}
        vocabulary = corpus.tokenizer.vocab_size
        print_json({"vocab_size": vocabulary, "weights": weights, "caches": caches, "xz_bits_per_byte": baseline})
        return
    vocab_size = corpus.tokenizer.vocab_size
    typer.echo(f"tokenizer  {config.tokenizer.kind}, {vocab_size:,} tokens")
    for name, weight in zip(corpus.names, corpus.weights, strict=True):
        typer.echo(f"source     {name}, weight {weight} ({quantities.percent(float(weight), 1)})")
    rows = [
        [
            f"{entry.source} {entry.split}",
            f"{entry.report.documents:,}",
            quantities.count(entry.report.tokens),
            f"{entry.report.rows:,}",
            quantities.percent(entry.utilisation_fraction, 2),
            f"{entry.bytes_per_token:.3f}",
            quantities.percent(entry.distinct_tokens / vocab_size, 1),
            quantities.percent(entry.unknown_fraction, 3),
        ]
        for entry in found
    ]
    titles = ["CACHE", "DOCUMENTS", "TOKENS", "ROWS", "FULL", "BYTES/TOKEN", "VOCABULARY", "UNKNOWN"]
    typer.echo("")
    print_table(titles, rows, right=" ".join(titles[1:]))
    if baseline is not None:
        typer.echo(f"\nxz needs {baseline:.3f} bits per byte for the validation text")


@app.command(context_settings=OVERRIDES_CONTEXT)
def peek(
    words: Words,
    num_rows: Annotated[int, typer.Option("--rows", min=1, help="Rows of each source.")] = 2,
    split: Annotated[Literal["train", "validation"], typer.Option(help="Which part.")] = "train",
    as_json: AsJson = False,
) -> None:
    """Show packed rows as text, with the documents that they come from."""
    from vorox.data import inspection
    from vorox.data.dataset import prepare

    config = _load(words, ("--rows", "--split", "--json"))
    with _showing() as display:
        corpus = prepare(config, on_progress=display, build=False)
    rows = inspection.peek(corpus, num_rows, split=split)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    for row in rows:
        typer.echo(f"{row.source} {row.split}, row {row.row:,}, {row.padding_tokens:,} positions of padding")
        for segment in row.segments:
            place = f"{segment.uri}, bytes {segment.byte_offset:,} to {segment.byte_offset + segment.byte_length:,}"
            typer.echo(f"  {segment.num_tokens:,} tokens from {segment.document_token_offset:,} of {place}")
            for line in quantities.printable(segment.text).split("\n"):
                typer.echo(f"    \N{BOX DRAWINGS LIGHT VERTICAL} {line}")


def _load(words: list[str], options: tuple[str, ...]) -> RunConfig:
    from vorox.core.config import load_config

    sorted_words = sort_words(words, options=options, max_positional=1)
    source = configuration_source(sorted_words.positional[0]) if sorted_words.positional else None
    return load_config(source, sorted_words.overrides)


@contextlib.contextmanager
def _showing() -> Generator[PreparationDisplay]:
    from vorox.cli.preparation import PreparationDisplay

    display = PreparationDisplay()
    try:
        yield display
    finally:
        display.close()


def _json(report: BuildReport) -> dict[str, Any]:
    return {**asdict(report), "utilisation_fraction": report.utilisation_fraction}
