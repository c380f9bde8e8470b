"""Plots of runs for print: loss, learning rate, throughput and memory, as PNG or SVG.

The metrics of one or several runs go in; the bytes of a file come out, the same for the same metrics. The colours are
those of Okabe and Ito, which readers with any colour vision can tell apart.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import matplotlib.style
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from vorox.dashboard.metrics.series import MetricSeries, Position
from vorox.dashboard.pages.run_pages import curves

Format = Literal["png", "svg"]
Metrics = Mapping[str, dict[str, Any]]
"""The curves of a run by metric, as ``run_pages.curves`` returns them."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The colour of each run, which is also how many runs a plot shows."""
_NUM_POINTS = 1000
_MIN_LOG_RATIO = 3.0
"""A loss that falls at least by this factor has a logarithmic axis."""
_MAX_LABEL_LENGTH = 64
_LEGEND_COLUMNS = 120
"""Characters that fit below the panels."""
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_DURATIONS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""From how many seconds on a time axis has a unit, its seconds, and its name."""
STYLE: dict[str, Any] = {
    "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#808080", "axes.grid": True,
    "axes.axisbelow": True, "grid.color": "#e4e4e4", "grid.linewidth": 0.6, "xtick.color": "#404040",
    "ytick.color": "#404040", "legend.frameon": False, "lines.linewidth": 1.4, "lines.markersize": 4,
    "text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "vorox",
}  # fmt: skip
_RAW: dict[str, Any] = {"linewidth": 0.5, "alpha": 0.35, "zorder": 1.9}
_VALIDATION: dict[str, Any] = {"linestyle": ":", "marker": "o", "markerfacecolor": "white", "zorder": 3}


class _Panel(NamedTuple):
    """One chart: its title, the label of its y axis, and its metrics, of which the first that a run has is shown."""

    title: str
    label: str
    metrics: tuple[str, ...]


_PANELS = (
    _Panel("Loss", "nats", ("loss",)),
    _Panel("Learning rate", "learning rate", ("learning_rate",)),
    _Panel("Throughput", "tokens per second", ("tokens_per_second",)),
    _Panel("Memory", "peak memory", ("memory/device_peak_bytes", "memory/host_peak_bytes")),
)
_NAMES = (*(name for panel in _PANELS for name in panel.metrics), "eval/loss")


def draw_runs(
    runs: Mapping[str, MetricSeries],
    file_format: Format,
    *,
    position: Position = "steps",
    smoothing: float | None = None,
) -> bytes:
    """Return a plot of one or several runs. In an SVG, each curve is a group with an id such as ``loss-0``.

    Args:
        runs: Metrics by the label of the run; at most as many as there are ``COLOURS``.
        file_format: ``png`` or ``svg``.
        position: The x axis: steps, tokens, or time spent training.
        smoothing: Weight of the moving average of loss and throughput, from 0 to below 1; ``None`` chooses it by the
            number of points.
    """
    found = [curves(series, _NAMES, num_points=_NUM_POINTS, smoothing=smoothing)["metrics"] for series in runs.values()]
    scale, label = _x_axis(found, position)
    with matplotlib.style.context(STYLE, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of a label; an SVG does not need the glyph here
        figure = Figure(figsize=(10, 6.6), layout="constrained")
        axes: list[Axes] = figure.subplots(2, 2, sharex=True).ravel().tolist()
        for panel, axis in zip(_PANELS, axes, strict=True):
            _draw_panel(panel, axis, found, position, scale)
            axis.set_xlabel(label)
        _finish_loss(axes[0], found)
        axes[2].yaxis.set_major_formatter(_count)
        axes[3].yaxis.set_major_formatter(EngFormatter(unit="B"))
        figure.align_ylabels(axes)
        labels = [_shortened(name) for name in runs]
        columns = max(1, _LEGEND_COLUMNS // (max(map(len, labels)) + 8))
        lines = [Line2D([], [], color=colour, linewidth=2) for colour, _ in zip(COLOURS, labels, strict=False)]
        figure.legend(lines, labels, loc="outside lower center", ncols=min(columns, len(labels)))
        return render(figure, file_format)


def render(figure: Figure, file_format: Format) -> bytes:
    """Return a figure as the bytes of a file, the same for the same figure."""
    buffer = io.BytesIO()
    metadata = {"Date": None, "Creator": "Vorox"} if file_format == "svg" else {"Software": "Vorox"}
    figure.savefig(buffer, format=file_format, dpi=200, metadata=metadata)
    return buffer.getvalue()


def _x_axis(found: list[Metrics], position: Position) -> tuple[float, str]:
    """Return what to divide positions by, and the label of the axis."""
    if position != "seconds":
        return 1.0, {"steps": "step", "tokens": "tokens"}[position]
    last = max((curve["seconds"][-1] for metrics in found for curve in metrics.values()), default=0.0)
    return next((size, f"{name} of training") for start, size, name in _DURATIONS if last >= start)


def _draw_panel(panel: _Panel, axis: Axes, found: list[Metrics], position: Position, scale: float) -> None:
    sources: set[str] = set()
    for index, (metrics, colour) in enumerate(zip(found, COLOURS, strict=False)):
        name = next((name for name in panel.metrics if name in metrics), None)
        if name is not None:
            sources.add(name.partition("/")[2].partition("_")[0])
            _draw_curve(axis, f"{name}-{index}", metrics[name], position, scale, colour)
        if panel.title == "Loss" and "eval/loss" in metrics:
            curve = metrics["eval/loss"]
            x = _numbers(curve[position]) / scale
            axis.plot(x, _numbers(curve["values"]), color=colour, gid=f"eval/loss-{index}", **_VALIDATION)
    axis.set_title(f"{panel.title} ({' and '.join(sorted(sources))})" if any(sources) else panel.title)
    axis.set_ylabel(panel.label)
    axis.margins(x=0.01)
    axis.xaxis.set_major_formatter(_count)
    axis.xaxis.set_tick_params(labelbottom=True)
    if not axis.lines:
        axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", va="center", color="#808080")
    if panel.title != "Loss" and axis.dataLim.y1 > 0:
        axis.set_ylim(0, 1.05 * axis.dataLim.y1)
    axis.yaxis.set_major_formatter("{x:g}")


def _draw_curve(axis: Axes, gid: str, curve: dict[str, Any], position: Position, scale: float, colour: str) -> None:
    x, values = _numbers(curve[position]) / scale, _numbers(curve["values"])
    if curve["smooth"] is None:
        axis.plot(x, values, color=colour, gid=gid)
    else:
        axis.plot(x, values, color=colour, gid=gid, **_RAW)
        axis.plot(x, _numbers(curve["smooth"]), color=colour, gid=f"{gid}-smooth")


def _finish_loss(axis: Axes, found: list[Metrics]) -> None:
    """Choose the scale of the loss, and explain the kinds of lines."""
    shown = [
        _numbers(values)
        for metrics in found
        for name in ("loss", "eval/loss")
        if name in metrics and (values := metrics[name]["smooth"] or metrics[name]["values"])
    ]
    values = np.concatenate(shown) if shown else np.empty(0)
    values = values[np.isfinite(values)]
    if values.size and values.min() > 0 and values.max() / values.min() >= _MIN_LOG_RATIO:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_ylabel(f"{axis.get_ylabel()}, log scale")
    weights = sorted({round(metrics["loss"]["smoothing"], 2) for metrics in found if "loss" in metrics} - {0.0})
    kinds: dict[str, dict[str, Any]] = {"training": _RAW if weights else {}}
    if weights:
        kinds[f"moving average, weight {' and '.join(f'{weight:g}' for weight in weights)}"] = {}
    kinds["validation"] = _VALIDATION
    if not any("eval/loss" in metrics for metrics in found):
        del kinds["validation"]
    lines = [Line2D([], [], color="#444444", **kind) for kind in kinds.values()]
    axis.legend(lines, list(kinds), loc="upper right", fontsize=8)


def _count(value: float, position: float | None = None) -> str:
    """Format a tick: 500, 1.5k, 20M, 3B."""
    del position
    size, suffix = next(((size, suffix) for size, suffix in _COUNTS if abs(value) >= size), (1.0, ""))
    return f"{value / size:g}{suffix}"


def _shortened(text: str) -> str:
    half = _MAX_LABEL_LENGTH // 2
    return text if len(text) <= _MAX_LABEL_LENGTH else f"{text[:half]}\N{HORIZONTAL ELLIPSIS}{text[-half:]}"


def _numbers(values: list[float | None]) -> npt.NDArray[np.float64]:
    return np.array(values, np.float64)
