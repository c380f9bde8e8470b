"""``vorox data build``, ``fill``, ``grow`` and ``repair``: build the tokenizer and the caches of a configuration.

All four complete the caches; they differ in what they verify first. A signal stops them after the current unit with
exit code 75, and the same command resumes.
"""

from __future__ import annotations

from collections.abc import Sequence

import typer

from vorox.cli.data.loading import load_with_tokenizer, print_notes, progress_display, recorded_views, report_json
from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import print_json, print_table
from vorox.core.errors import ConfigError
from vorox.core.pluralize import pluralize
from vorox.data.cache.build import BuildOptions, Executor
from vorox.data.cache.building.build_queue import Mode
from vorox.data.cache.building.report import BuildReport
from vorox.data.corpus.corpus import prepare
from vorox.training.steps.stop import StopRequest

_OPTIONS = ("--workers", "--executor", "--json")


def build(
    arguments: list[str],
    mode: Mode,
    workers: int,
    executor: Executor,
    force_rebuild: bool,
    repair: bool,
    as_json: bool,
) -> None:
    if force_rebuild and repair:
        raise ConfigError(
            "--force-rebuild and --repair exclude each other", where="--repair",
            hint="use one of them",
        )  # fmt: skip
    options = BuildOptions(
        verify="full" if repair else "quick", mode=mode, workers=workers, executor=executor,
        force_rebuild=force_rebuild, wait_for="complete",
    )  # fmt: skip
    _make(arguments, ("--mode", "--force-rebuild", "--repair", *_OPTIONS), options, as_json)


def fill(arguments: list[str], verify: bool, workers: int, executor: Executor, as_json: bool) -> None:
    options = BuildOptions(
        verify="full" if verify else "quick", mode="gaps", workers=workers, executor=executor, wait_for="complete"
    )
    _make(arguments, ("--verify", *_OPTIONS), options, as_json)


def repair(arguments: list[str], workers: int, executor: Executor, as_json: bool) -> None:
    _make(
        arguments,
        _OPTIONS,
        BuildOptions(verify="full", workers=workers, executor=executor, wait_for="complete"),
        as_json,
    )


def grow(arguments: list[str], workers: int, executor: Executor, as_json: bool) -> None:
    options = BuildOptions(verify="quick", workers=workers, executor=executor, wait_for="complete")
    _make(arguments, _OPTIONS, options, as_json, overrides=("data.cache.grow=true",))


def _make(
    arguments: list[str], known: tuple[str, ...], options: BuildOptions, as_json: bool, overrides: Sequence[str] = ()
) -> None:
    config, tokenizer = load_with_tokenizer([*arguments, *overrides], known)
    views = recorded_views([*arguments, *overrides], known, config)
    with StopRequest(), progress_display() as display:
        corpus = prepare(config, on_progress=display, options=options, tokenizer=tokenizer, views=views)
        corpus.close()
    print_notes(corpus)
    if as_json:
        print_json(
            {"root": str(corpus.root), "caches": {name: report_json(report) for name, report in corpus.reports.items()}}
        )
        return
    _print_reports(corpus.reports)
    seconds = sum(report.seconds for report in corpus.reports.values())
    built_bytes = sum(report.built_text_bytes for report in corpus.reports.values())
    speed = f", {built_bytes / 1e6 / seconds:.1f} MB/s" if built_bytes and seconds > 0 else ""
    typer.echo(f"\nReady in {corpus.root}; build time {humanize.duration(seconds)}{speed}")


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
    titles += ["OF-UINT32", "OF-UINT16", "BUILT-NOW", "BAD"]
    print_table(titles, rows, right=" ".join(titles[1:]))
    for name, report in reports.items():
        if report.units_adopted:
            typer.echo(f"{name}: {pluralize(report.units_adopted, 'unit')} built earlier, not built again")
        for transform, count in report.transforms.items():
            added = f", added {count.added:,}" if count.added else ""
            title = transform.partition("/")[2]
            typer.echo(f"{name}: {title} removed {count.removed:,} of {pluralize(count.inputs, 'document')}{added}")
        if report.stages is not None and report.stages.bottleneck:
            stages = {stage.name: stage for stage in report.stages.stages}
            slowest = stages[report.stages.bottleneck]
            share = humanize.percent(slowest.busy_seconds / slowest.threads / report.stages.seconds)
            typer.echo(f"{name}: slowest stage {slowest.name}, busy {share} of the time")
