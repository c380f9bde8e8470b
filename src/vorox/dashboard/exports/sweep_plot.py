"""A plot of a sweep: the validation loss of its trials by step, and by searched setting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullFormatter

from vorox.dashboard.exports.plotting import COLOURS, STYLE, Format, render

_MAX_COLUMNS = 3
_BEST, _FINISHED, _STOPPED = COLOURS[1], COLOURS[0], "#a0a0a0"


class TrialResult(NamedTuple):
    """What the plot shows of a trial.

    Attributes:
        settings: Value by setting.
        is_finished: Whether it trained to its end; otherwise it was stopped early.
        losses: Validation loss by step, at least one.
    """

    settings: Mapping[str, Any]
    is_finished: bool
    losses: Mapping[int, float]

    @property
    def loss(self) -> float:
        return self.losses[max(self.losses)]


def draw_sweep(trials: Sequence[TrialResult], log_scale: Mapping[str, bool], file_format: Format = "png") -> bytes:
    """Return a plot of trials. In an SVG, the curve of trial N in the order of the argument is the group ``trial-N``.

    Args:
        trials: The trials with a validation loss, the best first.
        log_scale: The settings to show, and whether their axis is logarithmic.
        file_format: ``png`` or ``svg``.
    """
    columns = min(_MAX_COLUMNS, 1 + len(log_scale))
    rows = math.ceil((1 + len(log_scale)) / columns)
    with matplotlib.style.context(STYLE, after_reset=True):
        figure = Figure(figsize=(3.6 * columns + 0.4, 3.1 * rows + 0.4), layout="constrained")
        axes: list[Axes] = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
        _draw_curves(axes[0], trials)
        for axis, (key, is_log) in zip(axes[1:], log_scale.items(), strict=False):
            _draw_setting(axis, trials, key, is_log)
        for axis in axes[1 + len(log_scale) :]:
            axis.set_axis_off()
        kinds = {"best": _BEST, "finished": _FINISHED, "stopped early": _STOPPED}
        lines = [Line2D([], [], color=colour, marker="o", linewidth=1) for colour in kinds.values()]
        figure.legend(lines, list(kinds), loc="outside lower center", ncols=len(kinds))
        return render(figure, file_format)


def _colour(rank: int, trial: TrialResult) -> str:
    return _STOPPED if not trial.is_finished else _BEST if rank == 0 else _FINISHED


def _draw_curves(axis: Axes, trials: Sequence[TrialResult]) -> None:
    for rank, trial in reversed(list(enumerate(trials))):  # the best one is drawn last, on top
        axis.plot(
            list(trial.losses), list(trial.losses.values()), color=_colour(rank, trial), marker="o", markersize=2.5,
            linewidth=1, gid=f"trial-{rank}",
        )  # fmt: skip
    axis.set_title("Validation loss")
    axis.set_xlabel("step")
    axis.set_ylabel("nats")


def _draw_setting(axis: Axes, trials: Sequence[TrialResult], key: str, is_log: bool) -> None:
    values = [trial.settings[key] for trial in trials]
    is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    names = list(dict.fromkeys(map(str, values)))
    for rank, trial in reversed(list(enumerate(trials))):
        x = values[rank] if is_number else names.index(str(values[rank]))
        axis.plot([x], [trial.loss], "o", color=_colour(rank, trial), gid=f"{key}-{rank}")
    if is_number and is_log:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
    elif is_number and all(isinstance(value, int) for value in values):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not is_number:
        axis.set_xticks(range(len(names)), names)
        axis.margins(x=0.2)
    axis.set_title(key)
    axis.set_xlabel("value")
    axis.set_ylabel("nats")
