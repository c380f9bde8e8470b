"""``vorox runs plot`` and ``vorox runs report``: curves of runs as PNG or SVG, a run as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from vorox.cli.terminal import humanize
from vorox.core.errors import ConfigError
from vorox.core.files import atomic
from vorox.core.platform.installation import install_command
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import RunLayout
from vorox.dashboard.metrics.series import MetricSeries, Position
from vorox.records.run_lookup import find_run, run_argument, short_path

if TYPE_CHECKING:
    from vorox.dashboard.exports.plotting import Format


def plot(names: list[str], to: Path, x: Position, smoothing: float | None, root: str) -> None:
    _require_ending(to, (".png", ".svg"))
    try:
        from vorox.dashboard.exports.plotting import COLOURS, draw_runs  # matplotlib is optional
    except ImportError as error:
        raise _missing_package(error, "vorox runs plot") from error
    runs = _labelled_series(names, root)
    if len(runs) > len(COLOURS):
        raise ConfigError(f"A plot shows at most {len(COLOURS)} runs, not {len(runs)}", where="vorox runs plot")
    file_format = cast("Format", to.suffix.lower().removeprefix("."))
    atomic.write_file(to, draw_runs(runs, file_format, position=x, smoothing=smoothing))
    typer.echo(f"{to}: {pluralize(len(runs), 'run')}, {humanize.size(to.stat().st_size)}")


def report(run: str, to: Path, smoothing: float | None, root: str) -> None:
    _require_ending(to, (".html",))
    try:
        from vorox.dashboard.exports import report_page  # matplotlib is optional
    except ImportError as error:
        raise _missing_package(error, "vorox runs report") from error
    directory = find_run(root, run)
    page = report_page.page(directory, _series(directory), smoothing=smoothing)
    atomic.write_file(to, humanize.printable(page).encode())
    typer.echo(f"{to}: {humanize.printable(directory.resolve().name)}, {humanize.size(to.stat().st_size)}")


def _labelled_series(names: Sequence[str], root: str) -> dict[str, MetricSeries]:
    """Return the metrics of runs by name, or by path where several have one name."""
    directories = list(dict.fromkeys(find_run(root, name).resolve() for name in names))
    ids = [directory.name for directory in directories]
    found: dict[str, MetricSeries] = {}
    for directory in directories:
        series = _series(directory)
        if not series.names:
            raise ConfigError(
                f"Run {directory.name} has no metrics to plot", where=short_path(RunLayout(directory).metrics),
                hint=f"see what it did with `vorox runs show {run_argument(directory)}`",
            )  # fmt: skip
        label = directory.name if ids.count(directory.name) == 1 else short_path(directory)
        found[humanize.printable(label)] = series
    return found


def _series(directory: Path) -> MetricSeries:
    series = MetricSeries(directory)
    series.refresh()
    return series


def _require_ending(path: Path, endings: Sequence[str]) -> None:
    if path.suffix.lower() not in endings:
        raise ConfigError(
            f"{path} does not end in {' or '.join(endings)}", where="--to", hint=f"name it {path.stem}{endings[0]}"
        )


def _missing_package(error: ImportError, command: str) -> ConfigError:
    return ConfigError(f"Plots need the package {error.name}", where=command, hint=install_command("plot"))
