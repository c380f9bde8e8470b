"""``vorox data build``, ``fill``, ``grow`` and ``repair``: make the tokenizer and the caches of a configuration.

All four bring caches to completion; they differ in what they take for missing. A signal ends them after the unit in
hand with exit code 75, and the same command goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vorox.cli import humanize
from vorox.cli.data.loading import Words, load, report_json, showing, tell
from vorox.cli.output import AsJson, print_json, print_table
from vorox.core.pluralize import pluralize

if TYPE_CHECKING:
    from vorox.data.cache.build import BuildOptions
    from vorox.data.cache.report import BuildReport

Workers = Annotated[int, typer.Option("--workers", min=1, max=256, help="Processes, or Ray tasks, that build at once.")]
Executor = Annotated[
    Literal["process", "ray"],
    typer.Option("--executor", help="What the workers are; ray: on all machines of a cluster."),
]
_OPTIONS = ("--workers", "--executor", "--json")


def build(
    words: Words,
    mode: Annotated[
        Literal["forward", "inverse", "gaps"],
        typer.Option("--mode", help="Lowest missing unit first, highest first, or what lies between others first."),
    ] = "forward",
    workers: Workers = 1,
    executor: Executor = "process",
    force_rebuild: Annotated[
        bool, typer.Option("--force-rebuild", help="Build everything anew; the old cache stays until the new is whole.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Check every chunk first, build damaged ones again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make the tokenizer and the caches that a run of this configuration reads."""
    from vorox.core.errors import ConfigError
    from vorox.data.cache.build import BuildOptions

    if force_rebuild and repair:
        raise ConfigError(
            "--force-rebuild builds everything, so --repair has nothing to check", where="--repair",
            hint="give one of them",
        )  # fmt: skip
    options = BuildOptions(
        verify="full" if repair else None, mode=mode, workers=workers, executor=executor, force_rebuild=force_rebuild,
        wait_for="complete",
    )  # fmt: skip
    _make(words, ("--mode", "--force-rebuild", "--repair", *_OPTIONS), options, as_json)


def fill(
    words: Words,
    verify: Annotated[
        bool, typer.Option("--verify", help="Look for damage in every byte, not only in sizes and headers.")
    ] = False,
    workers: Workers = 1,
    executor: Executor = "process",
    as_json: AsJson = False,
) -> None:
    """Build what is missing and what is lost or damaged of what was there, and nothing else."""
    from vorox.data.cache.build import BuildOptions

    options = BuildOptions(
        verify="full" if verify else "quick", mode="gaps", workers=workers, executor=executor, wait_for="complete"
    )
    _make(words, ("--verify", *_OPTIONS), options, as_json)


def repair(words: Words, workers: Workers = 1, executor: Executor = "process", as_json: AsJson = False) -> None:
    """Check every byte of every chunk and build again what is lost or damaged."""
    from vorox.data.cache.build import BuildOptions

    _make(
        words, _OPTIONS, BuildOptions(verify="full", workers=workers, executor=executor, wait_for="complete"), as_json
    )


def grow(words: Words, workers: Workers = 1, executor: Executor = "process", as_json: AsJson = False) -> None:
    """Take up files that are new into the caches that were begun with the others (data.cache.grow=true)."""
    from vorox.data.cache.build import BuildOptions

    options = BuildOptions(workers=workers, executor=executor, wait_for="complete")
    _make(words, _OPTIONS, options, as_json, overrides=("data.cache.grow=true",))


def _make(
    words: list[str], known: tuple[str, ...], options: BuildOptions, as_json: bool, overrides: Sequence[str] = ()
) -> None:
    from vorox.data.corpus import prepare
    from vorox.training.stop import StopRequest

    config = load([*words, *overrides], known)
    with StopRequest(), showing() as display:
        corpus = prepare(config, on_progress=display, options=options)
        corpus.close()
    tell(corpus)
    if as_json:
        print_json(
            {"root": str(corpus.root), "caches": {name: report_json(report) for name, report in corpus.reports.items()}}
        )
        return
    _print_reports(corpus.reports)
    seconds = sum(report.seconds for report in corpus.reports.values())
    built_bytes = sum(report.built_text_bytes for report in corpus.reports.values())
    speed = f", {built_bytes / 1e6 / seconds:.1f} MB/s" if built_bytes and seconds > 0 else ""
    typer.echo(f"\nready in {corpus.root}: {humanize.duration(seconds)} of building{speed}")


def _print_reports(reports: dict[str, BuildReport]) -> None:
    rows = [
        [
            name,
            f"{report.documents:,}",
            humanize.size(report.text_bytes),
            humanize.count(report.tokens),
            f"{report.text_bytes / max(report.tokens - report.documents, 1):.2f}",
            f"{report.rows:,}",
            f"{report.chunks:,}",
            humanize.percent(report.utilisation_fraction, 2),
            humanize.size(report.compressed_bytes),
            humanize.percent(report.ratio_to_uint32),
            humanize.percent(report.ratio_to_uint16),
            f"{report.units_built:,}/{report.units:,}",
            f"{report.quarantined:,}",
        ]
        for name, report in reports.items()
    ]
    titles = ["CACHE", "DOCUMENTS", "TEXT", "TOKENS", "BYTES/TOKEN", "ROWS", "CHUNKS", "FULL", "SIZE"]
    titles += ["OF-UINT32", "OF-UINT16", "BUILT", "BAD"]
    print_table(titles, rows, right=" ".join(titles[1:]))
    for name, report in reports.items():
        for transform, count in report.transforms.items():
            added = f", added {count.added:,}" if count.added else ""
            word = transform.partition("/")[2]
            typer.echo(f"{name}: {word} removed {count.removed:,} of {pluralize(count.taken, 'document')}{added}")
        if report.stages is not None and report.stages.bottleneck:
            stages = {stage.name: stage for stage in report.stages.stages}
            slowest = stages[report.stages.bottleneck]
            share = humanize.percent(slowest.busy_seconds / slowest.threads / report.stages.seconds)
            typer.echo(f"{name}: the slowest stage was {slowest.name}, busy {share} of the time")
