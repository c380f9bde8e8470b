"""The options and the help of ``vorox data``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import (
    DEFAULT_ROOT,
    OVERRIDES_CONTEXT,
    AsJson,
    ConfigArguments,
    DeviceOption,
    Root,
    RunName,
    TrustCode,
    WeightsOption,
    Yes,
)

app = typer.Typer(
    name="data",
    help="Build, verify, inspect and export token caches; query provenance.",
    no_args_is_help=True,
    add_completion=False,
)

Workers = Annotated[int, typer.Option("--workers", min=1, max=256, help="Number of worker processes or Ray tasks.")]
Executor = Annotated[
    Literal["process", "ray"],
    typer.Option("--executor", help="Kind of workers; ray: on all machines of a cluster."),
]


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.data.build")
def build(
    arguments: ConfigArguments,
    mode: Annotated[
        Literal["forward", "inverse", "gaps"],
        typer.Option(
            "--mode", help="Order: lowest missing unit first, highest first, or gaps between built units first."
        ),
    ] = "forward",
    workers: Workers = 1,
    executor: Executor = "process",
    force_rebuild: Annotated[
        bool,
        typer.Option(
            "--force-rebuild", help="Rebuild everything; the old cache is kept until the new one is complete."
        ),
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Verify every byte first, not only sizes and headers.")
    ] = False,
    as_json: AsJson = False,
    _: TrustCode = False,
) -> None:
    """Build the tokenizer and the caches of a configuration."""


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.data.build")
def fill(
    arguments: ConfigArguments,
    verify: Annotated[bool, typer.Option("--verify", help="Verify every byte, not only sizes and headers.")] = False,
    workers: Workers = 1,
    executor: Executor = "process",
    as_json: AsJson = False,
    _: TrustCode = False,
) -> None:
    """Build only missing, lost or damaged units."""


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.data.build")
def grow(
    arguments: ConfigArguments,
    workers: Workers = 1,
    executor: Executor = "process",
    as_json: AsJson = False,
    _: TrustCode = False,
) -> None:
    """Add new files to the existing caches (data.cache.grow=true)."""


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.data.build")
def repair(
    arguments: ConfigArguments,
    workers: Workers = 1,
    executor: Executor = "process",
    as_json: AsJson = False,
    _: TrustCode = False,
) -> None:
    """Verify every byte of every chunk, and rebuild lost or damaged units."""


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.data.inspect")
def verify(arguments: ConfigArguments, as_json: AsJson = False, _: TrustCode = False) -> None:
    """Verify every byte of source files and caches, and trace a few rows to their documents; exit code 4 on damage."""


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.data.inspect")
def stats(
    arguments: ConfigArguments,
    xz: Annotated[
        bool, typer.Option("--xz", help="Also compress the validation text with xz, as a baseline (slow).")
    ] = False,
    as_json: AsJson = False,
    _: TrustCode = False,
) -> None:
    """Print statistics of the caches: tokens, packing, bytes per token, use of the vocabulary."""


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.data.inspect")
def peek(
    arguments: ConfigArguments,
    num_rows: Annotated[int, typer.Option("--rows", min=1, help="Number of rows per source.")] = 2,
    split: Annotated[Literal["train", "validation"], typer.Option(help="Split to show.")] = "train",
    as_json: AsJson = False,
    _: TrustCode = False,
) -> None:
    """Show packed rows as text, with their documents; in conversations, brackets mark the trained tokens."""


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.data.transfer")
def export(
    arguments: ConfigArguments,
    to: Annotated[Literal["bin", "mds", "npy"], typer.Option("--to", help="llm.c shards, MDS, or flat numpy arrays.")],
    output: Annotated[Path, typer.Option("--output", help="New directory.")],
    split: Annotated[
        Literal["train", "validation"] | None, typer.Option(help="Only this split. Default: both.")
    ] = None,
    shard_tokens: Annotated[
        int | None, typer.Option("--shard-tokens", min=1, help="Maximum number of tokens per shard.")
    ] = None,
    as_json: AsJson = False,
    _: TrustCode = False,
) -> None:
    """Export complete caches to the format of another trainer, with a manifest."""


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.data.upkeep")
def gc(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [a.b=v ...]", help="Configuration that names the cache directory. Default: $VOROX_CACHE."
        ),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            help="Also remove caches that no run below --root reads, that are not pinned, and that were not opened "
            "for this long: 30d.",
        ),
    ] = None,
    runs: Root = DEFAULT_ROOT,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be removed, and remove nothing.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove unreferenced files of caches, and with --older-than unused caches."""


PinName = Annotated[str, typer.Option("--name", help="Name of the pin.")]
Cache = Annotated[
    str | None,
    typer.Option("--cache", help="Name of one cache, as listed by `vorox data gc`, instead of those of CONFIG."),
]
PinArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [a.b=v ...]",
        help="Configuration whose caches are meant; with --cache, the one that names the cache directory.",
    ),
]
_DEFAULT_PIN = "kept"


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.data.upkeep")
def pin(
    arguments: PinArguments = None,
    name: PinName = _DEFAULT_PIN,
    reason: Annotated[str, typer.Option("--reason", help="Reason, shown in the list.")] = "",
    cache: Cache = None,
) -> None:
    """Protect the caches of a configuration from gc until they are unpinned."""


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.data.upkeep")
def unpin(arguments: PinArguments = None, name: PinName = _DEFAULT_PIN, cache: Cache = None) -> None:
    """Remove a pin from the caches of a configuration."""


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.data.teacher_logits")
def teacher_logits(
    arguments: ConfigArguments,
    to: Annotated[Path, typer.Option("--to", help="Directory: a new one, or one to continue.")],
    precision: Annotated[
        Literal["fp16", "fp32"], typer.Option("--precision", help="Number format of the stored logits.")
    ] = "fp16",
    as_json: AsJson = False,
    _: TrustCode = False,
) -> None:
    """Write the top-k logits of train.distillation.teacher for all rows of a run.

    Students read them with train.distillation.logits=DIRECTORY, without the
    teacher in memory. Rows that the directory has are not computed again.
    """


@app.command()
@implemented_in("vorox.cli.data.provenance")
def where(
    run: RunName,
    step: Annotated[int, typer.Option("--step", min=1, help="The step, from 1, as in the log.")],
    slot: Annotated[
        int | None, typer.Option("--slot", min=0, help="Only this row of the step, from 0. Default: all.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Also print the text, read from the source files.")] = False,
    root: Root = DEFAULT_ROOT,
    _: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Show the documents that a step was trained on: files, bytes, tokens, optionally the text.

    `vorox data losses` sorts the documents of many steps by their loss.
    """


@app.command()
@implemented_in("vorox.cli.data.when")
def when(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="Run id, name or prefix, a path, or 'latest' (with a checkpoint)."),
    ] = None,
    source: Annotated[str | None, typer.Option("--source", help="The file, or the end of its name.")] = None,
    byte: Annotated[int | None, typer.Option("--byte", min=0, help="Only the document with this byte.")] = None,
    record: Annotated[
        int | None, typer.Option("--record", min=0, help="Only the document with this index in the file, from 0.")
    ] = None,
    text_file: Annotated[
        Path | None, typer.Option("--text-file", help="Instead of --source: a file with the document's whole text.")
    ] = None,
    text_hash: Annotated[
        str | None, typer.Option("--text-hash", help="Instead of --source: text_xxh3 of `vorox data where --json`.")
    ] = None,
    all_runs: Annotated[bool, typer.Option("--all-runs", help="Search all runs of --root instead of one.")] = False,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Show which steps and checkpoints were trained on a file, a document or a text; of one run or of all."""


@app.command()
@implemented_in("vorox.cli.data.losses")
def losses(
    run: RunName,
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="A:B", help="Steps with the documents. Default: the last 10.")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="One step with the documents, instead of --steps.")
    ] = None,
    checkpoint: Annotated[
        int | None,
        typer.Option("--checkpoint", metavar="STEP", help="Step of the weights, kept or not. Default: the newest."),
    ] = None,
    against: Annotated[
        int | None,
        typer.Option(
            "--against", metavar="STEP", help="Another checkpoint: sort by the change of the loss since then."
        ),
    ] = None,
    easiest: Annotated[bool, typer.Option("--easiest", help="Lowest losses first.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Documents to print.")] = 20,
    weights: WeightsOption = "model",
    device: DeviceOption = None,
    root: Root = DEFAULT_ROOT,
    _: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Show which documents of some steps a checkpoint finds hardest, or has memorised: the mean loss of each."""


@app.command()
@implemented_in("vorox.cli.data.contamination")
def contamination(
    run: RunName,
    against: Annotated[
        list[str], typer.Option("--against", help="File, folder or glob of the evaluation set; repeatable.")
    ],
    field: Annotated[
        str | None, typer.Option("--field", help="Its text column, if it is ambiguous (jsonl, csv, parquet).")
    ] = None,
    ngram_tokens: Annotated[
        int, typer.Option("--ngram-tokens", min=1, help="Length of the n-grams that are compared.")
    ] = 13,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Find records of an evaluation set in the text that a run was trained on, and the steps that saw them."""


@app.command()
@implemented_in("vorox.cli.data.sql")
def sql(
    run: RunName,
    words: Annotated[
        list[str], typer.Argument(metavar="STATEMENT", help="For example select '*' from consumed, quoted or not.")
    ],
    samples: Annotated[
        str | None,
        typer.Option("--samples", metavar="A:B", help="First write the rows of steps A to B into the table sample."),
    ] = None,
    inventory: Annotated[
        bool, typer.Option("--inventory", help="First write the files, units and chunks of the run's caches.")
    ] = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="First add data of the run directory that the database lacks.")
    ] = False,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Run a read-only SQL query on the run's metadata database."""


@app.command()
@implemented_in("vorox.cli.data.transfer")
def download(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="fineweb10B, fineweb100B, finewebedu10B, or hf://datasets/OWNER/NAME/GLOB."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", help="Target directory.")],
    shards: Annotated[
        int | None, typer.Option("--shards", min=0, help="Maximum number of training shards or files.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Download token shards or other files from the Hugging Face Hub. Interrupted downloads resume."""
